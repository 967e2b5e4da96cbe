"""What plugged devices are called.

A QEMU id begins with a letter, has at most 32 characters, and none but letters, digits, ``.``,
``_`` and ``-``. Ours say what a device is, whose, and where: ``nic-9fb0b0f9-pci-13``. Source:
"Design decisions" in the hotplug design.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum

LONGEST_ID = 32
_OF_PATHS = "5c1f8a52-6a0f-4f0d-9d0e-3c8f8f3a7b11"
LONGEST_SERIAL = 20  # virtio-blk's VIRTIO_BLK_ID_BYTES

_ID = re.compile(r"(?P<kind>nic|disk)-(?P<part>[0-9a-f]{8})-(?P<bus>pci|scsi)-(?P<slot>\d+)")


class Kind(StrEnum):
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

    kind: Kind
    part: str
    bus: Bus
    slot: int

    @classmethod
    def of(cls, kind: Kind, device_uuid: str, bus: Bus, slot: int) -> DeviceName:
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
        return cls(Kind(match["kind"]), match["part"], Bus(match["bus"]), int(match["slot"]))

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
