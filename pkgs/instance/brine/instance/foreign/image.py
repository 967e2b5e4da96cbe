"""The image of a disk, as a spec; and files that only look as if they were one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.common.files import open_safely
from brine.vm.disk_files import format_of
from brine.vm.values import FORMATS

_SECTOR_BYTES = 512
_HEAD_BYTES = 4096
_CONVERT = "qemu-img convert -O qcow2 {path} {path}.qcow2"
_UNPACK = "tar -xf {path}, and import the disk that is in it"
_PROXMOX = re.compile(r"^(memory|cores|ostype|(scsi|virtio|sata|ide|net)[0-9]+): ", re.MULTILINE)
_BLANKS = "\t\n\r\f"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file that is no disk as it is.

    :param name: with its article.
    :param hint: how to come to a disk; ``{path}`` is the file.
    """

    name: str
    hint: str


_PACKED = tuple(
    (magic, Kind(f"a file packed by {program}", f"{program} -d -k {{path}}, and import the result"))
    for magic, program in (
        (b"\x1f\x8b", "gzip"),
        (b"BZh", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x04\x22\x4d\x18", "lz4"),
    )
)
_BEGINNINGS = (
    *_PACKED,
    (b"PK\x03\x04", Kind("a zip archive", "unzip {path}, and import the disk that is in it")),
    (b"7z\xbc\xaf\x27\x1c", Kind("a 7z archive", "7z x {path}, and import the disk in it")),
    (b"WithoutFreeSpace", Kind("an image of the format Parallels", _CONVERT)),
    (b"WithouFreSpacExt", Kind("an image of the format Parallels", _CONVERT)),
)
_TAR = Kind("a tar archive, as OVA files are", _UNPACK)
_ENDINGS = (
    (b"conectix", Kind("an image of the format VHD", _CONVERT)),
    (b"koly", Kind("an image of the format DMG", _CONVERT)),
)


def kind_of(head: bytes, tail: bytes = b"") -> Kind | None:
    """The kind of a file by its content; None if it may be the content of a disk.

    :param head: its first bytes.
    :param tail: its last 512 bytes.
    """
    for magic, kind in _BEGINNINGS:
        if head.startswith(magic):
            return kind
    if head.startswith(b"ustar", 257):
        return _TAR
    for magic, kind in _ENDINGS:
        if tail.startswith(magic):
            return kind
    return _kind_of_text(_text_of(head))


def _text_of(head: bytes) -> str:
    """The text that a file begins with; empty if it is none."""
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    # The last character may be cut.
    text = head.decode(encoding, errors="ignore")
    is_text = all(character.isprintable() or character in _BLANKS for character in text)
    whole = len(text.encode(encoding)) >= len(head) - 4
    return text if is_text and whole else ""


def _kind_of_text(text: str) -> Kind | None:
    start = text.lstrip()
    if not start:
        return None
    if start.startswith("<"):
        is_domain = "<domain" in start
        hint = "brine instance import --libvirt {path}" if is_domain else "name the disk's image"
        return Kind("XML", hint)
    if _PROXMOX.search(text):
        return Kind("text", "brine instance import --proxmox {path}")
    if start.startswith("{"):
        return Kind("JSON", "brine instance define {path}, if it is a spec")
    return Kind("text", "name the disk's image")


def spec_of_image(image: Path, *, link: str = "") -> dict[str, Any]:
    """The spec of an instance with *image* as its disk, in the format that it shows.

    :param link: the bridge of its NIC; empty is no NIC.
    :raises BrineError: if it is no disk, or of a format that Brine does not open.
    """
    found = format_of(image)
    if found not in FORMATS:
        hint = f"qemu-img convert -O qcow2 {image} {image.with_suffix('.qcow2')}"
        raise BrineError(f"{image}: is an image of the format {found}", hint=hint)
    if found == "raw":
        _refuse_no_disk(image)
    disks = [{"path": str(image), "format": found}]
    data = {"name": image.name.split(".")[0], "disks": disks}
    return {**data, "nics": [{"link": link}]} if link else data


def _refuse_no_disk(image: Path) -> None:
    try:
        with os.fdopen(open_safely(image, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            head = file.read(_HEAD_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SECTOR_BYTES))
            tail = file.read(_SECTOR_BYTES)
    except OSError as error:
        raise BrineError(f"{image}: can't be read: {error.strerror}") from error
    if kind := kind_of(head, tail):
        text = f"{image}: is {kind.name}, and no image of a disk"
        raise BrineError(text, hint=kind.hint.format(path=image))
    if not size:
        raise BrineError(f"{image}: is empty, and no image of a disk")
    if size % _SECTOR_BYTES:
        text = f"{image}: has {size} bytes, and a disk has a multiple of {_SECTOR_BYTES}"
        hint = f"if it is one all the same: truncate -s %{_SECTOR_BYTES} {image}"
        raise BrineError(text, hint=hint)
