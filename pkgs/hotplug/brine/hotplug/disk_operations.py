"""Adding and removing disks of a VM that one has to oneself: each is done whole, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.hotplug import messages
from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.disk import Disk, placed_disk
from brine.hotplug.disk_files import opened, size_of
from brine.hotplug.disks import plug_disk, remove_disk_back_end
from brine.hotplug.existing_disks import existing_disk
from brine.hotplug.pending import Action, Pending
from brine.hotplug.plugged import Plugged
from brine.hotplug.recording import is_recorded, record
from brine.hotplug.runtime import Runtime
from brine.hotplug.slots import RESERVED_SLOTS
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device
from brine.hotplug.vm import Vm


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
    is_format_said: bool = True,
    bus: Bus = Bus.PCI,
    controller: str | None = None,
    reserved: int = RESERVED_SLOTS,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> Done:
    """Plug a disk in, and note it in the runtime file if there is one.

    If it is plugged in already, as it is wanted, only the runtime file may lack it.

    :param is_format_said: else a disk that looks like another format's image is refused.
    :param controller: of SCSI: the id of a virtio-scsi controller; None is the first.
    :param reserved: slots of ``pci.0`` that are left alone.
    :param timeout_s: how long the guest may take to give it up again, if a later step fails.
    :param dry_run: only tell what would be done.
    :raises brine.common.errors.BrineError: what failed; then all is as it was.
    """
    if existing := await existing_disk(vm, disk, bus, runtime):
        device, disk = existing
        if not dry_run:
            await _record_again(vm, device, disk, runtime)
        slot_number = device.name.slot
        return Done(device.device_id, disk.uuid, device.value, slot_number, changed=False)
    if bus is Bus.PCI:
        slot = await vm.machine.free_pci_slot(reserved=reserved)
    else:
        slot = await vm.machine.free_lun(controller)
    device_id = str(DeviceName.of(Kind.DISK, disk.uuid, bus, slot.number))
    serial = disk.guest_serial()
    done = Done(device_id, disk.uuid, serial, slot.number, changed=True)
    with opened(disk, is_format_said=is_format_said) as files:
        entry = placed_disk(disk, files.size_mib, slot, bus, device_id)
        if runtime:
            Runtime.load(runtime).with_device(Kind.DISK, entry)  # or it says why not
        if dry_run:
            return done
        pending = _addition(entry, device_id, runtime)
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
    vm.tell_unplugged(device)
    return done


def _addition(entry: dict[str, Any], device_id: str, runtime: Path | None) -> Pending:
    return Pending(
        action=Action.ADD,
        kind=Kind.DISK,
        uuid=entry["uuid"],
        device_id=device_id,
        device=entry,
        runtime=str(runtime) if runtime else None,
    )


async def _record_again(vm: Vm, device: Plugged, disk: Disk, runtime: Path | None) -> None:
    """Enter a disk that is plugged in into a runtime file that does not know of it."""
    device_id = device.device_id
    if is_recorded(runtime, Kind.DISK, disk.uuid, device_id):
        return
    slot = await vm.machine.slot_of(device_id, device.name)
    entry = placed_disk(disk, size_of(disk), slot, device.name.bus, device_id)
    record(_addition(entry, device_id, runtime), plugged=True)
