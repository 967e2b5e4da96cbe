"""Slots: the places of devices on their buses, how many a machine has, and which are free.

QEMU is asked for free slots each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from brine.common.errors import BrineError
from brine.vm.address import Bus, DeviceKind, default_serial
from brine.vm.values import RESERVED_SLOTS

LAST_SLOT = 31
FIRST_PORT = 6  # on pcie.0, after what the machine has itself, and our controllers
LAST_PORT = 29
MOST_PORTS = LAST_PORT - FIRST_PORT + 1
"""The number of devices that a q35 machine can have."""
LUNS = 256
"""Of a SCSI bus, from 0."""
MOST_XEN_DISKS = 26
"""Disks of a domain: xvda to xvdz."""


def is_q35(machine: str) -> bool:
    """Whether it is a machine of PCI Express, where devices plug into ports."""
    return "q35" in machine


def ide_units(machine: str) -> tuple[int, int]:
    """The IDE buses of a machine, and the units of each."""
    return (6, 1) if is_q35(machine) else (2, 2)


def slots_fault(
    machine: str, *, nics: int, virtio: int, scsi: int, ide: int
) -> tuple[str, str] | None:
    """Why a machine has no slots for its devices, and a hint; None if it has.

    :param virtio: the number of disks of that interface, as *scsi* is.
    :param ide: the number of disks of that interface, and of CD-ROM drives.
    """
    begin, pci = "no slot left: ", nics + virtio
    most = MOST_PORTS if is_q35(machine) else LAST_SLOT + 1 - RESERVED_SLOTS
    more = "give disks the interface scsi" if nics <= most else f"leave out {nics - most} NICs"
    if is_q35(machine) and pci > MOST_PORTS:
        text = f"{pci} disks and NICs want ports, and a q35 machine has {MOST_PORTS}"
        return begin + text, more
    if pci > most:
        text = f"{most} disks and NICs have slots {RESERVED_SLOTS} to {LAST_SLOT} of pci.0"
        return begin + text, more
    if scsi > LUNS:
        return f"{begin}{LUNS} disks have the interface scsi", "give disks the interface virtio"
    buses, units = ide_units(machine)
    if ide > buses * units:
        text = f"{buses * units} disks and CD-ROMs have the interface ide"
        return begin + text, "give disks the interface virtio or scsi"
    return None


class NoSlotError(BrineError):
    """No slot is free."""


class Slot(NamedTuple):
    """A slot on a bus.

    :param bus: QEMU's name of the bus.
    :param number: on a ``pc`` machine the slot of ``pci.0``; elsewhere that of the root port, or
        the LUN.
    :param placement: the arguments of ``device_add`` for this slot.
    """

    bus: str
    number: int
    placement: Mapping[str, Any]

    def kind(self) -> Bus:
        """The kind of the bus."""
        return Bus.SCSI if "lun" in self.placement else Bus.PCI

    def device_id(self, kind: DeviceKind, device_uuid: str) -> str:
        """QEMU's id of a device in this slot; a ValueError if it has no UUID."""
        return f"{kind}-{default_serial(device_uuid)[:8]}-{self.kind()}-{self.number}"

    def recorded(self, driver: str, device_id: str) -> dict[str, Any]:
        """The slot of a device, as a runtime file has it."""
        hvinfo = {"driver": driver, "id": device_id, **self.placement}
        return {"pci": self.number, "bus": self.bus, "hvinfo": hvinfo}


def pci_slot(number: int) -> Slot:
    """A slot of ``pci.0`` by its number."""
    return Slot("pci.0", number, {"bus": "pci.0", "addr": hex(number)})


def port_slot(port: str, number: int) -> Slot:
    """The slot in a PCI Express port, by the port's id. QEMU would accept a second device in it, at
    an address where no guest looks."""
    return Slot(port, number, {"bus": port, "addr": "0x0"})


def lun_slot(bus: str, lun: int) -> Slot:
    """A LUN of a SCSI bus."""
    return Slot(bus, lun, {"bus": bus, "channel": 0, "scsi-id": 0, "lun": lun})


def free_pci_slot(query_pci: Any, *, reserved: int = RESERVED_SLOTS) -> Slot:
    """The first free slot of ``pci.0`` above the reserved ones.

    :param query_pci: what that command returned.
    """
    taken = {device["slot"] for bus in query_pci if bus["bus"] == 0 for device in bus["devices"]}
    for number in range(reserved, LAST_SLOT + 1):
        if number not in taken:
            return pci_slot(number)
    raise NoSlotError(
        f"no slot left: {LAST_SLOT + 1 - reserved} devices have slots {reserved} to {LAST_SLOT}"
        " of pci.0",
        hint="unplug a device; or lower --reserved-slots, if the first slots are free",
    )


def free_root_port(ports: Mapping[str, tuple[int, bool]]) -> Slot:
    """A free PCI Express port.

    :param ports: by id: the slot of the root bus, and whether a device is in the port.
    """
    free = sorted((slot, port) for port, (slot, is_taken) in ports.items() if not is_taken)
    if free:
        slot, port = free[0]
        return port_slot(port, slot)
    if ports:
        raise NoSlotError(
            f"no slot left: all {len(ports)} pcie-root-ports have a device",
            hint="unplug a device, or start the VM with more ports",
        )
    raise NoSlotError(
        "this q35 machine has no pcie-root-port, and pcie.0 takes no device while it runs",
        hint="start it with some: -device pcie-root-port,id=rp1,chassis=1",
    )


def free_lun(bus: str, taken: Iterable[int]) -> Slot:
    """The first LUN of a SCSI bus without a device."""
    free = sorted(set(range(LUNS)).difference(taken))
    if not free:
        raise NoSlotError(f"no slot left: all {LUNS} LUNs of {bus} have a disk")
    return lun_slot(bus, free[0])
