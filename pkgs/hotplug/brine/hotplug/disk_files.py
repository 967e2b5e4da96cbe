"""Opening what disks are kept in, so that what was looked at is what QEMU is given."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from brine.hotplug.choices import CACHE_MODES, FORMATS
from brine.hotplug.disk import Disk
from brine.hotplug.errors import HotplugError

_QCOW2_MAGIC = b"QFI\xfb"
# Where images of each format say what they are: offset, and what stands there.
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


@dataclass(frozen=True, slots=True)
class Opened:
    """A disk's descriptors.

    :param descriptors: QEMU picks the one that is open as it wants, for reading or both.
    :param size_mib: what its file or device holds, rounded up.
    :param backing: the backing files', in the disk's order.
    """

    descriptors: tuple[int, ...]
    is_device: bool
    size_mib: int
    backing: tuple[Opened, ...] = ()


@contextmanager
def opened(disk: Disk, *, is_format_said: bool = True) -> Iterator[Opened]:
    """Open what a disk is kept in, for the time of the block.

    :param is_format_said: somebody said the disk's format; else one that looks like another
        format's image is refused.

    QEMU takes a descriptor of a set only if it is open as it would have opened it, which since 9.1
    goes for O_DIRECT, too.

    :raises HotplugError: if it can't be, or is not of the format that was said.
    """
    _, direct, _ = CACHE_MODES[disk.cache]
    with _open(disk, disk.path, os.O_RDONLY) as plain, ExitStack() as stack:
        is_device = _is_device(disk, plain)
        if not is_format_said:
            _refuse_other_format(disk, plain)
        _check_format(disk, plain)
        backing: tuple[Opened, ...] = ()
        for each in _nearest_backing(disk):
            nearest = stack.enter_context(opened(each))
            backing = (replace(nearest, backing=()), *nearest.backing)
        ways = (os.O_RDONLY,) if disk.read_only else (os.O_RDWR, os.O_RDONLY)
        extra = os.O_DIRECT if direct else 0
        # What was looked at, whatever has the name by now.
        again = Path(f"/proc/self/fd/{plain}")
        descriptors = tuple(stack.enter_context(_open(disk, again, way | extra)) for way in ways)
        yield Opened(descriptors, is_device, _size_mib(plain), backing)


def refuse_other_format(disk: Disk, *, is_format_said: bool = False) -> None:
    """Refuse a disk that shows now that a start would refuse it: one whose format nobody said, and
    that looks like another format's image; or an image that needs another file. One that can't be
    read now is for the start to look at.

    :raises HotplugError: what it shows.
    """
    try:
        descriptor = os.open(disk.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if not is_format_said:
            _refuse_other_format(disk, descriptor)
        if disk.format == "qcow2" and stat.S_ISREG(os.fstat(descriptor).st_mode):
            _check_format(disk, descriptor)
    finally:
        os.close(descriptor)
    for each in _nearest_backing(disk):
        refuse_other_format(each, is_format_said=True)


def _nearest_backing(disk: Disk) -> Iterator[Disk]:
    """The nearest backing file as a disk by itself, with those behind it; or none."""
    if disk.backing:
        first, *others = disk.backing
        path, image_format = first.path, first.format
        yield replace(disk, path=path, format=image_format, backing=tuple(others), read_only=True)


def format_of(path: Path) -> str:
    """The format that the content of a file or device shows; ``raw`` where it shows none.

    The content is the guest's where it wrote to the image as raw: this is a proposal for a person,
    and never decides how QEMU opens an image.

    :returns: ``raw``, ``qcow2``, or the name of a format that Brine does not open, such as VMDK.
    :raises HotplugError: if it can't be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise HotplugError(f"{path}: can't be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode) and not stat.S_ISBLK(mode):
            raise HotplugError(f"{path}: is neither a block device nor a file")
        return _shown_format(descriptor)
    finally:
        os.close(descriptor)


def _refuse_other_format(disk: Disk, descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        return
    found = _shown_format(descriptor)
    if found == disk.format:
        return
    if found in FORMATS:
        hint = f'say "format": "{found}"; or "format": "raw", if the guest is to see that header'
    elif found == "LUKS":
        hint = 'say "format": "raw", and the guest sees it encrypted'
    else:
        hint = f"qemu-img convert -O qcow2 {disk.path} {disk.path.with_suffix('.qcow2')}"
        hint += ' makes one that can be used; or say "format": "raw"'
    raise HotplugError(
        f"{disk.path}: begins as {found} does, and its format is not said", hint=hint
    )


def _shown_format(descriptor: int) -> str:
    header = os.pread(descriptor, _HEADER_BYTES, 0)
    for name, magics in _MAGICS.items():
        if any(header.startswith(magic, offset) for offset, magic in magics):
            return name
    return "raw"


def size_of(disk: Disk) -> int:
    """How many MiB a disk holds, rounded up; 0 if that can't be found out: it need not be there.

    :raises HotplugError: if what is there can be no disk.
    """
    try:
        descriptor = os.open(disk.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        _is_device(disk, descriptor)
        return _size_mib(descriptor)
    finally:
        os.close(descriptor)


def _is_device(disk: Disk, descriptor: int) -> bool:
    """Whether it is a block device, and no file."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise HotplugError(f"{disk.path}: is neither a block device nor a file")
    return stat.S_ISBLK(mode)


def _size_mib(descriptor: int) -> int:
    return -(-os.lseek(descriptor, 0, os.SEEK_END) // (1 << 20))


@contextmanager
def _open(disk: Disk, path: Path, flags: int) -> Iterator[int]:
    try:
        # A FIFO in this place must not hold us up.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EINVAL and flags & os.O_DIRECT:
            raise HotplugError(
                f"{disk.path}: its file system has no direct access,"
                f" as the cache mode {disk.cache} wants",
                hint="the cache mode writeback goes through the node's page cache",
            ) from error
        raise HotplugError(f"{disk.path}: can't be opened: {error.strerror}") from error
    try:
        os.set_blocking(descriptor, True)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_format(disk: Disk, descriptor: int) -> None:
    header = os.pread(descriptor, 80, 0)
    if disk.format != "qcow2":
        if header[:4] == _QCOW2_MAGIC:
            import logging  # most disks are what they are said to be

            log = logging.getLogger(__name__)
            log.warning("%s: looks like a qcow2 image, and is plugged in as raw", disk.path)
        return
    if header[:4] != _QCOW2_MAGIC:
        raise HotplugError(f"{disk.path}: is no qcow2 image", hint="the format raw takes any file")
    has_backing = int.from_bytes(header[8:16], "big") > 0
    if has_backing and not disk.backing:
        raise HotplugError(
            f"{disk.path}: has a backing file, which QEMU would have to open itself",
            hint='name it in the spec: "backing": {"path": ..., "format": ...}; or make an image'
            " that stands alone with qemu-img convert",
        )
    if disk.backing and not has_backing:
        # Its guest would see another's data where it has written nothing.
        raise HotplugError(
            f"{disk.path}: has no backing file, but {disk.backing[0].path} is named as one",
            hint="leave out backing; qemu-img create -b makes an image that has one",
        )
    # The first version has no such field.
    is_newer = int.from_bytes(header[4:8], "big") >= 3
    if is_newer and int.from_bytes(header[72:80], "big") & _QCOW2_EXTERNAL_DATA:
        raise HotplugError(
            f"{disk.path}: has an external data file, which QEMU would have to open itself",
            hint="qemu-img convert makes an image that stands alone",
        )
