"""Plugging disks: descriptors go to QEMU as a set, then the block node, then what the guest sees.

QEMU opens nothing by itself, so it may run as any user, and in any root. Source: "Dealing with
chroot and uid pool (and disks in general)" in the hotplug design.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from brine.common.qmp import QmpCommandError
from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.errors import HotplugError
from brine.hotplug.machine import Machine
from brine.hotplug.slots import Slot
from brine.hotplug.undo import Undo
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device

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

_LONGEST_SERIAL = 20  # virtio-blk's VIRTIO_BLK_ID_BYTES
_QCOW2_MAGIC = b"QFI\xfb"


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
        return self.serial or str(uuid.UUID(self.uuid))[:_LONGEST_SERIAL]


@dataclass(frozen=True, slots=True)
class Opened:
    """A disk's descriptors.

    :param descriptors: QEMU picks the one that is open as it wants, for reading or both.
    """

    descriptors: tuple[int, ...]
    is_device: bool


@contextmanager
def opened(disk: Disk) -> Iterator[Opened]:
    """Open what a disk is kept in, for the time of the block.

    QEMU takes a descriptor of a set only if it is open as it would have opened it, which since 9.1
    goes for O_DIRECT, too.

    :raises HotplugError: if it can't be, or is not of the format that was said.
    """
    _, direct, _ = CACHE_MODES[disk.cache]
    with ExitStack() as stack:
        plain = stack.enter_context(_open(disk, os.O_RDONLY))
        mode = os.fstat(plain).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise HotplugError(f"{disk.path}: is neither a block device nor a file")
        _check_format(disk, plain)
        ways = (os.O_RDONLY,) if disk.read_only else (os.O_RDWR, os.O_RDONLY)
        extra = os.O_DIRECT if direct else 0
        descriptors = tuple(stack.enter_context(_open(disk, way | extra)) for way in ways)
        yield Opened(descriptors, stat.S_ISBLK(mode))


@contextmanager
def _open(disk: Disk, flags: int) -> Iterator[int]:
    try:
        # A FIFO in this place must not hold us up.
        descriptor = os.open(disk.path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EINVAL and flags & os.O_DIRECT:
            raise HotplugError(
                f"{disk.path}: its file system has no direct access, as --cache {disk.cache} wants",
                hint="--cache writeback goes through the node's page cache",
            ) from error
        raise HotplugError(f"{disk.path}: can't be opened: {error.strerror}") from error
    try:
        os.set_blocking(descriptor, True)
        yield descriptor
    finally:
        os.close(descriptor)


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
    if not await machine.supports("add-fd"):
        raise HotplugError(
            "this QEMU has no add-fd, so it can't be given a disk",
            hint="restart the VM with a newer QEMU",
        )
    device_id = str(DeviceName.of(Kind.DISK, disk.uuid, bus, slot.number))
    opaque = f"{device_id} {disk.uuid}"
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


async def whole_uuids(machine: Machine) -> dict[str, str]:
    """The UUIDs of the disks that QEMU was given, by device id, which has but a part of them."""
    found = {}
    for fdset in await machine.qmp.execute("query-fdsets"):
        for each in fdset["fds"]:
            device_id, _, uuid = str(each.get("opaque", "")).partition(" ")
            found[device_id] = uuid
    return {device_id: uuid for device_id, uuid in found.items() if uuid}


async def _remove_fdsets(machine: Machine, device_id: str) -> None:
    for fdset in await machine.qmp.execute("query-fdsets"):
        opaques = [str(each.get("opaque", "")) for each in fdset["fds"]]
        if any(opaque.partition(" ")[0] == device_id for opaque in opaques):
            await machine.remove("remove-fd", {"fdset-id": fdset["fdset-id"]})


async def _hand_over(machine: Machine, opaque: str, descriptors: tuple[int, ...]) -> int:
    """Give QEMU a set of descriptors; returns its number."""
    arguments: dict[str, Any] = {"opaque": opaque}
    for descriptor in descriptors:
        added = await machine.qmp.execute("add-fd", arguments, descriptors=[descriptor])
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


def _check_format(disk: Disk, descriptor: int) -> None:
    header = os.pread(descriptor, 16, 0)
    if disk.format != "qcow2":
        return
    if header[:4] != _QCOW2_MAGIC:
        raise HotplugError(f"{disk.path}: is no qcow2 image", hint="--format raw takes any file")
    if int.from_bytes(header[8:16], "big"):
        raise HotplugError(
            f"{disk.path}: has a backing file, which QEMU would have to open itself",
            hint="qemu-img rebase, or convert, makes an image that stands alone",
        )
