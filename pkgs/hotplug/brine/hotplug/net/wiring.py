"""Wiring: connecting a tap to the node's network, completely or not at all.

A NIC is *bridged* (the tap is a port of a bridge), *routed* (the node routes the guest's addresses
to the tap) or of *Open vSwitch*. Wiring twice has the same result as wiring once. An interrupted
attempt is undone first.

The functions block as long as operators' scripts take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from brine.common.digest import sha256
from brine.common.errors import BrineError
from brine.common.locks import LockedError, node_lock
from brine.hotplug.net import ovs, records
from brine.hotplug.net.netlink import Link, LinkError, Netlink, Proxy, Rule, set_interface
from brine.hotplug.net.packet_filter import (
    filtered_taps,
    is_filtered,
    remove_filter,
    set_filter,
)
from brine.hotplug.net.records import TapRecord
from brine.hotplug.net.routing import (
    connect_by_routes,
    disconnect_routes,
    plan_routes,
    table_number,
)
from brine.hotplug.net.scripts import Phase, run_scripts
from brine.hotplug.net.tap import (
    Tap,
    TapBusyError,
    TapError,
    TapExistsError,
    check_devices,
    check_name,
    holders,
    open_tap,
    owner_for,
)
from brine.vm.connection import Vlans, parse_vlans
from brine.vm.values import LARGEST_MTU, SMALLEST_MTU, USUAL_MTU, Mode
from brine.vm.vif import Vif, owner_of

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


def open_own_tap(nic: Vif) -> Tap:
    """Make the tap of a NIC and open it, see :func:`brine.hotplug.net.tap.open_tap`. A tap that the
    NIC has already, and that no process has open, is replaced.

    :raises TapError: if it can't be made.
    """
    make = partial(open_tap, nic.tap_name(), queues=nic.queues, vhost=nic.vhost)
    try:
        return make()
    except TapExistsError:
        if not remove_unheld(nic):
            raise
    return make()


def remove_unheld(nic: Vif, name: str | None = None) -> bool:
    """Remove the tap of a NIC, with its wiring, if no process has it open.

    A QEMU can make its tap persistent (``TUNSETPERSIST``). Then the tap outlives it.

    :param name: of the tap, if it is not the usual one.
    :returns: whether there was one, and it is gone.
    """
    name = name or nic.tap_name()
    with records.one_at_a_time(name), Netlink() as netlink:
        link = netlink.find(name)
        if link is None or link.carrier or link.owner() != (nic.instance, nic.uuid):
            return False
        if record := records.load(name):
            undo_record(netlink, record)
        return remove(netlink, link)


def wire(tap: Tap | str, nic: Vif) -> Wired:
    """Connect a tap with the settings of *nic*, and bring it up.

    Operators' scripts are called before and after. If anything fails, the changes are undone, and
    scripts are called to undo theirs; the tap itself stays.

    :param tap: an open tap, or the name of one.
    :raises UsageError: if the settings are not possible.
    :raises BrineError: what failed.
    """
    nic.check()
    with records.one_at_a_time(str(tap)), Netlink() as netlink:
        return _wire(netlink, tap, nic)


def check_wiring(nic: Vif) -> None:
    """Refuse a NIC whose bridge, routing table or devices on the node do not exist.

    :raises BrineError: what is wrong.
    """
    nic.check()
    if nic.mode == Mode.ROUTED:
        table_number(nic.link)
    elif nic.mode == Mode.OPEN_VSWITCH:
        ovs.check_bridge(nic.link)
    else:
        with Netlink() as netlink:
            _find_bridge(netlink, nic.link, parse_vlans(nic.vlan))
    check_devices(nic.tap_name(), vhost=nic.vhost)


def unwire(tap: Tap | str) -> bool:
    """Disconnect a tap, and remove its record; the interface stays, if it still exists.

    Operators' scripts are called before and after. A script that fails is reported, and the work
    goes on.

    :returns: whether there was anything to undo.
    """
    with records.one_at_a_time(str(tap)):
        record = records.load(str(tap))
        if record is None:
            return False
        with Netlink() as netlink:
            undo_record(netlink, record)
        return True


def undo_record(netlink: Netlink, record: TapRecord) -> None:
    """Undo the wiring of a record as far as possible, and remove it; failures are reported.

    The caller holds the tap's lock.
    """
    nic = record.nic
    present = _link_of(netlink, record)
    scripts = _scripts(record)
    steps: list[Callable[[], object]] = []
    if present:
        steps.append(partial(scripts, Phase.PRE_DOWN))
        steps.append(partial(netlink.change, present, up=False))
    if nic.mode == Mode.OPEN_VSWITCH:
        steps.append(partial(ovs.remove_port, record.name))
    elif present and nic.mode == Mode.BRIDGED:
        steps.append(lambda: netlink.set_master(netlink.get(record.name), None))
    living = [one for one in _others(record) if _link_of(netlink, one)]
    things: list[Proxy | Rule] = [*record.proxies, *record.rules]
    for thing in things:
        if not any(thing in (*one.proxies, *one.rules) for one in living):
            steps.append(partial(netlink.remove, thing))
    if nic.mode == Mode.ROUTED and present:
        steps.append(partial(disconnect_routes, netlink, present, record.table))
    if is_filtered(nic):
        steps.append(partial(remove_filter, record.name))
    steps.append(partial(scripts, Phase.DOWN))
    for step in steps:
        try:
            step()
        except BrineError as error:
            # An interface that went away meanwhile took its settings along.
            is_usual = isinstance(error, LinkError) and not _link_of(netlink, record)
            log.log(logging.DEBUG if is_usual else logging.WARNING, "%s: %s", record.name, error)
    records.remove(record.name)


def restore_filters(netlink: Netlink) -> list[str]:
    """Restore filters of taps that another program has removed; returns these taps.

    ``nft flush ruleset`` removes them; Debian's ``nftables.service`` begins with that.
    """
    filtered = {
        name: record
        for name, record in records.load_all().items()
        if is_filtered(record.nic) and record.is_here() and record.complete
    }
    restored: list[str] = []
    try:
        gone = filtered.keys() - filtered_taps() if filtered else ()
    except BrineError as error:
        log.warning("%s", error)
        return restored
    for name in sorted(gone):
        try:
            with records.one_at_a_time(name, timeout_s=0):
                record = filtered[name]
                is_current = records.load(name) == record and _link_of(netlink, record)
                if is_current and name not in filtered_taps():
                    set_filter(name, record.nic)
                    restored.append(name)
                    log.warning("%s: its filter was gone, and is there again", name)
        except LockedError:
            continue
        except BrineError as error:
            log.warning("%s", error)
    return restored


def tap_mac(name: str) -> str:
    """The node's own MAC address on a tap: not the guest's, and always the same.

    A bridge takes the lowest address of its ports as its own. This one begins so high that guests
    that come and go don't change it.
    """
    return "fe:" + sha256(name.encode(errors="surrogateescape"))[:5].hex(":")


def _scripts(record: TapRecord) -> Callable[[Phase], None]:
    """Runs operators' scripts; names and values of their environment are Ganeti's."""
    nic = record.nic
    optional = {"IP": " ".join(nic.ips), "LINK": nic.link, "VLAN": nic.vlan}
    if nic.mode == Mode.BRIDGED:
        optional["BRIDGE"] = nic.link
    environment = {
        "INSTANCE": nic.instance,
        "MAC": nic.mac,
        "MODE": nic.mode,
        "INTERFACE": record.name,
        "INTERFACE_INDEX": "" if nic.index is None else str(nic.index),
        "INTERFACE_UUID": "" if nic.uuid.isdigit() else nic.uuid,
        "TAGS": " ".join(nic.tags),
        **{key: value for key, value in optional.items() if value},
        **nic.network,
    }
    return partial(run_scripts, environment=environment)


def _wire(netlink: Netlink, tap: Tap | str, nic: Vif) -> Wired:
    """Connect a tap whose lock the caller holds."""
    name = str(tap)
    link = netlink.get(name)
    _refuse_strange(link, nic)
    old = records.load(name)
    if old and old.complete and old.is_of(link) and old.nic.is_wired_as(nic):
        # Scripts may have changed it.
        record = _planned(netlink, old)
        if (record.uplinks, record.rules) == (old.uplinks, old.rules):
            _connect(netlink, link, record)
            netlink.change(link, up=True)
            return Wired(name, old.mtu, changed=False)
    if old:
        undo_record(netlink, old)
        link = netlink.get(name)
    if isinstance(tap, Tap):
        nic = replace(nic, queues=len(tap.queues), vhost=bool(tap.vhost))
    record = TapRecord(name, link.index, nic, time.time(), namespace=records.current_namespace())
    record = _planned(netlink, record)
    names = record.uplinks if nic.mode == Mode.ROUTED else (nic.link,)
    mtus = [one.mtu for one in map(netlink.find, names) if one]
    # No tap can have the MTU of what is no bridge, such as lo; _connect() says that it is none.
    mtu = max(SMALLEST_MTU, min([*mtus, LARGEST_MTU])) if mtus else USUAL_MTU
    record = replace(record, mtu=nic.mtu or mtu)
    kept = replace(record, proxies=_our_proxies(netlink, record))
    scripts = _scripts(record)
    with ExitStack() as undo:
        records.save(kept)
        undo.callback(undo_record, netlink, kept)
        netlink.change(link, alias=nic.alias())
        scripts(Phase.PRE_UP)
        netlink.change(link, mtu=record.mtu, mac=tap_mac(name))
        _connect(netlink, link, record)
        netlink.change(link, up=True)
        scripts(Phase.UP)
        # A script may have taken minutes, and the process that had the tap open may have ended.
        netlink.get(name)
        records.save(kept, complete=True)
        undo.pop_all()
    return Wired(name, record.mtu, changed=True)


def _refuse_strange(link: Link, nic: Vif) -> None:
    if link.kind != "tun":
        raise TapError(link.name, "is no tap", hint=f"see ip -d link show {link.name}")
    owner = owner_of(link.alias)
    if link.alias and owner is None:
        raise TapError(link.name, f"belongs to something else: {link.alias}")
    if owner and owner != (nic.instance, nic.uuid):
        text = f"belongs to NIC {owner[1]} of {owner[0]}"
        raise TapError(link.name, text, hint="use another name")


def _planned(netlink: Netlink, record: TapRecord) -> TapRecord:
    return plan_routes(netlink, record) if record.nic.mode == Mode.ROUTED else record


def _our_proxies(netlink: Netlink, record: TapRecord) -> tuple[Proxy, ...]:
    """The proxy entries that go with the NIC: those of other programs stay."""
    if not record.proxies:
        return ()
    of_taps = {proxy for other in _others(record) for proxy in other.proxies}
    theirs = netlink.proxies() - of_taps
    return tuple(proxy for proxy in record.proxies if proxy not in theirs)


def _connect(netlink: Netlink, link: Link, record: TapRecord) -> None:
    nic, vlans = record.nic, parse_vlans(record.nic.vlan)
    if nic.mode == Mode.ROUTED:
        connect_by_routes(netlink, link, record)
    elif nic.mode == Mode.OPEN_VSWITCH:
        there = netlink.find(nic.link)
        kept = there.mtu if there and record.mtu < there.mtu else None
        ovs.add_port(nic.link, link.name, vlans, nic.alias(), bridge_mtu=kept)
    else:
        bridge = _find_bridge(netlink, nic.link, vlans)
        # The node has no address on a port: its own neighbour discovery would reach the guest.
        set_interface("ipv6", link.name, "disable_ipv6", 1, required=False)
        if nic.filter:
            # Before it is up, so that no packet escapes the filter.
            set_filter(link.name, nic)
        _add_port(netlink, link, bridge, record.mtu)
        if vlans:
            netlink.set_vlans(link, vlans)


def _add_port(netlink: Netlink, link: Link, bridge: Link, mtu: int) -> None:
    """Make a tap a port of a bridge, whose MTU does not change.

    The kernel lowers a bridge's MTU to that of a port, unless an admin has set it. The host and
    other guests would lose their larger frames.

    :param mtu: of the tap, in bytes.
    """
    if mtu >= bridge.mtu:
        netlink.set_master(link, bridge)
        return
    with node_lock(f"bridge-{bridge.name}", timeout_s=records.LOCK_TIMEOUT_S):
        before = netlink.get(bridge.name)
        netlink.set_master(link, bridge)
        now = netlink.get(bridge.name)
        if now.mtu < before.mtu:
            netlink.change(now, mtu=before.mtu)


def _find_bridge(netlink: Netlink, name: str, vlans: Vlans | None) -> Link:
    bridge = netlink.find(name)
    if bridge is None:
        hint = "brine-tap(1), BRIDGES, shows how to make one that the next boot has too"
        raise BrineError(f"there is no bridge {name}", hint=hint)
    if bridge.kind != "bridge":
        hint = "name a bridge: brine-tap(1), BRIDGES, shows how to make one; "
        hint += "for a bridge of Open vSwitch the mode is openvswitch"
        raise BrineError(f"{name} is no bridge", hint=hint)
    if vlans and not bridge.vlan_filtering:
        hint = f"ip link set {name} type bridge vlan_filtering 1"
        raise BrineError(f"bridge {name}: VLAN filtering is off", hint=hint)
    return bridge


def _others(record: TapRecord) -> list[TapRecord]:
    """Other wired NICs on this node: an address may have moved to one of them."""
    found = records.load_all().values()
    return [one for one in found if one.name != record.name and one.is_here()]


def _link_of(netlink: Netlink, record: TapRecord) -> Link | None:
    """The interface of a record, unless it is gone or another one has its name."""
    link = netlink.find(record.name)
    return link if record.is_of(link) else None


# Persistent taps, for a QEMU that opens its tap by name (``-netdev tap,ifname=NAME,script=no``).


def bring_up(
    nic: Vif,
    *,
    name: str | None = None,
    queues: int = 1,
    user: int | None = None,
    group: int | None = None,
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
    with records.one_at_a_time(name), Netlink() as netlink:
        link = netlink.find(name)
        if link and link.owner():
            if not link.persistent:
                raise TapBusyError(name, f"is in use, and ends with its VM: {_holders(name)}")
            if link.carrier:
                return _wire(netlink, name, nic)
            found = (link.multi_queue, link.user, link.group)
            if found != (queues > 1, owner_for(user, group), group):  # what only a new tap can have
                remove(netlink, link)
                link = None
        reuse = link is not None and link.persistent
        with open_tap(name, queues=queues, user=user, group=group, reuse=reuse) as tap:
            wired = _wire(netlink, tap, nic)
            tap.set_persistent(True)
        return wired


def take_down(name: str, *, force: bool = False) -> bool:
    """Disconnect a tap that Brine made, and remove it.

    :param force: also if a VM has it open, whose NIC is then disconnected.
    :returns: whether anything had to change.
    :raises TapBusyError: if a process has it open.
    :raises TapError: if Brine did not make it.
    """
    check_name(name)
    with records.one_at_a_time(name), Netlink() as netlink:
        link = netlink.find(name)
        record = records.load(name)
        if link and not link.owner():
            hint = f"see ip -d link show {name}"
            raise TapError(name, "is none of ours, and is left alone", hint=hint)
        if link and link.carrier and not force:
            hint = "stop that, or use --force, and its NIC leads nowhere"
            raise TapBusyError(name, f"is in use: {_holders(name)}", hint=hint)
        if record:
            undo_record(netlink, record)
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
            tap.set_persistent(False)
    except (TapBusyError, TapExistsError):
        return False
    return True


def _holders(name: str) -> str:
    return ", ".join(map(str, holders(name))) or "a process has it open"
