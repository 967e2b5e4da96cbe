"""Adding and removing disks of a VM that one has to oneself: each is done whole, or not at all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.disks import Disk, opened, plug_disk, unplug_disk
from brine.hotplug.pending import Action, Pending
from brine.hotplug.slots import RESERVED_SLOTS
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S
from brine.hotplug.vm import Vm, record


@dataclass(frozen=True, slots=True)
class Done:
    """What was done.

    :param changed: False if it was so already.
    :param slot: of the bus.
    """

    device_id: str
    uuid: str
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
) -> Done:
    """Plug a disk in, and note it in the runtime file if there is one.

    :param controller: of SCSI: the id of a virtio-scsi controller; None is the first.
    :param reserved: slots of ``pci.0`` that are left alone.
    :raises brine.common.errors.BrineError: what failed; then all is as it was.
    """
    device_id = await vm.plugged(Kind.DISK, disk.uuid)
    if device_id:
        return _done(device_id, disk.uuid, changed=False)
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
        request={"path": str(disk.path)},
        device={**recorded_disk(disk), "pci": slot.number, "bus": slot.bus},
        runtime=str(runtime) if runtime else None,
    )
    with opened(disk) as files:
        async with vm.doing(pending):
            await plug_disk(vm.machine, disk, files, slot, bus=bus)
            record(pending, plugged=True)
    return _done(device_id, disk.uuid, changed=True)


async def remove_disk(
    vm: Vm,
    device_id: str,
    disk_uuid: str,
    *,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
) -> Done:
    """Take a disk out, and out of the runtime file if there is one.

    :param disk_uuid: as the runtime file has it.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps it.
    """
    pending = Pending(
        action=Action.REMOVE,
        kind=Kind.DISK,
        uuid=disk_uuid,
        device_id=device_id,
        runtime=str(runtime) if runtime else None,
    )
    async with vm.doing(pending):
        await unplug_disk(vm.machine, device_id, timeout_s=timeout_s)
        record(pending, plugged=False)
    return _done(device_id, disk_uuid, changed=True)


def recorded_disk(disk: Disk) -> dict[str, Any]:
    """A disk as a runtime file has it."""
    return {key: str(value) if key == "path" else value for key, value in asdict(disk).items()}


def _done(device_id: str, disk_uuid: str, *, changed: bool) -> Done:
    name = DeviceName.parse(device_id)
    return Done(device_id, disk_uuid, name.slot if name else -1, changed)
