"""Snapshots of all disks of an instance at one moment.

A snapshot is taken of each disk that Brine may change: those in a storage unit that are not read
only. In a folder an overlay is laid over the image, for a running guest by one transaction of
QEMU's; in a volume group LVM makes a snapshot, while the guest stands still. The guest's agent
holds the guest's writes meanwhile, if it answers. The guest's memory is no part of a snapshot.

Each is an operation. A snapshot counts as taken once QEMU may have written to an overlay.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from brine.common import operation
from brine.common.errors import BrineError, UsageError, warn
from brine.common.files import try_to_write
from brine.common.operation import Facts, OperationError, OperationKind, Work
from brine.common.progress import ProgressLines, Tell, tell_nothing
from brine.common.qmp.client import QmpClient
from brine.common.unix_socket import is_listening
from brine.hotplug.disk_images import image_of, laying_over, merge_layer
from brine.hotplug.errors import HotplugError
from brine.instance import store
from brine.instance.disks.live import settle_vm
from brine.instance.kvm.guest import freeze_by_agent, has_agent, run_state, thaw_by_agent
from brine.instance.observe import Oper, look
from brine.instance.registry import refuse_stray_vm
from brine.instance.stop import stop_instance
from brine.instance.store import InstanceError
from brine.storage.file_directory import FileDirectory
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import Volume, VolumeSnapshot, is_snapshot_name
from brine.storage.volumes import as_it_is, volume_in
from brine.vm.disk import MOST_BACKING, Backing, Disk
from brine.vm.files import InstanceFiles
from brine.vm.identities import layers_of
from brine.vm.runtime_file import LastStart, Runtime, change_file
from brine.vm.spec import Spec
from brine.vm.values import is_folder_unit

CLONE_SNAPSHOT = "clone-snapshot"
"""The kind of an operation that copies disks from a snapshot, and removes it then."""

# lvm(8), "Reserved names"; its other words can't begin a name that begins with "brine".
_LVMS_OWN = re.compile(
    r"_(?:[ct]data|[cirt]meta|i?orig|w?corig|cpool|w?cvol|[mr]image|mlog|pmspare|vdata|vorigin)"
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OVERLAY_BYTES = 1 << 20  # more than that of an empty one, with its record
_FREEZE_S = 30.0
_THAW_S = 10.0
_LOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot that was taken.

    :param disks: that it has.
    :param notes: what it lacks, and what else is to be known of it, in sentences.
    """

    name: str
    disks: tuple[Disk, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """A snapshot of one disk."""

    disk: Disk
    snapshot: VolumeSnapshot


def new_name() -> str:
    """The name of a snapshot that was given none: the time."""
    return time.strftime("%Y%m%d-%H%M%S")


# Looking.


def snapshots_of(spec: Spec) -> dict[str, list[DiskSnapshot]]:
    """The snapshots of an instance's disks, by name, the oldest first."""
    of_disks = [
        [DiskSnapshot(disk, one) for one in _volume(disk).certain_status().snapshots]
        for disk in spec.disks
        if disk.unit
    ]
    found: dict[str, list[DiskSnapshot]] = {}
    # Each disk has them in the order in which they were taken; the clock may have been put back.
    while of_disks := [one for one in of_disks if one]:
        later = {one.snapshot.name for each in of_disks for one in each[1:]}
        heads = [each[0] for each in of_disks]
        free = [one for one in heads if one.snapshot.name not in later] or heads
        name = min(free, key=lambda one: one.snapshot.since).snapshot.name
        found.setdefault(name, []).extend(one for one in heads if one.snapshot.name == name)
        of_disks = [each[each[0].snapshot.name == name :] for each in of_disks]
    return found


def _volume(disk: Disk) -> Volume:
    return volume_in(disk.unit, disk.uuid)


def _is_file(disk: Disk) -> bool:
    return is_folder_unit(disk.unit)


def called(disk: Disk) -> str:
    """A disk's name for people."""
    return disk.name or disk.path


def _why_left_out(disk: Disk) -> str:
    if not disk.unit:
        return "is no volume of Brine's"
    return "is read-only" if disk.read_only else ""


def _refuse_unknown(spec: Spec, name: str) -> list[DiskSnapshot]:
    there = snapshots_of(spec)
    if name not in there:
        known = ", ".join(there) or "none"
        text = f"has no snapshot {name}"
        raise InstanceError(spec.name, text, hint=f"its snapshots are: {known}")
    return there[name]


def refuse_work(name: str, *, but: str = "") -> None:
    """Refuse what would meet another command's work on the instance's disks.

    :param but: a kind of work that is not in the way.
    """
    for record in operation.pending(store.operation_key(name)):
        if record.kind != but and record.kind in ("disk-move", CLONE_SNAPSHOT, REMOVAL.name):
            hint = "brine operations list shows how far that is"
            text = "a disk of it is moved, merged or cloned just now"
            raise InstanceError(name, text, hint=hint)


def _look(name: str) -> tuple[Spec, bool]:
    """The spec of an instance, and whether it runs."""
    seen = look(name)
    oper = seen.state.oper
    if oper in (Oper.STARTING, Oper.STOPPING):
        raise InstanceError(name, f"is {oper}", hint="try again when that is done")
    if oper is not Oper.RUNNING:
        refuse_stray_vm(name, "end it before")
    return seen.spec, oper is Oper.RUNNING


# Taking one.


def take_snapshot(name: str, snapshot: str, *, space: int = 0) -> Taken:
    """Take a snapshot of all disks of an instance.

    :param space: the bytes that LVM gives the snapshot of each disk in a volume group; 0 is a part
        of the disk's size.
    :raises BrineError: why not; then there is none.
    """
    if not is_snapshot_name(snapshot):
        hint = "lower-case letters, digits, dots, dashes and underscores, at most 32"
        raise UsageError(f"not the name of a snapshot: {snapshot!r:.60}", hint=hint)
    with store.alone(name):
        spec, is_running = _look(name)
        disks = [disk for disk in spec.disks if not _why_left_out(disk)]
        notes = [
            f"{called(one)} is not part of it: {why}"
            for one in spec.disks
            if (why := _why_left_out(one))
        ]
        notes += take_of(spec, disks, snapshot, is_running=is_running, space=space)
        if volumes := [called(one) for one in disks if not _is_file(one)]:
            text = "LVM copies what is overwritten, and writes take many times as long"
            notes.append(f"{', '.join(volumes)}: {text}, until the snapshot is removed")
        return Taken(snapshot, tuple(disks), tuple(notes))


def take_of(
    spec: Spec, disks: Sequence[Disk], snapshot: str, *, is_running: bool, space: int = 0
) -> list[str]:
    """Take a snapshot of some disks of an instance, whose lock the caller holds. Returns notes."""
    refuse_work(spec.name, but=CLONE_SNAPSHOT)
    _refuse(spec, disks, snapshot, is_running=is_running)
    facts: Facts = {
        "name": spec.name,
        "snapshot": snapshot,
        "disks": [{"unit": one.unit, "uuid": one.uuid} for one in disks],
    }
    with operation.begin(SNAPSHOT, store.operation_key(spec.name), facts=facts) as work:
        if is_running:
            return _take_of_running(work, spec, disks, facts, space)
        for disk in disks:
            _make(work, disk, facts, space)
        with work.committing(("is taken", facts), ("save", facts)):
            pass
    return []


def _refuse(spec: Spec, disks: Sequence[Disk], snapshot: str, *, is_running: bool) -> None:
    if not disks:
        hint = "brine disk adopt makes a disk a volume of Brine's"
        raise InstanceError(spec.name, "has no disk of which snapshots can be taken", hint=hint)
    if snapshot in snapshots_of(spec):
        hint = "give it another name, or remove that one"
        raise InstanceError(spec.name, f"has a snapshot {snapshot} already", hint=hint)
    if (match := _LVMS_OWN.search(snapshot)) and not all(map(_is_file, disks)):
        text = f"{match[0]} can't be part of the name {snapshot} in a volume group"
        raise InstanceError(spec.name, text, hint="give it another name")
    for disk in disks:
        if _is_file(disk) and len(disk.layers()) >= MOST_BACKING:
            text = f"{called(disk)} has {MOST_BACKING} backing files, which is the most"
            raise InstanceError(spec.name, text, hint="remove a snapshot before")
        if spec.is_xen() and _is_file(disk):
            text = f"{called(disk)}: disks of Xen's domains in folders have no snapshots"
            raise InstanceError(spec.name, text, hint="those in volume groups have")
    if spec.is_xen() and is_running:
        hint = f"brine instance stop {spec.name}"
        raise InstanceError(spec.name, "is a domain of Xen's, and runs", hint=hint)


def _make(work: Work, disk: Disk, facts: Facts, space: int) -> None:
    """Make the snapshot of one disk as a step of an operation."""
    known = {"unit": disk.unit, "uuid": disk.uuid, "snapshot": facts["snapshot"]}
    work.step(f"snapshot of {called(disk)}", undo=("unmake", known))
    _volume(disk).snapshot(facts["snapshot"], space=0 if _is_file(disk) else space)


def _take_of_running(
    work: Work, spec: Spec, disks: Sequence[Disk], facts: Facts, space: int
) -> list[str]:
    """Take a snapshot while the guest runs; returns notes on it."""
    files = InstanceFiles(spec.name)
    images = [one for one in disks if _is_file(one)]
    for disk in images:
        _make(work, disk, facts, space)
    overlays = [as_it_is(one) for one in images]
    # QEMU must have closed overlays before they are removed.
    work.step("have the guest stand still", undo=("thaw", facts))
    with (
        laying_over(files.qmp, images, overlays, runtime=files.runtime) as snapshot,
        _frozen(work, spec, facts, snapshot.vm.machine.qmp) as note,
    ):
        try:
            if len(images) < len(disks):
                snapshot.pause()
            for disk in disks:
                if not _is_file(disk):
                    _make(work, disk, facts, space)
            with work.committing(("is taken", facts), ("save", facts), ("thaw", facts)):
                snapshot.take()
        finally:
            snapshot.resume()  # a guest that stands still has no agent
    return [note] if note else []


@contextmanager
def _frozen(work: Work, spec: Spec, facts: Facts, qmp: QmpClient) -> Iterator[str]:
    """Have the guest's agent hold writes to its file systems, for the time of the block. Yields a
    note if it does not.

    :param facts: get ``is_frozen``, for :func:`_thaw`.
    """
    if why := _why_not_frozen(spec, qmp):
        yield f"{why}: the guest's file systems are in it as after a power failure"
        return
    facts["is_frozen"] = True
    work.step("hold the guest's writes", undo=("thaw", facts))
    is_frozen = freeze_by_agent(spec.name, timeout_s=_FREEZE_S)
    try:
        text = "the guest's agent did not freeze its file systems: they are in it as after a power "
        yield "" if is_frozen else f"{text}failure"
    finally:
        facts["is_frozen"] = False
        if not thaw_by_agent(spec.name, timeout_s=_THAW_S) and is_frozen:
            warn(f"{spec.name}: its agent did not say that the guest writes again")


def _why_not_frozen(spec: Spec, qmp: QmpClient) -> str:
    if not spec.guest_agent:
        return "the instance has no guest_agent"
    if not has_agent(qmp):
        return "no agent runs in the guest"
    return "the guest is paused" if run_state(qmp) != "running" else ""


def _runs(name: str) -> bool:
    return is_listening(InstanceFiles(name).qmp)


def _names(volume: Volume) -> list[str]:
    return [one.name for one in volume.certain_status().snapshots]


def _is_taken(facts: Facts) -> bool:
    """Whether the guest uses the overlays, or may have: then they stay."""
    volumes = [volume_in(one["unit"], one["uuid"]) for one in facts["disks"]]
    if not all(facts["snapshot"] in _names(one) for one in volumes):
        return False
    overlay = next((one for one in volumes if is_folder_unit(one.unit)), None)
    if overlay is None or not _runs(facts["name"]):
        return True
    path = overlay.disk(Disk(uuid=overlay.uuid, path="/")).path
    return image_of(InstanceFiles(facts["name"]).qmp, overlay.uuid) == path


def _unmake(facts: Facts) -> None:
    """Remove a snapshot that nothing uses: an overlay is empty."""
    volume = volume_in(facts["unit"], facts["uuid"])
    if facts["snapshot"] in _names(volume):
        volume.merged(facts["snapshot"])
    volume.remove_snapshot(facts["snapshot"])


def _save(facts: Facts) -> None:
    """Have the spec, and what the next start goes by, have the disks as their volumes are."""
    name = facts["name"]
    spec = store.load_sound(name)
    if spec is None:
        return
    uuids = [one["uuid"] for one in facts["disks"]]
    disks = {one.uuid: as_it_is(one) for one in spec.disks if one.unit and one.uuid in uuids}
    changed = replace(spec, disks=tuple(disks.get(one.uuid, one) for one in spec.disks))
    runtime = InstanceFiles(name).runtime
    if runtime.exists():
        for disk in disks.values():
            change_file(runtime, partial(_with_image, disk))
    if changed != spec:
        store.save(changed)


def _with_image(disk: Disk, runtime: Runtime) -> Runtime:
    return runtime.with_image(disk, disk.size_mib)


def _thaw(facts: Facts) -> None:
    name = facts["name"]
    settle_vm(name)  # a guest that stands still has no agent
    if not facts.get("is_frozen") or not _runs(name):
        return
    if not thaw_by_agent(name, timeout_s=_THAW_S):
        warn(f"{name}: its agent did not say that the guest writes again")


SNAPSHOT = OperationKind(
    "snapshot",
    {"is taken": _is_taken, "unmake": _unmake, "save": _save, "thaw": _thaw},
    alone=store.all_held,
)


# Removing one: what was written since goes into the image below.


def remove_snapshot(name: str, snapshot: str, tell: Tell | None = None) -> list[Disk]:
    """Remove a snapshot; the disks stay as they are. Returns those that had it. A running guest
    goes on meanwhile, and its instance may be stopped; the next command goes on with it then.

    :raises BrineError: why it is not removed, or not yet.
    """
    with ExitStack() as stack:
        stack.enter_context(store.alone(name))
        refuse_work(name)
        spec, is_running = _look(name)
        disks = [one.disk for one in _refuse_unknown(spec, snapshot)]
        facts: Facts = {
            "name": name,
            "snapshot": snapshot,
            "disks": [{"unit": one.unit, "uuid": one.uuid} for one in disks],
            "merged": [],
        }
        faults: list[BrineError] = []
        # The lock is not held while the guest goes on: then the spec needs it by itself.
        lock = _hold if is_running else _held_already
        merge = partial(_merge, tell=tell or ProgressLines(), lock=lock, failed=faults.append)
        kind = replace(REMOVAL, functions={"merge": merge})
        with operation.begin(kind, store.operation_key(name), facts=facts) as work:
            work.commit(("merge", facts))
            if is_running:
                stack.close()  # merging may take long, and nothing else waits for it
    if left := operation.find(work.record.id):
        raise operation.waiting_error(left)
    if not faults:
        _end_rest(name, snapshot)
    else:
        kept = [called(one) for one in disks if _may_have(one, snapshot)]
        gone = [called(one) for one in disks if called(one) not in kept]
        word = f"removed of {', '.join(gone)} alone, not of {', '.join(kept)}" if gone else ""
        text = f"the snapshot {snapshot} is {word or 'not removed'}: {faults[0]}"
        hint = "remove the cause, then remove it again; what the disks have is as before"
        full = next(filter(_is_in_full_unit, disks), None)
        raise InstanceError(
            name, text, hint=_way_out(name, full) if full else faults[0].hint or hint
        )
    return disks


def _is_in_full_unit(disk: Disk) -> bool:
    """Whether the unit of an image may have too little space for a merge."""
    if not _is_file(disk):
        return False
    return FileDirectory.at(disk.unit).free < max(_OVERLAY_BYTES, _volume(disk).status().used)


def _way_out(name: str, disk: Disk) -> str:
    """How to free space in a full unit without losing what a disk has now."""
    move = f"brine disk move {name} {called(disk)} --to UNIT --discard-snapshots"
    return f"{disk.unit} needs space; or {move} keeps what the disk has now"


def _may_have(disk: Disk, snapshot: str) -> bool:
    try:
        return snapshot in _names(_volume(disk))
    except StorageError:  # which is not seen now
        return True


def _hold(name: str) -> AbstractContextManager[None]:
    return store.held(name, timeout_s=_LOCK_S)


def _held_already(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def _merge(
    facts: Facts,
    tell: Tell = tell_nothing,
    lock: Callable[[str], AbstractContextManager[None]] = _held_already,
    failed: Callable[[BrineError], object] | None = None,
) -> None:
    """Merge what a snapshot has into what is below it, on each disk that has it. A disk where that
    fails, as on a full file system, stays as it was, with its layers: this keeps its instance from
    nothing, and the snapshot can be removed later.

    :param lock: holds the instance's lock, if the caller does not.
    :param failed: is told why; None is a warning.
    """
    spec = store.load_sound(facts["name"])
    rows = {one["uuid"] for one in facts["disks"]}
    disks = [one for one in (spec.disks if spec else ()) if one.uuid in rows and one.unit]
    tell_fault = failed or partial(_warn, facts)

    def failed_of(error: BrineError) -> None:
        tell_fault(error)
        _note_rest(facts["name"], facts["snapshot"], disks, error)

    if not facts["merged"]:  # else it had been noted on all before the first was merged
        try:
            _note_merging(disks, facts["snapshot"])
        except StorageError as error:
            failed_of(error)
            return
    for disk in disks:
        with ExitStack() as held:
            # From the switch on, no start goes by the former spec.
            hold = _holder(held, lock, facts["name"])
            try:
                _merge_of(disk, facts, tell, hold)
            except (StorageError, HotplugError) as error:
                if disk.uuid in facts["merged"]:  # the guest may write below by now
                    raise
                failed_of(error)
                continue
            hold()
            _save({**facts, "disks": [{"unit": disk.unit, "uuid": disk.uuid}]})


def _note_merging(disks: Sequence[Disk], snapshot: str) -> None:
    """Have no rollback be possible to a snapshot that a part of its disks may lack soon."""
    if len(disks) > 1:
        for disk in disks:
            _volume(disk).merging(snapshot)


def _warn(facts: Facts, error: BrineError) -> None:
    name, snapshot = facts["name"], facts["snapshot"]
    warn(f"{name}: the snapshot {snapshot} is not removed: {error}", hint=error.hint)


def _holder(
    held: ExitStack, lock: Callable[[str], AbstractContextManager[None]], name: str
) -> Callable[[], None]:
    """A function that holds the lock of an instance until the end of *held*; once is enough."""
    is_held = False

    def hold() -> None:
        nonlocal is_held
        if not is_held:
            held.enter_context(lock(name))
            is_held = True

    return hold


def _merge_of(disk: Disk, facts: Facts, tell: Tell, hold: Callable[[], None]) -> None:
    volume, snapshot = _volume(disk), facts["snapshot"]
    if snapshot not in (names := _names(volume)):
        return
    if not _is_file(disk):
        volume.remove_snapshot(snapshot, tell)
    elif _runs(facts["name"]):
        number = len(names) - 1 - names.index(snapshot)
        files = InstanceFiles(facts["name"])
        after = _without_layer(as_it_is(disk), number)
        _note_merged(facts, disk.uuid, is_merged=False)
        volume.merging(snapshot)
        merge_layer(
            files.qmp,
            number,
            after,
            runtime=files.runtime,
            before_stop=hold,
            before_switch=partial(_note_merged, facts, disk.uuid, is_merged=True),
            tell=tell,
            text=f"merging the snapshot {snapshot} of {called(disk)}",
        )
        volume.merged(snapshot)
    elif disk.uuid in facts["merged"] or _is_merged_at_end(facts["name"], disk, names, snapshot):
        # The guest ended when it had switched, or was about to: then both were the same, and what
        # it has written since is below.
        volume.merged(snapshot)
    else:
        volume.remove_snapshot(snapshot, tell)


def _is_merged_at_end(name: str, disk: Disk, names: Sequence[str], snapshot: str) -> bool:
    """Whether QEMU had merged a snapshot when what it had was last recorded: another command may
    have completed that, and the guest has written below since."""
    below = _without_layer(as_it_is(disk), len(names) - 1 - names.index(snapshot))
    last = LastStart.known(name)
    rows = [row for row in (last.disks if last else ()) if row.get("uuid") == disk.uuid]
    return any(
        row.get("path") == below.path and len(list(layers_of(row))) == len(below.layers())
        for row in rows
    )


def _note_merged(facts: Facts, uuid: str, *, is_merged: bool) -> None:
    """Record whether the guest may write to the image below an overlay from now on."""
    others = [one for one in facts["merged"] if one != uuid]
    known = [*others, uuid] if is_merged else others
    if known == facts["merged"]:
        return
    facts["merged"] = known
    for record in operation.pending(store.operation_key(facts["name"])):
        if record.kind == REMOVAL.name and record.facts["snapshot"] == facts["snapshot"]:
            for step in record.steps:
                step.facts["merged"] = known
            Work(REMOVAL, record).note()


def _without_layer(disk: Disk, number: int) -> Disk:
    """A disk without one of its images: 0 is its own, 1 the first backing file."""
    images = [Backing(path=disk.path, format=disk.format), *disk.layers()]
    del images[number]
    backing: Backing | None = None
    for one in reversed(images[1:]):
        backing = replace(one, backing=backing)
    return replace(disk, path=images[0].path, format=images[0].format, backing=backing)


REMOVAL = OperationKind("snapshot-removal", {"merge": _merge}, alone=store.all_held)


# The rest of a removal that failed on a disk: it is no operation on the instance, which it must
# keep from nothing, and the next settling completes it.


def _rest_key(name: str) -> str:
    return f"snapshots/{name}"


def _rests(name: str, snapshot: str) -> list[operation.Operation]:
    found = operation.pending(_rest_key(name))
    return [one for one in found if one.facts.get("snapshot") == snapshot]


def _note_rest(name: str, snapshot: str, disks: Sequence[Disk], error: BrineError) -> None:
    """Record that the removal of a snapshot, which has begun on a disk, is to be completed."""
    if not any(_is_partial(one, snapshot) for one in disks) or _rests(name, snapshot):
        return
    facts: Facts = {"name": name, "snapshot": snapshot}
    try:
        with operation.begin(REST, _rest_key(name), facts=facts) as work:
            work.commit(("complete", facts))
            work.postpone(str(error))
    except OperationError as fault:
        warn(str(fault), hint=fault.hint)


def _end_rest(name: str, snapshot: str) -> None:
    for record in _rests(name, snapshot):
        with suppress(OperationError):  # which stays recorded
            operation.settle_one(record)


def _is_partial(disk: Disk, snapshot: str) -> bool:
    try:
        found = _volume(disk).certain_status().snapshots
    except StorageError:  # which is not seen now
        return True
    return any(one.name == snapshot and one.is_partial for one in found)


def _complete(facts: Facts) -> None:
    name, snapshot = facts["name"], facts["snapshot"]
    spec = store.load_sound(name)
    if spec is None and store.spec_file_of(name).exists():
        raise InstanceError(name, "its spec is damaged")
    disks = [one for one in (spec.disks if spec else ()) if one.unit]
    if any(_is_partial(one, snapshot) for one in disks):
        remove_snapshot(name, snapshot)


REST = OperationKind("snapshot-rest", {"complete": _complete})


# Rolling back.


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The disks that were rolled back, and those that the snapshot lacks, which stay as they are.

    :param discarded: the newer snapshots that are gone.
    """

    disks: tuple[Disk, ...]
    others: tuple[Disk, ...] = ()
    discarded: tuple[str, ...] = ()


def roll_back(
    name: str, snapshot: str, *, force_stop: bool = False, discard_newer: bool = False
) -> RolledBack:
    """Have the disks of an instance be as they were at a snapshot, which stays. What was written
    since is lost.

    :param force_stop: stop the instance before, if it runs.
    :param discard_newer: remove the snapshots that were taken after it.
    :raises BrineError: why not; then nothing has changed.
    """
    with store.alone(name):
        refuse_work(name)
        spec, is_running = _look(name)
        _refuse_rollback(spec, snapshot, discard_newer=discard_newer)
        _try_to_write(spec, snapshot)
    if is_running:
        if not force_stop:
            hint = f"brine instance stop {name}, or --force-stop"
            raise InstanceError(name, "runs, and its disks are in use", hint=hint)
        stop_instance(name, force=True)
    with store.alone(name):
        spec, is_running = _look(name)
        if is_running:
            raise InstanceError(name, "was started meanwhile")
        refuse_work(name)
        newer = _refuse_rollback(spec, snapshot, discard_newer=discard_newer)
        disks = [one.disk for one in _refuse_unknown(spec, snapshot)]
        _try_to_write(spec, snapshot)
        rows = [
            {"unit": one.unit, "uuid": one.uuid, "size": _volume(one).status().size}
            for one in disks
        ]
        facts: Facts = {"name": name, "snapshot": snapshot, "newer": newer, "disks": rows}
        others = [one for one in spec.disks if one not in disks and one.unit]
        facts["others"] = [{"unit": one.unit, "uuid": one.uuid} for one in others]
        with operation.begin(ROLLBACK, store.operation_key(name), facts=facts) as work:
            work.commit(("roll back", facts))
    if left := operation.find(work.record.id):
        raise operation.waiting_error(left)
    return RolledBack(tuple(disks), tuple(others), tuple(newer))


def _refuse_rollback(spec: Spec, snapshot: str, *, discard_newer: bool) -> list[str]:
    """Refuse a snapshot that the disks can't be rolled back to; returns the newer ones."""
    if bad := [one for one in _refuse_unknown(spec, snapshot) if one.snapshot.why]:
        text = f"the snapshot of {', '.join(called(one.disk) for one in bad)}: "
        hint = f"brine disk snapshot {spec.name} --remove {snapshot}"
        raise InstanceError(spec.name, text + bad[0].snapshot.why, hint=hint)
    for disk in spec.disks:
        if disk.unit and (why := _why_not_whole(disk)):
            hint = f"brine disk status {spec.name} shows its disks"
            raise InstanceError(spec.name, f"{called(disk)}: {why}", hint=hint)
    names = list(snapshots_of(spec))
    newer = names[names.index(snapshot) + 1 :]
    if newer and not discard_newer:
        text = f"has newer snapshots than {snapshot}: {', '.join(newer)}"
        raise InstanceError(spec.name, text, hint="--discard-newer removes them")
    return newer


def _why_not_whole(disk: Disk) -> str:
    """Why a disk can not go back, or stay, with the others. Its own overlay may be gone: it
    is made anew."""
    status = _volume(disk).status()
    if status.status is not UnitStatus.MISSING:
        return ""
    layers = disk.layers() if status.snapshots else []
    is_whole = layers and all(os.path.exists(one.path) for one in layers)
    return "" if is_whole else status.why


def _try_to_write(spec: Spec, snapshot: str) -> None:
    """See that new overlays can be written: half a rollback would keep the instance from starting.
    Each takes the place of one that goes, which has the space for it in a full unit.

    :raises InstanceError: if they can't be.
    """
    disks = [one.disk for one in _refuse_unknown(spec, snapshot) if _is_file(one.disk)]
    for unit in {one.unit for one in disks}:
        paths = [one.path for one in disks if one.unit == unit]
        with store.telling(spec.name, f"{unit}: can't be written"):
            try:
                try_to_write(Path(unit), len(paths) * _OVERLAY_BYTES)
            except OSError as error:
                if error.errno not in _NO_SPACE or not all(map(os.path.exists, paths)):
                    raise


def _roll_back(facts: Facts) -> None:
    for row in facts["disks"]:
        volume = volume_in(row["unit"], row["uuid"])
        for newer in reversed(facts["newer"]):
            if newer in _names(volume):
                volume.discard(newer)
        volume.rollback(facts["snapshot"], size=row.get("size", 0))
    for row in facts["others"]:  # which stay as they are
        volume = volume_in(row["unit"], row["uuid"])
        for newer in reversed(facts["newer"]):
            try:
                volume.remove_snapshot(newer)
            except StorageError as error:  # it keeps the snapshot, and its instance from nothing
                _warn({**facts, "snapshot": newer}, error)
    _save({**facts, "disks": [*facts["disks"], *facts["others"]]})


ROLLBACK = OperationKind("rollback", {"roll back": _roll_back}, alone=store.all_held)
