"""What the kernel's network configuration is made of, as netlink tells it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PROTOCOL = 66
"""Whose a route or a rule is: ``ip route show proto 66`` lists ours."""

RULE_PRIORITY = 31000
"""Where our rules stand: before those that the kernel begins with, 32766 and 32767."""

MAIN_TABLE = 254


@dataclass(frozen=True)
class Link:
    """A network interface.

    :param kind: ``bridge``, ``tun``, ...; empty for hardware.
    :param carrier: for a tap: whether anybody has it open.
    :param carrier_changes: how often that has changed.
    :param master: index of the bridge that it is a port of.
    :param vlan_filtering: whether it is a bridge that looks at VLANs.
    :param persistent: whether it is a tap that stays when nobody has it open.
    :param multi_queue: whether it is a tap that several may have open, each with its own queue.
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
    """A route to a network; *gateway* is whether it goes through a router."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    link: int
    gateway: bool
    protocol: int


@dataclass(frozen=True)
class Rule:
    """Packets that come in by an interface look a table up; ``lo`` is this node's own packets.

    :param to: only those to this address.
    :param version: of IP, 4 or 6.
    """

    version: int
    table: int
    incoming: str
    to: str | None = None


@dataclass(frozen=True)
class Proxy:
    """An address that we answer for on an interface: proxy ARP, or proxy NDP."""

    address: str
    link: str


def routes_of(message: Any, version: int) -> Iterator[Route]:
    """A route, of pyroute2's message: one for each of the ways that it goes."""
    destination = message.get_attr("RTA_DST") or ("0.0.0.0" if version == 4 else "::")
    network = ipaddress.ip_network((destination, message["dst_len"]))
    hops = message.get_attr("RTA_MULTIPATH")
    # A hop of several is told with its interface's index in its head, all others in an attribute.
    pairs = (
        [(hop["oif"], hop) for hop in hops] if hops else [(message.get_attr("RTA_OIF"), message)]
    )
    for link, hop in pairs:
        if link is not None:
            gateway = hop.get_attr("RTA_GATEWAY") or hop.get_attr("RTA_VIA")
            yield Route(network, link, gateway is not None, message["proto"])
