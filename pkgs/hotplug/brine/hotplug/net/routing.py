"""Routed taps: their rules and routes."""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from brine.common.errors import UsageError, nearest
from brine.hotplug.net.netlink import (
    MAIN_TABLE,
    PROTOCOL,
    Link,
    LinkAddress,
    LinkError,
    Netlink,
    Proxy,
    Route,
    Rule,
    get_interface,
    set_interface,
)
from brine.hotplug.net.packet_filter import set_filter
from brine.hotplug.net.records import TapRecord
from brine.hotplug.net.tap import TapError
from brine.vm.connection import Address

GATEWAY = "fe80::1"
"""The guest's IPv6 router, the same on every tap."""

# Settings that keep a guest from changing the node's, and that let its packets pass.
_IPV4 = {"forwarding": 1, "proxy_arp": 1, "accept_redirects": 0, "rp_filter": 1}
_NO_IPV6_CHANGES = {"accept_ra": 0, "autoconf": 0, "accept_redirects": 0}
_IPV6 = {"disable_ipv6": 0, "forwarding": 1, "proxy_ndp": 1, **_NO_IPV6_CHANGES}

_LOCAL_TABLE = 255
_HIGHEST_TABLE = 2**32 - 1
_STANDARD_NAMES = {"main": MAIN_TABLE, "default": 253, "local": _LOCAL_TABLE}
# The first file with a name counts; newer iproute2 has its names below /usr.
_NAME_FILES = (Path("/etc/iproute2"), Path("/usr/share/iproute2"), Path("/usr/lib/iproute2"))

log = logging.getLogger(__name__)


def plan_routes(netlink: Netlink, record: TapRecord) -> TapRecord:
    """The record of a routed NIC, with a plan from the node's present routes."""
    table = table_number(record.nic.link)
    # A table of its own may have only a default route, or nothing.
    tables = list(dict.fromkeys((table, MAIN_TABLE)))
    versions = {address.version for address in record.nic.addresses()}
    return make_plan(
        record,
        table,
        routes={version: [netlink.routes(version, one) for one in tables] for version in versions},
        names=dict(socket.if_nameindex()),
    )


def make_plan(
    record: TapRecord,
    table: int,
    *,
    routes: Mapping[int, Iterable[Iterable[Route]]],
    names: Mapping[int, str],
) -> TapRecord:
    """Plan a routed NIC.

    :param routes: by version of IP: those of the table, then those of the main table.
    :param names: of interfaces, by index.
    """
    addresses = record.nic.addresses()
    uplinks: dict[Address, str] = {}
    for address in addresses:
        for candidates in routes[address.version]:
            name = names.get(find_uplink(address, candidates), "lo")
            if name not in (record.name, "lo"):
                uplinks.setdefault(address, name)
    rules: list[Rule] = []
    if table != MAIN_TABLE:
        rules += [Rule(version, table, record.name) for version in sorted(routes)]
        for address in addresses:
            incoming = [uplinks[address], "lo"] if address in uplinks else ["lo"]
            rules += [Rule(address.version, table, name, str(address)) for name in incoming]
    return replace(
        record,
        table=table,
        uplinks=tuple(dict.fromkeys(uplinks.values())),
        proxies=tuple(Proxy(str(address), name) for address, name in uplinks.items()),
        rules=tuple(rules),
    )


def find_uplink(address: Address, routes: Iterable[Route]) -> int:
    """The index of the interface by which other hosts reach an address; 0 if there is none.

    That is the interface whose network contains the address. If there is none, it is the interface
    to the router, which may take the address for a neighbour.
    """
    best: Route | None = None
    for route in routes:
        if route.protocol == PROTOCOL or address not in route.network:
            continue
        length = route.network.prefixlen
        if length and route.gateway:
            continue
        if best is None or length > best.network.prefixlen:
            best = route
    return best.link if best else 0


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
        for file in [folder / "rt_tables", *sorted((folder / "rt_tables.d").glob("*.conf"))]:
            try:
                lines = file.read_text(errors="replace").splitlines()
            except OSError:
                continue
            for line in lines:
                if match := re.match(r"\s*(0[xX][0-9a-fA-F]+|[0-9]+)\s+([^\s#]+)", line):
                    found[match[2]] = int(match[1], 16 if match[1][:2] in ("0x", "0X") else 10)
    return found


def connect_by_routes(netlink: Netlink, tap: Link, record: TapRecord) -> None:
    """Carry out a plan: settings of the tap, routes, rules, and proxy entries.

    :raises TapError: if one of the addresses has another route.
    """
    addresses = record.nic.addresses()
    versions = {address.version for address in addresses}
    # Before it is up, so that no packet escapes the filter.
    set_filter(tap.name, record.nic)
    for version, values in ((4, _IPV4), (6, _IPV6)):
        if version in versions:
            for key, value in values.items():
                set_interface(f"ipv{version}", tap.name, key, value)
            # Otherwise the kernel delays its proxy answers by up to 0.8 s, to spread them.
            set_interface(f"ipv{version}", tap.name, "proxy_delay", 0, folder="neigh")
    # The kernel accepts routes only to an interface that is up.
    netlink.change(tap, up=True)
    if 6 in versions:
        netlink.add(LinkAddress(tap, GATEWAY))
    for address in addresses:
        _add_route(netlink, tap, address, record.table)
    for rule in record.rules:
        netlink.add(rule)
    for proxy in record.proxies:
        _let_forward(proxy)
    if 6 in versions and not get_interface("ipv6", "all", "forwarding"):
        # Before Linux 6.17 the whole node forwards IPv6 or does not, and a node that forwards
        # ignores router advertisements. So its operator decides on that.
        log.warning(
            "this node does not forward IPv6, so its guests reach no host beyond it: "
            "sysctl -w net.ipv6.conf.all.forwarding=1; where the node takes its own routes from "
            "router advertisements, first net.ipv6.conf.INTERFACE.accept_ra=2"
        )
    for proxy in record.proxies:
        netlink.add(proxy)


def _add_route(netlink: Netlink, tap: Link, address: Address, table: int) -> None:
    route = Route(ipaddress.ip_network(address), tap.index, table)
    try:
        netlink.add(route)
    except LinkError as error:
        if error.code != errno.EEXIST:
            raise
        present = netlink.routes(address.version, table)
        if any((one.network, one.link) == (route.network, route.link) for one in present):
            return
        where = "" if table == MAIN_TABLE else f" table {table}"
        hint = f"two NICs can't have one address: see ip route show{where} {address}"
        raise TapError(tap.name, f"{address} is routed elsewhere already", hint=hint) from error


def _let_forward(proxy: Proxy) -> None:
    """Forward packets that come in by an uplink, and answer there for IPv6 addresses."""
    if ":" in proxy.address:
        set_interface("ipv6", proxy.link, "proxy_ndp", 1)
    elif not get_interface("ipv4", proxy.link, "forwarding"):
        set_interface("ipv4", proxy.link, "forwarding", 1)


def disconnect_routes(netlink: Netlink, tap: Link, table: int) -> None:
    """Undo what would stay on an existing tap."""
    for version in (4, 6):
        for route in netlink.routes(version, table):
            if route.link == tap.index and route.protocol == PROTOCOL:
                netlink.remove(route)
    netlink.remove(LinkAddress(tap, GATEWAY))
    for family, key in (("ipv4", "forwarding"), ("ipv4", "proxy_arp"), ("ipv6", "proxy_ndp")):
        set_interface(family, tap.name, key, 0, required=False)
