"""A tap that the node routes a guest's addresses to: carrying out a plan of :mod:`routing`."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable

from brine.hotplug.links import LinkError, Netlink
from brine.hotplug.network import MAIN_TABLE, Link, Route
from brine.hotplug.routing import Plan, make_plan, table_number
from brine.hotplug.source_filter import allow_sources
from brine.hotplug.sysctl import get_interface, set_interface
from brine.hotplug.taps import TapError
from brine.hotplug.wanted import Wiring

GATEWAY = "fe80::1"
"""A guest's router for IPv6, the same on every tap."""

# What a guest may not tell the node, and what lets its packets pass.
_IPV4 = {"forwarding": 1, "proxy_arp": 1, "accept_redirects": 0, "rp_filter": 1}
_IPV6 = {"forwarding": 1, "proxy_ndp": 1, "accept_ra": 0, "autoconf": 0, "accept_redirects": 0}

log = logging.getLogger(__name__)


def plan_routes(netlink: Netlink, tap: Link, wiring: Wiring) -> Plan:
    """Plan a routed NIC, by the routes that this node has now."""
    addresses = wiring.addresses()
    table = table_number(wiring.link)
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
    """Carry out a plan: settings of the tap, routes, rules, and what we answer for.

    :raises TapError: if one of the addresses is routed elsewhere.
    """
    # Before it is up, so that no packet gets by.
    allow_sources(tap.name, plan.addresses)
    if 4 in plan.versions():
        _set(tap.name, "ipv4", _IPV4)
    if 6 in plan.versions():
        _set(tap.name, "ipv6", {"disable_ipv6": 0, **_IPV6})
    # The kernel takes routes only to an interface that is up.
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
    """Undo on a tap that is still there what would stay on it."""
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
    # Answers as a proxy would else be held back for up to 0.8 s, so as not to be all at once.
    set_interface(family, tap, "proxy_delay", 0, folder="neigh")


def _let_uplinks_forward(plan: Plan) -> None:
    """Let packets that come in by the uplinks pass on, and our answers for IPv6 go out there.

    IPv6 is forwarded by the node as a whole or not at all (before Linux 6.17), and a node that
    forwards stops to heed router advertisements: that is for its operator to decide.
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
