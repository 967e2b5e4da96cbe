"""Where an instance's devices go when it starts: in the order of its spec, each in its slot.

Source: "Where to place the devices upon instance startup?" in the hotplug design. What is plugged
in later finds its slot among those that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.slots import (
    LAST_SLOT,
    RESERVED_SLOTS,
    NoSlotError,
    Slot,
    lun_slot,
    pci_slot,
    port_slot,
)
from brine.instance.spec import Interface, Spec

SCSI_CONTROLLER = "scsi0"

_SATA_PORTS = 6
_FIRST_PORT = 6  # on pcie.0, after what the machine has itself, and our controllers
_LAST_PORT = 29
MOST_PORTS = _LAST_PORT - _FIRST_PORT + 1
"""How many devices a q35 machine has room for."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A device in its place.

    :param device_id: QEMU's.
    """

    device_id: str
    slot: Slot
    bus: Bus


@dataclass(frozen=True, slots=True)
class Layout:
    """All devices in their places.

    :param disks: by UUID, but for those of IDE, which nothing plugs; so are *nics*.
    :param ide: the disks and CD-ROMs of IDE: what QEMU calls the place of each, by its id.
    :param ports: of PCI Express: slot on ``pcie.0`` by id, in order.
    """

    disks: dict[str, Placed] = field(default_factory=dict)
    nics: dict[str, Placed] = field(default_factory=dict)
    ide: dict[str, dict[str, str | int]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)


def layout_of(spec: Spec) -> Layout:
    """Give each device its place.

    :raises NoSlotError: if there are more than places.
    """
    pci = _Places(spec)
    layout = Layout(ports=pci.ports)
    lun = 0
    for number, disk in enumerate(spec.disks):
        if disk.interface == Interface.SCSI:
            slot, bus = lun_slot(f"{SCSI_CONTROLLER}.0", lun), Bus.SCSI
            lun += 1
        elif disk.interface == Interface.VIRTIO:
            slot, bus = pci.next(), Bus.PCI
        else:
            _place_ide(spec, layout, f"ide{number}")
            continue
        name = DeviceName.of(Kind.DISK, disk.uuid, bus, slot.number)
        layout.disks[disk.uuid] = Placed(str(name), slot, bus)
    for number in range(len(spec.cdroms)):
        _place_ide(spec, layout, f"cdrom{number}")
    for nic in spec.nics:
        slot = pci.next()
        name = DeviceName.of(Kind.NIC, nic.uuid, Bus.PCI, slot.number)
        layout.nics[nic.uuid] = Placed(str(name), slot, Bus.PCI)
    return layout


def on_pci(spec: Spec) -> int:
    """How many of its devices take a slot, or a port of PCI Express."""
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
    """The slots of ``pci.0``, or the ports of PCI Express, one after the other."""

    def __init__(self, spec: Spec) -> None:
        self._next = RESERVED_SLOTS
        self.ports: dict[str, int] = {}
        self._is_express = spec.is_q35()
        if self._is_express:
            devices = on_pci(spec)
            if devices > MOST_PORTS:
                raise NoSlotError(
                    f"no slot left: {devices} disks and NICs want ports, and a q35 machine has"
                    f" {MOST_PORTS}",
                    hint="give disks the interface scsi",
                )
            # What was plugged in has ports of its own now, and leaves less room for more.
            wanted = min(devices + spec.hotplug_ports, MOST_PORTS)
            self.ports = {f"port{number}": _FIRST_PORT + number for number in range(wanted)}
        self._unused = iter(self.ports.items())

    def next(self) -> Slot:
        if self._is_express:
            return port_slot(*next(self._unused))
        if self._next > LAST_SLOT:
            raise NoSlotError(
                f"no slot left: {LAST_SLOT + 1 - RESERVED_SLOTS} disks and NICs have slots"
                f" {RESERVED_SLOTS} to {LAST_SLOT} of pci.0",
                hint="give disks the interface scsi",
            )
        self._next += 1
        return pci_slot(self._next - 1)
