"""What the watcher tells of volumes: each change once, until it changes again.

A volume that becomes degraded or missing, a thick snapshot that has little space left or is lost,
and that one is well again. What was told is on record, across passes and boots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import read_regular, write_whole
from brine.instance.listing import begin_volumes
from brine.instance.store import group, is_here
from brine.vm.spec import AdminState, Spec
from brine.watcher.messages import tell_volume

if TYPE_CHECKING:
    from brine.instance.disks.states import DiskState

log = logging.getLogger(__name__)

FILE = paths.STATE_DIR / "watcher-volumes.json"

NEARLY_FULL = 0.8
"""The part of a snapshot's space from which on it is told."""

_ANSWER_S = 30.0  # a cleanup waits longer for a pass
_MODE = 0o640


class VolumeFault(StrEnum):
    DEGRADED = "degraded"
    MISSING = "missing"
    FILLING = "filling"
    """A snapshot has little space left."""
    LOST = "lost"
    """A snapshot had no space left."""


_OF_STATUS = {one.value: one for one in (VolumeFault.DEGRADED, VolumeFault.MISSING)}


class Watched(NamedTuple):
    """What can have a fault.

    :param snapshot: empty is the volume itself.
    """

    unit: str
    uuid: str
    snapshot: str = ""


Faults = Mapping[Watched, VolumeFault]


class VolumeChange(NamedTuple):
    """What is to be told.

    :param fault: None if it is well now.
    """

    instance: str
    state: DiskState
    watched: Watched
    fault: VolumeFault | None


def faults_of(state: DiskState) -> dict[Watched, VolumeFault | None]:
    """The volume and its snapshots, with their faults."""
    disk, made = state.disk, state.made
    of_snapshots = {one.fault() for one in made.snapshots if one.why}
    own = None if made.why in of_snapshots else _OF_STATUS.get(made.status.value)
    found = {Watched(disk.unit, disk.uuid): own}
    for one in made.snapshots:
        is_filling = one.size and one.used >= NEARLY_FULL * one.size
        # What has no limit is a file's, which is never lost so.
        is_lost = one.size and one.why and not one.is_partial
        fault = VolumeFault.LOST if is_lost else VolumeFault.FILLING if is_filling else None
        found[Watched(disk.unit, disk.uuid, one.name)] = fault
    return found


def changes(
    before: Faults, now: Mapping[str, Sequence[DiskState]], *, are_all: bool = True
) -> tuple[list[VolumeChange], Faults]:
    """What is to be told, and the faults that are known then.

    A volume whose state is unknown has the faults that it had, and one that is missing has those of
    its snapshots. What no instance has any more is forgotten.

    :param now: by the name of the instance.
    :param are_all: whether these are all instances; else the others' faults are kept.
    """
    told: list[VolumeChange] = []
    seen = {(one.disk.unit, one.disk.uuid) for states in now.values() for one in states}
    after: dict[Watched, VolumeFault] = {
        one: fault for one, fault in before.items() if not are_all and one[:2] not in seen
    }
    for name, states in now.items():
        for state in states:
            found = {} if state.is_unknown else faults_of(state)
            if state.is_unknown or VolumeFault.MISSING in found.values():
                own = (state.disk.unit, state.disk.uuid)
                after |= {one: fault for one, fault in before.items() if one[:2] == own}
            for watched, fault in found.items():
                if fault:
                    after[watched] = fault
                if fault != before.get(watched):
                    told.append(VolumeChange(name, state, watched, fault))
    return told, after


def watch_volumes(specs: Iterable[Spec], *, are_all: bool) -> Iterator[BrineError]:
    """Look at the volumes of the instances of this node, and tell what has changed; yields what
    can't be found out, or kept.

    :param are_all: whether these are the specs of all instances.
    """
    here = [one for one in specs if one.admin_state != AdminState.OFFLINE and is_here(one)]
    now = begin_volumes(here, timeout_s=_ANSWER_S)()
    if not now and not FILE.exists():
        return
    before = told_faults()
    told, after = changes(before, now, are_all=are_all)
    for change in told:
        _tell(change)
    try:
        if after != before:
            _save(after)  # told before: a pass that is killed in between tells it again
    except OSError as error:
        yield BrineError(f"{FILE}: can't be written: {error.strerror}")
    unknown = {one.made.why: one for states in now.values() for one in states if one.is_unknown}
    for one in unknown.values():
        yield BrineError(one.words())


def _tell(change: VolumeChange) -> None:
    made, snapshot = change.state.made, change.watched.snapshot
    why = made.why
    if snapshot:
        (found,) = (one for one in made.snapshots if one.name == snapshot)
        why = found.why or f"{100 * found.used // found.size} % of its space is used"
    label = change.state.disk.name or change.state.disk.uuid
    fault = str(change.fault or "")
    tell_volume(change.instance, label, change.watched.unit, snapshot, fault, why)


def told_faults() -> Faults:
    """The faults that were told and have not gone since, by the last pass."""
    try:
        rows = json.loads(read_regular(FILE))["faults"]
        return {Watched(*map(str, row[:3])): VolumeFault(row[3]) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        log.warning("%s: can't be used, and what it had is told again: %s", FILE, error)
        return {}


def _save(faults: Faults) -> None:
    rows = sorted([*watched, fault.value] for watched, fault in faults.items())
    FILE.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    text = json.dumps({"version": 1, "faults": rows}, indent=1)
    write_whole(FILE, text.encode() + b"\n", mode=_MODE, group=group(), alone=True)
