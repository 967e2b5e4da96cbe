"""Routed taps: their rules, routes, and the filter of forged source addresses.

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

The command ``nft`` need not be installed. Source: ``nf_tables.h`` and ``nfnetlink.h`` of Linux,
:manpage:`nft(8)`.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from brine.common.errors import BrineError, UsageError, nearest
from brine.hotplug.net.netlink import (
    ACK,
    APPEND,
    CREATE,
    MAIN_TABLE,
    PROTOCOL,
    Link,
    LinkAddress,
    LinkError,
    Netlink,
    NetlinkSocket,
    Proxy,
    Route,
    Rule,
    attribute,
    get_interface,
    set_interface,
)
from brine.hotplug.net.records import TapRecord
from brine.hotplug.net.tap import TapError
from brine.hotplug.nic import Address

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
    allow_sources(tap.name, addresses)
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
            "this node does not forward IPv6, so its guests reach nobody beyond it: "
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


# The filter of source addresses.

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_FAMILY = 5  # NFPROTO_NETDEV
_INGRESS, _BEFORE_ALL = 0, -500
_CHAIN = "sources"
_NESTED = 0x8000
_BATCH_BEGIN, _BATCH_END = ((kind, 0, struct.pack(">BBH", 0, 0, _SUBSYSTEM)) for kind in (16, 17))
_NEW_TABLE, _GET_TABLE, _DELETE_TABLE, _NEW_CHAIN, _GET_CHAIN, _NEW_RULE = 0, 1, 2, 3, 4, 6

_IP, _ARP, _IP6 = 0x0800, 0x0806, 0x86DD
_UDP = 17
_DROP, _ACCEPT = 0, 1
_NETWORK_HEADER = 1
_META_PROTOCOL = 1


@dataclass(frozen=True)
class _Match:
    """A condition: these bits of the network header have this value."""

    offset: int
    value: bytes
    mask: bytes = b""


def allow_sources(tap: str, addresses: Iterable[Address]) -> None:
    """Let a tap's guest send from these addresses only; this replaces an earlier filter.

    The kernel replaces it in one step, so the guest is never without a filter.

    :raises BrineError: if the kernel refuses.
    """
    hook = attribute(1, _big(_INGRESS)), attribute(2, _big(_BEFORE_ALL)), attribute(3, tap)
    chain = attribute(4 | _NESTED, *hook), attribute(5, _big(_DROP)), attribute(7, "filter")
    new_rule = partial(_request, tap, _NEW_RULE, CREATE | APPEND, attribute(2, _CHAIN))
    _ask(
        tap,
        _BATCH_BEGIN,
        _request(tap, _NEW_TABLE, CREATE),
        _request(tap, _DELETE_TABLE, 0),
        _request(tap, _NEW_TABLE, CREATE),
        _request(tap, _NEW_CHAIN, CREATE, attribute(3, _CHAIN), *chain),
        *map(new_rule, _rules(addresses)),
        _BATCH_END,
    )


def forget_sources(tap: str) -> None:
    """Remove a tap's filter; succeeds if there is none.

    :raises BrineError: if the kernel refuses.
    """
    if _ask(tap, _request(tap, _GET_TABLE, 0), only_look=True):
        _ask(tap, _BATCH_BEGIN, _request(tap, _DELETE_TABLE, 0), _BATCH_END)


def is_filtered(tap: str) -> bool:
    """Whether a tap has its filter: ``nft flush ruleset`` removes it with all others.

    :raises BrineError: if the kernel refuses.
    """
    return _ask(tap, _request(tap, _GET_CHAIN, 0, attribute(3, _CHAIN)), only_look=True)


def _rules(addresses: Iterable[Address]) -> Iterator[bytes]:
    """Rules that accept packets."""
    versions = set()
    for address in addresses:
        versions.add(address.version)
        if address.version == 4:
            yield _rule(_IP, _Match(12, address.packed))
            yield _rule(_ARP, _Match(14, address.packed))
        else:
            yield _rule(_IP6, _Match(8, address.packed))
    if 4 in versions:
        # ARP probes for a free address, and DHCP requests, have no source address.
        yield _rule(_ARP, _Match(14, bytes(4)))
        everybody, udp = _Match(16, b"\xff" * 4), _Match(9, bytes([_UDP]))
        yield _rule(_IP, _Match(12, bytes(4)), everybody, udp)
    if 6 in versions:
        # Neighbour discovery uses link-local addresses, which no router forwards.
        yield _rule(_IP6, _Match(8, b"\xfe\x80", mask=b"\xff\xc0"))
        yield _rule(_IP6, _Match(8, bytes(16)), _Match(24, b"\xff\x02"))


def _rule(protocol: int, *matches: _Match) -> bytes:
    """A rule that accepts packets of an Ethernet protocol for which all conditions are true."""
    # Each value is loaded into register 1, and compared there.
    parts = [_expression("meta", 1, _META_PROTOCOL), _compare(struct.pack(">H", protocol))]
    for match in matches:
        size = len(match.value)
        parts.append(_expression("payload", 1, _NETWORK_HEADER, match.offset, size))
        if match.mask:
            mask, nothing = attribute(1, match.mask), attribute(1, bytes(size))
            parts.append(_expression("bitwise", 1, 1, size, mask, nothing))
        parts.append(_compare(match.value))
    verdict = attribute(2 | _NESTED, attribute(1, _big(_ACCEPT)))
    return attribute(4 | _NESTED, *parts, _expression("immediate", 0, verdict))


def _compare(value: bytes) -> bytes:
    return _expression("cmp", 1, 0, attribute(1, value))


def _expression(name: str, *fields: int | bytes) -> bytes:
    """An expression, whose fields have numbers from 1 on."""
    packed = [
        attribute(number, _big(field))
        if isinstance(field, int)
        else attribute(number | _NESTED, field)
        for number, field in enumerate(fields, 1)
    ]
    return attribute(1 | _NESTED, attribute(1, name), attribute(2 | _NESTED, *packed))


def _big(value: int) -> bytes:
    return struct.pack(">i", value)


def _request(tap: str, kind: int, flags: int, *attributes: bytes) -> tuple[int, int, bytes]:
    """A request about a tap's table, or about its content."""
    body = struct.pack(">BBH", _FAMILY, 0, 0) + attribute(1, f"brine-{tap}") + b"".join(attributes)
    return _SUBSYSTEM << 8 | kind, flags | ACK, body


def _ask(tap: str, *requests: tuple[int, int, bytes], only_look: bool = False) -> bool:
    """Make requests, of which a batch is one change.

    :param only_look: return False if there is no such object.
    """
    try:
        with NetlinkSocket(_NETLINK_NETFILTER) as kernel:
            kernel.ask(*requests)
    except OSError as error:
        if only_look and error.errno == errno.ENOENT:
            return False
        hint = None
        if error.errno == errno.EPERM:
            hint = "be root; it takes CAP_NET_ADMIN"
        elif error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL):
            hint = "a routed NIC needs nf_tables: modprobe nf_tables"
        text = f"{tap}: packets can't be filtered by their source: {error.strerror or error}"
        raise BrineError(text, hint=hint) from error
    return True
