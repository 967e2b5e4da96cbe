"""Adding and removing disks of a locked VM: each change succeeds completely or is undone."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common.qmp.wire import QmpCommandError, QmpProtocolError
from brine.hotplug import messages
from brine.hotplug.address import RESERVED_SLOTS, Bus, DeviceKind, DeviceName, Slot, uuid_of_path
from brine.hotplug.disk import (
    MOST_BACKING,
    Disk,
    DiskUse,
    block_node_names,
    block_nodes,
    disk_device,
    fdset_opaque,
    ide_disks,
    is_same,
    opened,
    placed_disk,
    recorded_disk,
    shared,
    size_of,
)
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import UNPLUG_TIMEOUT_S, Device, Machine, fdsets, unplug_device
from brine.hotplug.runtime_file import Runtime, is_recorded, record
from brine.hotplug.transaction import Pending, PendingAction, Undo
from brine.hotplug.vm import Vm

if TYPE_CHECKING:
    from brine.hotplug.disk import Opened


# Plugging disks: descriptors go to QEMU as a set, then the block node, then what the guest sees.


def plug_disk(
    machine: Machine,
    disk: Disk,
    files: Opened,
    slot: Slot,
    undo: Undo,
    *,
    bus: Bus = Bus.PCI,
    timeout_s: float = UNPLUG_TIMEOUT_S,
) -> str:
    """Plug a disk in; returns its device id.

    :param undo: collects what undoes each step.
    :param bus: of *slot*.
    :param timeout_s: how long the guest may take to release it if a later step fails.
    :raises HotplugError: if this QEMU does not accept descriptors.
    :raises brine.common.qmp.client.QmpError: what failed.
    """
    device_id = str(DeviceName.of(DeviceKind.DISK, disk.uuid, bus, slot.number))
    opaque = fdset_opaque(device_id, disk)
    undo.by(partial(_remove_fdsets, machine, device_id), asks_qemu=True)
    fdset = hand_over(machine, opaque, files.descriptors)
    for node in reversed(block_node_names(device_id, backing=0)):
        # A removed device may keep it for a moment.
        close = partial(machine.remove, "blockdev-del", {"node-name": node})
        undo.by(close, asks_qemu=True)
    for layer in block_nodes(device_id, disk, [(fdset, files.is_device)]):
        machine.qmp.execute("blockdev-add", layer)
    undo.by(partial(unplug_device, machine, device_id, timeout_s=timeout_s), asks_qemu=True)
    try:
        machine.qmp.execute("device_add", disk_device(device_id, disk, slot, bus))
    except QmpCommandError as error:
        if " lock" not in error.description:
            raise
        hint = "another VM or program has it open for writing"
        raise HotplugError(f"{disk.path}: is in use: {error.description}", hint=hint) from error
    return device_id


def remove_disk_back_end(machine: Machine, device_id: str) -> None:
    """Have QEMU close the block node and descriptors of a removed disk, unless it already has."""
    sets = {one.number for one in fdsets(machine) if one.device_id == device_id}
    for node in block_node_names(device_id, backing=min(max(len(sets) - 1, 0), MOST_BACKING)):
        machine.remove("blockdev-del", {"node-name": node})
    _remove_fdsets(machine, device_id)


def plugged_disks(machine: Machine) -> dict[str, Disk]:
    """The disks that Brine plugged in, with their settings, by device id."""
    found = {}
    for one in fdsets(machine):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found[one.device_id] = Disk.from_json(json.loads(one.disk))
    return found


def _remove_fdsets(machine: Machine, device_id: str) -> None:
    for number in {one.number for one in fdsets(machine) if one.device_id == device_id}:
        machine.remove("remove-fd", {"fdset-id": number})


def hand_over(machine: Machine, opaque: str, descriptors: tuple[int, ...]) -> int:
    """Give QEMU a set of descriptors; returns its number.

    :param opaque: the text that QEMU keeps with each; the device's id comes first.
    :raises HotplugError: if this QEMU does not accept descriptors.
    """
    arguments: dict[str, Any] = {"opaque": opaque}
    for descriptor in descriptors:
        try:
            added = machine.qmp.execute("add-fd", arguments, descriptors=[descriptor])
        except QmpCommandError as error:
            if error.error_class != "CommandNotFound":
                raise
            raise HotplugError(
                "this QEMU has no add-fd, so it can't be given a disk",
                hint="restart the VM with a newer QEMU",
            ) from error
        number = added.get("fdset-id") if type(added) is dict else None
        if type(number) is not int:
            raise QmpProtocolError(f"{machine.qmp.path}: no answer to add-fd: {added!r:.60}")
        arguments["fdset-id"] = number
    return int(arguments["fdset-id"])


# Disks that a VM already has. A UUID identifies a disk, and so does a path.


def existing_disk(vm: Vm, disk: Disk, bus: Bus, runtime: Path | None) -> tuple[Device, Disk] | None:
    """The requested disk, if it is already plugged in, and its known settings.

    :raises HotplugError: if another disk has its UUID or path, or it is plugged in with other
        settings.
    """
    there = vm.devices(DeviceKind.DISK)
    known = plugged_disks(vm.machine) if there else {}
    for device in there:
        if device.is_of(disk.uuid):
            return device, _same(vm, device, known.get(device.device_id), disk, bus, runtime)
    for device in there:
        one = known.get(device.device_id)
        if one and shared(str(disk.path), read_only=disk.read_only, uses=[_use_of(one)]):
            if disk.uuid != uuid_of_path(str(disk.path)):
                text = f"{disk.path}: is plugged in already, as {device.device_id}"
                raise HotplugError(text, hint="leave out --uuid, or give it that one's")
            # The request names no UUID.
            wanted = replace(disk, uuid=one.uuid)
            return device, _same(vm, device, one, wanted, bus, runtime)
    if runtime:
        _refuse_ide(disk, Runtime.load(runtime))
    return None


def _use_of(disk: Disk) -> DiskUse:
    return DiskUse(str(disk.path), disk.read_only)


def _same(
    vm: Vm, device: Device, known: Disk | None, disk: Disk, bus: Bus, runtime: Path | None
) -> Disk:
    """Refuse a disk that is already plugged in with different settings.

    If another program plugged it in, only its serial, its bus and perhaps its path are known.
    """
    if known:
        # The request need not repeat the serial.
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
        Runtime.load(runtime).with_device(
            DeviceKind.DISK, recorded_disk(disk, 0)
        )  # or it says why not
    return disk


def _differences(there: Disk, wanted: Disk) -> list[str]:
    """The present values of a disk that differ from the requested ones."""
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
    """Refuse a disk that the VM was started with on IDE, which has no hotplug."""
    started = runtime.rest if isinstance(runtime.rest, dict) else {}
    if shared(str(disk.path), read_only=disk.read_only, uses=ide_disks(started)):
        raise HotplugError(f"{disk.path}: the VM has it already, on the interface ide")


@dataclass(frozen=True, slots=True)
class DiskChange:
    """The result of a change.

    :param changed: False if nothing had to change.
    :param serial: by which the guest knows the disk.
    :param slot: of the bus.
    """

    device_id: str
    uuid: str
    serial: str
    slot: int
    changed: bool


def add_disk(
    vm: Vm,
    disk: Disk,
    *,
    is_format_said: bool = True,
    bus: Bus = Bus.PCI,
    controller: str | None = None,
    reserved: int = RESERVED_SLOTS,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> DiskChange:
    """Plug a disk in, and record it in the runtime file if there is one.

    If the same disk is already plugged in, only a missing record is added.

    :param is_format_said: whether the request names the format. If not, a disk that looks like
        another format's image is refused.
    :param controller: of SCSI: the id of a virtio-scsi controller; None is the first.
    :param reserved: slots of ``pci.0`` that stay free.
    :param timeout_s: how long the guest may take to release it if a later step fails.
    :param dry_run: change nothing; return what would be done.
    :raises brine.common.errors.BrineError: what failed; then nothing has changed.
    """
    if existing := existing_disk(vm, disk, bus, runtime):
        device, disk = existing
        if not dry_run:
            _record_again(vm, device, disk, runtime)
        slot_number = device.name.slot
        return DiskChange(device.device_id, disk.uuid, device.value, slot_number, changed=False)
    if bus is Bus.PCI:
        slot = vm.machine.free_pci_slot(reserved=reserved)
    else:
        slot = vm.machine.free_lun(controller)
    device_id = str(DeviceName.of(DeviceKind.DISK, disk.uuid, bus, slot.number))
    serial = disk.guest_serial()
    done = DiskChange(device_id, disk.uuid, serial, slot.number, changed=True)
    with opened(disk, is_format_said=is_format_said) as files:
        entry = placed_disk(disk, files.size_mib, slot, bus, device_id)
        if runtime:
            Runtime.load(runtime).with_device(DeviceKind.DISK, entry)  # or it says why not
        if dry_run:
            return done
        pending = _addition(entry, device_id, runtime)
        with vm.doing(pending) as doing:
            plug_disk(vm.machine, disk, files, slot, doing.undo, bus=bus, timeout_s=timeout_s)
            record(pending, plugged=True)
    messages.tell_plugged(vm.name, DeviceKind.DISK, device_id, serial=serial)
    return done


def remove_disk(
    vm: Vm,
    device: Device,
    *,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> DiskChange:
    """Remove a disk, also from the runtime file if there is one.

    :param dry_run: change nothing; return what would be done.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps it.
    """
    done = DiskChange(device.device_id, device.uuid, device.value, device.name.slot, changed=True)
    if dry_run:
        return done
    pending = Pending(
        action=PendingAction.REMOVE,
        kind=DeviceKind.DISK,
        uuid=device.uuid,
        device_id=device.device_id,
        runtime=str(runtime) if runtime else None,
    )
    with vm.doing(pending):
        unplug_device(vm.machine, device.device_id, timeout_s=timeout_s)
        remove_disk_back_end(vm.machine, device.device_id)
        record(pending, plugged=False)
    vm.tell_unplugged(device)
    return done


def _addition(entry: dict[str, Any], device_id: str, runtime: Path | None) -> Pending:
    return Pending(
        action=PendingAction.ADD,
        kind=DeviceKind.DISK,
        uuid=entry["uuid"],
        device_id=device_id,
        device=entry,
        runtime=str(runtime) if runtime else None,
    )


def _record_again(vm: Vm, device: Device, disk: Disk, runtime: Path | None) -> None:
    """Record a plugged disk that is missing in the runtime file."""
    device_id = device.device_id
    if is_recorded(runtime, DeviceKind.DISK, disk.uuid, device_id):
        return
    slot = vm.machine.slot_of(device_id, device.name)
    entry = placed_disk(disk, size_of(disk), slot, device.name.bus, device_id)
    record(_addition(entry, device_id, runtime), plugged=True)
