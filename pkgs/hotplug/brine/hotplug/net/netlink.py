"""The kernel's network configuration, through netlink: interfaces, VLANs, routes, rules, proxies.

A library for it takes longer to import than a whole command should take. Source:
:manpage:`netlink(7)`, :manpage:`rtnetlink(7)`, and ``rtnetlink.h``, ``if_link.h``,
``if_bridge.h``, ``fib_rules.h`` and ``neighbour.h`` in ``include/uapi/linux`` of Linux.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from brine.common.errors import BrineError
from brine.hotplug.nic import Vlans, owner_of

# Messages and their attributes, the same for all that netlink configures.

ACK, DUMP, CREATE, APPEND = 0x4, 0x300, 0x400, 0x800
"""Flags of a request."""

_REQUEST, _DUMP_CHANGED, _EXCLUSIVE = 0x1, 0x10, 0x200
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_TYPE_MASK = 0x3FFF  # without what says that there are attributes inside

_SOL_NETLINK, _GET_STRICT_CHK = 270, 12
_LARGEST_ANSWER = 1 << 17
_TIMEOUT_S = 30.0
_MOST_DUMPS = 10


class NetlinkSocket:
    """A connection to the kernel, in the network namespace of the thread that makes it.

    :param protocol: such as ``socket.NETLINK_ROUTE``.
    """

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        self._socket.settimeout(_TIMEOUT_S)
        # The kernel filters a dump as the request says, such as by the table of routes.
        self._socket.setsockopt(_SOL_NETLINK, _GET_STRICT_CHK, 1)
        self._last = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, *requests: tuple[int, int, bytes]) -> list[bytes]:
        """Send requests in one datagram; returns the bodies of the kernel's answers.

        :param requests: type, flags and body of each; one without ``ACK`` is not answered.
        :raises OSError: the kernel's first error.
        """
        for _ in range(_MOST_DUMPS):
            found, is_whole = self._ask(requests)
            if is_whole:
                return found
        raise OSError(errno.EBUSY, "it changes all the time")

    def _ask(self, requests: Iterable[tuple[int, int, bytes]]) -> tuple[list[bytes], bool]:
        """The answers, and whether they are consistent: nothing changed between them."""
        data, waiting = b"", set()
        for kind, flags, body in requests:
            self._last += 1
            size = _HEADER.size + len(body)
            data += _HEADER.pack(size, kind, _REQUEST | flags, self._last, 0) + body
            if flags & ACK:
                waiting.add(self._last)
        self._socket.send(data)
        found: list[bytes] = []
        is_whole = True
        while waiting:
            for kind, flags, of_request, body in _messages(self._socket.recv(_LARGEST_ANSWER)):
                if of_request not in waiting:
                    continue  # the rest of an earlier one, which failed
                is_whole = is_whole and not flags & _DUMP_CHANGED
                if kind not in (_ERROR, _DONE):
                    found.append(body)
                    continue
                (code,) = struct.unpack_from("=i", body)
                if code:
                    raise OSError(-code, os.strerror(-code))
                waiting.remove(of_request)
        return found, is_whole


def attribute(kind: int, *values: bytes | str | int) -> bytes:
    """An attribute of a message: bytes or other attributes, text, or a number of 32 bits."""
    value = b"".join(map(_packed, values))
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _packed(value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return struct.pack("=I", value)
    return os.fsencode(value) + b"\0" if isinstance(value, str) else value


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The type and value of each attribute."""
    start = 0
    while start + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        yield kind & _TYPE_MASK, data[start + _ATTRIBUTE.size : start + size]
        start += max(_ATTRIBUTE.size, (size + 3) & ~3)


def _parsed(head: struct.Struct, answer: bytes) -> tuple[tuple[int, ...], dict[int, bytes]]:
    """The head and the attributes of an answer."""
    return head.unpack_from(answer), dict(attributes(answer[head.size :]))


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """The type, flags, number and body of each message of a datagram."""
    start = 0
    while start + _HEADER.size <= len(data):
        size, kind, flags, of_request, _ = _HEADER.unpack_from(data, start)
        yield kind, flags, of_request, data[start + _HEADER.size : start + size]
        start += (size + 3) & ~3


def _text_of(value: bytes | None) -> str:
    return os.fsdecode(value.rstrip(b"\0")) if value else ""


def _number_of(value: bytes | None) -> int | None:
    return int.from_bytes(value, sys.byteorder) if value else None


# Interfaces.

_SET_LINK, _DELETE_LINK, _GET_LINK, _SET_PORT = 16, 17, 18, 19
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, which of them change
_MAC, _NAME, _MTU, _MASTER, _INFORMATION, _ALIAS = 1, 3, 4, 10, 18, 20
_PORT, _FILTER, _CARRIER, _CARRIER_CHANGES = 26, 29, 33, 35
_KIND, _DATA = 1, 2  # in _INFORMATION; in _DATA of each kind:
_BRIDGE_VLAN_FILTERING = 7
_TUN_OWNER, _TUN_GROUP, _TUN_PERSIST, _TUN_MULTI_QUEUE = 1, 2, 6, 7
_UP = 0x1
_WITH_VLANS = attribute(_FILTER, 0x2)
_WITHOUT_STATISTICS = attribute(_FILTER, 0x8)

_VLAN = struct.Struct("=HH")  # flags, id
_IN_VLAN = 2  # in _PORT
_PVID, _UNTAGGED = 0x2, 0x4


@dataclass(frozen=True)
class Link:
    """A network interface.

    :param kind: ``bridge``, ``tun``, ...; empty for hardware.
    :param carrier: of a tap: whether a process has it open.
    :param master: index of its bridge.
    :param user: id of the user who may open a tap, beside those with CAP_NET_ADMIN; so is *group*.
    """

    index: int
    name: str
    kind: str
    alias: str
    mac: str
    mtu: int
    up: bool
    carrier: bool
    carrier_changes: int
    master: int | None
    vlan_filtering: bool
    persistent: bool
    multi_queue: bool
    user: int | None
    group: int | None

    def owner(self) -> tuple[str, str] | None:
        """The instance and the NIC of a tap of Brine's; None for other interfaces."""
        return owner_of(self.alias) if self.kind == "tun" else None


def _link(answer: bytes) -> Link:
    (_, _, index, flags, _), values = _parsed(_LINK, answer)
    information = dict(attributes(values.get(_INFORMATION, b"")))
    kind = _text_of(information.get(_KIND))
    data = dict(attributes(information.get(_DATA, b""))) if kind in ("bridge", "tun") else {}
    return Link(
        index=index,
        name=_text_of(values[_NAME]),
        kind=kind,
        alias=_text_of(values.get(_ALIAS)),
        mac=values.get(_MAC, b"").hex(":"),
        mtu=_number_of(values.get(_MTU)) or 0,
        up=bool(flags & _UP),
        carrier=bool(_number_of(values.get(_CARRIER))),
        carrier_changes=_number_of(values.get(_CARRIER_CHANGES)) or 0,
        master=_number_of(values.get(_MASTER)),
        vlan_filtering=bool(_number_of(data.get(_BRIDGE_VLAN_FILTERING))),
        persistent=bool(_number_of(data.get(_TUN_PERSIST))),
        multi_queue=bool(_number_of(data.get(_TUN_MULTI_QUEUE))),
        user=_number_of(data.get(_TUN_OWNER)),
        group=_number_of(data.get(_TUN_GROUP)),
    )


# Other objects of the network configuration. The kernel has three types of messages for each kind:
# to make one, and after that number to delete one, and to get all.

PROTOCOL = 66
"""The protocol of Brine's routes and rules: ``ip route show proto 66`` lists them."""

RULE_PRIORITY = 31000
"""The priority of Brine's rules: before the kernel's own, 32766 and 32767."""

MAIN_TABLE = 254

_ADDRESS_TYPE, _ROUTE_TYPE, _NEIGHBOUR_TYPE, _RULE_TYPE = 20, 24, 28, 32
_ADDRESS = struct.Struct("=4BI")  # family, prefix length, flags, scope, index
# Family, prefix lengths of target and source, TOS, table, protocol, scope, type, flags; a rule's
# last is the action.
_ROUTE = struct.Struct("=8BI")
_NEIGHBOUR = struct.Struct("=B3xiHBB")  # family, index, state, flags, type
_HOP = struct.Struct("=HBBi")  # length, flags, hops, index
_TO = 1
_OUTGOING, _GATEWAY, _HOPS, _TABLE, _VIA = 4, 5, 9, 15, 18
_INCOMING, _PRIORITY, _RULE_PROTOCOL = 3, 6, 21
_UNICAST, _TO_TABLE = 1, 1
_SCOPE_UNIVERSE, _SCOPE_LINK = 0, 253
_NO_DAD = 0x2
_PROXY, _PERMANENT = 0x8, 0x80


@dataclass(frozen=True)
class LinkAddress:
    """A link-local IPv6 address of an interface, without duplicate address detection."""

    link: Link
    address: str


@dataclass(frozen=True)
class Route:
    """A route to a network.

    :param link: index of the interface.
    :param gateway: whether it goes through a router.
    """

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    link: int
    table: int = MAIN_TABLE
    gateway: bool = False
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Rule:
    """A rule: packets that come in by an interface use a routing table. ``lo`` are the node's own.

    :param version: of IP, 4 or 6.
    :param to: only packets to this address.
    """

    version: int
    table: int
    incoming: str
    to: str | None = None


@dataclass(frozen=True)
class Proxy:
    """An address that the node answers for on an interface: proxy ARP, or proxy NDP."""

    address: str
    link: str


Thing = LinkAddress | Route | Rule | Proxy


def _message(thing: Thing) -> tuple[str, int, bytes]:
    """What a thing is in words, and the type and the body of a message that makes it."""
    match thing:
        case LinkAddress(link, address):
            body = _ADDRESS.pack(socket.AF_INET6, 64, _NO_DAD, _SCOPE_UNIVERSE, link.index)
            body += attribute(_TO, ipaddress.ip_address(address).packed)
            return f"address {address} of {link.name}", _ADDRESS_TYPE, body
        case Route(network, link, table, _, protocol):
            scope = _SCOPE_LINK if network.version == 4 else _SCOPE_UNIVERSE
            kind = (0, 0, 0, protocol, scope, _UNICAST, 0)
            body = _ROUTE.pack(_family(network.version), network.prefixlen, *kind)
            body += attribute(_TO, network.network_address.packed)
            body += attribute(_OUTGOING, link) + attribute(_TABLE, table)
            return f"route to {network.network_address}", _ROUTE_TYPE, body
        case Rule(version, table, incoming, to):
            packed = ipaddress.ip_address(to).packed if to else b""
            body = _ROUTE.pack(_family(version), 8 * len(packed), 0, 0, 0, 0, 0, _TO_TABLE, 0)
            body += attribute(_TO, packed) if packed else b""
            body += attribute(_INCOMING, incoming)
            body += attribute(_PRIORITY, RULE_PRIORITY)
            body += attribute(_TABLE, table) + attribute(_RULE_PROTOCOL, bytes([PROTOCOL]))
            return f"rule for {incoming}", _RULE_TYPE, body
        case Proxy(address, link_name):
            packed = ipaddress.ip_address(address).packed
            # The kernel knows no interface -1, and says so.
            index = {name: index for index, name in socket.if_nameindex()}.get(link_name, -1)
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            body = _NEIGHBOUR.pack(family, index, _PERMANENT, _PROXY, 0) + attribute(_TO, packed)
            return f"proxy for {address} on {link_name}", _NEIGHBOUR_TYPE, body


def _routes(answer: bytes, table: int) -> Iterator[Route]:
    """The routes in an answer: one for each next hop."""
    (family, length, _, _, _, protocol, _, _, _), values = _parsed(_ROUTE, answer)
    to = values.get(_TO, bytes(4 if family == socket.AF_INET else 16))
    hops = [(_number_of(values.get(_OUTGOING)), values)]
    # One of several hops has its interface's index in its header, a single one in an attribute.
    if data := values.get(_HOPS):
        hops = []
        while len(data) >= _HOP.size:
            size, _, _, index = _HOP.unpack_from(data)
            hops.append((index, dict(attributes(data[_HOP.size : size]))))
            data = data[max(size, _HOP.size) :]
    for link, hop in hops:
        if link is not None:
            gateway = _GATEWAY in hop or _VIA in hop
            yield Route(ipaddress.ip_network((to, length)), link, table, gateway, protocol)


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


class LinkError(BrineError):
    """The kernel refused a change to the network.

    :param code: its error number (:mod:`errno`).
    """

    def __init__(self, message: str, code: int, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class Netlink(NetlinkSocket):
    """The network configuration of this thread's network namespace; used as a context manager."""

    def __init__(self) -> None:
        super().__init__(socket.NETLINK_ROUTE)

    def links(self) -> list[Link]:
        """All interfaces."""
        body = _LINK.pack(0, 0, 0, 0, 0) + _WITHOUT_STATISTICS
        return list(map(_link, self._try("interfaces", _GET_LINK, body, flags=DUMP)))

    def find(self, name: str) -> Link | None:
        """The interface of that name, or None."""
        body = _LINK.pack(0, 0, 0, 0, 0) + attribute(_NAME, name) + _WITHOUT_STATISTICS
        found = self._try(f"interface {name}", _GET_LINK, body, but=[errno.ENODEV])
        return _link(found[0]) if found else None

    def get(self, name: str) -> Link:
        """The interface of that name.

        :raises LinkError: if there is none.
        """
        link = self.find(name)
        if link is None:
            raise LinkError(f"there is no interface {name}", errno.ENODEV, hint="see ip link")
        return link

    def change(
        self,
        link: Link,
        *,
        alias: str | None = None,
        mtu: int | None = None,
        mac: str | None = None,
        up: bool | None = None,
    ) -> None:
        """Change an interface; None leaves a value as it is."""
        body = _LINK.pack(0, 0, link.index, _UP if up else 0, 0 if up is None else _UP)
        if alias is not None:
            body += attribute(_ALIAS, alias.encode())
        if mtu is not None:
            body += attribute(_MTU, mtu)
        if mac is not None:
            body += attribute(_MAC, bytes.fromhex(mac.replace(":", "")))
        self._try(f"interface {link.name}", _SET_LINK, body)

    def set_master(self, link: Link, bridge: Link | None) -> None:
        """Make an interface a port of a bridge, or of no bridge."""
        index = bridge.index if bridge else 0
        if (link.master or 0) != index:
            body = _LINK.pack(0, 0, link.index, 0, 0) + attribute(_MASTER, index)
            self._try(f"interface {link.name}", _SET_LINK, body)

    def delete(self, link: Link) -> None:
        """Delete an interface; succeeds if there is none."""
        body = _LINK.pack(0, 0, link.index, 0, 0)
        self._try(f"interface {link.name}", _DELETE_LINK, body, but=[errno.ENODEV])

    def set_vlans(self, port: Link, wanted: Vlans) -> None:
        """Put a port of a bridge into these VLANs, and into no others."""
        flags = dict.fromkeys(wanted.tagged, 0)
        if wanted.untagged is not None:
            flags[wanted.untagged] = _PVID | _UNTAGGED
        present = self._vlan_flags(port)
        changes = [(_DELETE_LINK, vid, 0) for vid in present.keys() - flags.keys()]
        changes += [(_SET_PORT, vid, flags[vid]) for vid in flags if present.get(vid) != flags[vid]]
        for kind, vid, its_flags in changes:
            vlan = attribute(_PORT, attribute(_IN_VLAN, _VLAN.pack(its_flags, vid)))
            body = _LINK.pack(socket.AF_BRIDGE, 0, port.index, 0, 0) + vlan
            self._try(f"VLANs of {port.name}", kind, body)

    def _vlan_flags(self, port: Link) -> dict[int, int]:
        body = _LINK.pack(socket.AF_BRIDGE, 0, 0, 0, 0) + _WITH_VLANS
        found = {}
        for answer in self._try(f"VLANs of {port.name}", _GET_LINK, body, flags=DUMP):
            (_, _, index, _, _), values = _parsed(_LINK, answer)
            for kind, value in attributes(values.get(_PORT, b"")):
                if (index, kind) == (port.index, _IN_VLAN):
                    flags, vid = _VLAN.unpack(value)
                    found[vid] = flags & (_PVID | _UNTAGGED)
        return found

    def routes(self, version: int, table: int) -> list[Route]:
        """The routes of a table; empty if there is no such table."""
        body = _ROUTE.pack(_family(version), *[0] * 8) + attribute(_TABLE, table)
        what = f"routes of table {table}"
        found = self._try(what, _ROUTE_TYPE + 2, body, flags=DUMP, but=[errno.ENOENT])
        return [route for answer in found for route in _routes(answer, table)]

    def proxies(self) -> set[Proxy]:
        """All addresses that the node answers for."""
        names = dict(socket.if_nameindex())
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _NEIGHBOUR.pack(family, 0, 0, _PROXY, 0)
            for answer in self._try("proxies", _NEIGHBOUR_TYPE + 2, body, flags=DUMP):
                (_, index, _, _, _), values = _parsed(_NEIGHBOUR, answer)
                # An entry without an interface is for all interfaces, and not Brine's.
                if index in names:
                    found.add(Proxy(str(ipaddress.ip_address(values[_TO])), names[index]))
        return found

    def add(self, thing: Thing) -> None:
        """Add an address, a route, a rule or a proxy entry; succeeds if it exists.

        :raises LinkError: EEXIST if there is a route to the same network.
        """
        what, kind, body = _message(thing)
        but = [] if isinstance(thing, Route) else [errno.EEXIST]
        self._try(what, kind, body, flags=CREATE | _EXCLUSIVE, but=but)

    def remove(self, thing: Thing) -> None:
        """Remove it; succeeds if there is none, or no interface."""
        what, kind, body = _message(thing)
        gone = [errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.EADDRNOTAVAIL]
        self._try(what, kind + 1, body, but=gone)

    def _try(
        self, what: str, kind: int, body: bytes, *, flags: int = 0, but: Collection[int] = ()
    ) -> list[bytes]:
        """The kernel's answers; none if its error is one of *but*."""
        try:
            return self.ask((kind, ACK | flags, body))
        except OSError as error:
            if error.errno in but:
                return []
            raise _refused(what, error) from error


def _refused(what: str, error: OSError) -> LinkError:
    hints = {
        errno.EPERM: "be root; it takes CAP_NET_ADMIN",
        errno.EEXIST: "something else has it: see ip route show table all",
        errno.ENODEV: "an interface went away meanwhile: see ip link",
    }
    code = error.errno or 0
    reason = f"{error.strerror or error} ({errno.errorcode.get(code)})"
    return LinkError(f"{what}: the kernel says {reason}", code, hint=hints.get(code))


# Settings of one interface, below ``/proc/sys/net`` (``ip-sysctl.rst`` of Linux).

_NET = Path("/proc/sys/net")


def set_interface(
    family: str, link: str, key: str, value: int, *, folder: str = "conf", required: bool = True
) -> None:
    """Set a key of an interface, e.g. ``net.ipv4.conf.LINK.forwarding``.

    :param required: False if a kernel without the key needs no setting.
    :raises BrineError: if it can't be set.
    """
    file = _NET / family / folder / link / key
    if required or file.exists():
        with _told(file):
            file.write_text(f"{value}\n")


def get_interface(family: str, link: str, key: str) -> int:
    """The value of a key of an interface; ``all`` means the whole node.

    :raises BrineError: if it can't be read.
    """
    file = _NET / family / "conf" / link / key
    with _told(file):
        return int(file.read_text())


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = None
        if error.errno == errno.ENOENT and not (_NET / "ipv6").exists():
            hint = "this node has no IPv6"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "be root, where /proc/sys can be written"
        raise BrineError(f"{file}: {error.strerror}", hint=hint) from error
