"""Devices: their kinds, names and slots, and how plugging one fails.

QEMU is asked for free slots each time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from brine.common.errors import BrineError
from brine.vm.rules import LAST_SLOT, RESERVED_SLOTS
from brine.vm.values import LONGEST_SERIAL


class HotplugError(BrineError):
    """A device that could not be plugged or unplugged."""


class RefusedByGuestError(HotplugError):
    """The guest did not give a device up; it is still plugged in whole.

    :param device_id: QEMU's.
    :param reason: what the guest did, or did not.
    """

    def __init__(self, device_id: str, reason: str) -> None:
        super().__init__(
            f"{device_id}: refused by the guest: {reason}; it is still plugged in",
            hint="a guest that boots, is paused or can't hotplug keeps it; try again later",
        )
        self.device_id = device_id
        self.reason = reason


# The ids of plugged devices.

_OF_PATHS = "5c1f8a52-6a0f-4f0d-9d0e-3c8f8f3a7b11"
_ID = re.compile(r"(?P<kind>nic|disk)-(?P<part>[0-9a-f]{8})-(?P<bus>pci|scsi)-(?P<slot>\d+)")


class DeviceKind(StrEnum):
    NIC = "nic"
    DISK = "disk"

    @property
    def key(self) -> str:
        """The property by which the guest knows such a device."""
        return "mac" if self is DeviceKind.NIC else "serial"


class Bus(StrEnum):
    PCI = "pci"
    SCSI = "scsi"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The parts of an id.

    :param part: the first eight hexadecimal digits of the device's UUID.
    """

    kind: DeviceKind
    part: str
    bus: Bus
    slot: int

    @classmethod
    def parse(cls, device_id: str) -> DeviceName | None:
        """The parts of an id; None if the id is not Brine's."""
        match = _ID.fullmatch(device_id)
        if not match:
            return None
        return cls(DeviceKind(match["kind"]), match["part"], Bus(match["bus"]), int(match["slot"]))


def new_mac() -> str:
    """A new MAC address: QEMU's prefix, and three random bytes."""
    return f"52:54:00:{os.urandom(3).hex(':')}"


def uuid_of_mac(mac: str) -> str:
    """The default UUID of a NIC: a MAC address identifies a NIC."""
    import uuid

    return str(uuid.uuid5(uuid.NAMESPACE_OID, mac.lower()))


def uuid_of_path(path: str) -> str:
    """The default UUID of a disk: an absolute path identifies a disk."""
    import uuid

    return str(uuid.uuid5(uuid.UUID(_OF_PATHS), ascii(path)))


def default_serial(disk_uuid: str) -> str:
    """The default serial of a disk: the beginning of its UUID; a ValueError if it is none."""
    if _USUAL_UUID.fullmatch(disk_uuid):  # as specs have it: to load uuid takes long
        return disk_uuid[:LONGEST_SERIAL]
    import uuid

    return str(uuid.UUID(disk_uuid))[:LONGEST_SERIAL]


_USUAL_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

# A MAC, or at least the beginning of a UUID, of which serials are made.
_LIKE_OURS = re.compile(r"(?i)[0-9a-f]{8}(-|$)|([0-9a-f]{2}:){5}[0-9a-f]{2}$")


def is_like_ours(kind: DeviceKind, reference: str) -> bool:
    """Whether a reference has a form that Brine gives to devices, or is the path of a disk.

    If no device has such a reference, the device was removed before, which is no error. Any other
    reference is a mistake.
    """
    is_path = kind is DeviceKind.DISK and "/" in reference
    return is_path or bool(DeviceName.parse(reference) or _LIKE_OURS.match(reference))


# Slots.

_LARGEST_LUN = 255


class NoSlotError(BrineError):
    """No slot is free."""


@dataclass(frozen=True, slots=True)
class Slot:
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
    free = sorted(set(range(_LARGEST_LUN + 1)).difference(taken))
    if not free:
        raise NoSlotError(f"no slot left: all {_LARGEST_LUN + 1} LUNs of {bus} have a disk")
    return lun_slot(bus, free[0])
