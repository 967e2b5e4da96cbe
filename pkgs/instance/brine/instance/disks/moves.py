"""Moving the volume of a disk to another storage unit: ``brine disk move``.

The new volume has the same disk's UUID, in the other unit. The disk is wholly at its old or at its
new place at any time, whichever process is killed:

- While the copy is made, no disk is in it, and an error or a kill removes it. QEMU mirrors the disk
  of a running instance, and the guest writes on.
- At the switch the guest's processors stand still for a moment. Both volumes have the same content
  then. QEMU leaves the old one, the spec names the new one, and the guest goes on. So after a kill
  the disk is what QEMU has; and if QEMU has ended, too, what the spec names: the guest has not
  written since.
- Then the old volume is removed. If it can't be removed, it belongs to no disk, and ``brine storage
  orphans`` lists it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from brine.common import operation
from brine.common.errors import UsageError
from brine.common.operation import Facts, OperationKind, Work
from brine.common.progress import Tell, tell_nothing
from brine.common.qmp.wire import QmpClosedError
from brine.common.unix_socket import is_listening
from brine.hotplug import block_graph, disk_images
from brine.hotplug.errors import HotplugError
from brine.hotplug.locked_vm import Vm
from brine.hotplug.session import working_on
from brine.instance import messages, store
from brine.instance.disks.finding import find_disk
from brine.instance.disks.live import settle_vm
from brine.instance.disks.snapshots import refuse_work
from brine.instance.disks.volumes import leaving_orphan, refuse_existing, request_of
from brine.instance.kvm.runtime_devices import devices_now
from brine.instance.observe import Observed, Oper, look
from brine.instance.registry import refuse_stray_vm
from brine.instance.store import InstanceError
from brine.storage.unit import UnitStatus
from brine.storage.volume import Volume, Wipe
from brine.storage.volumes import as_it_is, refuse_without_room, volume_in
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.halt import PAUSED
from brine.vm.run import Run
from brine.vm.runtime_file import LastStart, change_file
from brine.vm.spec import parse, to_json
from brine.vm.values import unit_fault

_OF_VOLUME = ("unit", "path", "format", "format_source", "backing")
_REST = ("save", "resume", "remove the original", "tell")
_MIB = 1 << 20
_LOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class MovedDisk:
    """The result of a move.

    :param disk: as the spec has it now, and *before* as it was.
    :param is_live: whether the guest ran on meanwhile.
    """

    name: str
    before: Disk
    disk: Disk
    is_live: bool = False

    @property
    def changed(self) -> bool:
        return self.before.unit != self.disk.unit


def move_disk(
    name: str,
    reference: str,
    unit: str,
    *,
    discard_snapshots: bool = False,
    rate: int = 0,
    tell: Tell = tell_nothing,
) -> MovedDisk:
    """Move the volume of a disk to another unit. A disk that is there stays.

    :param reference: the disk's name, UUID, path, serial or device id.
    :param discard_snapshots: whether the snapshots of the disk are removed with the old volume;
        what the disk has now is moved in any case.
    :param rate: how many bytes a second QEMU copies at most; 0 is no limit.
    :raises BrineError: why it is not moved. The disk is at its old place then.
    """
    if fault := unit_fault(unit):
        raise UsageError(f"{unit!r:.60}: {fault}", hint="brine storage list shows the units")
    return _Move(name, unit, discard_snapshots, rate, tell).do(reference)


class _Move:
    """A move that this process does; it holds the lock of the instance but while QEMU copies."""

    def __init__(
        self, name: str, unit: str, discards_snapshots: bool, rate: int, tell: Tell
    ) -> None:
        self._name = name
        self._unit = unit
        self._discards_snapshots = discards_snapshots
        self._rate = rate
        self._tell = tell
        self._lock = ExitStack()
        self._is_held = False

    def do(self, reference: str) -> MovedDisk:
        with self._lock:
            self._hold()
            seen = look(self._name)
            disk = find_disk(seen.spec, reference)
            if disk.unit == self._unit:
                return MovedDisk(self._name, disk, disk)
            source = _source(seen, disk, discards_snapshots=self._discards_snapshots)
            is_live = _is_plugged(seen, disk)
            facts: Facts = {"name": self._name, "uuid": disk.uuid, "disk": disk.name or disk.path}
            facts |= {"from": disk.unit, "to": self._unit}
            facts["discards_snapshots"] = self._discards_snapshots
            key = store.operation_key(self._name)
            with operation.begin(MOVE, key, facts=facts) as work:
                if is_live:
                    after = self._live(work, disk, source)
                else:
                    after = self._still(work, disk, source)
        return MovedDisk(self._name, disk, after, is_live)

    def _made(self, work: Work, disk: Disk, source: Volume, wipe: Wipe) -> tuple[Volume, Disk]:
        """Make the new volume; returns it, and the disk in it. A file keeps the format that it had
        without its snapshots."""
        target = volume_in(self._unit, disk.uuid)
        # A volume group has raw volumes only.
        first = disk.layers()[-1].format if disk.backing else disk.format
        image = replace(disk, format="raw" if target.driver == "plain" else first)
        size = source.status().size
        request = request_of(target, image, size=size, owner=self._name, wipe=wipe)
        refuse_without_room(self._unit, size)
        refuse_existing(target)  # or the undo would remove it
        work.step("make the new volume", undo=("remove the copy", work.record.facts))
        target.create(request, partial(self._told, work))
        return target, as_it_is(replace(disk, unit=self._unit))

    def _told(self, work: Work, done: float, text: str) -> None:
        work.progress(done, text)
        self._tell(done, f"{self._name}: {text}")

    def _still(self, work: Work, disk: Disk, source: Volume) -> Disk:
        """Move a disk that no QEMU has open."""
        target, after = self._made(work, disk, source, Wipe.ZERO)
        source.prepare()
        target.copy_from(disk, partial(self._told, work))
        facts = {**work.record.facts, "after": to_json(after)}
        with work.committing(("is moved", facts), *((one, facts) for one in _REST)):
            _save(facts)
        return after

    def _live(self, work: Work, disk: Disk, source: Volume) -> Disk:
        """Move a disk that a guest uses."""
        # QEMU copies all of it.
        target, after = self._made(work, disk, source, Wipe.ENDS)
        after = self._as_large(disk, after, source, target)
        facts = {**work.record.facts, "after": to_json(after), "was_running": False}
        files = InstanceFiles(self._name)
        work.step("have the guest use it", undo=("resume", facts))
        rest = [(one, facts) for one in _REST]
        with work.committing(("is moved", facts), *rest):
            self._lock.close()  # a stop, say, need not wait for the copy
            self._is_held = False
            try:
                disk_images.mirror_disk(
                    files.qmp,
                    after,
                    runtime=files.runtime,
                    rate=self._rate,
                    before_switch=partial(self._stand_still, work, disk, facts),
                    tell=partial(self._told, work),
                )
            except QmpClosedError as error:
                text = "ended while its disk was moved"
                raise InstanceError(self._name, text, hint="move it again") from error
            except HotplugError as error:
                text = f"its disk {disk.name or disk.path} is not moved from {disk.unit} to "
                hint = error.hint or "after an error of a device, journalctl -k names it"
                raise InstanceError(
                    self._name, f"{text}{self._unit}: {error}", hint=hint
                ) from error
            finally:
                self._hold()
            _save(facts)
        _resume(facts)
        return after

    def _as_large(self, disk: Disk, after: Disk, source: Volume, target: Volume) -> Disk:
        """Have the old volume be as large as the new one, whose unit may have larger extents: QEMU
        copies to images of the same size only."""
        size = target.status().size
        if source.status().size == size:
            return after
        source.grow(size)
        with working_on(InstanceFiles(self._name).qmp) as vm:
            device = block_graph.device_of(vm.machine, disk.uuid)
            block_graph.grow_disk(vm.machine, device, size)
        return replace(after, size_mib=size // _MIB) if disk.size_mib else after

    def _stand_still(self, work: Work, disk: Disk, facts: Facts) -> None:
        """Have the guest write no more until the spec names the new volume."""
        self._hold()
        if find_disk(store.load(self._name), disk.uuid) != disk:
            text = f"its disk {disk.name or disk.path} was changed while it was moved"
            raise InstanceError(self._name, text, hint="move it again")
        with working_on(InstanceFiles(self._name).qmp) as vm:
            if _state(vm) == "running":
                facts["was_running"] = True
                work.note()
                vm.machine.qmp.execute("stop")

    def _hold(self) -> None:
        """Hold the lock of the instance, unless that is so already."""
        if not self._is_held:
            self._lock.enter_context(store.alone(self._name, timeout_s=_LOCK_S))
            self._is_held = True


def _source(seen: Observed, disk: Disk, *, discards_snapshots: bool) -> Volume:
    """The volume of a disk that can be moved.

    :raises InstanceError: why it can't be.
    """
    name, called = seen.name, disk.name or disk.path
    if not disk.unit:
        hint = f"brine disk adopt {name} {called} has Brine look after it"
        raise InstanceError(name, f"its disk {called} is no volume of Brine's", hint=hint)
    volume = volume_in(disk.unit, disk.uuid)
    status = volume.status()
    if status.status is UnitStatus.MISSING:
        raise InstanceError(name, f"its disk {called}: {status.why}")
    if status.snapshots and discards_snapshots:
        refuse_work(name)
    elif status.snapshots:
        snapshots = ", ".join(one.name for one in status.snapshots)
        hint = f"brine disk snapshot {name} --remove {status.snapshots[-1].name}; or "
        hint += "--discard-snapshots moves what the disk has now, and removes them"
        text = f"its disk {called} has snapshots, which do not move with it: {snapshots}"
        raise InstanceError(name, text, hint=hint)
    overlays = len(status.snapshots) if volume.driver == "file" else 0
    if disk.backing and len(disk.layers()) > overlays:
        hint = "qemu-img rebase -b '' makes an image that stands alone, while it is stopped"
        text = f"its disk {called} has a backing file, {disk.backing.path}, which does not move"
        raise InstanceError(name, text, hint=hint)
    return volume


def _is_plugged(seen: Observed, disk: Disk) -> bool:
    """Whether the instance's QEMU has a disk now.

    :raises InstanceError: if the disk can't be moved as it is.
    """
    name, oper = seen.name, seen.state.oper
    if not seen.is_going:
        refuse_stray_vm(name, "end it, then move the disk")
        return False
    if oper is not Oper.RUNNING or seen.spec.is_xen():
        hint = f"brine instance stop {name}, then move the disk"
        raise InstanceError(name, f"is {oper}", hint=hint)
    now = next((one for one in devices_now(name).now.disks if one.uuid == disk.uuid), None)
    if now is None:
        return False
    if now.path != disk.path:
        text = f"runs with {now.path}, and its spec has {disk.path}"
        raise InstanceError(name, text, hint=f"brine instance reboot {name}, then move the disk")
    if disk.read_only:
        text = f"its disk {disk.name or disk.path} is read-only, and QEMU does not copy it"
        raise InstanceError(name, text, hint=f"brine instance stop {name}, then move the disk")
    return True


def _state(vm: Vm) -> str:
    answer = vm.machine.qmp.execute("query-status")
    return str(answer.get("status")) if isinstance(answer, dict) else ""


# The functions of the operation. An instance that is no more, or has the disk no more, uses neither
# volume.


def _disk_in_spec(facts: Facts) -> Disk | None:
    spec = store.load_sound(facts["name"])
    return next((one for one in spec.disks if one.uuid == facts["uuid"]), None) if spec else None


def _is_moved(facts: Facts) -> bool:
    """Whether the disk is at its new place: by what QEMU has; without one, by the spec."""
    disk = _disk_in_spec(facts)
    if disk and disk.unit == facts["to"]:
        return True
    if "was_running" not in facts:
        return False
    image = _image_in_use(facts) if is_listening(InstanceFiles(facts["name"]).qmp) else ""
    return bool((image or _image_at_end(facts)) == facts["after"]["path"])


def _image_at_end(facts: Facts) -> str:
    """The path of the image that QEMU had as the disk when that was last recorded."""
    last = LastStart.known(facts["name"])
    rows = last.disks if last else ()
    return next((str(row.get("path")) for row in rows if row.get("uuid") == facts["uuid"]), "")


def _image_in_use(facts: Facts) -> str:
    """The path of the image that QEMU has as the disk; empty if there is no QEMU, or it has not."""
    qmp = InstanceFiles(facts["name"]).qmp
    if not is_listening(qmp):
        return ""
    try:
        with working_on(qmp) as vm:
            sets = block_graph.recorded_sets(vm.machine)
            device = block_graph.device_of(vm.machine, facts["uuid"])
            return sets[device].path() or ""
    except QmpClosedError:
        if is_listening(qmp):
            raise
        return ""
    except HotplugError:
        if not _has_disk(facts):
            return ""
        raise


def _has_disk(facts: Facts) -> bool:
    with working_on(InstanceFiles(facts["name"]).qmp) as vm:
        return any(one.uuid == facts["uuid"] for one in vm.machine.fdsets())


def _save(facts: Facts) -> None:
    """Have the spec, and what the next start goes by, name the new volume."""
    name, after = facts["name"], parse(Disk, facts["after"], "/after")
    spec = store.load_sound(name)
    if spec is None:
        return
    image: dict[str, Any] = {key: getattr(after, key) for key in (*_OF_VOLUME, "size_mib")}
    disks = tuple(replace(one, **image) if one.uuid == after.uuid else one for one in spec.disks)
    if disks != spec.disks:
        store.save(replace(spec, disks=disks))
    file = InstanceFiles(name).runtime
    if file.exists():
        change_file(file, lambda known: known.with_image(after, after.size_mib))


def _resume(facts: Facts) -> None:
    """Have the guest go on that stood still for the switch, unless an administrator has paused
    it."""
    qmp = InstanceFiles(facts["name"]).qmp
    if not facts.get("was_running") or not is_listening(qmp):
        return
    try:
        with working_on(qmp) as vm:
            if _state(vm) == PAUSED and not Run.last(facts["name"]).is_paused():
                vm.machine.qmp.execute("cont")
    except QmpClosedError:
        if is_listening(qmp):
            raise


def _remove_copy(facts: Facts) -> None:
    _remove(facts, facts["to"])


def _remove_original(facts: Facts) -> None:
    _remove(facts, facts["from"], with_snapshots=facts.get("discards_snapshots") is True)


def _remove(facts: Facts, unit: str, *, with_snapshots: bool = False) -> None:
    """Remove the volume that the disk is not in."""
    disk = _disk_in_spec(facts)
    if disk and disk.unit == unit:
        return
    with leaving_orphan(facts["name"], unit):
        settle_vm(facts["name"])  # after a kill its copy may still go on
        volume_in(unit, facts["uuid"]).remove(with_snapshots=with_snapshots)


def _tell_moved(facts: Facts) -> None:
    how = f"{facts['disk']} from {facts['from']} to {facts['to']}"
    messages.tell(messages.DISK_MOVED, facts["name"], how=how)


MOVE = OperationKind(
    "disk-move",
    {
        "is moved": _is_moved,
        "save": _save,
        "resume": _resume,
        "remove the copy": _remove_copy,
        "remove the original": _remove_original,
        "tell": _tell_moved,
    },
    alone=store.all_held,
)
