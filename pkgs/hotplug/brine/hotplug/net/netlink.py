"""The kernel's network configuration, through netlink: interfaces, VLANs, routes, rules, proxies.

pyroute2 takes longer to load than all else that a start needs. So interfaces, which every start
asks for, have code of their own here, and pyroute2 is loaded for all others. pyroute2 0.9 does not
work in a running asyncio loop. Source: :manpage:`netlink(7)`, :manpage:`rtnetlink(7)`, and
``rtnetlink.h`` and ``if_link.h`` in ``include/uapi/linux`` of Linux.
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
from typing import Any, Self

from brine.common.errors import BrineError
from brine.vm.connection import Vlans
from brine.vm.vif import owner_of

# Messages and their attributes.

_REQUEST, _ACK, _DUMP, _DUMP_CHANGED = 0x1, 0x4, 0x300, 0x10
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_TYPE_MASK = 0x3FFF  # without what says that there are attributes inside

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
        self._last = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, *requests: tuple[int, int, bytes]) -> list[bytes]:
        """Send requests in one datagram; returns the bodies of the kernel's answers.

        :param requests: type, flags and body of each; one without ``_ACK`` is not answered.
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
            if flags & _ACK:
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


def _attribute(kind: int, *values: bytes | str | int) -> bytes:
    """An attribute of a message: bytes or other attributes, text, or a number of 32 bits."""
    value = b"".join(map(_packed, values))
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _packed(value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return struct.pack("=I", value)
    return os.fsencode(value) + b"\0" if isinstance(value, str) else value


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The type and value of each attribute."""
    start = 0
    while start + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        yield kind & _TYPE_MASK, data[start + _ATTRIBUTE.size : start + size]
        start += max(_ATTRIBUTE.size, (size + 3) & ~3)


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

_SET_LINK, _DELETE_LINK, _GET_LINK = 16, 17, 18
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, which of them change
_MAC, _NAME, _MTU, _MASTER, _INFORMATION, _ALIAS = 1, 3, 4, 10, 18, 20
_FILTER, _CARRIER, _CARRIER_CHANGES = 29, 33, 35
_KIND, _DATA = 1, 2  # in _INFORMATION; in _DATA of each kind:
_BRIDGE_VLAN_FILTERING = 7
_TUN_OWNER, _TUN_GROUP, _TUN_PERSIST, _TUN_MULTI_QUEUE = 1, 2, 6, 7
_UP = 0x1
_WITHOUT_STATISTICS = _attribute(_FILTER, 0x8)


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
    _, _, index, flags, _ = _LINK.unpack_from(answer)
    values = dict(_attributes(answer[_LINK.size :]))
    information = dict(_attributes(values.get(_INFORMATION, b"")))
    kind = _text_of(information.get(_KIND))
    data = dict(_attributes(information.get(_DATA, b""))) if kind in ("bridge", "tun") else {}
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


# Other objects of the network configuration.

PROTOCOL = 66
"""The protocol of Brine's routes and rules: ``ip route show proto 66`` lists them."""

RULE_PRIORITY = 31000
"""The priority of Brine's rules: before the kernel's own, 32766 and 32767."""

MAIN_TABLE = 254

_NO_DAD = 0x2
_GET_NEIGHBOURS, _PROXY = 30, 0x8
_PVID, _UNTAGGED = 0x2, 0x4


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


def _arguments(thing: Thing) -> tuple[str, str, dict[str, Any]]:
    """A thing in words, and pyroute2's function for it, with arguments."""
    match thing:
        case LinkAddress(link, address):
            found = {"family": socket.AF_INET6, "address": address, "prefixlen": 64}
            found |= {"index": link.index, "flags": _NO_DAD}
            return f"address {address} of {link.name}", "addr", found
        case Route(network, link, table, _, protocol):
            found = {"family": _family(network.version), "dst": str(network), "oif": link}
            found |= {"table": table, "proto": protocol, "scope": "link"}
            return f"route to {network.network_address}", "route", found
        case Rule(version, table, incoming, to):
            found = {"family": _family(version), "iifname": incoming, "table": table}
            found |= {"priority": RULE_PRIORITY, "protocol": PROTOCOL} | ({"dst": to} if to else {})
            return f"rule for {incoming}", "rule", found
        case Proxy(address, link_name):
            # The kernel knows no interface -1, and says so.
            index = {name: index for index, name in socket.if_nameindex()}.get(link_name, -1)
            found = {"dst": address, "ifindex": index, "flags": _PROXY}
            return f"proxy for {address} on {link_name}", "neigh", found


def _routes(message: Any, table: int) -> Iterator[Route]:
    """The routes in a message of pyroute2's: one for each next hop."""
    to = message.get_attr("RTA_DST") or ("0.0.0.0" if message["family"] == socket.AF_INET else "::")
    network = ipaddress.ip_network((to, message["dst_len"]))
    hops = message.get_attr("RTA_MULTIPATH")
    for hop in hops or [message]:
        # One of several hops has its interface's index in its header, a single one in an attribute.
        link = hop["oif"] if hops else hop.get_attr("RTA_OIF")
        if link is not None:
            gateway = hop.get_attr("RTA_GATEWAY") or hop.get_attr("RTA_VIA")
            yield Route(network, link, table, gateway is not None, message["proto"])


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
        body = _LINK.pack(0, 0, 0, 0, 0) + _WITHOUT_STATISTICS
        return list(map(_link, self._try("interfaces", _GET_LINK, body, flags=_DUMP)))

    def find(self, name: str) -> Link | None:
        """The interface of that name, or None."""
        body = _LINK.pack(0, 0, 0, 0, 0) + _attribute(_NAME, name) + _WITHOUT_STATISTICS
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
            body += _attribute(_ALIAS, alias.encode())
        if mtu is not None:
            body += _attribute(_MTU, mtu)
        if mac is not None:
            body += _attribute(_MAC, bytes.fromhex(mac.replace(":", "")))
        self._try(f"interface {link.name}", _SET_LINK, body)

    def set_master(self, link: Link, bridge: Link | None) -> None:
        """Make an interface a port of a bridge, or of no bridge."""
        index = bridge.index if bridge else 0
        if (link.master or 0) != index:
            body = _LINK.pack(0, 0, link.index, 0, 0) + _attribute(_MASTER, index)
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
        changes = [("del", vid, 0) for vid in present.keys() - flags.keys()]
        changes += [("add", vid, flags[vid]) for vid in flags if present.get(vid) != flags[vid]]
        for command, vid, its_flags in changes:
            info = {"vid": vid, "flags": its_flags}
            what = f"VLANs of {port.name}"
            self._call(what, "vlan_filter", command, index=port.index, vlan_info=info)

    def _vlan_flags(self, port: Link) -> dict[int, int]:
        found = {}
        for message in self._call(f"VLANs of {port.name}", "get_vlans"):
            block = message.get_attr("IFLA_AF_SPEC")
            if message["index"] == port.index and block:
                for vlan in block.get_attrs("IFLA_BRIDGE_VLAN_INFO"):
                    found[vlan["vid"]] = vlan["flags"] & (_PVID | _UNTAGGED)
        return found

    def routes(self, version: int, table: int) -> list[Route]:
        """The routes of a table; empty if there is no such table."""
        what = f"routes of table {table}"
        found = self._call(what, "get_routes", family=_family(version), table=table)
        return [route for message in found for route in _routes(message, table)]

    def proxies(self) -> set[Proxy]:
        """All addresses that the node answers for."""
        # Not "dump", which asks for neighbours: the kernel lists either those or proxies.
        command, names = (_GET_NEIGHBOURS, _REQUEST | _DUMP), dict(socket.if_nameindex())
        found = self._call("proxies", "neigh", command, family=0, flags=_PROXY)
        # An entry without an interface is for all interfaces, and not Brine's.
        return {
            Proxy(message.get_attr("NDA_DST"), names[message["ifindex"]])
            for message in found
            if message["ifindex"] in names
        }

    def add(self, thing: Thing) -> None:
        """Add an address, a route, a rule or a proxy entry; succeeds if it exists.

        :raises LinkError: EEXIST if there is a route to the same network.
        """
        what, function, arguments = _arguments(thing)
        but = [] if isinstance(thing, Route) else [errno.EEXIST]
        self._call(what, function, "add", but=but, **arguments)

    def remove(self, thing: Thing) -> None:
        """Remove it; succeeds if there is none, or no interface."""
        what, function, arguments = _arguments(thing)
        gone = [errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.EADDRNOTAVAIL]
        self._call(what, function, "del", but=gone, **arguments)

    def _call(
        self, what: str, function: str, *arguments: Any, but: Collection[int] = (), **options: Any
    ) -> list[Any]:
        """Call a function of pyroute2; the result is empty if the kernel's error is in *but*."""
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            with IPRoute() as kernel:
                return list(getattr(kernel, function)(*arguments, **options))
        except (NetlinkError, OSError) as error:
            refused = OSError(*error.args)
            if refused.errno in but:
                return []
            raise _refused(what, refused) from error

    def _try(
        self, what: str, kind: int, body: bytes, *, flags: int = 0, but: Collection[int] = ()
    ) -> list[bytes]:
        """The kernel's answers; none if its error is one of *but*."""
        try:
            return self.ask((kind, _ACK | flags, body))
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
