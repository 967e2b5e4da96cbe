"""The verbs of ``brine disk`` for disks with volumes: add by size, grow, remove, status."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from brine.common.cli import print_done, undo_when_told_to_end
from brine.common.errors import BrineError, UsageError, printable, warn
from brine.common.progress import size_text
from brine.common.tables import print_table
from brine.hotplug import commands as hotplug_commands
from brine.hotplug.session import remove_device, working_on
from brine.hotplug.timeouts import Waits
from brine.instance import store
from brine.instance.disks.adoption import adopt_disk, unit_of
from brine.instance.disks.finding import find_disk
from brine.instance.disks.live import show_growth
from brine.instance.disks.states import DiskState
from brine.instance.disks.volumes import delete_volume, refuse_to_delete
from brine.instance.kvm.live_definition import change_live
from brine.instance.kvm.runtime_devices import devices_now
from brine.instance.messages import log_to_journal
from brine.instance.observe import Oper, look
from brine.instance.registry import Defined, SpecChangedError, define_instance
from brine.instance.store import InstanceError
from brine.storage.orphans import VolumeClaims
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import Volume, Wipe
from brine.storage.volumes import volume_in, volumes_of
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk, Interface
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import Runtime, change_file
from brine.vm.spec import Spec, to_json

_MIB = 1 << 20
_HEADING = ("DISK", "UNIT", "DRIVER", "SIZE", "MADE", "USED", "SNAPSHOTS", "STATUS", "WHY")
_OF_VOLUME = ("uuid", "unit", "path", "format", "backing", "size_mib")
_PLUGGING = ("qmp", "runtime", "controller", "no_hotplug")


def add(arguments: argparse.Namespace) -> int:
    """``brine disk add``: by size, or else by path, which is the business of hotplug."""
    if arguments.size is None:
        if volume := _kept_volume(arguments):
            return _put_back(arguments, volume)
        for key in ("unit", "name", "wipe"):
            if getattr(arguments, key) is not None:
                raise UsageError(f"--{key} goes with --size")
        if arguments.path is None:
            raise UsageError("which disk?", hint="give --size, and one is made; or --path")
        return hotplug_commands.add_disk(arguments)
    if arguments.path is not None:
        raise UsageError("--size makes a disk, and --path is one that there is")
    for key in _PLUGGING:
        if getattr(arguments, key):
            option = f"--{key.replace('_', '-')}"
            raise UsageError(f"{option} goes with --path: a disk by its size is an instance's")
    if arguments.vm is None:
        raise UsageError("which instance?", hint="brine disk add INSTANCE --size 10G")
    return _add_sized(arguments)


def _add_sized(arguments: argparse.Namespace) -> int:
    if arguments.size < _MIB:
        raise UsageError("a disk has at least 1M")
    log_to_journal("brine")
    undo_when_told_to_end()
    dry_run, name = arguments.dry_run, arguments.vm
    if left := _left_unplugged(arguments):
        is_plugged = not dry_run and _plug(store.load(name), None, left, arguments)
        return _print_added(arguments, left, is_plugged)
    uuid = arguments.uuid or str(uuid4())

    def row_of(spec: Spec) -> dict[str, Any]:
        return {**_row_of(arguments, spec), "uuid": uuid}

    # What another command may have added as well is no addition to undo.
    return _add_row(arguments, uuid, row_of, undoes=not (arguments.uuid or dry_run))


def _kept_volume(arguments: argparse.Namespace) -> Volume | None:
    """The volume at the path, if Brine has made or adopted it, and no instance has it."""
    is_plain = arguments.path is None or any(getattr(arguments, key) for key in _PLUGGING)
    if is_plain or arguments.vm is None or store.load_sound(arguments.vm) is None:
        return None
    path = os.path.abspath(arguments.path)
    if unit := unit_of(path):
        with suppress(StorageError):  # then it is a disk as others
            for volume in volumes_of(unit):
                status = volume.status()
                if status.path == path and not VolumeClaims.read().has(volume, status):
                    return volume
    return None


def _put_back(arguments: argparse.Namespace, volume: Volume) -> int:
    """Have an instance have a disk with a volume that was kept."""
    known = volume.disk(Disk(path=os.path.abspath(arguments.path)))
    kept = {key: to_json(known)[key] for key in _OF_VOLUME}
    for key in ("uuid", "unit", "format"):
        given = getattr(arguments, key)
        if given not in (None, kept[key]):
            raise UsageError(f"--{key} {given}: the volume {known.path} has {kept[key]}")
    if arguments.wipe:
        raise UsageError("--wipe goes with --size: the volume keeps its data")
    log_to_journal("brine")
    undo_when_told_to_end()
    called = volume.status().name

    def row_of(spec: Spec) -> dict[str, Any]:
        row = {**_row_of(arguments, spec), **kept}
        is_free = called and called not in [one.name for one in spec.disks]
        return {**row, "name": called} if is_free and not arguments.name else row

    return _add_row(arguments, known.uuid, row_of)


def _add_row(
    arguments: argparse.Namespace,
    uuid: str,
    row_of: Callable[[Spec], dict[str, Any]],
    *,
    undoes: bool = False,
) -> int:
    """Have an instance have a further disk, as *row_of* makes it for a spec.

    :param undoes: whether a signal that ends this process also undoes the addition.
    """
    try:
        disk, is_plugged = _define_and_plug(arguments, uuid, row_of)
    except (KeyboardInterrupt, SystemExit):
        if undoes:
            _undo_addition(arguments, uuid)
        elif not arguments.dry_run and _disk_with(arguments.vm, uuid):
            warn(f"{arguments.vm}: the disk {uuid} is in its spec")
        raise
    return _print_added(arguments, disk, is_plugged)


def _print_added(arguments: argparse.Namespace, disk: Disk, is_plugged: bool) -> int:
    name, dry_run = arguments.vm, arguments.dry_run
    where = f"{size_text(disk.size_mib * _MIB)} in {disk.unit}"
    text = f"{'would be added' if dry_run else 'added'}: {name} {disk.name}, {where}"
    text += ", plugged in" if is_plugged else ""
    facts = {"name": name, "disk": _named(disk), "plugged": is_plugged, "dry_run": dry_run}
    print_done(printable(text), as_json=arguments.json, **facts)
    return 0


def _left_unplugged(arguments: argparse.Namespace) -> Disk | None:
    """The disk that the same command has added before it was killed: its running guest lacks it."""
    spec = store.load(arguments.vm)
    for disk in spec.disks if arguments.name else ():
        is_it = disk.size_mib == -(-arguments.size // _MIB) and disk.unit
        if disk.name == arguments.name and is_it and arguments.unit in (None, disk.unit):
            has_now = None if spec.is_xen() else _disks_now(spec.name)
            return disk if has_now is not None and disk.uuid not in has_now else None
    return None


def _disks_now(name: str) -> frozenset[str] | None:
    """The UUIDs of the disks that a running instance has; None if it does not run."""
    if look(name).state.oper is not Oper.RUNNING:
        return None
    return frozenset(one.uuid for one in devices_now(name).now.disks)


def _disk_with(name: str, uuid: str) -> Disk | None:
    """The disk with a UUID in the spec of an instance."""
    return next((one for one in store.load(name).disks if one.uuid == uuid), None)


def _define_and_plug(
    arguments: argparse.Namespace, uuid: str, row_of: Callable[[Spec], dict[str, Any]]
) -> tuple[Disk, bool]:
    """Add a disk; returns it, and whether it is plugged in."""

    def with_it(spec: Spec) -> list[dict[str, Any]]:
        row = row_of(spec)
        if any(uuid == one.uuid for one in spec.disks):
            raise InstanceError(spec.name, f"has the disk {uuid} already")
        if any(row["name"] == one.name for one in spec.disks):
            text = f"has a disk {row['name']} already"
            raise InstanceError(spec.name, text, hint="give another --name")
        return [*to_json(spec)["disks"], row]

    wipe = Wipe(arguments.wipe or Wipe.ZERO)
    defined = _define(arguments.vm, with_it, dry_run=arguments.dry_run, wipe=wipe)
    disk = find_disk(defined.spec, uuid)
    if arguments.dry_run:
        return disk, False
    return disk, _plug(defined.spec, defined.before, disk, arguments)


def _undo_addition(arguments: argparse.Namespace, uuid: str) -> None:
    """Undo an addition that was told to end, and say in a line what is so."""
    name = arguments.vm
    if (disk := _disk_with(name, uuid)) is None:
        return
    try:
        if uuid in (_disks_now(name) or ()):
            warn(f"{name}: the disk {disk.name} is added, and plugged in")
            return
        _take_back(name, disk, arguments)
    except BrineError as error:
        if _disk_with(name, uuid):
            hint = f"the same command with --name {disk.name} plugs it in"
            warn(f"{name}: the disk {disk.name} is in its spec, not plugged in: {error}", hint=hint)
        else:
            hint = "brine storage orphans lists it"
            warn(f"{name}: {disk.path}: is kept, and no instance has it: {error}", hint=hint)
    else:
        warn(f"{name}: the addition of the disk {disk.name} is undone")


def _row_of(arguments: argparse.Namespace, spec: Spec) -> dict[str, Any]:
    """The disk that the options want, as a spec has it."""
    row: dict[str, Any] = {
        "name": arguments.name or _free_name(spec),
        "size_mib": -(-(arguments.size or 0) // _MIB),
        "cache": arguments.cache,
        "aio": arguments.aio,
        "read_only": arguments.read_only,
        "discard": not arguments.no_discard,
        "interface": "scsi" if arguments.bus == "scsi" else "virtio",
        "by_hand": True,
    }
    given = {key: getattr(arguments, key) for key in ("unit", "format", "serial", "uuid")}
    return row | {key: value for key, value in given.items() if value}


def _free_name(spec: Spec) -> str:
    names = {one.name for one in spec.disks}
    return next(name for number in range(1000) if (name := f"disk{number}") not in names)


def _define(
    name: str,
    rows: Callable[[Spec], list[dict[str, Any]]],
    *,
    dry_run: bool = False,
    wipe: Wipe = Wipe.ZERO,
) -> Defined:
    """Define an instance with other disks. If another command changes its spec meanwhile, it is
    done anew with that."""
    while True:
        spec = store.load(name)
        data = {**to_json(spec), "disks": rows(spec)}
        with suppress(SpecChangedError):
            return define_instance(data, over=spec, dry_run=dry_run, wipe=wipe)


def _without(disk: Disk) -> Callable[[Spec], list[dict[str, Any]]]:
    return lambda spec: [one for one in to_json(spec)["disks"] if one["uuid"] != disk.uuid]


def _plug(spec: Spec, before: Spec | None, disk: Disk, arguments: argparse.Namespace) -> bool:
    """Plug a disk into its instance if that runs. If that fails, a disk that is new is undone.

    :param before: the spec without the disk; None if the spec had it before this command.
    """
    seen = look(spec.name)
    if spec.is_xen() or seen.state.oper is not Oper.RUNNING:
        return False
    live = change_live(
        spec,
        before,
        seen,
        dry_run=False,
        only=disk.uuid,
        reserved=arguments.reserved_slots,
        waits=_waits(arguments),
    )
    is_attached = disk.uuid in [one.uuid for one in live.attached]
    if is_attached or disk.uuid in (_disks_now(spec.name) or ()):  # another command has done it
        return True
    if before is not None:
        _take_back(spec.name, disk, arguments)
    error = live.errors[0] if live.errors else BrineError("it has no place for the disk")
    raise InstanceError(spec.name, f"the disk is not plugged in: {error}", hint=error.hint)


def _waits(arguments: argparse.Namespace) -> Waits:
    return Waits(arguments.timeout, arguments.lock_timeout, arguments.qmp_timeout)


def _take_back(name: str, disk: Disk, arguments: argparse.Namespace) -> None:
    _define(name, _without(disk))
    if arguments.size is not None:  # or it was there before
        volume_in(disk.unit, disk.uuid).remove()


def grow(arguments: argparse.Namespace) -> int:
    """``brine disk grow``."""
    log_to_journal("brine")
    name = arguments.instance
    spec = store.load(name)
    disk = _managed(spec, arguments.disk)
    made = volume_in(disk.unit, disk.uuid).status()
    if made.status is UnitStatus.MISSING:
        raise InstanceError(name, f"{disk.path}: {made.why}")
    is_more, size = arguments.size
    wanted = made.size + size if is_more else size
    if wanted < made.size:
        text = f"{disk.name or disk.path} has {size_text(made.size)}: a disk can't shrink"
        raise InstanceError(name, text)
    mib = max(-(-wanted // _MIB), disk.size_mib)

    def grown(spec: Spec) -> list[dict[str, Any]]:
        rows = to_json(spec)["disks"]
        return [{**one, "size_mib": mib} if one["uuid"] == disk.uuid else one for one in rows]

    defined = _define(name, grown, dry_run=arguments.dry_run)
    if not arguments.dry_run and not defined.changed and made.size < mib * _MIB:
        # It was killed before the image had grown.
        volume_in(disk.unit, disk.uuid).grow(mib * _MIB)
    sees, late = False, ""
    if not arguments.dry_run:
        sees, late = _show(name, find_disk(defined.spec, disk.uuid))
    word = "grown" if defined.changed or made.size < mib * _MIB else "unchanged"
    word = f"would be {word}" if arguments.dry_run and word == "grown" else word
    text = f"{word}: {name} {disk.name or disk.path}, {size_text(mib * _MIB)}"
    text += ", and the guest sees it" if sees else ""
    text += f"; the guest sees it at its next start: {late}" if late else ""
    facts = {"name": name, "disk": _named(replace(disk, size_mib=mib)), "seen_by_guest": sees}
    print_done(printable(text), as_json=arguments.json, **facts, dry_run=arguments.dry_run)
    return 0


def _show(name: str, disk: Disk) -> tuple[bool, str]:
    """Have a running guest see that a disk has grown; returns whether it does, and why it does not.

    :raises InstanceError: if the volume has not grown, as one that QEMU alone can have grow.
    """
    try:
        return show_growth(name, [disk]), ""
    except BrineError as error:
        if volume_in(disk.unit, disk.uuid).status().size >= disk.size_mib * _MIB:
            return False, str(error)
        size = size_text(disk.size_mib * _MIB)
        text = f"{disk.path}: has {size} in the spec, and its volume has not grown: {error}"
        hint = f"stop it, then: brine disk grow {name} {disk.name or disk.uuid} {disk.size_mib}M"
        raise InstanceError(name, text, hint=hint) from error


def remove(arguments: argparse.Namespace) -> int:
    """``brine disk remove``: of a disk with a volume, from the spec too; of others, as hotplug."""
    spec = store.load_sound(arguments.vm) if arguments.vm and not arguments.qmp else None
    disk = None
    if spec:
        try:
            disk = find_disk(spec, arguments.device)
        except InstanceError:
            disk = None  # plugged in by hand, perhaps
    if spec is None or disk is None or not disk.unit or arguments.no_hotplug:
        if arguments.delete:
            text = f"{arguments.device}: is no disk with a volume that Brine has made or adopted"
            raise UsageError(text)
        return hotplug_commands.remove_disk(arguments)
    log_to_journal("brine")
    undo_when_told_to_end()
    return _remove_managed(arguments, spec, disk)


def _remove_managed(arguments: argparse.Namespace, spec: Spec, disk: Disk) -> int:
    name, volume = spec.name, volume_in(disk.unit, disk.uuid)
    if arguments.delete and (snapshots := volume.status().snapshots):
        hint = f"brine disk snapshot {name} --remove {snapshots[-1].name}; or leave out --delete, "
        hint += f"and then: brine storage orphans --remove {disk.uuid}"
        names = ", ".join(one.name for one in snapshots)
        raise InstanceError(name, f"{disk.path}: has snapshots: {names}", hint=hint)
    if arguments.delete:
        VolumeClaims.read()  # before the disk is gone
    is_plugged = not spec.is_xen() and look(name).state.oper is Oper.RUNNING
    if arguments.delete and not is_plugged:  # it stays in use until the instance has ended
        refuse_to_delete(name, [disk])
    is_on_ide = is_plugged and disk.interface == Interface.IDE
    stays = is_on_ide and disk.uuid in (_disks_now(name) or ())
    if arguments.delete and stays:
        hint = f"stop {name} before; or leave out --delete"
        text = f"{disk.path}: on IDE, its guest has it until its next start"
        raise InstanceError(name, text, hint=hint)
    is_deleted = arguments.delete
    if not arguments.dry_run:
        if is_plugged and not stays:
            _unplug(arguments, name, disk)
            _note_removal(name, disk)
        _define(name, _without(disk))
        is_deleted = arguments.delete and delete_volume(disk)
    would = "would be " if arguments.dry_run else ""
    text = f"{would}removed: {name} {disk.name or disk.path}; its volume {disk.path} "
    text += f"{would}{'deleted' if is_deleted else 'kept'}"
    text += "; on IDE, its guest has it until its next start" if stays else ""
    facts = {"name": name, "disk": _named(disk), "deleted": is_deleted, "restart_pending": stays}
    print_done(printable(text), as_json=arguments.json, **facts, dry_run=arguments.dry_run)
    return 0 if is_deleted == arguments.delete else 1


def _unplug(arguments: argparse.Namespace, name: str, disk: Disk) -> None:
    files = InstanceFiles(name)
    session = working_on(files.qmp, runtime=files.runtime, **_waits(arguments)._asdict())
    with session as vm:
        if found := vm.find(DeviceKind.DISK, disk.uuid):
            remove_device(vm, found)
        else:
            vm.refuse_boot_device(DeviceKind.DISK, disk.uuid)


def _note_removal(name: str, disk: Disk) -> None:
    """Have the spec of the start lack a disk, too: what was plugged since is kept at the next
    start, unless that spec and the one of the start have other disks."""

    def noted(runtime: Runtime) -> Runtime:
        rows = (runtime.started_with() or {}).get("disks")
        if not isinstance(rows, list):
            return runtime
        return runtime.with_started(disks=[one for one in rows if one.get("uuid") != disk.uuid])

    file = InstanceFiles(name).runtime
    if file.exists():
        change_file(file, noted)


def adopt(arguments: argparse.Namespace) -> int:
    """``brine disk adopt``."""
    log_to_journal("brine")
    name = arguments.instance
    before = find_disk(store.load(name), arguments.disk)
    disk = adopt_disk(name, before.uuid, unit=arguments.unit, called=arguments.name)
    word = "adopted" if not before.unit else "named" if disk.name != before.name else "unchanged"
    text = f"{word}: {name} {disk.name or disk.path}, in {disk.unit}"
    print_done(printable(text), as_json=arguments.json, name=name, disk=_named(disk))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """``brine disk status``: 1 if a disk is not ok."""
    spec = store.load(arguments.instance)
    states = [DiskState.of(disk) for disk in spec.disks]
    rows = [one.row() for one in states]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(_HEADING, map(_cells, rows), none=f"{spec.name} has no disk")
    return 0 if all(one.is_ok for one in states) else 1


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(size: int) -> str:
        return size_text(size) if size else "-"

    return (
        printable(row["name"] or row["path"]),
        printable(row["unit"] or "-"),
        row["driver"] or "-",
        shown(row["size_mib"] * _MIB),
        shown(row["made"]),
        shown(row["used"]),
        ",".join(row["snapshots"]) or "-",
        row["status"],
        printable(row["why"]),
    )


def _managed(spec: Spec, reference: str) -> Disk:
    disk = find_disk(spec, reference)
    if not disk.unit:
        hint = f"brine disk adopt {spec.name} {reference}"
        text = f"{disk.path}: Brine has not made it, and changes only what it made or adopted"
        raise InstanceError(spec.name, text, hint=hint)
    return disk


def _named(disk: Disk) -> dict[str, Any]:
    return {key: getattr(disk, key) for key in ("name", "uuid", "unit", "path", "size_mib")}
