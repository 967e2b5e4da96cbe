"""Disks that a VM has already: a UUID and a path stand for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from brine.hotplug.device_names import Bus, Kind, uuid_of_path
from brine.hotplug.disk import Disk, recorded_disk
from brine.hotplug.disk_uses import Use, ide_disks, is_same, shared
from brine.hotplug.disks import plugged_disks
from brine.hotplug.errors import HotplugError
from brine.hotplug.plugged import Plugged
from brine.hotplug.runtime import Runtime
from brine.hotplug.vm import Vm


async def existing_disk(
    vm: Vm, disk: Disk, bus: Bus, runtime: Path | None
) -> tuple[Plugged, Disk] | None:
    """The disk that is wanted, if it is plugged in already; and what is known of it.

    :raises HotplugError: if its UUID is another one's, its path is, or it is there otherwise.
    """
    there = await vm.devices(Kind.DISK)
    known = await plugged_disks(vm.machine) if there else {}
    for device in there:
        if device.is_of(disk.uuid):
            return device, _same(vm, device, known.get(device.device_id), disk, bus, runtime)
    for device in there:
        one = known.get(device.device_id)
        if one and shared(str(disk.path), read_only=disk.read_only, uses=[_use_of(one)]):
            if disk.uuid != uuid_of_path(str(disk.path)):
                text = f"{disk.path}: is plugged in already, as {device.device_id}"
                raise HotplugError(text, hint="leave out --uuid, or give it that one's")
            # Nobody has said which UUID it is to have.
            wanted = replace(disk, uuid=one.uuid)
            return device, _same(vm, device, one, wanted, bus, runtime)
    if runtime:
        _refuse_ide(disk, Runtime.load(runtime))
    return None


def _use_of(disk: Disk) -> Use:
    return Use(str(disk.path), disk.read_only)


def _same(
    vm: Vm, device: Plugged, known: Disk | None, disk: Disk, bus: Bus, runtime: Path | None
) -> Disk:
    """Refuse a disk that is plugged in already, and otherwise than it is wanted.

    Of one that somebody else plugged in only its serial and bus are known, and perhaps its path.
    """
    if known:
        # Nobody need say again which serial it has.
        disk = replace(disk, serial=disk.serial or known.serial)
        unlike = _differences(known, disk)
    else:
        unlike = [f"serial {device.value}"] if device.value != disk.guest_serial() else []
    if device.name.bus is not bus:
        unlike.append(f"bus {device.name.bus}")
    if unlike:
        raise HotplugError(
            f"{device.device_id}: is plugged in already, and otherwise: {', '.join(unlike)}",
            hint=f"{vm.command('disk remove', device.device_id)} takes it out"
            + _or_another(known, disk),
        )
    if runtime:
        Runtime.load(runtime).with_device(Kind.DISK, recorded_disk(disk, 0))  # or it says why not
    return disk


def _differences(there: Disk, wanted: Disk) -> list[str]:
    """What of a disk is otherwise than it is wanted, as it is."""
    old, new = there.to_json(), wanted.to_json()
    old["serial"], new["serial"] = there.guest_serial(), wanted.guest_serial()
    names = {"read_only": "read-only"}
    words = {True: "yes", False: "no"}
    return [
        f"{names.get(key, key)} {words.get(old[key], old[key])}"
        for key in old
        if old[key] != new[key]
    ]


def _or_another(known: Disk | None, disk: Disk) -> str:
    is_another = known and not is_same(str(known.path), str(disk.path))
    return "; or give this one another --uuid" if is_another else ""


def _refuse_ide(disk: Disk, runtime: Runtime) -> None:
    """Refuse a disk that the VM was started with on IDE, where nothing is plugged."""
    started = runtime.rest if isinstance(runtime.rest, dict) else {}
    if shared(str(disk.path), read_only=disk.read_only, uses=ide_disks(started)):
        raise HotplugError(f"{disk.path}: the VM has it already, on the interface ide")
