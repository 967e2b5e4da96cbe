"""The slots of an instance's devices at its start, in the order of its spec.

Source: "Where to place the devices upon instance startup?" in the hotplug design. Devices that are
plugged in later take the remaining slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from brine.hotplug.address import (
    LAST_SLOT,
    RESERVED_SLOTS,
    Bus,
    DeviceKind,
    DeviceName,
    NoSlotError,
    Slot,
    lun_slot,
    pci_slot,
    port_slot,
)
from brine.instance.spec import DiskSpec, Interface, NicSpec, Spec

Device = TypeVar("Device", bound=DiskSpec | NicSpec)

SCSI_CONTROLLER = "scsi0"

_SATA_PORTS = 6
_FIRST_PORT = 6  # on pcie.0, after what the machine has itself, and our controllers
_LAST_PORT = 29
MOST_PORTS = _LAST_PORT - _FIRST_PORT + 1
"""The number of devices that a q35 machine can have."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A device with its slot.

    :param device_id: of QEMU.
    """

    device_id: str
    slot: Slot
    bus: Bus


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of all devices.

    :param disks: by UUID, without IDE disks, which have no hotplug; *nics* are by UUID, too.
    :param ide: of IDE disks and CD-ROMs: QEMU's name of the slot, by id.
    :param ports: of PCI Express: slot on ``pcie.0`` by id, in order.
    """

    disks: dict[str, Placed] = field(default_factory=dict)
    nics: dict[str, Placed] = field(default_factory=dict)
    ide: dict[str, dict[str, str | int]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)


def layout_of(spec: Spec) -> Layout:
    """Give each device its slot.

    :raises NoSlotError: if there are more devices than slots.
    """
    pci = _Places(spec)
    layout = Layout(ports=pci.ports)
    kept = {one.slot for one in spec.disks if one.interface == Interface.SCSI}
    luns = (number for number in count() if number not in kept)
    taken: set[int] = set()
    for number, disk in enumerate(spec.disks):
        if disk.interface == Interface.SCSI:
            lun = next(luns) if disk.slot < 0 or disk.slot in taken else disk.slot
            taken.add(lun)
            slot, bus = lun_slot(f"{SCSI_CONTROLLER}.0", lun), Bus.SCSI
        elif disk.interface == Interface.VIRTIO:
            slot, bus = pci.place(disk), Bus.PCI
        else:
            _place_ide(spec, layout, f"ide{number}")
            continue
        name = DeviceName.of(DeviceKind.DISK, disk.uuid, bus, slot.number)
        layout.disks[disk.uuid] = Placed(str(name), slot, bus)
    for number in range(len(spec.cdroms)):
        _place_ide(spec, layout, f"cdrom{number}")
    for nic in spec.nics:
        slot = pci.place(nic)
        name = DeviceName.of(DeviceKind.NIC, nic.uuid, Bus.PCI, slot.number)
        layout.nics[nic.uuid] = Placed(str(name), slot, Bus.PCI)
    return layout


def with_slots(spec: Spec, layout: Layout) -> Spec:
    """The spec with the slots of its devices, so that later changes move none of them."""

    def placed(device: Device, places: dict[str, Placed]) -> Device:
        there = places.get(device.uuid)
        return replace(device, slot=there.slot.number) if there else device

    return replace(
        spec,
        disks=tuple(placed(disk, layout.disks) for disk in spec.disks),
        nics=tuple(placed(nic, layout.nics) for nic in spec.nics),
    )


def on_pci(spec: Spec) -> int:
    """The number of its devices that take a slot, or a PCI Express port."""
    return len(spec.nics) + sum(1 for disk in spec.disks if disk.interface == Interface.VIRTIO)


def _place_ide(spec: Spec, layout: Layout, device_id: str) -> None:
    buses, units = (_SATA_PORTS, 1) if spec.is_q35() else (2, 2)
    number = len(layout.ide)
    if number >= buses * units:
        raise NoSlotError(
            f"no slot left: {buses * units} disks and CD-ROMs have the interface ide",
            hint="give disks the interface virtio or scsi",
        )
    layout.ide[device_id] = {"bus": f"ide.{number // units}", "unit": number % units}


class _Places:
    """The slots of ``pci.0``, or the PCI Express ports. A device keeps its former slot, or gets the
    next one that no device had."""

    def __init__(self, spec: Spec) -> None:
        self.ports: dict[str, int] = {}
        self._is_express = spec.is_q35()
        self._taken: set[int] = set()
        virtio = [disk for disk in spec.disks if disk.interface == Interface.VIRTIO]
        kept = {disk.slot for disk in virtio} | {nic.slot for nic in spec.nics}
        if self._is_express:
            devices = on_pci(spec)
            if devices > MOST_PORTS:
                raise NoSlotError(
                    f"no slot left: {devices} disks and NICs want ports, and a q35 machine has"
                    f" {MOST_PORTS}",
                    hint="give disks the interface scsi",
                )
            # Formerly plugged devices have ports of their own now, so fewer spare ports fit.
            wanted = min(devices + spec.hotplug_ports, MOST_PORTS)
            last = max((one for one in kept if one <= _LAST_PORT), default=0)
            wanted = max(wanted, last - _FIRST_PORT + 1)
            self.ports = {f"port{number}": _FIRST_PORT + number for number in range(wanted)}
        self._names = {number: port for port, number in self.ports.items()}
        # The machine's own devices take the slots below.
        self._all = tuple(self._names) or tuple(range(RESERVED_SLOTS, LAST_SLOT + 1))
        self._unused = self._free(kept)

    def _free(self, kept: set[int]) -> Iterator[int]:
        return iter([number for number in self._all if number not in kept])

    def place(self, device: DiskSpec | NicSpec) -> Slot:
        number = device.slot
        if number not in self._all or number in self._taken:
            number = self._next()
        self._taken.add(number)
        return port_slot(self._names[number], number) if self._is_express else pci_slot(number)

    def _next(self) -> int:
        if (number := next(self._unused, None)) is not None:
            return number
        raise NoSlotError(
            f"no slot left: {len(self._all)} disks and NICs have slots"
            f" {self._all[0]} to {self._all[-1]} of pci.0",
            hint="give disks the interface scsi",
        )
