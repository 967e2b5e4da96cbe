"""The volumes of an instance's disks: they are made and grown with its spec, as one operation.

Wherever a process is killed, a disk is in the spec, or its volume does not exist.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial

from brine.common import operation
from brine.common.errors import BrineError, warn
from brine.common.operation import Facts, OperationKind, Work
from brine.common.progress import ProgressLines
from brine.common.unix_socket import is_listening
from brine.instance import store
from brine.instance.disks.changes import VolumeChanges
from brine.instance.disks.live import show_growth
from brine.instance.disks.parameters import VolumeParameters, volume_parameters
from brine.storage import lvm
from brine.storage.orphans import Orphan, VolumeClaims
from brine.storage.settings import load_settings
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import Volume, VolumeRequest, VolumeStatus, Wipe
from brine.storage.volumes import as_it_is, refuse_without_room, volume_in
from brine.vm.conflicts import IdentityKeys, identities_lock
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.spec import Spec, SpecError

_MIB = 1 << 20
_LOOKS = 10
_LOOK_S = 0.2


def default_unit() -> str:
    """The storage unit of disks that name none: the node's, or its cluster's volume group; empty if
    neither has one."""
    if unit := load_settings().default_unit:
        return unit
    return volume_parameters().group


def refuse_volumes(spec: Spec, changes: VolumeChanges, before: Spec | None) -> None:
    """Refuse volumes for which there is no room, and disks that name a volume that is not there.

    :raises SpecError: which disk.
    :raises brine.storage.unit.StorageError: which unit has how much.
    """
    old = {disk.uuid: disk for disk in before.disks} if before else {}
    made = {disk.uuid for disk in changes.made}
    for index, disk in enumerate(spec.disks):
        if disk.size_mib and not disk.unit:
            hint = "leave it out; brine disk adopt makes the disk a volume of Brine's"
            raise SpecError("is for disks in a unit", where=f"/disks/{index}/size_mib", hint=hint)
        if disk.unit and disk.uuid not in made and disk.uuid not in old:
            status = volume_in(disk.unit, disk.uuid).certain_status()
            if status.status is UnitStatus.MISSING:
                text = f"there is no volume of the disk {disk.uuid} in {disk.unit}"
                hint = "leave out uuid and path, and a new volume is made"
                raise SpecError(text, where=f"/disks/{index}", hint=hint)
            if os.path.realpath(status.path) != os.path.realpath(disk.path):
                text = f"the volume of the disk {disk.uuid} is {status.path}"
                raise SpecError(text, where=f"/disks/{index}/path")
            if disk.backing and disk.backing != volume_in(disk.unit, disk.uuid).disk(disk).backing:
                text = f"is not what the volume {status.path} has below it"
                raise SpecError(text, where=f"/disks/{index}/backing", hint="leave it out")
            VolumeClaims.read(but=spec.name)  # no other instance may have it
    for disk in changes.grown:
        volume = volume_in(disk.unit, disk.uuid)
        status = volume.status()
        if volume.driver == "plain" and (snapshots := status.snapshots):
            text = f"{disk.path}: has the snapshot {snapshots[-1].name}"
            raise StorageError(text, hint="LVM grows no volume with snapshots: remove them before")
        runs = is_listening(InstanceFiles(spec.name).qmp)
        if status.format != "raw" and status.is_open and not runs:
            text = f"{disk.path}: is in use, and only what uses it could have the image grow"
            raise StorageError(text, hint="stop that before")
    needed: defaultdict[str, int] = defaultdict(int)
    for disk in changes.made:
        needed[disk.unit] += disk.size_mib * _MIB
    for disk in changes.grown:
        needed[disk.unit] += (disk.size_mib - old[disk.uuid].size_mib) * _MIB
    for unit, size in needed.items():
        refuse_without_room(unit, size)


@contextmanager
def with_made(spec: Spec, changes: VolumeChanges, *, wipe: Wipe = Wipe.ZERO) -> Iterator[Spec]:
    """Make and grow volumes for a spec, which the block saves. The caller holds the instance's
    lock. What fails in the block, or before it, removes what was made.

    Yields the spec with what the volumes have got. The sizes in it stay as they were asked for: a
    volume may have more, up to the next extent.
    """
    name = spec.name
    facts = {"name": name, "uuids": [disk.uuid for disk in changes.made]}
    with ExitStack() as stack:
        with identities_lock(partial(_refuse_begun, changes.made)):
            begun = operation.begin(VOLUMES, store.operation_key(name), facts=facts)
            work = stack.enter_context(begun)
        for disk in changes.made:
            make(work, spec, disk, wipe=wipe)
        for disk in changes.grown:
            growing = {"unit": disk.unit, "uuid": disk.uuid}
            # A volume that is half grown may have its former owner's data at its end.
            work.step(f"grow {disk.path}", undo=("grow", growing))
            volume_in(disk.unit, disk.uuid).grow(disk.size_mib * _MIB)
        spec = as_made(spec, (*changes.made, *changes.grown))
        shown = {"name": name, "uuids": [disk.uuid for disk in changes.grown]}
        with work.committing(("is saved", facts), *[("show growth", shown)] * bool(changes.grown)):
            yield spec


def _refuse_begun(made: Sequence[Disk], _: IdentityKeys) -> None:
    """Refuse to make volumes that other work is about to make, or to remove.

    :raises StorageError: which work.
    """
    for record in operation.pending():
        text = json.dumps(asdict(record))
        for disk in made:
            if disk.uuid in text:
                other = f"{record.kind} of {record.key} works on a disk {disk.uuid}"
                raise StorageError(other, hint="brine operations list shows that")


def make(
    work: Work, spec: Spec, disk: Disk, *, wipe: Wipe = Wipe.ZERO, undo: str = "remove"
) -> Volume:
    """Make the volume of a disk as a step of an operation.

    :param undo: the name of :func:`remove_unused` among the functions of the operation's kind.
    """
    volume = volume_in(disk.unit, disk.uuid)
    request = request_of(volume, disk, size=disk.size_mib * _MIB, owner=spec.name, wipe=wipe)
    refuse_existing(volume)  # or the undo would remove it
    facts: Facts = {"name": spec.name, "unit": disk.unit, "uuid": disk.uuid}
    work.step(f"make {disk.path}", undo=(undo, facts))
    volume.create(request, telling(work, request.size))
    return volume


def request_of(volume: Volume, disk: Disk, *, size: int, owner: str, wipe: Wipe) -> VolumeRequest:
    """The volume that is asked for a disk, with the cluster's parameters if it is LVM's.

    :param size: in bytes.
    """
    parameters = volume_parameters() if volume.driver == "plain" else VolumeParameters()
    return VolumeRequest(
        size=size,
        owner=owner,
        name=disk.name,
        format=disk.format,
        stripes=parameters.stripes,
        stripe_size=parameters.stripe_size,
        wipe=wipe,
    )


def refuse_existing(volume: Volume) -> None:
    """Refuse to make a volume that is there.

    :raises StorageError: if it is there, whole.
    """
    status = volume.status()
    if status.status is not UnitStatus.MISSING:
        hint = "brine storage orphans lists it, if no instance has it"
        raise StorageError(f"{status.path}: is there already", hint=hint)


def refuse_to_delete(name: str, disks: Sequence[Disk]) -> None:
    """Refuse to delete volumes of which one is in use, or may be another instance's.

    :raises BrineError: why they can't be deleted.
    """
    if disks:
        VolumeClaims.read()
    for disk in disks:
        if _status_when_closed(volume_in(disk.unit, disk.uuid)).is_open:
            hint = f"brine instance stop {name}, if it runs"
            raise store.InstanceError(name, f"{disk.path}: is in use", hint=hint)


def delete_volume(disk: Disk) -> bool:
    """Delete the volume of a disk that no spec has, with its snapshots; or warn why it stays."""
    volume = volume_in(disk.unit, disk.uuid)
    try:
        status = _status_when_closed(volume)
        if VolumeClaims.read().has(volume, status):
            raise StorageError("an instance has it")
        Orphan(volume, status).remove()
    except BrineError as error:
        warn(f"{disk.path}: is not deleted: {error}", hint="brine storage orphans lists it")
        return False
    return True


def _status_when_closed(volume: Volume) -> VolumeStatus:
    """The status of a volume that was in use just now: udev may look at it for a moment."""
    for _ in range(_LOOKS):
        lvm.forget()
        status = volume.certain_status()
        if not status.is_open:
            break
        time.sleep(_LOOK_S)
    return status


def as_made(spec: Spec, changed: tuple[Disk, ...]) -> Spec:
    """The spec with these disks as their volumes are."""
    uuids = {disk.uuid for disk in changed}
    disks = [as_it_is(disk) if disk.uuid in uuids else disk for disk in spec.disks]
    return replace(spec, disks=tuple(disks))


def telling(work: Work, size: int) -> Callable[[float, str], None]:
    """Tells people how far an operation is, and records that."""
    lines = ProgressLines(size)

    def tell(done: float, text: str) -> None:
        work.progress(done, text)
        lines(done, text)

    return tell


def _is_saved(facts: Facts) -> bool:
    spec = _spec_of(facts)
    there = {disk.uuid for disk in spec.disks} if spec else set()
    return set(facts["uuids"]) <= there


def _spec_of(facts: Facts) -> Spec | None:
    """The spec of an operation's instance; None if there is none.

    :raises store.InstanceError: if it is damaged: then it may have the disk.
    """
    name = facts["name"]
    spec = store.load_sound(name)
    if spec is None and store.spec_file_of(name).exists():
        raise store.InstanceError(name, "its spec is damaged")
    return spec


def remove_unused(facts: Facts) -> None:
    """Remove a volume, unless the spec has its disk."""
    spec = _spec_of(facts)
    if spec is None or facts["uuid"] not in [disk.uuid for disk in spec.disks]:
        with leaving_orphan(facts["name"], facts["unit"]):
            volume_in(facts["unit"], facts["uuid"]).remove()


@contextmanager
def leaving_orphan(name: str, unit: str) -> Iterator[None]:
    """Warn if the block can't remove a volume that no disk is in: a failure, as of a device that is
    dying, must not keep the instance from its work."""
    try:
        yield
    except BrineError as error:
        text = f"{name}: a volume is left in {unit}, which no disk is in: {error}"
        warn(text, hint="brine storage orphans lists it, and removes it later")


def _finish_growth(facts: Facts) -> None:
    """Have what a volume has got so far be empty: its growth need not be done."""
    volume = volume_in(facts["unit"], facts["uuid"])
    status = volume.certain_status()
    if status.status is not UnitStatus.MISSING:
        volume.grow(status.size)


def _show_growth(facts: Facts) -> None:
    """Have a running guest see what has grown. Its QEMU grows an image in a file; one that it was
    about to grow when it ended is grown now."""
    spec = _spec_of(facts)
    grown = [disk for disk in (spec.disks if spec else ()) if disk.uuid in facts["uuids"]]
    try:
        for disk in grown:
            volume_in(disk.unit, disk.uuid).grow(disk.size_mib * _MIB)
        show_growth(facts["name"], grown)
    except BrineError as error:  # a guest that hangs keeps its instance from nothing
        warn(f"{facts['name']}: disks have not grown for its guest: {error}", hint=error.hint)


VOLUMES = OperationKind(
    "volumes",
    {
        "is saved": _is_saved,
        "remove": remove_unused,
        "grow": _finish_growth,
        "show growth": _show_growth,
    },
    alone=store.all_held,
)
