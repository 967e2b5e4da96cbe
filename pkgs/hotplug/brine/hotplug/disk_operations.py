"""Adding and removing disks of a VM that one has to oneself: each is done whole, or not at all."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brine.hotplug import messages
from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.disks import DRIVERS, Disk, opened, plug_disk, remove_disk_back_end
from brine.hotplug.pending import Action, Pending
from brine.hotplug.slots import RESERVED_SLOTS
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device
from brine.hotplug.vm import Plugged, Vm, record


@dataclass(frozen=True, slots=True)
class Done:
    """What was done.

    :param changed: False if it was so already.
    :param serial: what the guest knows it by.
    :param slot: of the bus.
    """

    device_id: str
    uuid: str
    serial: str
    slot: int
    changed: bool


async def add_disk(
    vm: Vm,
    disk: Disk,
    *,
    bus: Bus = Bus.PCI,
    controller: str | None = None,
    reserved: int = RESERVED_SLOTS,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> Done:
    """Plug a disk in, and note it in the runtime file if there is one.

    :param controller: of SCSI: the id of a virtio-scsi controller; None is the first.
    :param reserved: slots of ``pci.0`` that are left alone.
    :param timeout_s: how long the guest may take to give it up again, if a later step fails.
    :param dry_run: only tell what would be done.
    :raises brine.common.errors.BrineError: what failed; then all is as it was.
    """
    for device in await vm.devices(Kind.DISK):
        if device.is_of(disk.uuid):
            return Done(
                device.device_id, device.uuid, device.value, device.name.slot, changed=False
            )
    if bus is Bus.PCI:
        slot = await vm.machine.free_pci_slot(reserved=reserved)
    else:
        slot = await vm.machine.free_lun(controller)
    device_id = str(DeviceName.of(Kind.DISK, disk.uuid, bus, slot.number))
    pending = Pending(
        action=Action.ADD,
        kind=Kind.DISK,
        uuid=disk.uuid,
        device_id=device_id,
        device={**recorded_disk(disk), **slot.recorded(DRIVERS[bus], device_id)},
        runtime=str(runtime) if runtime else None,
    )
    serial = disk.guest_serial()
    done = Done(device_id, disk.uuid, serial, slot.number, changed=True)
    with opened(disk) as files:
        if dry_run:
            return done
        async with vm.doing(pending) as doing:
            await plug_disk(vm.machine, disk, files, slot, doing.undo, bus=bus, timeout_s=timeout_s)
            record(pending, plugged=True)
    messages.tell_plugged(vm.name, Kind.DISK, device_id, serial=serial)
    return done


async def remove_disk(
    vm: Vm,
    device: Plugged,
    *,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> Done:
    """Take a disk out, and out of the runtime file if there is one.

    :param dry_run: only tell what would be done.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps it.
    """
    done = Done(device.device_id, device.uuid, device.value, device.name.slot, changed=True)
    if dry_run:
        return done
    pending = Pending(
        action=Action.REMOVE,
        kind=Kind.DISK,
        uuid=device.uuid,
        device_id=device.device_id,
        runtime=str(runtime) if runtime else None,
    )
    async with vm.doing(pending):
        await unplug_device(vm.machine, device.device_id, timeout_s=timeout_s)
        await remove_disk_back_end(vm.machine, device.device_id)
        record(pending, plugged=False)
    device.tell_unplugged(vm.name)
    return done


def recorded_disk(disk: Disk) -> dict[str, Any]:
    """A disk as a runtime file has it."""
    return {**asdict(disk), "path": str(disk.path), "size_mib": _size_mib(disk)}


def _size_mib(disk: Disk) -> int:
    """What its file or device holds, rounded up; 0 if that can't be found out."""
    try:
        with disk.path.open("rb") as file:
            return -(-file.seek(0, os.SEEK_END) // (1 << 20))
    except OSError:
        return 0
