"""Wiring: connecting a tap to the node's network, completely or not at all.

A NIC is *bridged* (the tap is a port of a bridge), *routed* (the node routes the guest's addresses
to the tap) or of *Open vSwitch*. Wiring twice has the same result as wiring once. An interrupted
attempt is undone first.

The functions block as long as operators' scripts take.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.hotplug.choices import Mode
from brine.hotplug.net import ovs, records
from brine.hotplug.net.netlink import Link, LinkError, Netlink, set_interface
from brine.hotplug.net.records import PLACES, Places, TapRecord
from brine.hotplug.net.routing import (
    Plan,
    allow_sources,
    connect_by_routes,
    disconnect_routes,
    forget_sources,
    is_filtered,
    mtu_of,
    plan_routes,
    table_number,
)
from brine.hotplug.net.scripts import Phase, run_scripts
from brine.hotplug.net.tap import (
    Tap,
    TapBusyError,
    TapError,
    TapExistsError,
    check_name,
    holders,
    open_tap,
    owner_for,
)
from brine.hotplug.nic import Nic, Vlans, owner_of, parse_vlans

# A tap as a port of a Linux bridge, with or without VLANs.


class BridgeError(BrineError):
    """A NIC can't be connected to a bridge."""


def connect_to_bridge(netlink: Netlink, tap: Link, name: str, vlans: Vlans | None) -> None:
    """Make a tap a port of a bridge, in these VLANs.

    :param tap: its present state.
    :param vlans: None leaves the port in the bridge's default VLAN.
    :raises BridgeError: if there is no such bridge, or it needs VLAN filtering and has none.
    """
    bridge = find_bridge(netlink, name, vlans)
    # The node has no address on a port: its own neighbour discovery would reach the guest.
    set_interface("ipv6", tap.name, "disable_ipv6", 1, required=False)
    netlink.set_master(tap, bridge)
    if vlans:
        netlink.set_vlans(tap, vlans)


def find_bridge(netlink: Netlink, name: str, vlans: Vlans | None) -> Link:
    """A bridge for a NIC in these VLANs.

    :raises BridgeError: if there is no such bridge, or it needs VLAN filtering and has none.
    """
    bridge = netlink.find(name)
    if bridge is None:
        raise BridgeError(f"there is no bridge {name}", hint=f"ip link add {name} up type bridge")
    if bridge.kind != "bridge":
        hint = "for a bridge of Open vSwitch the mode is openvswitch"
        raise BridgeError(f"{name} is no bridge", hint=hint)
    if vlans and not bridge.vlan_filtering:
        raise BridgeError(
            f"bridge {name} takes no notice of VLANs",
            hint=f"ip link set {name} type bridge vlan_filtering 1",
        )
    return bridge


__all__ = ["Mode", "Nic", "Wired", "unwire", "wire"]

_DEFAULT_MTU = 1500

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wired:
    """A connected tap.

    :param mtu: of the tap, in bytes; the guest's may be as large.
    :param changed: whether anything had to change.
    """

    name: str
    mtu: int
    changed: bool


def wire(tap: Tap | str, nic: Nic, *, places: Places = PLACES) -> Wired:
    """Connect a tap with the settings of *nic*, and bring it up.

    Operators' scripts are called before and after. If anything fails, the changes are undone, and
    scripts are called to undo theirs; the tap itself stays.

    :param tap: an open tap, or the name of one.
    :raises UsageError: if the settings are not possible.
    :raises BrineError: what failed.
    """
    nic.check()
    with records.one_at_a_time(places, tap.name if isinstance(tap, Tap) else tap):
        return wire_alone(tap, nic, places=places)


def wire_alone(tap: Tap | str, nic: Nic, *, places: Places = PLACES) -> Wired:
    """The same for a caller that holds the tap's lock."""
    name = tap.name if isinstance(tap, Tap) else tap
    with Netlink() as netlink:
        link = _tap(netlink, name, nic)
        old = records.load(places, name)
        if old and old.complete and old.index == link.index and old.nic.is_wired_as(nic):
            # Scripts may have changed it.
            plan = _plan(netlink, link, nic)
            if plan is None or (plan.uplinks, plan.rules) == (old.uplinks, old.rules):
                _connect(netlink, link, nic, plan)
                netlink.set_up(link)
                return Wired(name, old.mtu, changed=False)
        if old:
            undo_record(netlink, old, places)
            link = netlink.get(name)
        namespace = records.current_namespace()
        if isinstance(tap, Tap):
            nic = replace(nic, queues=len(tap.queues), vhost=bool(tap.vhost))
        record = TapRecord(name, link.index, nic, time.time(), namespace=namespace)
        return _wire(netlink, link, record, places)


def check_link(nic: Nic) -> None:
    """Refuse a NIC whose bridge or routing table does not exist.

    :raises BrineError: what is wrong.
    """
    nic.check()
    if nic.mode == Mode.ROUTED:
        table_number(nic.link)
    elif nic.mode == Mode.OPEN_VSWITCH:
        ovs.check_bridge(nic.link)
    else:
        with Netlink() as netlink:
            find_bridge(netlink, nic.link, parse_vlans(nic.vlan))


def unwire(tap: Tap | str, *, places: Places = PLACES) -> bool:
    """Disconnect a tap, and remove its record; the interface stays, if it still exists.

    Operators' scripts are called before and after. A script that fails is reported, and the work
    goes on.

    :returns: whether there was anything to undo.
    """
    name = tap.name if isinstance(tap, Tap) else tap
    with records.one_at_a_time(places, name):
        record = records.load(places, name)
        if record is None:
            return False
        with Netlink() as netlink:
            undo_record(netlink, record, places)
        return True


def undo_record(netlink: Netlink, record: TapRecord, places: Places) -> None:
    """Undo the wiring of a record as far as possible, and remove it; failures are reported.

    The caller holds the tap's lock.
    """
    nic = record.nic
    variables = environment(nic, record.name)
    present = netlink.find(record.name)
    if present is not None and present.index != record.index:
        present = None  # another one, that only has the name

    def scripts(phase: Phase) -> None:
        run_scripts(phase, variables, folder=places.scripts)

    steps: list[Callable[[], object]] = []
    if present:
        steps.append(partial(scripts, Phase.PRE_DOWN))
        steps.append(partial(netlink.set_up, present, False))
    if nic.mode == Mode.OPEN_VSWITCH:
        steps.append(partial(ovs.remove_port, record.name))
    elif present and nic.mode == Mode.BRIDGED:
        steps.append(lambda: netlink.set_master(netlink.get(record.name), None))
    living = [one for one in _others(record, places) if not _is_gone(netlink, one)]
    for proxy in record.proxies:
        if not any(proxy in one.proxies for one in living):
            steps.append(partial(netlink.remove_proxy, proxy))
    for rule in record.rules:
        if not any(rule in one.rules for one in living):
            steps.append(partial(netlink.remove_rule, rule))
    if nic.mode == Mode.ROUTED:
        if present:
            steps.append(partial(disconnect_routes, netlink, present, record.table))
        steps.append(partial(forget_sources, record.name))
    steps.append(partial(scripts, Phase.DOWN))
    for step in steps:
        try:
            step()
        except LinkError as error:
            level = logging.DEBUG if _is_gone(netlink, record) else logging.WARNING
            log.log(level, "%s: %s", record.name, error)
        except BrineError as error:
            log.warning("%s: %s", record.name, error)
    records.remove(places, record.name)


def restore_filters(netlink: Netlink, *, places: Places = PLACES) -> None:
    """Restore filters of routed taps that another program has removed.

    ``nft flush ruleset`` removes them; Debian's ``nftables.service`` begins with that.
    """
    for name, record in records.load_all(places).items():
        if record.nic.mode != Mode.ROUTED or not (record.is_here() and record.complete):
            continue
        try:
            with records.one_at_a_time(places, name, timeout_s=0):
                if records.load(places, name) != record or _is_gone(netlink, record):
                    continue
                if not is_filtered(name):
                    allow_sources(name, record.nic.addresses())
                    log.warning("%s: its filter was gone, and is there again", name)
        except LockedError:
            continue
        except BrineError as error:
            log.warning("%s", error)


def environment(nic: Nic, tap: str) -> dict[str, str]:
    """The environment of operators' scripts: names and values are Ganeti's."""
    found = {
        "INSTANCE": nic.instance,
        "MAC": nic.mac,
        "MODE": nic.mode.value,
        "INTERFACE": tap,
        "INTERFACE_INDEX": "" if nic.index is None else str(nic.index),
        "INTERFACE_UUID": "" if nic.uuid.isdigit() else nic.uuid,
        "TAGS": " ".join(nic.tags),
    }
    optional = {"IP": " ".join(nic.ips), "LINK": nic.link, "VLAN": nic.vlan}
    if nic.mode == Mode.BRIDGED:
        optional["BRIDGE"] = nic.link
    found.update({key: value for key, value in optional.items() if value})
    found.update(nic.network)
    return found


def _wire(netlink: Netlink, link: Link, record: TapRecord, places: Places) -> Wired:
    nic = record.nic
    plan = _plan(netlink, link, nic)
    mtu = nic.mtu or _link_mtu(netlink, nic, plan)
    record = replace(record, mtu=mtu)
    if plan:
        # Proxy entries of other programs stay when the NIC goes.
        of_taps = {proxy for other in _others(record, places) for proxy in other.proxies}
        ours = set(plan.proxies) - (netlink.proxies() - of_taps)
        proxies = tuple(proxy for proxy in plan.proxies if proxy in ours)
        record = replace(
            record, table=plan.table, uplinks=plan.uplinks, proxies=proxies, rules=plan.rules
        )
    variables = environment(nic, link.name)
    with ExitStack() as undo:
        record = records.save(places, record)
        undo.callback(undo_record, netlink, record, places)
        netlink.set_alias(link, nic.alias())
        run_scripts(Phase.PRE_UP, variables, folder=places.scripts)
        netlink.set_mtu(link, mtu)
        netlink.set_mac(link, tap_mac(link.name))
        _connect(netlink, link, nic, plan)
        netlink.set_up(link)
        run_scripts(Phase.UP, variables, folder=places.scripts)
        # A script may have taken minutes, and the process that had the tap open may have ended.
        netlink.get(link.name)
        records.save(places, record, complete=True)
        undo.pop_all()
    return Wired(link.name, mtu, changed=True)


def tap_mac(name: str) -> str:
    """The node's own MAC address on a tap: not the guest's, and always the same.

    A bridge takes the lowest address of its ports as its own. This one begins so high that guests
    that come and go don't change it.
    """
    return "fe:" + hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:5].hex(":")


def _tap(netlink: Netlink, name: str, nic: Nic) -> Link:
    link = netlink.get(name)
    if link.kind != "tun":
        raise TapError(name, "is no tap", hint=f"see ip -d link show {name}")
    owner = owner_of(link.alias)
    if link.alias and owner is None:
        raise TapError(name, f"belongs to something else: {link.alias}")
    if owner and owner != (nic.instance, nic.uuid):
        raise TapError(name, f"belongs to NIC {owner[1]} of {owner[0]}", hint="use another name")
    return link


def _plan(netlink: Netlink, link: Link, nic: Nic) -> Plan | None:
    return plan_routes(netlink, link, nic) if nic.mode == Mode.ROUTED else None


def _link_mtu(netlink: Netlink, nic: Nic, plan: Plan | None) -> int:
    if plan:
        return mtu_of(netlink, plan.uplinks) or _DEFAULT_MTU
    bridge = netlink.find(nic.link)
    return bridge.mtu if bridge else _DEFAULT_MTU


def _connect(netlink: Netlink, link: Link, nic: Nic, plan: Plan | None) -> None:
    if plan:
        connect_by_routes(netlink, link, plan)
    elif nic.mode == Mode.BRIDGED:
        connect_to_bridge(netlink, link, nic.link, parse_vlans(nic.vlan))
    else:
        ovs.add_port(nic.link, link.name, parse_vlans(nic.vlan), nic.alias())


def _others(record: TapRecord, places: Places) -> list[TapRecord]:
    """Other wired NICs on this node: an address may have moved to one of them."""
    found = records.load_all(places).values()
    return [one for one in found if one.name != record.name and one.is_here()]


def _is_gone(netlink: Netlink, record: TapRecord) -> bool:
    link = netlink.find(record.name)
    return link is None or link.index != record.index


# Persistent taps, for a QEMU that opens its tap by name (``-netdev tap,ifname=NAME,script=no``).


def bring_up(
    nic: Nic,
    *,
    name: str | None = None,
    queues: int = 1,
    user: int | None = None,
    group: int | None = None,
    places: Places = PLACES,
) -> Wired:
    """Make a persistent tap, and wire it. Doing so twice has the same result as once.

    The tap becomes persistent last: if this process ends before, so does the tap.

    :param name: of the tap; None makes one from the names of the instance and the NIC.
    :param queues: how many queues a QEMU may open.
    :param user: id of the user who may open it, see :func:`brine.hotplug.net.tap.open_tap`.
    :param group: the same for a group.
    :raises TapBusyError: if it is the tap of a running VM, which ends with the VM.
    :raises BrineError: what failed. The tap is unchanged, or gone.
    """
    nic.check()
    name = name or nic.tap_name()
    check_name(name)
    with records.one_at_a_time(places, name):
        return _bring_up(nic, name, queues, user, group, places)


def _bring_up(
    nic: Nic, name: str, queues: int, user: int | None, group: int | None, places: Places
) -> Wired:
    with Netlink() as netlink:
        link = netlink.find(name)
        if link and link.kind == "tun" and owner_of(link.alias):
            if not link.persistent:
                raise TapBusyError(name, f"is in use, and ends with its VM: {_holders(name)}")
            if link.carrier:
                return wire_alone(name, nic, places=places)
            found = (link.multi_queue, link.user, link.group)
            if found != (queues > 1, owner_for(user, group), group):  # what only a new tap can have
                remove(netlink, link)
                link = None
    reuse = link is not None and link.persistent
    with open_tap(name, queues=queues, user=user, group=group, reuse=reuse) as tap:
        wired = wire_alone(tap, nic, places=places)
        tap.keep()
    return wired


def take_down(name: str, *, force: bool = False, places: Places = PLACES) -> bool:
    """Disconnect a tap that Brine made, and remove it.

    :param force: also if a VM has it open, whose NIC is then disconnected.
    :returns: whether anything had to change.
    :raises TapBusyError: if a process has it open.
    :raises TapError: if Brine did not make it.
    """
    check_name(name)
    with records.one_at_a_time(places, name), Netlink() as netlink:
        link = netlink.find(name)
        record = records.load(places, name)
        if link and not (link.kind == "tun" and owner_of(link.alias)):
            hint = f"see ip -d link show {name}"
            raise TapError(name, "is none of ours, and is left alone", hint=hint)
        if link and link.carrier and not force:
            hint = "stop that, or use --force, and its NIC leads nowhere"
            raise TapBusyError(name, f"is in use: {_holders(name)}", hint=hint)
        if record:
            undo_record(netlink, record, places)
        if link:
            netlink.delete(link)
    return bool(link or record)


def remove(netlink: Netlink, link: Link) -> bool:
    """Remove a tap that no process has open; returns False if one has.

    A tap with one queue is opened first, so that no process can open it meanwhile.
    """
    if link.multi_queue:
        current = netlink.find(link.name)
        if current is None or current.carrier:
            return False
        netlink.delete(current)
        return True
    try:
        with open_tap(link.name, reuse=True) as tap:
            tap.discard()
    except (TapBusyError, TapExistsError):
        return False
    return True


def _holders(name: str) -> str:
    return ", ".join(map(str, holders(name))) or "somebody has it open"
