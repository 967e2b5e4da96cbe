"""The kernel's network configuration, through netlink: interfaces, bridges, VLANs, routes.

Importing pyroute2 takes as long as a whole command should. So interfaces have code of their own
here, and pyroute2 is imported when something else is needed first. pyroute2 0.9 brings an asyncio
loop: in a running loop, call these functions in a thread.

Source: :manpage:`rtnetlink(7)`, and ``include/uapi/linux/rtnetlink.h`` of Linux.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.hotplug.nic import Address, Vlans

# The objects of the kernel's network configuration.

PROTOCOL = 66
"""The protocol of Brine's routes and rules: ``ip route show proto 66`` lists them."""

RULE_PRIORITY = 31000
"""The priority of Brine's rules: before the kernel's own, 32766 and 32767."""

MAIN_TABLE = 254


@dataclass(frozen=True)
class Link:
    """A network interface.

    :param kind: ``bridge``, ``tun``, ...; empty for hardware.
    :param carrier: of a tap: whether a process has it open.
    :param carrier_changes: how often that has changed.
    :param master: index of its bridge.
    :param vlan_filtering: whether it is a bridge with VLAN filtering.
    :param persistent: whether it is a tap that stays when no process has it open.
    :param multi_queue: whether it is a tap with several queues.
    :param user: id of the user who may open a tap, beside those with CAP_NET_ADMIN.
    :param group: the same for a group.
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


@dataclass(frozen=True)
class Route:
    """A route to a network; *gateway* says whether it goes through a router."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    link: int
    gateway: bool
    protocol: int


@dataclass(frozen=True)
class Rule:
    """A rule: packets that come in by an interface use a routing table. ``lo`` are the node's own.

    :param to: only packets to this address.
    :param version: of IP, 4 or 6.
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


def routes_of(message: Any, version: int) -> Iterator[Route]:
    """The routes in a message of pyroute2's: one for each next hop."""
    destination = message.get_attr("RTA_DST") or ("0.0.0.0" if version == 4 else "::")
    network = ipaddress.ip_network((destination, message["dst_len"]))
    hops = message.get_attr("RTA_MULTIPATH")
    # One of several hops has its interface's index in its header, a single one in an attribute.
    pairs = (
        [(hop["oif"], hop) for hop in hops] if hops else [(message.get_attr("RTA_OIF"), message)]
    )
    for link, hop in pairs:
        if link is not None:
            gateway = hop.get_attr("RTA_GATEWAY") or hop.get_attr("RTA_VIA")
            yield Route(network, link, gateway is not None, message["proto"])


# Interfaces by rtnetlink: as much of it as is needed to read and change them.

Attributes = dict[int, bytes]

IFF_UP = 0x1

_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_LINK_HEADER = struct.Struct("=BxHiII")  # family, type, index, flags, which of them change
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_TYPE_MASK = 0x3FFF  # without what says that there are attributes inside

_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP_CHANGED, _DUMP = 0x1, 0x4, 0x10, 0x300

_LARGEST_ANSWER = 1 << 17
_TIMEOUT_S = 30.0
_MOST_DUMPS = 10


class NetlinkRequest(IntEnum):
    """The requests to the kernel."""

    SET = 16
    DELETE = 17
    GET = 18


class Attribute(IntEnum):
    """The attributes of an interface."""

    ADDRESS = 1
    NAME = 3
    MTU = 4
    MASTER = 10
    INFORMATION = 18
    ALIAS = 20
    FILTER = 29
    CARRIER = 33
    CARRIER_CHANGES = 35


_SHORTER = {Attribute.FILTER: struct.pack("=I", 8)}  # RTEXT_FILTER_SKIP_STATS

# Nested in INFORMATION, and in the data of a kind.
_KIND, _DATA = 1, 2
_BRIDGE_VLAN_FILTERING = 7
_TUN_OWNER, _TUN_GROUP, _TUN_PERSIST, _TUN_MULTI_QUEUE = 1, 2, 6, 7


class LinkSocket:
    """A connection to the kernel, in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)
        self._number = 0

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def links(self) -> list[Link]:
        """All interfaces.

        :raises OSError: the kernel's error.
        """
        for _ in range(_MOST_DUMPS):
            found, is_whole = self._ask(NetlinkRequest.GET, _DUMP, _link_message(0, _SHORTER))
            if is_whole:
                return list(map(link_of, found))
        raise OSError(errno.EBUSY, "the interfaces change all the time")

    def link(self, name: str) -> Link:
        """The interface of that name.

        :raises OSError: the kernel's error; ENODEV if there is none.
        """
        wanted = {Attribute.NAME: os.fsencode(name) + b"\0", **_SHORTER}
        found, _ = self._ask(NetlinkRequest.GET, _ACK, _link_message(0, wanted))
        return link_of(found[0])

    def change(
        self, index: int, attributes: Mapping[Attribute, bytes], *, up: bool | None = None
    ) -> None:
        """Change an interface.

        :param up: bring it up, or down; None leaves it as it is.
        :raises OSError: the kernel's error.
        """
        flags, mask = (IFF_UP if up else 0), (0 if up is None else IFF_UP)
        self._ask(
            NetlinkRequest.SET, _ACK, _link_message(index, attributes, flags=flags, mask=mask)
        )

    def delete(self, index: int) -> None:
        """Delete an interface.

        :raises OSError: the kernel's error.
        """
        self._ask(NetlinkRequest.DELETE, _ACK, _link_message(index, {}))

    def _ask(self, request: NetlinkRequest, flags: int, message: bytes) -> tuple[list[bytes], bool]:
        """The kernel's answers, and whether they are consistent: nothing changed between them."""
        self._number += 1
        size = _HEADER.size + len(message)
        header = _HEADER.pack(size, request, _REQUEST | flags, self._number, 0)
        self._socket.send(header + message)
        found: list[bytes] = []
        is_whole = True
        while True:
            for kind, said, number, body in _messages(self._socket.recv(_LARGEST_ANSWER)):
                if number != self._number:
                    continue  # what is left of an earlier one
                is_whole = is_whole and not said & _DUMP_CHANGED
                if kind in (_ERROR, _DONE):
                    (code,) = struct.unpack_from("=i", body)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return found, is_whole
                found.append(body)


def link_of(message: bytes) -> Link:
    """The interface of a message of the kernel's."""
    _, _, index, flags, _ = _LINK_HEADER.unpack_from(message)
    has = attributes_in(message[_LINK_HEADER.size :])
    information = attributes_in(has.get(Attribute.INFORMATION, b""))
    kind = _text(information.get(_KIND))
    data = attributes_in(information.get(_DATA, b"")) if kind in ("bridge", "tun") else {}
    of_bridge, of_tap = (data if kind == each else {} for each in ("bridge", "tun"))
    return Link(
        index=index,
        name=_text(has[Attribute.NAME]),
        kind=kind,
        alias=_text(has.get(Attribute.ALIAS)),
        mac=has.get(Attribute.ADDRESS, b"").hex(":"),
        mtu=_number(has.get(Attribute.MTU)) or 0,
        up=bool(flags & IFF_UP),
        carrier=bool(_number(has.get(Attribute.CARRIER))),
        carrier_changes=_number(has.get(Attribute.CARRIER_CHANGES)) or 0,
        master=_number(has.get(Attribute.MASTER)),
        vlan_filtering=bool(_number(of_bridge.get(_BRIDGE_VLAN_FILTERING))),
        persistent=bool(_number(of_tap.get(_TUN_PERSIST))),
        multi_queue=bool(_number(of_tap.get(_TUN_MULTI_QUEUE))),
        user=_number(of_tap.get(_TUN_OWNER)),
        group=_number(of_tap.get(_TUN_GROUP)),
    )


def attributes_in(data: bytes) -> Attributes:
    """The attributes of a message, or those nested in an attribute."""
    found, start = {}, 0
    while start + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        if size < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = data[start + _ATTRIBUTE.size : start + size]
        start += _aligned(size)
    return found


def number(value: int) -> bytes:
    """A number as an attribute's value."""
    return struct.pack("=I", value)


def _link_message(
    index: int, attributes: Mapping[Attribute, bytes], *, flags: int = 0, mask: int = 0
) -> bytes:
    parts = [_LINK_HEADER.pack(0, 0, index, flags, mask)]
    for kind, value in attributes.items():
        size = _ATTRIBUTE.size + len(value)
        parts += [_ATTRIBUTE.pack(size, kind), value, bytes(_aligned(size) - size)]
    return b"".join(parts)


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """The type, flags, number and body of each message of a datagram."""
    start = 0
    while start + _HEADER.size <= len(data):
        size, kind, flags, of_request, _ = _HEADER.unpack_from(data, start)
        yield kind, flags, of_request, data[start + _HEADER.size : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def _text(value: bytes | None) -> str:
    return os.fsdecode(value.rstrip(b"\0")) if value else ""


def _number(value: bytes | None) -> int | None:
    return int.from_bytes(value, sys.byteorder) if value else None


_IFA_F_NODAD = 0x2
_NTF_PROXY = 0x8
_NUD_PERMANENT = 0x80
_VLAN_PVID = 0x2
_VLAN_UNTAGGED = 0x4
_SCOPE_LINK = 253
_SCOPE_UNIVERSE = 0


class LinkError(BrineError):
    """The kernel refused a change to the network.

    :param code: its error number (:mod:`errno`).
    """

    def __init__(self, message: str, code: int, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class NoLinkError(LinkError):
    """There is no such interface."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no interface {name}", errno.ENODEV, hint="see ip link")


class Netlink:
    """A connection to the kernel, used as a context manager."""

    def __init__(self) -> None:
        self._library: Any = None
        self._errors: tuple[type[Exception], ...] = (OSError,)

    def __enter__(self) -> Netlink:
        _refuse_in_loop()
        self._links = LinkSocket()
        return self

    def __exit__(self, *_: object) -> None:
        self._links.close()
        if self._library:
            self._library.close()

    def load_library(self) -> None:
        """Load pyroute2 now, which is otherwise loaded when it is needed."""
        if self._library is None:
            from pyroute2 import IPRoute
            from pyroute2.netlink.exceptions import NetlinkError

            self._errors = (OSError, NetlinkError)
            self._library = IPRoute()

    @property
    def _ip(self) -> Any:
        self.load_library()
        return self._library

    def links(self) -> list[Link]:
        """All interfaces of this network namespace."""
        with self._told("interfaces"):
            return self._links.links()

    def find(self, name: str) -> Link | None:
        """The interface of that name, or None."""
        with self._told(f"interface {name}", but=[errno.ENODEV]):
            return self._links.link(name)
        return None

    def get(self, name: str) -> Link:
        """The interface of that name.

        :raises NoLinkError: if there is none.
        """
        link = self.find(name)
        if link is None:
            raise NoLinkError(name)
        return link

    def set_alias(self, link: Link, alias: str) -> None:
        """Set the alias of an interface."""
        self._change(link, {Attribute.ALIAS: alias.encode()})

    def set_mtu(self, link: Link, mtu: int) -> None:
        """Set the MTU of an interface, in bytes."""
        self._change(link, {Attribute.MTU: number(mtu)})

    def set_mac(self, link: Link, mac: str) -> None:
        """Set the MAC address of an interface."""
        self._change(link, {Attribute.ADDRESS: bytes.fromhex(mac.replace(":", ""))})

    def set_up(self, link: Link, up: bool = True) -> None:
        """Bring an interface up, or down."""
        self._change(link, {}, up=up)

    def set_master(self, link: Link, bridge: Link | None) -> None:
        """Make an interface a port of a bridge, or of no bridge."""
        wanted = bridge.index if bridge else None
        if link.master != wanted:
            self._change(link, {Attribute.MASTER: number(wanted or 0)})

    def _change(
        self, link: Link, attributes: Mapping[Attribute, bytes], *, up: bool | None = None
    ) -> None:
        with self._told(f"interface {link.name}"):
            self._links.change(link.index, attributes, up=up)

    def delete(self, link: Link) -> None:
        """Delete an interface; succeeds if there is none."""
        with self._told(f"interface {link.name}", but=[errno.ENODEV]):
            self._links.delete(link.index)

    def set_vlans(self, port: Link, wanted: Vlans) -> None:
        """Put a port of a bridge into these VLANs, and into no others."""
        flags = dict.fromkeys(wanted.tagged, 0)
        if wanted.untagged is not None:
            flags[wanted.untagged] = _VLAN_PVID | _VLAN_UNTAGGED
        present = self._vlans_of(port)
        with self._told(f"VLANs of {port.name}"):
            for vid in present.keys() - flags.keys():
                self._ip.vlan_filter("del", index=port.index, vlan_info={"vid": vid, "flags": 0})
            for vid in sorted(flags):
                if present.get(vid) != flags[vid]:
                    info = {"vid": vid, "flags": flags[vid]}
                    self._ip.vlan_filter("add", index=port.index, vlan_info=info)

    def vlans(self, port: Link) -> Vlans:
        """The VLANs of a port of a bridge."""
        flags = self._vlans_of(port)
        untagged = next((vid for vid in flags if flags[vid] & _VLAN_PVID), None)
        return Vlans(untagged, frozenset(vid for vid in flags if vid != untagged))

    def _vlans_of(self, port: Link) -> dict[int, int]:
        found: dict[int, int] = {}
        with self._told(f"VLANs of {port.name}"):
            for message in self._ip.get_vlans():
                if message["index"] != port.index:
                    continue
                block = message.get_attr("IFLA_AF_SPEC")
                for name, value in block["attrs"] if block else ():
                    if name == "IFLA_BRIDGE_VLAN_INFO":
                        found[value["vid"]] = value["flags"] & (_VLAN_PVID | _VLAN_UNTAGGED)
        return found

    def add_link_address(self, link: Link, address: str) -> None:
        """Give an interface a link-local IPv6 address, without duplicate address detection."""
        with self._told(f"address {address} of {link.name}", but=[errno.EEXIST]):
            self._ip.addr(
                "add",
                index=link.index,
                family=socket.AF_INET6,
                address=address,
                prefixlen=64,
                flags=_IFA_F_NODAD,
            )

    def remove_link_address(self, link: Link, address: str) -> None:
        """Remove that address; succeeds if there is none."""
        gone = [errno.EADDRNOTAVAIL, errno.ENODEV]
        with self._told(f"address {address} of {link.name}", but=gone):
            self._ip.addr(
                "del", index=link.index, family=socket.AF_INET6, address=address, prefixlen=64
            )

    def routes(self, version: int, table: int) -> list[Route]:
        """The routes of a table; empty if there is no such table."""
        found: list[Route] = []
        # The kernel reports ENOENT for an IPv6 table without routes.
        with self._told(f"routes of table {table}", but=[errno.ENOENT]):
            for message in self._ip.get_routes(family=_family(version), table=table):
                found += routes_of(message, version)
        return found

    def add_host_route(self, link: Link, address: Address, table: int) -> None:
        """Route an address to an interface; succeeds if that route exists.

        :raises LinkError: EEXIST if the address has another route.
        """
        try:
            with self._told(f"route to {address}"):
                self._ip.route("add", **_host_route(link, address, table))
        except LinkError as error:
            if error.code != errno.EEXIST:
                raise
            for route in self.routes(address.version, table):
                if route.network.network_address == address and route.link == link.index:
                    return
            raise

    def remove_our_routes(self, link: Link, version: int, table: int) -> None:
        """Remove all of Brine's routes to an interface."""
        for route in self.routes(version, table):
            if route.link == link.index and route.protocol == PROTOCOL:
                address = route.network.network_address
                with self._told(f"route to {address}", but=[errno.ESRCH, errno.ENODEV]):
                    self._ip.route("del", **_host_route(link, address, table))

    def add_rule(self, rule: Rule) -> None:
        """Add a rule; succeeds if it exists."""
        with self._told(f"rule for {rule.incoming}", but=[errno.EEXIST]):
            self._ip.rule("add", **_rule(rule))

    def remove_rule(self, rule: Rule) -> None:
        """Remove a rule of Brine's; succeeds if there is none."""
        with self._told(f"rule for {rule.incoming}", but=[errno.ENOENT]):
            self._ip.rule("del", **_rule(rule))

    def add_proxy(self, proxy: Proxy) -> None:
        """Answer for an address on an interface."""
        with self._told(f"proxy for {proxy.address} on {proxy.link}"):
            self._ip.neigh("replace", **self._proxy(proxy))

    def remove_proxy(self, proxy: Proxy) -> None:
        """Stop answering; succeeds if there is no such entry, or no interface."""
        with contextlib.suppress(NoLinkError):
            gone = [errno.ENOENT, errno.ENODEV]
            with self._told(f"proxy for {proxy.address} on {proxy.link}", but=gone):
                self._ip.neigh("del", **self._proxy(proxy))

    def proxies(self) -> set[Proxy]:
        """All addresses that the node answers for."""
        from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST
        from pyroute2.netlink.rtnl import RTM_GETNEIGH
        from pyroute2.netlink.rtnl.ndmsg import ndmsg

        names = {link.index: link.name for link in self.links()}
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            # The kernel dumps either neighbours or proxies; pyroute2 asks for neighbours only.
            request = ndmsg()
            request["family"] = family
            request["flags"] = _NTF_PROXY
            flags = NLM_F_REQUEST | NLM_F_DUMP
            for message in self._ip.nlm_request(request, RTM_GETNEIGH, flags):
                address = message.get_attr("NDA_DST")
                # An entry without an interface is for all interfaces, and not Brine's.
                if address and message["ifindex"] in names:
                    found.add(Proxy(str(address), names[message["ifindex"]]))
        return found

    def _proxy(self, proxy: Proxy) -> dict[str, Any]:
        return {
            "family": _family(ipaddress.ip_address(proxy.address).version),
            "dst": proxy.address,
            "ifindex": self.get(proxy.link).index,
            "flags": _NTF_PROXY,
            "state": _NUD_PERMANENT,
        }

    @contextlib.contextmanager
    def _told(self, what: str, *, but: Iterable[int] = ()) -> Iterator[None]:
        """Raise the kernel's error, unless its number is one of *but*."""
        try:
            yield
        except self._errors as error:
            code = (error.errno if isinstance(error, OSError) else getattr(error, "code", 0)) or 0
            if code not in but:
                raise _refused(what, code) from error


def _refuse_in_loop() -> None:
    """Raise the error of a missing interface with every version of pyroute2."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        raise RuntimeError("netlink in a running asyncio loop: use asyncio.to_thread()")


def _refused(what: str, code: int) -> LinkError:
    hints = {
        errno.EPERM: "be root; it takes CAP_NET_ADMIN",
        errno.EEXIST: "something else has it: see ip route show table all",
        errno.ENODEV: "an interface went away meanwhile: see ip link",
    }
    text = f"{what}: the kernel says {os.strerror(code)} ({errno.errorcode.get(code)})"
    return LinkError(text, code, hint=hints.get(code))


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _host_route(link: Link, address: Address, table: int) -> dict[str, Any]:
    return {
        "family": _family(address.version),
        "dst": f"{address}/{address.max_prefixlen}",
        "oif": link.index,
        "table": table,
        "proto": PROTOCOL,
        "scope": _SCOPE_LINK if address.version == 4 else _SCOPE_UNIVERSE,
    }


def _rule(rule: Rule) -> dict[str, Any]:
    options: dict[str, Any] = {
        "family": _family(rule.version),
        "iifname": rule.incoming,
        "table": rule.table,
        "priority": RULE_PRIORITY,
        "protocol": PROTOCOL,
    }
    if rule.to:
        options["dst"] = rule.to
        options["dst_len"] = 32 if rule.version == 4 else 128
    return options


# Settings of one interface, below ``/proc/sys/net`` (``ip-sysctl.rst`` of Linux).

_NET = Path("/proc/sys/net")


def set_interface(
    family: str, link: str, key: str, value: int, *, folder: str = "conf", required: bool = True
) -> None:
    """Set a key of an interface, e.g. ``net.ipv4.conf.LINK.forwarding``.

    :param family: ``ipv4`` or ``ipv6``.
    :param folder: ``conf``, or ``neigh``.
    :param required: False if a kernel without the key needs no setting.
    :raises BrineError: if it can't be set.
    """
    file = _NET / family / folder / link / key
    try:
        file.write_text(f"{value}\n")
    except OSError as error:
        if not required and error.errno == errno.ENOENT:
            return
        raise _error(file, error) from error


def get_interface(family: str, link: str, key: str) -> int:
    """The value of a key of an interface; ``all`` means the whole node.

    :raises BrineError: if it can't be read.
    """
    file = _NET / family / "conf" / link / key
    try:
        return int(file.read_text())
    except OSError as error:
        raise _error(file, error) from error


def _error(file: Path, error: OSError) -> BrineError:
    hint = None
    if error.errno == errno.ENOENT and not (_NET / "ipv6").exists():
        hint = "this node has no IPv6"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "be root, where /proc/sys can be written"
    return BrineError(f"{file}: {error.strerror}", hint=hint)
