"""The kinds of devices, their ids in QEMU, and the default UUIDs, MAC addresses and serials."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import NamedTuple

from brine.vm.values import LONGEST_SERIAL

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


class DeviceName(NamedTuple):
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


def short_uuid(uuid: str) -> str:
    """The part of a device's UUID in its QEMU id: no two devices of a kind have the same."""
    return uuid.replace("-", "")[:8].lower()
