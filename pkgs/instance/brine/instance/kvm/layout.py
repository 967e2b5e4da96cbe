"""The slots of an instance's devices at a start. Devices that are plugged in later take the others.

Source: "Where to place the devices upon instance startup?" in the hotplug design.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from brine.vm.disk import Disk, Interface
from brine.vm.nic import Nic
from brine.vm.slots import (
    FIRST_PORT,
    LAST_PORT,
    LAST_SLOT,
    LUNS,
    MOST_PORTS,
    NoSlotError,
    Slot,
    ide_units,
    lun_slot,
    pci_slot,
    port_slot,
    slots_fault,
)
from brine.vm.spec import Spec
from brine.vm.values import RESERVED_SLOTS

Device = TypeVar("Device", bound=Disk | Nic)

SCSI_CONTROLLER = "scsi0"


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of all devices.

    :param disks: by UUID, without IDE disks, which have no hotplug; *nics* are by UUID, too.
    :param ide: of IDE disks and CD-ROMs: QEMU's name of the slot, by id.
    :param ports: of PCI Express: slot on ``pcie.0`` by id, in order.
    """

    disks: dict[str, Slot] = field(default_factory=dict)
    nics: dict[str, Slot] = field(default_factory=dict)
    ide: dict[str, dict[str, str | int]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)


def layout_of(spec: Spec) -> Layout:
    """Give each device its slot.

    :raises NoSlotError: if there are more devices than slots.
    """
    scsi = [disk for disk in spec.disks if disk.interface == Interface.SCSI]
    ide = sum(disk.interface == Interface.IDE for disk in spec.disks) + len(spec.cdroms)
    virtio = len(on_pci(spec)) - len(spec.nics)
    counts = {"nics": len(spec.nics), "virtio": virtio, "scsi": len(scsi), "ide": ide}
    if fault := slots_fault(spec.machine, **counts):
        raise NoSlotError(fault[0], hint=fault[1])
    layout = Layout(ports=_ports(spec))
    ports = {number: port for port, number in layout.ports.items()}
    pci = _Numbers("pci.0", ports or range(RESERVED_SLOTS, LAST_SLOT + 1), on_pci(spec))
    luns = _Numbers(f"{SCSI_CONTROLLER}.0", range(LUNS), scsi)
    for number, disk in enumerate(spec.disks):
        if disk.interface == Interface.SCSI:
            layout.disks[disk.uuid] = lun_slot(luns.bus, luns.take(disk))
        elif disk.interface == Interface.VIRTIO:
            layout.disks[disk.uuid] = _slot(pci.take(disk), ports)
        else:
            _place_ide(spec, layout, f"ide{number}")
    for number in range(len(spec.cdroms)):
        _place_ide(spec, layout, cdrom_id(number))
    for nic in spec.nics:
        layout.nics[nic.uuid] = _slot(pci.take(nic), ports)
    return layout


def with_slots(spec: Spec, layout: Layout) -> Spec:
    """The spec with the slots of its devices, so that later changes move none of them."""

    def placed(device: Device, slots: dict[str, Slot]) -> Device:
        slot = slots.get(device.uuid)
        return replace(device, slot=slot.number) if slot else device

    return replace(
        spec,
        disks=tuple(placed(disk, layout.disks) for disk in spec.disks),
        nics=tuple(placed(nic, layout.nics) for nic in spec.nics),
    )


def on_pci(spec: Spec) -> list[Disk | Nic]:
    """Its devices that take a slot, or a PCI Express port."""
    return [*(one for one in spec.disks if one.interface == Interface.VIRTIO), *spec.nics]


def cdrom_id(number: int) -> str:
    return f"cdrom{number}"


def _ports(spec: Spec) -> dict[str, int]:
    """The PCI Express ports of a q35 machine; a pc has none."""
    if not spec.is_q35():
        return {}
    devices = on_pci(spec)
    # Formerly plugged devices have ports of their own now, so fewer spare ports fit.
    wanted = min(len(devices) + spec.hotplug_ports, MOST_PORTS)
    last = max((one.slot for one in devices if one.slot <= LAST_PORT), default=0)
    wanted = max(wanted, last - FIRST_PORT + 1)
    return {f"port{number}": FIRST_PORT + number for number in range(wanted)}


def _slot(number: int, ports: Mapping[int, str]) -> Slot:
    return port_slot(ports[number], number) if ports else pci_slot(number)


def _place_ide(spec: Spec, layout: Layout, device_id: str) -> None:
    _, units = ide_units(spec.machine)
    number = len(layout.ide)
    layout.ide[device_id] = {"bus": f"ide.{number // units}", "unit": number % units}


class _Numbers:
    """The slots of one bus. A device keeps its former slot, or gets the next one that no device
    had."""

    def __init__(self, bus: str, numbers: Iterable[int], devices: Iterable[Disk | Nic]) -> None:
        self.bus = bus
        self._all = tuple(numbers)
        kept = {device.slot for device in devices}
        self._unused = iter([number for number in self._all if number not in kept])
        self._taken: set[int] = set()

    def take(self, device: Disk | Nic) -> int:
        number = device.slot
        if number not in self._all or number in self._taken:
            number = next(self._unused)  # there are enough, as slots_fault() has found
        self._taken.add(number)
        return number
