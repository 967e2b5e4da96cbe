"""Routed taps: their rules and routes, and the filter of forged source addresses.

Each tap has an nf_tables table of its own, of the family ``netdev``. Its chain is the first to see
the guest's packets. ``nft list ruleset`` shows this for a NIC with one address of each kind::

    table netdev brine-vm-web1-6zt2qk {
        chain sources {
            type filter hook ingress device "vm-web1-6zt2qk" priority -500; policy drop;
            meta protocol ip ip saddr 192.0.2.10 accept
            meta protocol arp arp saddr ip 192.0.2.10 accept
            meta protocol arp arp saddr ip 0.0.0.0 accept
            meta protocol ip ip saddr 0.0.0.0 ip daddr 255.255.255.255 ip protocol udp accept
            meta protocol ip6 ip6 saddr 2001:db8::10 accept
            meta protocol ip6 ip6 saddr fe80::/10 accept
            meta protocol ip6 ip6 saddr :: ip6 daddr ff02::/16 accept
        }
    }

This module speaks netlink itself: the command ``nft`` need not be installed, and pyroute2 knows no
chain of a device. Source: ``nf_tables.h``, ``nfnetlink.h`` of Linux,
:manpage:`nft(8)`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from brine.common.errors import BrineError, UsageError, nearest
from brine.hotplug.net.netlink import (
    MAIN_TABLE,
    PROTOCOL,
    Link,
    LinkError,
    Netlink,
    Proxy,
    Route,
    Rule,
    get_interface,
    set_interface,
)
from brine.hotplug.net.tap import TapError
from brine.hotplug.nic import Address, Nic

# The plan that makes an address behind a tap reachable: a pure function of the node's routes.

_LOCAL_TABLE = 255
_HIGHEST_TABLE = 2**32 - 1
_STANDARD_NAMES = {"main": MAIN_TABLE, "default": 253, "local": _LOCAL_TABLE}
# The first file with a name counts; newer iproute2 has its names below /usr.
_NAME_FILES = (Path("/etc/iproute2"), Path("/usr/share/iproute2"), Path("/usr/lib/iproute2"))


@dataclass(frozen=True)
class Plan:
    """The settings of a routed NIC, beside those of the tap itself.

    :param uplinks: names of the interfaces by which other hosts reach its addresses.
    """

    table: int
    addresses: tuple[Address, ...]
    uplinks: tuple[str, ...]
    proxies: tuple[Proxy, ...]
    rules: tuple[Rule, ...]

    def versions(self) -> list[int]:
        """The versions of IP of its addresses."""
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

    :param routes: of the table, by version of IP.
    :param main_routes: of the main table, as a table of its own may have only a default route, or
        nothing.
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
    """The index of the interface by which other hosts reach an address, or None.

    That is the interface whose network contains the address. If there is none, it is the interface
    to the router, which may take the address for a neighbour.
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
    """The number of a routing table, given as number, name of ``rt_tables``, or empty for ``main``.

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
    """The names of routing tables, with their numbers (``rt_tables``, :manpage:`ip-route(8)`)."""
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


_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_FAMILY = 5  # NFPROTO_NETDEV
_INGRESS = 0
_BEFORE_ALL = -500
_CHAIN = b"sources\0"
_TIMEOUT_S = 30.0
_LARGEST_ANSWER = 1 << 17

_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_NESTED = 0x8000
_ERROR = 2
_BATCH_BEGIN, _BATCH_END = 16, 17
_NEW_TABLE, _GET_TABLE, _DELETE_TABLE, _NEW_CHAIN, _GET_CHAIN, _NEW_RULE = 0, 1, 2, 3, 4, 6

_IP, _ARP, _IP6 = 0x0800, 0x0806, 0x86DD
_UDP = 17
_ACCEPT = 1
_NETWORK_HEADER = 1
_META_PROTOCOL = 1


class SourceFilterError(BrineError):
    """The kernel refused a filter."""


@dataclass(frozen=True)
class _Match:
    """A condition: these bits of the network header have this value."""

    offset: int
    value: bytes
    mask: bytes = b""


@dataclass(frozen=True)
class _Allowed:
    """Packets that pass: of an Ethernet protocol, and with all conditions true."""

    protocol: int
    matches: tuple[_Match, ...]


def allow_sources(tap: str, addresses: Iterable[Address]) -> None:
    """Let a tap's guest send from these addresses only; this replaces an earlier filter.

    The kernel replaces it in one step, so the guest is never without a filter.

    :raises SourceFilterError: if the kernel refuses.
    """
    name = _table(tap)
    hook = _nested(
        4,  # NFTA_CHAIN_HOOK
        _attribute(1, _big(_INGRESS)),
        _attribute(2, struct.pack(">i", _BEFORE_ALL)),
        _attribute(3, os.fsencode(tap) + b"\0"),
    )
    chain = [
        _attribute(1, name),
        _attribute(3, _CHAIN),
        hook,
        _attribute(5, _big(0)),  # NFTA_CHAIN_POLICY: drop
        _attribute(7, b"filter\0"),
    ]
    _change(
        tap,
        (_NEW_TABLE, _CREATE, _attribute(1, name)),
        (_DELETE_TABLE, 0, _attribute(1, name)),
        (_NEW_TABLE, _CREATE, _attribute(1, name)),
        (_NEW_CHAIN, _CREATE, b"".join(chain)),
        *((_NEW_RULE, _CREATE | _APPEND, _rule(name, one)) for one in _allowed(addresses)),
    )


def forget_sources(tap: str) -> None:
    """Remove a tap's filter; succeeds if there is none.

    :raises SourceFilterError: if the kernel refuses.
    """
    if _is_there(tap, _GET_TABLE, _attribute(1, _table(tap))):
        _change(tap, (_DELETE_TABLE, 0, _attribute(1, _table(tap))))


def is_filtered(tap: str) -> bool:
    """Whether a tap has its filter: ``nft flush ruleset`` removes it with all others.

    :raises SourceFilterError: if the kernel refuses.
    """
    chain = _attribute(1, _table(tap)) + _attribute(3, _CHAIN)
    return _is_there(tap, _GET_CHAIN, chain)


def _allowed(addresses: Iterable[Address]) -> Iterator[_Allowed]:
    addresses = tuple(addresses)
    versions = {address.version for address in addresses}
    for address in addresses:
        if address.version == 4:
            yield _Allowed(_IP, (_Match(12, address.packed),))
            yield _Allowed(_ARP, (_Match(14, address.packed),))
        else:
            yield _Allowed(_IP6, (_Match(8, address.packed),))
    if 4 in versions:
        # ARP probes for a free address, and DHCP requests, have no source address.
        nobody = bytes(4)
        yield _Allowed(_ARP, (_Match(14, nobody),))
        everybody = _Match(16, b"\xff" * 4)
        yield _Allowed(_IP, (_Match(12, nobody), everybody, _Match(9, bytes([_UDP]))))
    if 6 in versions:
        # Neighbour discovery uses link-local addresses, which no router forwards.
        yield _Allowed(_IP6, (_Match(8, b"\xfe\x80", mask=b"\xff\xc0"),))
        yield _Allowed(_IP6, (_Match(8, bytes(16)), _Match(24, b"\xff\x02")))


# The filter as netlink messages.


def _table(tap: str) -> bytes:
    return b"brine-" + os.fsencode(tap) + b"\0"


def _rule(table: bytes, allowed: _Allowed) -> bytes:
    expressions = [
        # The value is loaded into register 1, and compared there.
        _expression(b"meta", _attribute(1, _big(1)), _attribute(2, _big(_META_PROTOCOL))),
        _compare(struct.pack(">H", allowed.protocol)),
    ]
    for match in allowed.matches:
        size = len(match.value)
        place = (1, _NETWORK_HEADER, match.offset, size)
        fields = [_attribute(number, _big(value)) for number, value in enumerate(place, 1)]
        expressions.append(_expression(b"payload", *fields))
        if match.mask:
            expressions.append(
                _expression(
                    b"bitwise",
                    *(_attribute(number, _big(value)) for number, value in ((1, 1), (2, 1))),
                    _attribute(3, _big(size)),
                    _nested(4, _attribute(1, match.mask)),
                    _nested(5, _attribute(1, bytes(size))),
                )
            )
        expressions.append(_compare(match.value))
    verdict = _nested(2, _nested(2, _attribute(1, _big(_ACCEPT))))
    expressions.append(_expression(b"immediate", _attribute(1, _big(0)), verdict))
    return _attribute(1, table) + _attribute(2, _CHAIN) + _nested(4, *expressions)


def _compare(value: bytes) -> bytes:
    equal = _attribute(2, _big(0))
    return _expression(b"cmp", _attribute(1, _big(1)), equal, _nested(3, _attribute(1, value)))


def _expression(name: bytes, *fields: bytes) -> bytes:
    return _nested(1, _attribute(1, name + b"\0"), _nested(2, *fields))


def _big(value: int) -> bytes:
    return struct.pack(">I", value)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, b"".join(attributes))


def _attribute(kind: int, value: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(-size % 4)


def _message(number: int, kind: int, flags: int, body: bytes, *, batch: bool = False) -> bytes:
    family, subsystem = (0, _SUBSYSTEM) if batch else (_FAMILY, 0)
    data = struct.pack(">BBH", family, 0, subsystem) + body
    kind = kind if batch else _SUBSYSTEM << 8 | kind
    return _HEADER.pack(_HEADER.size + len(data), kind, _REQUEST | flags, number, 0) + data


def _change(tap: str, *changes: tuple[int, int, bytes]) -> None:
    """Send changes as one transaction."""
    messages = [_message(0, _BATCH_BEGIN, 0, b"", batch=True)]
    for number, (kind, flags, body) in enumerate(changes, 1):
        messages.append(_message(number, kind, flags | _ACK, body))
    messages.append(_message(len(changes) + 1, _BATCH_END, 0, b"", batch=True))
    try:
        with _socket() as kernel:
            kernel.send(b"".join(messages))
            waiting = set(range(1, len(changes) + 1))
            while waiting:
                for number, kind, body in _answers(kernel.recv(_LARGEST_ANSWER)):
                    if kind == _ERROR:
                        _raise_if_refused(body)
                        waiting.discard(number)
    except OSError as error:
        raise _refused(tap, error) from error


def _is_there(tap: str, kind: int, body: bytes) -> bool:
    try:
        with _socket() as kernel:
            kernel.send(_message(1, kind, _ACK, body))
            for _, its_kind, answer in _answers(kernel.recv(_LARGEST_ANSWER)):
                if its_kind == _ERROR:
                    _raise_if_refused(answer)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise _refused(tap, error) from error
    return True


def _socket() -> socket.socket:
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    kernel.settimeout(_TIMEOUT_S)
    return kernel


def _answers(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The number, type and body of each message of a datagram."""
    start = 0
    while start + _HEADER.size <= len(data):
        size, kind, _, number, _ = _HEADER.unpack_from(data, start)
        yield number, kind, data[start + _HEADER.size : start + size]
        start += (size + 3) & ~3


def _raise_if_refused(body: bytes) -> None:
    (code,) = struct.unpack_from("=i", body)
    if code:
        raise OSError(-code, os.strerror(-code))


def _refused(tap: str, error: OSError) -> SourceFilterError:
    hints = {
        errno.EPERM: "be root; it takes CAP_NET_ADMIN",
        errno.EOPNOTSUPP: "a routed NIC needs nf_tables: modprobe nf_tables",
        errno.EPROTONOSUPPORT: "a routed NIC needs nf_tables: modprobe nf_tables",
        errno.EINVAL: "a routed NIC needs nf_tables: modprobe nf_tables",
    }
    reason = error.strerror or str(error)
    text = f"{tap}: packets can't be filtered by their source: {reason}"
    return SourceFilterError(text, hint=hints.get(error.errno or 0))


# Carrying out a plan.

GATEWAY = "fe80::1"
"""The guest's IPv6 router, the same on every tap."""

# Settings that keep a guest from changing the node's, and that let its packets pass.
_IPV4 = {"forwarding": 1, "proxy_arp": 1, "accept_redirects": 0, "rp_filter": 1}
_IPV6 = {"forwarding": 1, "proxy_ndp": 1, "accept_ra": 0, "autoconf": 0, "accept_redirects": 0}

log = logging.getLogger(__name__)


def plan_routes(netlink: Netlink, tap: Link, nic: Nic) -> Plan:
    """Plan a routed NIC from the node's present routes."""
    addresses = nic.addresses()
    table = table_number(nic.link)
    versions = {address.version for address in addresses}

    def routes(number: int) -> dict[int, list[Route]]:
        return {version: netlink.routes(version, number) for version in versions}

    main = routes(MAIN_TABLE)
    return make_plan(
        tap.name,
        addresses,
        table,
        routes=main if table == MAIN_TABLE else routes(table),
        main_routes=main,
        names={link.index: link.name for link in netlink.links()},
    )


def connect_by_routes(netlink: Netlink, tap: Link, plan: Plan) -> None:
    """Carry out a plan: settings of the tap, routes, rules, and proxy entries.

    :raises TapError: if one of the addresses has another route.
    """
    # Before it is up, so that no packet escapes the filter.
    allow_sources(tap.name, plan.addresses)
    if 4 in plan.versions():
        _set(tap.name, "ipv4", _IPV4)
    if 6 in plan.versions():
        _set(tap.name, "ipv6", {"disable_ipv6": 0, **_IPV6})
    # The kernel accepts routes only to an interface that is up.
    netlink.set_up(tap)
    if 6 in plan.versions():
        netlink.add_link_address(tap, GATEWAY)
    for address in plan.addresses:
        try:
            netlink.add_host_route(tap, address, plan.table)
        except LinkError as error:
            if error.code != errno.EEXIST:
                raise
            where = "" if plan.table == MAIN_TABLE else f" table {plan.table}"
            hint = f"two NICs can't have one address: see ip route show{where} {address}"
            raise TapError(tap.name, f"{address} is routed elsewhere already", hint=hint) from error
    for rule in plan.rules:
        netlink.add_rule(rule)
    _let_uplinks_forward(plan)
    for proxy in plan.proxies:
        netlink.add_proxy(proxy)


def disconnect_routes(netlink: Netlink, tap: Link, table: int) -> None:
    """Undo what would stay on an existing tap."""
    for version in (4, 6):
        netlink.remove_our_routes(tap, version, table)
    netlink.remove_link_address(tap, GATEWAY)
    for family, keys in (("ipv4", ("forwarding", "proxy_arp")), ("ipv6", ("proxy_ndp",))):
        for key in keys:
            set_interface(family, tap.name, key, 0, required=False)


def mtu_of(netlink: Netlink, uplinks: Iterable[str]) -> int | None:
    """The smallest MTU of these interfaces, or None without any."""
    links = [netlink.find(name) for name in uplinks]
    return min((link.mtu for link in links if link), default=None)


def _set(tap: str, family: str, values: dict[str, int]) -> None:
    for key, value in values.items():
        set_interface(family, tap, key, value)
    # Otherwise the kernel delays its proxy answers by up to 0.8 s, to spread them.
    set_interface(family, tap, "proxy_delay", 0, folder="neigh")


def _let_uplinks_forward(plan: Plan) -> None:
    """Forward packets that come in by the uplinks, and answer there for IPv6 addresses.

    Before Linux 6.17 the whole node forwards IPv6 or does not, and a node that forwards ignores
    router advertisements. So its operator decides on that.
    """
    versions = {uplink: set[int]() for uplink in plan.uplinks}
    for proxy in plan.proxies:
        versions[proxy.link].add(6 if ":" in proxy.address else 4)
    for uplink, needed in versions.items():
        if 4 in needed and not get_interface("ipv4", uplink, "forwarding"):
            set_interface("ipv4", uplink, "forwarding", 1)
        if 6 in needed:
            set_interface("ipv6", uplink, "proxy_ndp", 1)
    if 6 in plan.versions() and not _forwards_ipv6():
        log.warning(
            "this node does not forward IPv6, so its guests reach nobody beyond it: "
            "sysctl -w net.ipv6.conf.all.forwarding=1; where the node takes its own routes from "
            "router advertisements, first net.ipv6.conf.INTERFACE.accept_ra=2"
        )


def _forwards_ipv6() -> bool:
    return bool(get_interface("ipv6", "all", "forwarding"))
