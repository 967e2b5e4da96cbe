"""Disks: what there is to say of one, and how it is said to QEMU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brine.hotplug.choices import CACHE_MODES
from brine.hotplug.device_names import Bus, default_serial
from brine.hotplug.slots import Slot

DRIVERS = {Bus.PCI: "virtio-blk-pci", Bus.SCSI: "scsi-hd"}
"""What a guest sees."""


MOST_BACKING = 9
"""Backing files of one disk: the number of each has one digit in a block node's name."""


@dataclass(frozen=True, slots=True)
class Backing:
    """An image that another one has its unwritten parts from. It is only read."""

    path: Path
    format: str


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a guest.

    :param path: of a block device or an image file.
    :param format: of ``FORMATS`` in :mod:`brine.hotplug.choices`, as *cache* is of ``CACHE_MODES``.
    :param aio: of ``AIO_MODES``; ``native`` needs a cache mode that is direct.
    :param serial: that the guest sees; None is the beginning of the UUID.
    :param backing: the backing files, the nearest first: all of them, as nothing that an image's
        header says is followed.
    """

    uuid: str
    path: Path
    format: str = "raw"
    cache: str = "none"
    aio: str = "threads"
    read_only: bool = False
    discard: bool = True
    serial: str | None = None
    backing: tuple[Backing, ...] = ()

    def guest_serial(self) -> str:
        """What the guest sees as the serial: at most 20 characters."""
        return self.serial or default_serial(self.uuid)

    def to_json(self) -> dict[str, Any]:
        """The disk as a runtime file has it."""
        inner: dict[str, Any] | None = None
        for each in reversed(self.backing):
            inner = {"path": str(each.path), "format": each.format, "backing": inner}
        return {**asdict(self), "path": str(self.path), "backing": inner}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Disk:
        """The disk that :meth:`to_json` wrote.

        :raises TypeError: or KeyError, if it did not.
        """
        return cls(**{**data, "path": Path(data["path"]), "backing": backing_of(data)})


def backing_of(disk: Mapping[str, Any]) -> tuple[Backing, ...]:
    """The backing files of a disk as a runtime file or a spec has it, the nearest first.

    :raises TypeError: or KeyError, if it is none of these.
    """
    found: list[Backing] = []
    while (disk := disk.get("backing") or {}) and len(found) < MOST_BACKING:
        found.append(Backing(Path(disk["path"]), disk["format"]))
    return tuple(found)


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


def block_node_names(device_id: str, backing: int) -> list[str]:
    """The block nodes that a disk may have, in an order in which QEMU closes them.

    :param backing: how many backing files it has.
    """
    images = [device_id, *(f"{device_id}.{number}" for number in range(1, backing + 1))]
    return [node for image in images for node in (image, f"{image}.f")]


def block_nodes(
    device_id: str, disk: Disk, files: Sequence[tuple[int, bool]]
) -> Iterator[dict[str, Any]]:
    """What QEMU keeps a disk in: the arguments of ``blockdev-add``, in order.

    :param files: of the disk and then of each of its backing files: the number of the set that
        has its descriptors, and whether it is a block device.
    """
    _, direct, no_flush = CACHE_MODES[disk.cache]
    images = [(disk.format, disk.read_only), *((each.format, True) for each in disk.backing)]
    for number, (image_format, read_only) in reversed(list(enumerate(images))):
        fdset, is_device = files[number]
        node = f"{device_id}.{number}" if number else device_id
        shared = {
            "read-only": read_only,
            "discard": "unmap" if disk.discard else "ignore",
            "cache": {"direct": direct, "no-flush": no_flush},
        }
        is_raw = image_format == "raw"
        yield {
            "node-name": node if is_raw else f"{node}.f",
            "driver": "host_device" if is_device else "file",
            "filename": f"/dev/fdset/{fdset}",
            "aio": disk.aio,
            **shared,
        }
        if not is_raw:
            is_last = number == len(disk.backing)
            yield {
                "node-name": node,
                "driver": image_format,
                "file": f"{node}.f",
                "backing": None if is_last else f"{device_id}.{number + 1}",
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
