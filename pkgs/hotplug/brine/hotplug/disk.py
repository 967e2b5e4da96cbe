"""Disks: their settings, and the files or devices behind them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from brine.common.files import open_safely
from brine.hotplug.errors import HotplugError
from brine.vm.address import Bus, DeviceKind, default_serial
from brine.vm.conflicts import Claim, claims_of, layers_of
from brine.vm.slots import Slot
from brine.vm.values import CACHE_MODES, FORMATS

DRIVERS = {Bus.PCI: "virtio-blk-pci", Bus.SCSI: "scsi-hd"}
"""The device that a guest sees, by bus."""

MOST_BACKING = 9
"""Backing files of one disk: the number of each has one digit in a block node's name."""


@dataclass(frozen=True, slots=True)
class Backing:
    """A backing file: the image with the parts that an overlay has not written. It is only read."""

    path: Path
    format: str


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a guest.

    :param path: of a block device or an image file.
    :param format: of ``FORMATS`` in :mod:`brine.vm.values`, as *cache* is of ``CACHE_MODES``.
    :param aio: of ``AIO_MODES``; ``native`` needs a cache mode that is direct.
    :param serial: as the guest sees it; None is the beginning of the UUID.
    :param backing: all backing files, the nearest first. Brine follows no image's header.
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
        """The serial that the guest sees: at most 20 characters."""
        return self.serial or default_serial(self.uuid)

    def claims(self) -> Iterator[Claim]:
        """What no other VM may have."""
        return claims_of({"disks": [self.to_json()]})

    def to_json(self) -> dict[str, Any]:
        """The disk as a runtime file has it."""
        inner: dict[str, Any] | None = None
        for each in reversed(self.backing):
            inner = {"path": str(each.path), "format": each.format, "backing": inner}
        return {**asdict(self), "path": str(self.path), "backing": inner}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Disk:
        """The disk that :meth:`to_json` wrote."""
        return cls(**{**data, "path": Path(data["path"]), "backing": backing_of(data)})


def backing_of(disk: Mapping[str, Any]) -> tuple[Backing, ...]:
    """The backing files of a disk as a runtime file or a spec has it, the nearest first."""
    layers = itertools.islice(layers_of(disk), MOST_BACKING)
    return tuple(Backing(Path(one["path"]), one["format"]) for one in layers)


def fdset_opaque(device_id: str, disk: Disk) -> str:
    """The text that QEMU keeps with a disk's descriptors; :mod:`brine.hotplug.qemu` reads it."""
    return f"{device_id} {disk.uuid} {json.dumps(disk.to_json())}"


def recorded_disk(disk: Disk, size_mib: int, slot: Slot | None = None) -> dict[str, Any]:
    """A disk as a runtime file has it, with its slot if it has one."""
    found = {**disk.to_json(), "size_mib": size_mib}
    if slot:
        device_id = slot.device_id(DeviceKind.DISK, disk.uuid)
        found |= slot.recorded(DRIVERS[slot.kind()], device_id)
    return found


def block_node_names(device_id: str, backing: int) -> list[str]:
    """The block nodes of a disk with so many backing files, as QEMU closes them."""
    images = [device_id, *(f"{device_id}.{number}" for number in range(1, backing + 1))]
    return [node for image in images for node in (image, f"{image}.f")]


def block_nodes(
    device_id: str, disk: Disk, files: Sequence[tuple[int, bool]]
) -> Iterator[dict[str, Any]]:
    """The block nodes of a disk: the arguments of ``blockdev-add``, in order.

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


def disk_device(device_id: str, disk: Disk, slot: Slot) -> dict[str, Any]:
    """The device that the guest sees: the arguments of ``device_add``."""
    write_cache, _, _ = CACHE_MODES[disk.cache]
    return {
        "driver": DRIVERS[slot.kind()],
        "id": device_id,
        "drive": device_id,
        "serial": disk.guest_serial(),
        "write-cache": "on" if write_cache else "off",
        **slot.placement,
    }


# Opening files and devices: QEMU gets the descriptors of what Brine has checked.

_QCOW2_MAGIC = b"QFI\xfb"
# The magic number of each image format: its offset, and its bytes.
_MAGICS: dict[str, tuple[tuple[int, bytes], ...]] = {
    "qcow2": ((0, _QCOW2_MAGIC),),
    "VMDK": ((0, b"KDMV"), (0, b"COWD"), (0, b"# Disk DescriptorFile")),
    "VDI": ((64, bytes.fromhex("7f10dabe")),),
    "VHDX": ((0, b"vhdxfile"),),
    "VHD": ((0, b"conectix"),),
    "QED": ((0, b"QED\0"),),
    "LUKS": ((0, b"LUKS\xba\xbe"),),
}
_HEADER_BYTES = 96
_QCOW2_EXTERNAL_DATA = 1 << 2  # of a header's incompatible features


class UnopenedError(HotplugError):
    """A file or device that can't be opened, or read."""


class Opened(NamedTuple):
    """A disk's descriptors.

    :param descriptors: of the same file, opened in different modes; QEMU picks one.
    :param size_mib: of the file or device, rounded up.
    :param backing: of the backing files, in the disk's order.
    """

    descriptors: tuple[int, ...]
    is_device: bool
    size_mib: int
    backing: tuple[Opened, ...] = ()


@contextmanager
def opened(disk: Disk, *, is_format_said: bool = True) -> Iterator[Opened]:
    """Open the file or device of a disk, for the time of the block.

    QEMU takes a descriptor of a set only if it has the mode that QEMU would have opened it with;
    since 9.1 this includes O_DIRECT.

    :param is_format_said: whether the command or the spec names the disk's format. If not, a
        disk that looks like another format's image is refused.
    :raises HotplugError: if it can't be opened, or does not have the named format.
    """
    _, direct, _ = CACHE_MODES[disk.cache]
    with _open(disk) as plain, ExitStack() as stack:
        is_device = _is_device(disk, plain)
        if not is_format_said:
            _refuse_unsaid_format(disk, plain)
        _check_format(disk, plain)
        backing: tuple[Opened, ...] = ()
        if nearest := _nearest_backing(disk):
            behind = stack.enter_context(opened(nearest))
            backing = (behind._replace(backing=()), *behind.backing)
        ways = (os.O_RDONLY,) if disk.read_only else (os.O_RDWR, os.O_RDONLY)
        extra = os.O_DIRECT if direct else 0
        # The checked file itself, even if another file has its name now.
        again = f"/proc/self/fd/{plain}"
        descriptors = tuple(stack.enter_context(_open(disk, again, way | extra)) for way in ways)
        yield Opened(descriptors, is_device, _size_mib(plain), backing)


def refuse_other_format(disk: Disk, *, is_format_said: bool = False) -> None:
    """Refuse a disk that a start would refuse: a disk of unnamed format that looks like another
    format's image, or an image that needs another file. A disk that can't be read now is left to
    the start.

    :raises HotplugError: why.
    """
    with contextlib.suppress(UnopenedError), _open(disk) as descriptor:
        mode = os.fstat(descriptor).st_mode
        if not is_format_said and (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            _refuse_unsaid_format(disk, descriptor)
        if disk.format == "qcow2" and stat.S_ISREG(mode):
            _check_format(disk, descriptor)
        if nearest := _nearest_backing(disk):
            refuse_other_format(nearest, is_format_said=True)


def _nearest_backing(disk: Disk) -> Disk | None:
    """The nearest backing file as a disk of its own, with the files behind it."""
    if not disk.backing:
        return None
    first, *others = disk.backing
    path, image_format = first.path, first.format
    return replace(disk, path=path, format=image_format, backing=tuple(others), read_only=True)


def format_of(path: Path) -> str:
    """The format that the content of a file or device shows; ``raw`` if it shows none.

    The guest may have written the content of a raw image. So the result is a proposal for a person,
    and never decides how QEMU opens an image.

    :returns: ``raw``, ``qcow2``, or the name of a format that Brine does not open, such as VMDK.
    """
    disk = Disk("", path)
    with _open(disk) as descriptor:
        _is_device(disk, descriptor)
        return _shown_format(disk, descriptor)


def size_of(disk: Disk) -> int:
    """The size of a disk in MiB, rounded up; 0 if it is not known, as the disk need not exist."""
    with contextlib.suppress(UnopenedError), _open(disk) as descriptor:
        _is_device(disk, descriptor)
        return _size_mib(descriptor)
    return 0


def _refuse_unsaid_format(disk: Disk, descriptor: int) -> None:
    found = _shown_format(disk, descriptor)
    if found == disk.format:
        return
    if found in FORMATS:
        hint = f'say "format": "{found}"; or "format": "raw", if the guest is to see that header'
    elif found == "LUKS":
        hint = 'say "format": "raw", and the guest sees it encrypted'
    else:
        hint = f"qemu-img convert -O qcow2 {disk.path} {disk.path.with_suffix('.qcow2')}"
        hint += ' makes one that can be used; or say "format": "raw"'
    text = f"{disk.path}: begins as {found} does, and its format is not said"
    raise HotplugError(text, hint=hint)


def _shown_format(disk: Disk, descriptor: int) -> str:
    header = _header_of(disk, descriptor)
    for name, magics in _MAGICS.items():
        if any(header.startswith(magic, offset) for offset, magic in magics):
            return name
    return "raw"


def _header_of(disk: Disk, descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, _HEADER_BYTES, 0)
    except OSError as error:  # of a disk that is broken, say
        raise UnopenedError(f"{disk.path}: can't be read: {error.strerror}") from error


def _is_device(disk: Disk, descriptor: int) -> bool:
    """Whether it is a block device, not a file."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise HotplugError(f"{disk.path}: is neither a block device nor a file")
    return stat.S_ISBLK(mode)


def _size_mib(descriptor: int) -> int:
    return -(-os.lseek(descriptor, 0, os.SEEK_END) // (1 << 20))


@contextmanager
def _open(disk: Disk, again: str | None = None, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a disk by its path, or *again*, by that of its open descriptor."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK  # or opening a FIFO would wait
    try:
        descriptor = os.open(again, flags) if again else open_safely(disk.path, flags)
    except OSError as error:
        text, hint = f"can't be opened: {error.strerror}", None
        if error.errno == errno.EINVAL and flags & os.O_DIRECT:
            text = f"its file system has no direct access, as the cache mode {disk.cache} wants"
            hint = "the cache mode writeback goes through the node's page cache"
        raise UnopenedError(f"{disk.path}: {text}", hint=hint) from error
    try:
        os.set_blocking(descriptor, True)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_format(disk: Disk, descriptor: int) -> None:
    header = _header_of(disk, descriptor)
    is_qcow2 = header.startswith(_QCOW2_MAGIC)
    if disk.format != "qcow2":
        if is_qcow2:
            import logging  # most disks are what they are said to be

            log = logging.getLogger(__name__)
            log.warning("%s: looks like a qcow2 image, and is plugged in as raw", disk.path)
        return
    has_backing = int.from_bytes(header[8:16], "big") > 0
    # The first version of the format has no such field.
    is_newer = int.from_bytes(header[4:8], "big") >= 3
    fault = hint = ""
    if not is_qcow2:
        fault, hint = "is no qcow2 image", "the format raw takes any file"
    elif has_backing and not disk.backing:
        fault = "has a backing file, which QEMU would have to open itself"
        hint = 'name it in the spec: "backing": {"path": ..., "format": ...}; or make an image'
        hint += " that stands alone with qemu-img convert"
    elif disk.backing and not has_backing:
        # The guest would see another file's data where it has written nothing.
        fault = f"has no backing file, but {disk.backing[0].path} is named as one"
        hint = "leave out backing; qemu-img create -b makes an image that has one"
    elif is_newer and int.from_bytes(header[72:80], "big") & _QCOW2_EXTERNAL_DATA:
        fault = "has an external data file, which QEMU would have to open itself"
        hint = "qemu-img convert makes an image that stands alone"
    if fault:
        raise HotplugError(f"{disk.path}: {fault}", hint=hint)
