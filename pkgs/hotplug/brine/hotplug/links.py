"""The kernel's network configuration, through netlink: interfaces, bridges, VLANs, routes.

All here is synchronous. In a running asyncio loop it must be called in a thread: pyroute2 0.9
brings a loop of its own. Importing it takes as long as a whole command should, so that it is
imported when it is first needed, which is not for interfaces alone.

Source: :manpage:`rtnetlink(7)`, and ``include/uapi/linux/rtnetlink.h`` of Linux.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from brine.common.errors import BrineError
from brine.hotplug.network import (
    PROTOCOL,
    RULE_PRIORITY,
    Link,
    Proxy,
    Route,
    Rule,
    routes_of,
)
from brine.hotplug.rtnetlink import Attribute, LinkSocket, number
from brine.hotplug.vlans import Vlans
from brine.hotplug.wanted import Address

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
    """A connection to the kernel, to be used as a context."""

    def __init__(self) -> None:
        self._library: Any = None
        self._errors: tuple[type[Exception], ...] = (OSError,)

    def __enter__(self) -> Netlink:
        _refuse_in_loop()
        self._links = LinkSocket()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._links.close()
        if self._library:
            self._library.close()

    def load_library(self) -> None:
        """Have the library for all but interfaces at hand, which else is loaded when needed."""
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
        """Say of an interface whose it is."""
        self._change(link, {Attribute.ALIAS: alias.encode()})

    def set_mtu(self, link: Link, mtu: int) -> None:
        """Set how many bytes a frame of an interface may have."""
        self._change(link, {Attribute.MTU: number(mtu)})

    def set_mac(self, link: Link, mac: str) -> None:
        """Set the address that the node has on an interface."""
        self._change(link, {Attribute.ADDRESS: bytes.fromhex(mac.replace(":", ""))})

    def set_up(self, link: Link, up: bool = True) -> None:
        """Put an interface up, or down."""
        self._change(link, {}, up=up)

    def set_master(self, link: Link, bridge: Link | None) -> None:
        """Make an interface a port of a bridge, or of none."""
        wanted = bridge.index if bridge else None
        if link.master != wanted:
            self._change(link, {Attribute.MASTER: number(wanted or 0)})

    def _change(
        self, link: Link, attributes: Mapping[Attribute, bytes], *, up: bool | None = None
    ) -> None:
        with self._told(f"interface {link.name}"):
            self._links.change(link.index, attributes, up=up)

    def delete(self, link: Link) -> None:
        """Delete an interface; that it is gone already is no fault."""
        with self._told(f"interface {link.name}", but=[errno.ENODEV]):
            self._links.delete(link.index)

    def set_vlans(self, port: Link, wanted: Vlans) -> None:
        """Make a port of a bridge be in these VLANs, and in no others."""
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
        """The VLANs that a port of a bridge is in."""
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
        """Give an interface an IPv6 address of its link, at once and without asking around."""
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
        """Take it away again; that it has none is no fault."""
        gone = [errno.EADDRNOTAVAIL, errno.ENODEV]
        with self._told(f"address {address} of {link.name}", but=gone):
            self._ip.addr(
                "del", index=link.index, family=socket.AF_INET6, address=address, prefixlen=64
            )

    def routes(self, version: int, table: int) -> list[Route]:
        """The routes of a table; none if there is no such table."""
        found: list[Route] = []
        # The kernel says ENOENT of an IPv6 table without a route.
        with self._told(f"routes of table {table}", but=[errno.ENOENT]):
            for message in self._ip.get_routes(family=_family(version), table=table):
                found += routes_of(message, version)
        return found

    def add_host_route(self, link: Link, address: Address, table: int) -> None:
        """Route an address to an interface; that it is so already is no fault.

        :raises LinkError: EEXIST if it goes elsewhere.
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
        """Remove all routes of ours to an interface."""
        for route in self.routes(version, table):
            if route.link == link.index and route.protocol == PROTOCOL:
                address = route.network.network_address
                with self._told(f"route to {address}", but=[errno.ESRCH, errno.ENODEV]):
                    self._ip.route("del", **_host_route(link, address, table))

    def add_rule(self, rule: Rule) -> None:
        """Add a rule; that it is there already is no fault."""
        with self._told(f"rule for {rule.incoming}", but=[errno.EEXIST]):
            self._ip.rule("add", **_rule(rule))

    def remove_rule(self, rule: Rule) -> None:
        """Remove a rule of ours; that it is gone is no fault."""
        with self._told(f"rule for {rule.incoming}", but=[errno.ENOENT]):
            self._ip.rule("del", **_rule(rule))

    def add_proxy(self, proxy: Proxy) -> None:
        """Answer for an address on an interface."""
        with self._told(f"proxy for {proxy.address} on {proxy.link}"):
            self._ip.neigh("replace", **self._proxy(proxy))

    def remove_proxy(self, proxy: Proxy) -> None:
        """Answer no more; that we don't is no fault, nor that the interface is gone."""
        with contextlib.suppress(NoLinkError):
            gone = [errno.ENOENT, errno.ENODEV]
            with self._told(f"proxy for {proxy.address} on {proxy.link}", but=gone):
                self._ip.neigh("del", **self._proxy(proxy))

    def proxies(self) -> set[Proxy]:
        """All addresses that are answered for."""
        from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST
        from pyroute2.netlink.rtnl import RTM_GETNEIGH
        from pyroute2.netlink.rtnl.ndmsg import ndmsg

        names = {link.index: link.name for link in self.links()}
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            # The kernel dumps either neighbours or proxies; the library only asks for the first.
            request = ndmsg()
            request["family"] = family
            request["flags"] = _NTF_PROXY
            flags = NLM_F_REQUEST | NLM_F_DUMP
            for message in self._ip.nlm_request(request, RTM_GETNEIGH, flags):
                address = message.get_attr("NDA_DST")
                # An entry without an interface is for all of them, and none of ours.
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
        """Tell what the kernel refused; the error numbers *but* are no faults."""
        try:
            yield
        except self._errors as error:
            code = (error.errno if isinstance(error, OSError) else getattr(error, "code", 0)) or 0
            if code not in but:
                raise _refused(what, code) from error


def _refuse_in_loop() -> None:
    """Fail with any version of the library where its newest would."""
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
