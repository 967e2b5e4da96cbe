"""The files and devices behind disks: QEMU gets the descriptors of what Brine has checked."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from brine.common.errors import BrineError
from brine.common.files import open_safely
from brine.vm.disk import Disk, FormatSource
from brine.vm.values import CACHE_MODES, FORMATS

_SECTOR_BYTES = 512
_LARGEST_BLOCK = 4096
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


class DiskError(BrineError):
    """A disk that can't be used as the image, file or device that it is."""


class UnopenedError(DiskError):
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
def opened(disk: Disk) -> Iterator[Opened]:
    """Open the file or device of a disk, for the time of the block.

    QEMU takes a descriptor of a set only if it has the mode that QEMU would have opened it with;
    since 9.1 this includes O_DIRECT.

    A disk of unnamed format is refused if it looks like another format's image.

    :raises DiskError: if it can't be opened, or does not have the named format.
    """
    _, direct, _ = CACHE_MODES[disk.cache]
    with _open(disk) as plain, ExitStack() as stack:
        is_device = _is_device(disk, plain)
        if not disk.is_format_said():
            _refuse_unsaid_format(disk, plain)
        _check_format(disk, plain)
        backing: tuple[Opened, ...] = ()
        if nearest := _nearest_backing(disk):
            behind = stack.enter_context(opened(nearest))
            backing = (behind._replace(backing=()), *behind.backing)
        # QEMU opens a node of a volume for reading when a snapshot is laid over it. The descriptor
        # for writing would keep its lock in the set, and nothing could be merged into it again.
        ways = (os.O_RDWR,) if disk.unit else (os.O_RDWR, os.O_RDONLY)
        ways = (os.O_RDONLY,) if disk.read_only else ways
        extra = os.O_DIRECT if direct else 0
        # The checked file itself, even if another file has its name now.
        again = f"/proc/self/fd/{plain}"
        descriptors = tuple(stack.enter_context(_open(disk, again, way | extra)) for way in ways)
        if direct and disk.format == "raw" and not (disk.read_only or is_device):
            _refuse_unaligned(disk, descriptors[0])
        yield Opened(descriptors, is_device, _size_mib(plain), backing)


def refuse_other_format(disk: Disk) -> None:
    """Refuse a disk that a start would refuse: a disk of unnamed format that looks like another
    format's image, or an image that needs another file. A disk that can't be read now is left to
    the start.

    :raises DiskError: why.
    """
    with contextlib.suppress(UnopenedError), _open(disk) as descriptor:
        mode = os.fstat(descriptor).st_mode
        if not disk.is_format_said() and (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            _refuse_unsaid_format(disk, descriptor)
        if disk.format == "qcow2" and stat.S_ISREG(mode):
            _check_format(disk, descriptor)
        if nearest := _nearest_backing(disk):
            refuse_other_format(nearest)


def _nearest_backing(disk: Disk) -> Disk | None:
    """The nearest backing file as a disk of its own, with the files behind it."""
    if not (first := disk.backing):
        return None
    return replace(
        disk,
        path=first.path,
        format=first.format,
        format_source=FormatSource.ADMIN.value,
        backing=first.backing,
        read_only=not disk.own_layers(),
    )


def format_of(path: str | Path) -> str:
    """The format that the content of a file or device shows; ``raw`` if it shows none.

    The guest may have written the content of a raw image. So the result is a proposal for a person,
    and never decides how QEMU opens an image.

    :returns: ``raw``, ``qcow2``, or the name of a format that Brine does not open, such as VMDK.
    """
    disk = Disk(path=str(path))
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
        hint = f'add "format": "{found}"; or "format": "raw", if the guest is to see that header'
    elif found == "LUKS":
        hint = 'add "format": "raw": the guest sees it encrypted'
    else:
        hint = f"qemu-img convert -O qcow2 {disk.path} {Path(disk.path).with_suffix('.qcow2')}"
        hint += ' makes one that can be used; or add "format": "raw"'
    text = f"{disk.path} is a {found} file, and the disk has no format"
    raise DiskError(text, hint=hint)


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
        raise DiskError(f"{disk.path}: is neither a block device nor a file")
    return stat.S_ISBLK(mode)


def _refuse_unaligned(disk: Disk, descriptor: int) -> None:
    """Refuse an image whose size QEMU refuses: it writes no image past the page cache that ends
    within a block."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    sectors = -(-size // _SECTOR_BYTES) * _SECTOR_BYTES
    if not sectors % _LARGEST_BLOCK or not sectors % (block := _direct_block(descriptor)):
        return
    text = f"has {size} bytes, and QEMU needs a multiple of {block}"
    hint = f"truncate -s %{block} {disk.path}; or the cache mode writeback"
    raise DiskError(f"{disk.path}: {text} with the cache mode {disk.cache}", hint=hint)


def _direct_block(descriptor: int) -> int:
    """The bytes that QEMU reads and writes at a time past the page cache, as it finds them out. A
    file system that takes any number, such as tmpfs, gets the largest."""
    with mmap.mmap(-1, _LARGEST_BLOCK) as buffer, memoryview(buffer) as whole:
        for size in (1, 512, 1024, 2048):
            with contextlib.suppress(OSError), whole[:size] as part:
                os.preadv(descriptor, [part], 0)
                return size if size > 1 else _LARGEST_BLOCK
    return _LARGEST_BLOCK


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
        fault = f"has no backing file, but {disk.backing.path} is named as one"
        hint = "leave out backing; qemu-img create -b makes an image that has one"
    elif is_newer and int.from_bytes(header[72:80], "big") & _QCOW2_EXTERNAL_DATA:
        fault = "has an external data file, which QEMU would have to open itself"
        hint = "qemu-img convert makes an image that stands alone"
    if fault:
        raise DiskError(f"{disk.path}: {fault}", hint=hint)
