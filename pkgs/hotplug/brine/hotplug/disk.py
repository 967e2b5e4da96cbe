"""Disks: what there is to say of one, and how it is said to QEMU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brine.hotplug.choices import CACHE_MODES
from brine.hotplug.device_names import Bus, default_serial
from brine.hotplug.slots import Slot

DRIVERS = {Bus.PCI: "virtio-blk-pci", Bus.SCSI: "scsi-hd"}
"""What a guest sees."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a guest.

    :param path: of a block device or an image file.
    :param format: of ``FORMATS`` in :mod:`brine.hotplug.choices`, as *cache* is of ``CACHE_MODES``.
    :param aio: of ``AIO_MODES``; ``native`` needs a cache mode that is direct.
    :param serial: that the guest sees; None is the beginning of the UUID.
    """

    uuid: str
    path: Path
    format: str = "raw"
    cache: str = "none"
    aio: str = "threads"
    read_only: bool = False
    discard: bool = True
    serial: str | None = None

    def guest_serial(self) -> str:
        """What the guest sees as the serial: at most 20 characters."""
        return self.serial or default_serial(self.uuid)

    def to_json(self) -> dict[str, Any]:
        """The disk as a runtime file has it."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Disk:
        """The disk that :meth:`to_json` wrote.

        :raises TypeError: or KeyError, if it did not.
        """
        return cls(**{**data, "path": Path(data["path"])})


def fdset_opaque(device_id: str, disk: Disk) -> str:
    """What QEMU is told of a disk's descriptors; :mod:`brine.hotplug.fdsets` reads it."""
    return f"{device_id} {disk.uuid} {json.dumps(disk.to_json())}"


def recorded_disk(disk: Disk, size_mib: int) -> dict[str, Any]:
    """A disk as a runtime file has it."""
    return {**disk.to_json(), "size_mib": size_mib}


def placed_disk(disk: Disk, size_mib: int, slot: Slot, bus: Bus, device_id: str) -> dict[str, Any]:
    """The same, with its place.

    :param bus: of *slot*.
    """
    return {**recorded_disk(disk, size_mib), **slot.recorded(DRIVERS[bus], device_id)}


def file_node(device_id: str) -> str:
    """The block node that an image of another format than raw is in."""
    return f"{device_id}.f"


def block_nodes(
    device_id: str, disk: Disk, fdset: int, *, is_device: bool
) -> Iterator[dict[str, Any]]:
    """What QEMU keeps a disk in: the arguments of ``blockdev-add``, in order.

    :param fdset: the number of the set that has its descriptors.
    :param is_device: it is a block device, and no file.
    """
    _, direct, no_flush = CACHE_MODES[disk.cache]
    shared = {
        "read-only": disk.read_only,
        "discard": "unmap" if disk.discard else "ignore",
        "cache": {"direct": direct, "no-flush": no_flush},
    }
    is_raw = disk.format == "raw"
    yield {
        "node-name": device_id if is_raw else file_node(device_id),
        "driver": "host_device" if is_device else "file",
        "filename": f"/dev/fdset/{fdset}",
        "aio": disk.aio,
        **shared,
    }
    if not is_raw:
        yield {
            "node-name": device_id,
            "driver": disk.format,
            "file": file_node(device_id),
            **shared,
        }


def disk_device(device_id: str, disk: Disk, slot: Slot, bus: Bus) -> dict[str, Any]:
    """What the guest sees: the arguments of ``device_add``."""
    write_cache, _, _ = CACHE_MODES[disk.cache]
    return {
        "driver": DRIVERS[bus],
        "id": device_id,
        "drive": device_id,
        "serial": disk.guest_serial(),
        "write-cache": "on" if write_cache else "off",
        **slot.placement,
    }
