"""What makes an address behind a tap reachable: a pure plan, made of the node's routes.

- From this node: a route to the address, in the chosen table.
- From the network that the address is part of: on the interface to that network, the *uplink*, we
  answer for the address (proxy ARP, proxy NDP).
- With a table of its own: rules by which the tap's packets, those for the address that come from
  the uplink, and this node's own ones look that table up.

Source: "Non bridged instances support" in the design of Ganeti 2.1, in which a NIC's link is the
table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from brine.common.errors import UsageError
from brine.common.nearest import nearest
from brine.hotplug.network import MAIN_TABLE, PROTOCOL, Proxy, Route, Rule
from brine.hotplug.wanted import Address

_LOCAL_TABLE = 255
_HIGHEST_TABLE = 2**32 - 1
_STANDARD_NAMES = {"main": MAIN_TABLE, "default": 253, "local": _LOCAL_TABLE}
# The first that has a name is right; newer iproute2 has its own names below /usr.
_NAME_FILES = (Path("/etc/iproute2"), Path("/usr/share/iproute2"), Path("/usr/lib/iproute2"))


@dataclass(frozen=True)
class Plan:
    """What a routed NIC takes, beside what is on the tap itself.

    :param uplinks: names of the interfaces by which others reach its addresses.
    """

    table: int
    addresses: tuple[Address, ...]
    uplinks: tuple[str, ...]
    proxies: tuple[Proxy, ...]
    rules: tuple[Rule, ...]

    def versions(self) -> list[int]:
        """The versions of IP that it has addresses of."""
        return sorted({address.version for address in self.addresses})


def make_plan(
    tap: str,
    addresses: Iterable[Address],
    table: int,
    *,
    routes: Mapping[int, Iterable[Route]],
    main_routes: Mapping[int, Iterable[Route]],
    names: Mapping[int, str],
) -> Plan:
    """Plan a routed NIC.

    :param routes: those of the table, by version of IP.
    :param main_routes: the same of the main table: a table of its own may have no more than a
        default route, or nothing.
    :param names: of interfaces, by index.
    """
    addresses = tuple(addresses)
    uplinks: dict[Address, str] = {}
    for address in addresses:
        candidates = (routes[address.version], main_routes[address.version])
        for uplink in (find_uplink(address, candidate) for candidate in candidates):
            if uplink is not None and names.get(uplink, tap) not in (tap, "lo"):
                uplinks[address] = names[uplink]
                break
    rules: list[Rule] = []
    if table != MAIN_TABLE:
        for version in sorted({address.version for address in addresses}):
            rules.append(Rule(version, table, tap))
        for address in addresses:
            incoming = [uplinks[address]] if address in uplinks else []
            rules += [
                Rule(address.version, table, name, str(address)) for name in [*incoming, "lo"]
            ]
    return Plan(
        table=table,
        addresses=addresses,
        uplinks=tuple(dict.fromkeys(uplinks.values())),
        proxies=tuple(Proxy(str(address), name) for address, name in uplinks.items()),
        rules=tuple(rules),
    )


def find_uplink(address: Address, routes: Iterable[Route]) -> int | None:
    """The index of the interface by which others reach an address, or None.

    It is the one whose network the address is in; for an address of no such network it is the one
    to the router, which may take the address for one of its neighbours.
    """
    direct: Route | None = None
    default: Route | None = None
    for route in routes:
        if route.protocol == PROTOCOL or address not in route.network:
            continue
        if route.network.prefixlen == 0:
            default = default or route
        elif not route.gateway and (
            direct is None or route.network.prefixlen > direct.network.prefixlen
        ):
            direct = route
    best = direct or default
    return best.link if best else None


def table_number(text: str) -> int:
    """The number of a routing table: a number, a name of ``rt_tables``, or nothing for ``main``.

    :raises UsageError: if there is no such table.
    """
    text = text.strip()
    if not text:
        return MAIN_TABLE
    names = table_names() if not text.isdigit() else {}
    number = int(text[:11]) if text.isascii() and text.isdigit() else names.get(text, 0)
    if number == _LOCAL_TABLE:
        raise UsageError(f"routing table {text}: it is the kernel's own")
    if not 0 < number <= _HIGHEST_TABLE:
        hint = nearest(text, names) if names else f"a number is from 1 to {_HIGHEST_TABLE}"
        raise UsageError(f"there is no routing table {text!r}", hint=hint)
    return number


def table_names(folders: Iterable[Path] = _NAME_FILES) -> dict[str, int]:
    """The names that tables have, with their numbers (``rt_tables``, :manpage:`ip-route(8)`)."""
    found = dict(_STANDARD_NAMES)
    for folder in reversed(list(folders)):
        files = [folder / "rt_tables", *sorted((folder / "rt_tables.d").glob("*.conf"))]
        for file in files:
            try:
                text = file.read_text(errors="replace")
            except OSError:
                continue
            for line in text.splitlines():
                if match := re.match(r"\s*(0[xX][0-9a-fA-F]+|[0-9]+)\s+([^\s#]+)", line):
                    found[match[2]] = (
                        int(match[1], 0) if match[1][:2].lower() == "0x" else int(match[1])
                    )
    return found
