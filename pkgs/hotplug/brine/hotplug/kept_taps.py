"""Taps that stay: for a QEMU that opens its tap by name (``-netdev tap,ifname=NAME,script=no``)."""

from __future__ import annotations

from brine.hotplug import tap_records
from brine.hotplug.links import Netlink
from brine.hotplug.network import Link
from brine.hotplug.tap_records import PLACES, Places
from brine.hotplug.taps import (
    TapBusyError,
    TapError,
    TapExistsError,
    check_name,
    holders,
    open_tap,
    owner_for,
)
from brine.hotplug.wanted import Wiring, owner_of
from brine.hotplug.wiring import Wired, undo_record, wire_alone


def bring_up(
    wiring: Wiring,
    *,
    name: str | None = None,
    queues: int = 1,
    user: int | None = None,
    group: int | None = None,
    places: Places = PLACES,
) -> Wired:
    """Make a tap that stays, and wire it. Doing it again is the same as doing it once.

    It is made to stay last of all: whatever ends this process before then ends the tap, too.

    :param name: of the tap; None makes one from the instance's and the NIC's.
    :param queues: a QEMU may open as many at once.
    :param user: id of the user who may open it, see :func:`brine.hotplug.taps.open_tap`.
    :param group: the same for a group.
    :raises TapBusyError: if a VM has the tap that lives only as long as the VM.
    :raises BrineError: what failed, on what. The tap is as it was, or gone.
    """
    wiring.check()
    name = name or wiring.tap_name()
    check_name(name)
    with tap_records.one_at_a_time(places, name):
        return _bring_up(wiring, name, queues, user, group, places)


def _bring_up(
    wiring: Wiring, name: str, queues: int, user: int | None, group: int | None, places: Places
) -> Wired:
    with Netlink() as netlink:
        link = netlink.find(name)
        if link and link.kind == "tun" and owner_of(link.alias):
            if not link.persistent:
                raise TapBusyError(name, f"is in use, and ends with its VM: {_holders(name)}")
            if link.carrier:
                return wire_alone(name, wiring, places=places)
            found = (link.multi_queue, link.user, link.group)
            if found != (queues > 1, owner_for(user, group), group):  # what only a new tap can have
                remove(netlink, link)
                link = None
    reuse = link is not None and link.persistent
    with open_tap(name, queues=queues, user=user, group=group, reuse=reuse) as tap:
        wired = wire_alone(tap, wiring, places=places)
        tap.keep()
    return wired


def take_down(name: str, *, force: bool = False, places: Places = PLACES) -> bool:
    """Disconnect a tap of ours and remove it.

    :param force: also if a VM has it open, which then has a NIC that leads nowhere.
    :returns: whether there was anything to do.
    :raises TapBusyError: if somebody has it open.
    :raises TapError: if it is not ours.
    """
    check_name(name)
    with tap_records.one_at_a_time(places, name), Netlink() as netlink:
        link = netlink.find(name)
        record = tap_records.load(places, name)
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
    """Remove a tap that nobody has open; returns False if somebody has it, which may be just now.

    A tap with one queue is removed by who has it open himself, so that nobody can come between.
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
