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
from collections.abc import Iterator
from dataclasses import dataclass

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.hotplug.messages import tell_leftover_removed
from brine.hotplug.net import ovs, records
from brine.hotplug.net.netlink import Link, Netlink
from brine.hotplug.net.records import TapRecord
from brine.hotplug.net.wiring import remove, restore_filters, undo_record
from brine.vm.vif import owner_of

SETTLED_S = 60.0
"""The age at which an idle tap counts as a leftover."""

_IDLE_FILE = "idle"  # beside the records, whose names end in .json

log = logging.getLogger(__name__)


class LeftoverKind(enum.StrEnum):
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


def find_leftovers(*, at_once: bool = False, idle_for_s: float | None = None) -> list[Leftover]:
    """The leftovers that could be removed now.

    :param at_once: also taps that were wired just now, or whose instance has a QMP socket.
    :param idle_for_s: leave taps that are not known to have been idle for so long; the calls of
        :func:`remove_leftovers` measure that.
    """
    with Netlink() as netlink:
        found = list(_find(netlink, at_once))
        return _long_idle(netlink, found, idle_for_s, note=False)


def remove_leftovers(*, at_once: bool = False, idle_for_s: float | None = None) -> list[Leftover]:
    """Remove leftovers; returns those that were removed. A tap that is locked stays.

    Filters of routed taps that another program has removed are restored.

    The parameters are those of :func:`find_leftovers`.
    """
    with Netlink() as netlink:
        found = list(_find(netlink, at_once))
        found = _long_idle(netlink, found, idle_for_s, note=True)
        removed = [one for one in found if _remove(netlink, one, at_once)]
        restore_filters(netlink)
    records.remove_unfinished()
    for one in removed:
        tell_leftover_removed(one.instance, one.nic, one.name, one.kind.value, one.reason)
    return removed


def _find(netlink: Netlink, at_once: bool) -> Iterator[Leftover]:
    links = {link.name: link for link in netlink.links()}
    every = records.load_all()
    kept = {name: record for name, record in every.items() if record.is_here()}
    gone = "its interface is gone"
    for name, link in links.items():
        if owner := _unused_by(link, kept.get(name), at_once):
            yield Leftover(LeftoverKind.TAP, name, *owner, "no process has it open")
    for name, record in kept.items():
        if not record.is_of(links.get(name)):
            nic = record.nic
            yield Leftover(LeftoverKind.RECORD, name, nic.instance, nic.uuid, gone)
    try:
        ports = ovs.our_ports() if ovs.installed() else {}
    except BrineError as error:
        log.warning("%s", error)
        return
    for name, alias in ports.items():
        owner = owner_of(alias)
        if owner and name not in links and name not in kept:
            yield Leftover(LeftoverKind.PORT, name, *owner, gone)


def _unused_by(link: Link, record: TapRecord | None, at_once: bool) -> tuple[str, str] | None:
    """The instance and the NIC of a tap that is a leftover; None if it is none."""
    owner = link.owner()
    if owner is None or not link.persistent or link.carrier:
        return None
    if not at_once:
        if record and record.is_of(link) and time.time() - record.since < SETTLED_S:
            return None
        if (paths.CONTROL_DIR / f"{owner[0]}.qmp").exists():
            return None
    return owner


def _long_idle(
    netlink: Netlink,
    leftovers: list[Leftover],
    idle_for_s: float | None,
    *,
    note: bool,
) -> list[Leftover]:
    """Leftovers without the taps that have not been idle for so long.

    :param note: record the result for the next search.
    """
    if idle_for_s is None:
        return leftovers
    file = paths.TAPS_DIR / _IDLE_FILE
    try:
        before = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):  # half a file is as good as none
        before = {}
    names = {one.name for one in leftovers if one.kind is LeftoverKind.TAP}
    now_s = time.monotonic()
    found = {}
    for link in netlink.links():
        if link.name in names and not link.carrier:
            # Another number of changes means that a process had it open.
            state = {"index": link.index, "carrier_changes": link.carrier_changes}
            known = before.get(link.name, {})
            since_s = known["since_s"] if known.items() >= state.items() else now_s
            found[link.name] = {**state, "since_s": since_s}
    if note and found:
        paths.TAPS_DIR.mkdir(parents=True, exist_ok=True, mode=0o755)
        file.write_bytes(json.dumps(found).encode())
    elif note:
        file.unlink(missing_ok=True)
    idle = {name for name, tap in found.items() if now_s - tap["since_s"] >= idle_for_s}
    return [one for one in leftovers if one.kind is not LeftoverKind.TAP or one.name in idle]


def _remove(netlink: Netlink, leftover: Leftover, at_once: bool) -> bool:
    name = leftover.name
    try:
        with records.one_at_a_time(name, timeout_s=0):
            # Another command may have changed it since.
            link, record = netlink.find(name), records.load(name)
            if leftover.kind is LeftoverKind.TAP:
                if link is None or not _unused_by(link, record, at_once):
                    return False
                if record and record.is_of(link):
                    undo_record(netlink, record)
                return remove(netlink, link)
            if leftover.kind is LeftoverKind.RECORD and record and not record.is_of(link):
                undo_record(netlink, record)
            elif leftover.kind is LeftoverKind.PORT and not (link or record):
                ovs.remove_port(name)
            else:
                return False
    except LockedError:
        return False
    except BrineError as error:
        log.warning("%s", error)
        return False
    return True
