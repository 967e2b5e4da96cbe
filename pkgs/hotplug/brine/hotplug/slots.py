"""Where a device can be plugged: what is free on a VM's buses at this moment.

QEMU knows best, so it is asked each time ("Design decisions" in the hotplug design).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.errors import BrineError

RESERVED_SLOTS = 12
"""Slots of a ``pc`` machine that are left to devices that it starts with; Ganeti's number."""
LAST_SLOT = 31

ROOT_PORTS = frozenset({"pcie-root-port", "ioh3420", "xio3130-downstream"})
"""The devices that take one hotplugged PCI Express device each."""

_LARGEST_LUN = 255


class NoSlotError(BrineError):
    """There is no place left to plug a device into."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place on a bus.

    :param bus: QEMU's name of it.
    :param number: on a ``pc`` machine the slot of ``pci.0``; elsewhere that of the root port, or
        the LUN.
    :param placement: the arguments of ``device_add`` that mean this place.
    """

    bus: str
    number: int
    placement: Mapping[str, Any]

    def recorded(self, driver: str, device_id: str) -> dict[str, Any]:
        """The place of a device, as a runtime file has it.

        :param driver: QEMU's name of what the guest sees.
        """
        hvinfo = {"driver": driver, "id": device_id, **self.placement}
        return {"pci": self.number, "bus": self.bus, "hvinfo": hvinfo}


@dataclass(frozen=True, slots=True)
class RootPort:
    """A PCI Express port.

    :param slot: of the root bus.
    :param taken: whether a device is in it.
    """

    id: str
    slot: int
    taken: bool


def free_pci_slot(query_pci: Any, *, reserved: int = RESERVED_SLOTS) -> Slot:
    """The first free slot of ``pci.0`` above the reserved ones.

    :param query_pci: what that command returned.
    :raises NoSlotError: if all are taken.
    """
    taken = {device["slot"] for bus in query_pci if bus["bus"] == 0 for device in bus["devices"]}
    for number in range(reserved, LAST_SLOT + 1):
        if number not in taken:
            return Slot("pci.0", number, {"bus": "pci.0", "addr": hex(number)})
    raise NoSlotError(
        f"no slot left: {LAST_SLOT + 1 - reserved} devices have slots {reserved} to {LAST_SLOT}"
        " of pci.0",
        hint="unplug a device; or lower --reserved-slots, if the first slots are free",
    )


def pci_slot(number: int) -> Slot:
    """A slot of ``pci.0`` by its number."""
    return Slot("pci.0", number, {"bus": "pci.0", "addr": hex(number)})


def free_root_port(ports: Iterable[RootPort]) -> Slot:
    """A PCI Express port that is free.

    :raises NoSlotError: if none is, or there are none.
    """
    ports = list(ports)
    for port in sorted(ports, key=lambda port: port.slot):
        if not port.taken:
            return root_port_slot(port)
    if ports:
        raise NoSlotError(
            f"no slot left: all {len(ports)} pcie-root-ports have a device",
            hint="unplug a device, or start the VM with more ports",
        )
    raise NoSlotError(
        "this q35 machine has no pcie-root-port, and pcie.0 takes no device while it runs",
        hint="start it with some: -device pcie-root-port,id=rp1,chassis=1",
    )


def root_port_slot(port: RootPort) -> Slot:
    """The place in a port."""
    return port_slot(port.id, port.slot)


def port_slot(port: str, number: int) -> Slot:
    """The place in a port by its id. QEMU would find room for a second device in it, at an address
    where no guest looks."""
    return Slot(port, number, {"bus": port, "addr": "0x0"})


def free_lun(bus: str, taken: Iterable[int]) -> Slot:
    """The first free LUN of a SCSI bus.

    :param taken: LUNs that have a device.
    :raises NoSlotError: if all have.
    """
    used = set(taken)
    for lun in range(_LARGEST_LUN + 1):
        if lun not in used:
            return lun_slot(bus, lun)
    raise NoSlotError(f"no slot left: all {_LARGEST_LUN + 1} LUNs of {bus} have a disk")


def lun_slot(bus: str, lun: int) -> Slot:
    """A place on a SCSI bus."""
    return Slot(bus, lun, {"bus": bus, "channel": 0, "scsi-id": 0, "lun": lun})
