"""Adding disks to a locked VM, and removing their backends.

Descriptors go to QEMU as a set, then the block node, then what the guest sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from brine.common.qmp.wire import QmpCommandError
from brine.hotplug.block_graph import disk_in, hand_over, recorded_sets, remove_unused
from brine.hotplug.device_arguments import block_nodes, disk_device, fdset_opaque
from brine.hotplug.errors import HotplugError
from brine.hotplug.known_devices import Device, DeviceChange, differences
from brine.hotplug.locked_vm import Vm
from brine.hotplug.qemu import Machine, unplug_device
from brine.hotplug.transaction import Pending, PendingAction, Undo
from brine.vm.address import Bus, DeviceKind, uuid_of_path
from brine.vm.conflicts import is_same_disk
from brine.vm.disk import Disk
from brine.vm.disk_files import Opened, opened, size_of
from brine.vm.identities import identities_of
from brine.vm.runtime_file import Runtime
from brine.vm.slots import Slot
from brine.vm.values import RESERVED_SLOTS

_NOT_COMPARED = ("format_source", "interface", "slot")  # QEMU is not told of these


def plug_disk_in(
    vm: Vm,
    disk: Disk,
    *,
    controller: str | None = None,
    reserved: int = RESERVED_SLOTS,
) -> DeviceChange:
    """Plug a disk in, and record it in the runtime file if there is one.

    If the same disk is already plugged in, only a missing record is added.

    :param disk: one of unnamed format is refused if it looks like another format's image.
    :param controller: of SCSI: the id of a virtio-scsi controller; None is the first.
    :param reserved: slots of ``pci.0`` that stay free.
    """
    if existing := _existing(vm, disk):
        device, disk = existing
        vm.record_again(device, disk.uuid, lambda slot: disk.entry(size_of(disk), slot))
        return device.change(changed=False)._replace(uuid=disk.uuid)
    if disk.bus() is Bus.PCI:
        slot = vm.machine.free_slot(reserved=reserved)
    else:
        slot = vm.machine.free_lun(controller)
    device_id, serial = slot.device_id(DeviceKind.DISK, disk.uuid), disk.guest_serial()
    change = DeviceChange(DeviceKind.DISK, device_id, disk.uuid, serial, slot.number)
    with opened(disk) as files:
        entry = disk.entry(files.size_mib, slot)
        _check_record(vm, entry)
        if vm.dry_run:
            return change
        with vm.doing(PendingAction.ADD, change, disk.identities(), device=entry) as undo:
            _put_in(vm, undo, disk, files, slot)
    return change


# Disks that a VM already has. A UUID identifies a disk, and so does a path.


def _existing(vm: Vm, disk: Disk) -> tuple[Device, Disk] | None:
    """The requested disk, if it is already plugged in, and its known settings."""
    there = vm.devices(DeviceKind.DISK)
    known = _plugged_disks(vm.machine) if there else {}
    for device in there:
        if device.is_of(disk.uuid):
            return device, _same(vm, device, known.get(device.device_id), disk)
    for device in there:
        one = known.get(device.device_id)
        if one and _conflicts(disk, [one.recorded()]):
            if disk.uuid != uuid_of_path(disk.path):
                text = f"{disk.path}: already plugged in, as {device.device_id}"
                raise HotplugError(text, hint="leave out --uuid, or give it that one's")
            # The request names no UUID.
            return device, _same(vm, device, one, replace(disk, uuid=one.uuid))
    if vm.runtime and _conflicts(disk, Runtime.load(vm.runtime).ide_disks()):
        # The VM was started with it, and IDE has no hotplug.
        raise HotplugError(f"{disk.path}: the VM has it already, on the interface ide")
    return None


def _conflicts(disk: Disk, others: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of both writes a file of the other."""
    theirs = list(identities_of({"disks": list(others)}))
    return any(
        is_same_disk(one.value, other.value)
        for one in disk.identities()
        for other in theirs
        if not one.is_shared_with(other)
    )


def _plugged_disks(machine: Machine) -> dict[str, Disk]:
    """The disks that Brine plugged in, with their settings, by device id."""
    there = recorded_sets(machine)
    return {device_id: disk for device_id, one in there.items() if (disk := disk_in(one.disk))}


def _same(vm: Vm, device: Device, known: Disk | None, disk: Disk) -> Disk:
    """Refuse a disk that is already plugged in with different settings.

    If another program plugged it in, only its serial, its bus and perhaps its path are known.
    """
    if known:
        # The request need not repeat the serial.
        disk = replace(disk, serial=disk.serial or known.serial)
        there = replace(known, serial=known.guest_serial())
        wanted = replace(disk.as_qemu_has_it(), serial=disk.guest_serial())
        unlike = differences(there, wanted, but=_NOT_COMPARED)
    else:
        unlike = [f"serial {device.value}"] if device.value != disk.guest_serial() else []
    if device.name.bus is not disk.bus():
        unlike.append(f"bus {device.name.bus}")
    hint = f"{vm.command('disk remove', device.device_id)} takes it out"
    if known and not is_same_disk(known.path, disk.path):
        hint += "; or give this one another --uuid"
    vm.refuse_otherwise(device, unlike, hint)
    _check_record(vm, disk.entry(0))
    return disk


def _check_record(vm: Vm, entry: dict[str, Any]) -> None:
    """Refuse a disk that can't be recorded in the runtime file, if there is one."""
    if vm.runtime:
        Runtime.load(vm.runtime).with_device(DeviceKind.DISK, entry)


# Steps, each of which can be undone.


def _put_in(vm: Vm, undo: Undo, disk: Disk, files: Opened, slot: Slot) -> None:
    """Plug a disk in.

    :param undo: collects what undoes each step.
    """
    machine, device_id = vm.machine, slot.device_id(DeviceKind.DISK, disk.uuid)
    undo.by(partial(remove_unused, machine, device_id), asks_qemu=True)
    opaques = [fdset_opaque(device_id, disk), *(device_id for _ in files.backing)]
    images = [
        (hand_over(machine, opaque, one.descriptors), one.is_device)
        for opaque, one in zip(opaques, (files, *files.backing), strict=True)
    ]
    for node in block_nodes(device_id, disk, images):
        machine.qmp.execute("blockdev-add", node)
    undo.by(partial(unplug_device, machine, device_id, timeout_s=vm.timeout_s), asks_qemu=True)
    try:
        machine.qmp.execute("device_add", disk_device(device_id, disk, slot))
    except QmpCommandError as error:
        if " lock" not in error.description:
            raise
        hint = (
            "another VM or program has it open, or it is the medium in this VM's own CD-ROM drive"
        )
        raise HotplugError(f"{disk.path}: is in use: {error.description}", hint=hint) from error


def take_out(vm: Vm, device: Device) -> None:
    """Remove a disk from the guest, then its backend."""
    unplug_device(vm.machine, device.device_id, timeout_s=vm.timeout_s)
    remove_unused(vm.machine, device.device_id)


def remove_rest(vm: Vm, pending: Pending) -> None:
    """Remove what interrupted work has left of a disk."""
    remove_unused(vm.machine, pending.device_id)
