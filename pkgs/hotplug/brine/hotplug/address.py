"""Where a device is in a VM: its name, and which slots are free.

QEMU knows best, so it is asked each time ("Design decisions" in the hotplug design).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from brine.common.errors import BrineError

# What plugged devices are called.

LONGEST_ID = 32
_OF_PATHS = "5c1f8a52-6a0f-4f0d-9d0e-3c8f8f3a7b11"
LONGEST_SERIAL = 20  # virtio-blk's VIRTIO_BLK_ID_BYTES

_ID = re.compile(r"(?P<kind>nic|disk)-(?P<part>[0-9a-f]{8})-(?P<bus>pci|scsi)-(?P<slot>\d+)")


class DeviceKind(StrEnum):
    """What can be plugged."""

    NIC = "nic"
    DISK = "disk"


class Bus(StrEnum):
    """Where it can be plugged."""

    PCI = "pci"
    SCSI = "scsi"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The parts of an id.

    :param part: the first eight hexadecimal digits of the device's UUID.
    :param slot: of its bus.
    """

    kind: DeviceKind
    part: str
    bus: Bus
    slot: int

    @classmethod
    def of(cls, kind: DeviceKind, device_uuid: str, bus: Bus, slot: int) -> DeviceName:
        """The name of a device, from its UUID.

        :raises ValueError: if that is no UUID.
        """
        return cls(kind, _hex(device_uuid)[:8], bus, slot)

    @classmethod
    def parse(cls, device_id: str) -> DeviceName | None:
        """The parts of an id of ours; None for another's."""
        match = _ID.fullmatch(device_id)
        if not match:
            return None
        return cls(DeviceKind(match["kind"]), match["part"], Bus(match["bus"]), int(match["slot"]))

    def is_of(self, device_uuid: str) -> bool:
        """Whether it may be that device's."""
        return _hex(device_uuid).startswith(self.part)

    def __str__(self) -> str:
        """The id."""
        return f"{self.kind}-{self.part}-{self.bus}-{self.slot}"


def default_serial(disk_uuid: str) -> str:
    """What a guest sees as the serial of a disk that was given none: the beginning of its UUID.

    :raises ValueError: if that is no UUID.
    """
    import uuid

    return str(uuid.UUID(disk_uuid))[:LONGEST_SERIAL]


def new_mac() -> str:
    """A MAC address that nobody has: three bytes at random, after the prefix of QEMU's users."""
    return f"52:54:00:{os.urandom(3).hex(':')}"


def uuid_of_mac(mac: str) -> str:
    """The UUID of a NIC that was given none: a MAC address stands for one NIC."""
    import uuid

    return str(uuid.uuid5(uuid.NAMESPACE_OID, mac.lower()))


def uuid_of_path(path: str) -> str:
    """The UUID of a disk that was given none: a path stands for one disk.

    :param path: absolute.
    """
    import uuid

    return str(uuid.uuid5(uuid.UUID(_OF_PATHS), ascii(path)))


def _hex(device_uuid: str) -> str:
    import uuid  # takes long to load, and a VM may have no device that is plugged

    return uuid.UUID(device_uuid).hex


# What people call a device that they mean: QEMU's id, a UUID, a MAC address, a serial, a path.

# A MAC, or at least the beginning of a UUID, which is what serials are made from.
_LIKE_OURS = re.compile(r"(?i)[0-9a-f]{8}(-|$)|([0-9a-f]{2}:){5}[0-9a-f]{2}$")


def is_path(reference: str) -> bool:
    """Whether it may be the path of a disk."""
    return "/" in reference


def is_like_ours(kind: DeviceKind, reference: str) -> bool:
    """Whether we could have given it to a device, or it is the path of a disk.

    One that could be, and is not there, was taken out before: there is nothing to do. Any other is
    a mistake.
    """
    if kind is DeviceKind.DISK and is_path(reference):
        return True
    return bool(DeviceName.parse(reference) or _LIKE_OURS.match(reference))


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
