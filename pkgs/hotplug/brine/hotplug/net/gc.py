"""Finding and removing the leftovers of VMs that have ended.

A leftover is:

- a persistent tap with Brine's alias that no process has open, that was wired more than a minute
  ago, and whose instance has no QMP socket in the control directory;
- a record whose interface is gone, with its proxy entries, rules, and the work of scripts;
- a port of Open vSwitch with Brine's mark whose interface is gone.

A timer must not remove the tap of a VM that is just being restarted: it says how long a tap must
have been idle.
"""

from __future__ import annotations

import enum
import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.hotplug.messages import tell_leftover_removed
from brine.hotplug.net import ovs, records
from brine.hotplug.net.netlink import Link, Netlink
from brine.hotplug.net.records import PLACES, Places, TapRecord
from brine.hotplug.net.wiring import remove, restore_filters, undo_record
from brine.hotplug.nic import owner_of

SETTLED_S = 60.0
"""The age at which an idle tap counts as a leftover."""

_IDLE_FILE = "idle"  # beside the records, whose names end in .json

log = logging.getLogger(__name__)


class LeftoverKind(enum.StrEnum):
    """The kinds of leftovers."""

    TAP = "tap"
    RECORD = "record"
    PORT = "port"


@dataclass(frozen=True)
class Leftover:
    """A leftover of a VM.

    :param reason: why it counts as one.
    """

    kind: LeftoverKind
    name: str
    instance: str
    nic: str
    reason: str


def find_leftovers(
    *, at_once: bool = False, idle_for_s: float | None = None, places: Places = PLACES
) -> list[Leftover]:
    """The leftovers that could be removed now.

    :param at_once: also taps that were wired just now, or whose instance has a QMP socket.
    :param idle_for_s: leave taps that are not known to have been idle for so long; the calls of
        :func:`remove_leftovers` measure that.
    """
    with Netlink() as netlink:
        found = list(_find(netlink, at_once, places))
        return _long_idle(netlink, found, idle_for_s, places, note=False)


def remove_leftovers(
    *, at_once: bool = False, idle_for_s: float | None = None, places: Places = PLACES
) -> list[Leftover]:
    """Remove leftovers; returns those that were removed. A tap that is locked stays.

    Filters of routed taps that another program has removed are restored.

    The parameters are those of :func:`find_leftovers`.
    """
    with Netlink() as netlink:
        found = list(_find(netlink, at_once, places))
        found = _long_idle(netlink, found, idle_for_s, places, note=True)
        removed = [one for one in found if _remove(netlink, one, at_once, places)]
        restore_filters(netlink, places=places)
    records.remove_unfinished(places)
    for one in removed:
        tell_leftover_removed(one.instance, one.nic, one.name, one.kind.value, one.reason)
    return removed


def _find(netlink: Netlink, at_once: bool, places: Places) -> Iterator[Leftover]:
    links = {link.name: link for link in netlink.links()}
    every = records.load_all(places)
    kept = {name: record for name, record in every.items() if record.is_here()}
    gone = "its interface is gone"
    for link in links.values():
        owner = link.owner()
        if owner and _is_unused(link, owner[0], kept.get(link.name), at_once, places):
            yield Leftover(LeftoverKind.TAP, link.name, *owner, "nobody has it open")
    for name, record in kept.items():
        if _is_orphan(record, links.get(name)):
            nic = record.nic
            yield Leftover(LeftoverKind.RECORD, name, nic.instance, nic.uuid, gone)
    if not ovs.installed():
        return
    try:
        ports = ovs.our_ports()
    except BrineError as error:
        log.warning("%s", error)
        return
    for port in ports:
        owner = owner_of(port.owner)
        if owner and port.name not in links and port.name not in kept:
            yield Leftover(LeftoverKind.PORT, port.name, *owner, gone)


def _long_idle(
    netlink: Netlink,
    leftovers: list[Leftover],
    idle_for_s: float | None,
    places: Places,
    *,
    note: bool,
) -> list[Leftover]:
    """Leftovers without the taps that have not been idle for so long."""
    if idle_for_s is None:
        return leftovers
    names = {one.name for one in leftovers if one.kind is LeftoverKind.TAP}
    links = [link for link in netlink.links() if link.name in names and not link.carrier]
    idle_s = _idle_times(places, links, note=note)
    return [
        one
        for one in leftovers
        if one.kind is not LeftoverKind.TAP or idle_s.get(one.name, 0.0) >= idle_for_s
    ]


def _idle_times(places: Places, links: Iterable[Link], *, note: bool) -> dict[str, float]:
    """For how many seconds each tap is known to be idle.

    :param links: taps that no process has open now.
    :param note: record the result for the next search.
    """
    file = places.records / _IDLE_FILE
    try:
        before = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):  # half a file is as good as none
        before = {}
    now = time.monotonic()
    found = {}
    for link in links:
        # Another number of changes means that a process had it open.
        state = {"index": link.index, "carrier_changes": link.carrier_changes}
        known = before.get(link.name, {})
        since_s = known["since_s"] if known.items() >= state.items() else now
        found[link.name] = {**state, "since_s": since_s}
    if note and found != before:
        if found:
            places.records.mkdir(parents=True, exist_ok=True, mode=0o755)
            file.write_bytes(json.dumps(found).encode())
        else:
            file.unlink(missing_ok=True)
    return {name: now - idle["since_s"] for name, idle in found.items()}


def _is_unused(
    link: Link, instance: str, record: TapRecord | None, at_once: bool, places: Places
) -> bool:
    """Whether a tap of Brine's is a leftover."""
    if not link.persistent or link.carrier:
        return False
    if at_once:
        return True
    is_new = record and record.index == link.index and time.time() - record.since < SETTLED_S
    return not is_new and not (places.control / f"{instance}.qmp").exists()


def _is_orphan(record: TapRecord, link: Link | None) -> bool:
    return link is None or link.index != record.index


def _remove(netlink: Netlink, leftover: Leftover, at_once: bool, places: Places) -> bool:
    name = leftover.name
    try:
        with records.one_at_a_time(places, name, timeout_s=0):
            # Another command may have changed it since.
            link, record = netlink.find(name), records.load(places, name)
            match leftover.kind:
                case LeftoverKind.TAP:
                    owner = link.owner() if link else None
                    if not (link and owner and _is_unused(link, owner[0], record, at_once, places)):
                        return False
                    if record and record.index == link.index:
                        undo_record(netlink, record, places)
                    return remove(netlink, link)
                case LeftoverKind.RECORD:
                    if record is None or not _is_orphan(record, link):
                        return False
                    undo_record(netlink, record, places)
                case LeftoverKind.PORT:
                    if link or record:
                        return False
                    ovs.remove_port(name)
    except LockedError:
        return False
    except BrineError as error:
        log.warning("%s", error)
        return False
    return True
