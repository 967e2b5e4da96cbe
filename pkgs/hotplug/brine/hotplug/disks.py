"""Plugging disks: descriptors go to QEMU as a set, then the block node, then what the guest sees.

QEMU opens nothing by itself, so it may run as any user, and in any root. Source: "Dealing with
chroot and uid pool (and disks in general)" in the hotplug design.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common.qmp_errors import QmpCommandError
from brine.hotplug.device_names import Bus, DeviceName, Kind, default_serial
from brine.hotplug.errors import HotplugError
from brine.hotplug.fdsets import fdsets
from brine.hotplug.machine import Machine
from brine.hotplug.slots import Slot
from brine.hotplug.undo import Undo
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device

if TYPE_CHECKING:
    from brine.hotplug.disk_files import Opened

FORMATS = ("raw", "qcow2")
CACHE_MODES = {
    # write cache of the device, direct (past the page cache), no flush
    "none": (True, True, False),
    "writeback": (True, False, False),
    "writethrough": (False, False, False),
    "directsync": (False, True, False),
    "unsafe": (True, False, True),
}
DRIVERS = {Bus.PCI: "virtio-blk-pci", Bus.SCSI: "scsi-hd"}
"""What a guest sees."""
AIO_MODES = ("threads", "native", "io_uring")


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a guest.

    :param path: of a block device or an image file.
    :param format: of :data:`FORMATS`.
    :param cache: of :data:`CACHE_MODES`.
    :param aio: of :data:`AIO_MODES`; ``native`` needs a cache mode that is direct.
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


async def plug_disk(
    machine: Machine,
    disk: Disk,
    files: Opened,
    slot: Slot,
    undo: Undo,
    *,
    bus: Bus = Bus.PCI,
    timeout_s: float = UNPLUG_TIMEOUT_S,
) -> str:
    """Plug a disk in; returns its device id.

    :param undo: learns what undoes each step.
    :param bus: of *slot*.
    :param timeout_s: how long the guest may take to give it up again, if a later step fails.
    :raises HotplugError: if this QEMU can't be given descriptors.
    :raises brine.common.qmp.QmpError: what failed.
    """
    device_id = str(DeviceName.of(Kind.DISK, disk.uuid, bus, slot.number))
    opaque = f"{device_id} {disk.uuid} {json.dumps(disk.to_json())}"
    undo.by(partial(_remove_fdsets, machine, device_id), asks_qemu=True)
    fdset = await _hand_over(machine, opaque, files.descriptors)
    undo.by_command(machine, "blockdev-del", {"node-name": _file_node(device_id)})
    undo.by_command(machine, "blockdev-del", {"node-name": device_id})
    for node in _block_nodes(device_id, disk, files, fdset):
        await machine.qmp.execute("blockdev-add", node)
    undo.by(partial(unplug_device, machine, device_id, timeout_s=timeout_s), asks_qemu=True)
    try:
        await machine.qmp.execute("device_add", _device(device_id, disk, slot, bus))
    except QmpCommandError as error:
        if " lock" not in error.description:
            raise
        hint = "another VM or program has it open for writing"
        raise HotplugError(f"{disk.path}: is in use: {error.description}", hint=hint) from error
    return device_id


async def remove_disk_back_end(machine: Machine, device_id: str) -> None:
    """Have QEMU close what a disk that is gone is kept in; nothing happens if it has."""
    for node in (device_id, _file_node(device_id)):
        await machine.remove("blockdev-del", {"node-name": node})
    await _remove_fdsets(machine, device_id)


async def plugged_disk(machine: Machine, device_id: str) -> Disk | None:
    """A disk as it was plugged in; None if it is not known, as it was somebody else's work."""
    told = [one.disk for one in await fdsets(machine) if one.device_id == device_id]
    try:
        return Disk.from_json(json.loads(told[0])) if told else None
    except (ValueError, TypeError, KeyError):
        return None


async def _remove_fdsets(machine: Machine, device_id: str) -> None:
    for number in {one.number for one in await fdsets(machine) if one.device_id == device_id}:
        await machine.remove("remove-fd", {"fdset-id": number})


async def _hand_over(machine: Machine, opaque: str, descriptors: tuple[int, ...]) -> int:
    """Give QEMU a set of descriptors; returns its number.

    :raises HotplugError: if this QEMU can't be given any.
    """
    arguments: dict[str, Any] = {"opaque": opaque}
    for descriptor in descriptors:
        try:
            added = await machine.qmp.execute("add-fd", arguments, descriptors=[descriptor])
        except QmpCommandError as error:
            if error.error_class != "CommandNotFound":
                raise
            raise HotplugError(
                "this QEMU has no add-fd, so it can't be given a disk",
                hint="restart the VM with a newer QEMU",
            ) from error
        arguments["fdset-id"] = added["fdset-id"]
    return int(arguments["fdset-id"])


def _file_node(device_id: str) -> str:
    return f"{device_id}.f"


def _block_nodes(device_id: str, disk: Disk, files: Opened, fdset: int) -> Iterator[dict[str, Any]]:
    _, direct, no_flush = CACHE_MODES[disk.cache]
    shared = {
        "read-only": disk.read_only,
        "discard": "unmap" if disk.discard else "ignore",
        "cache": {"direct": direct, "no-flush": no_flush},
    }
    is_raw = disk.format == "raw"
    yield {
        "node-name": device_id if is_raw else _file_node(device_id),
        "driver": "host_device" if files.is_device else "file",
        "filename": f"/dev/fdset/{fdset}",
        "aio": disk.aio,
        **shared,
    }
    if not is_raw:
        yield {
            "node-name": device_id,
            "driver": disk.format,
            "file": _file_node(device_id),
            **shared,
        }


def _device(device_id: str, disk: Disk, slot: Slot, bus: Bus) -> dict[str, Any]:
    write_cache, _, _ = CACHE_MODES[disk.cache]
    return {
        "driver": DRIVERS[bus],
        "id": device_id,
        "drive": device_id,
        "serial": disk.guest_serial(),
        "write-cache": "on" if write_cache else "off",
        **slot.placement,
    }
