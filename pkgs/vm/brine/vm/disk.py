"""A disk: as specs have it, as QEMU gets it, and as runtime files record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any, ClassVar

from brine.vm.address import Bus, DeviceKind, default_serial
from brine.vm.identities import Identity, identities_of
from brine.vm.keys import key, path_key, slot_key, uuid_key
from brine.vm.slots import Slot
from brine.vm.values import (
    AIO_MODES,
    CACHE_MODES,
    FORMATS,
    LONGEST_SERIAL,
    like,
    tidy_path,
    unit_fault,
)

DRIVERS = {Bus.PCI: "virtio-blk-pci", Bus.SCSI: "scsi-hd"}
"""The device that a guest sees, by bus."""

MOST_BACKING = 9
"""Backing files of one disk: the number of each has one digit in a block node's name."""

_TEXTS = ("uuid", "path", "format", "cache", "aio")
_RECORDED = (*_TEXTS, "read_only", "discard")
_SERIAL = f"[ -~]{{1,{LONGEST_SERIAL}}}"
_NAME = r"[a-z0-9][a-z0-9._-]{0,31}"
_NAME_FAULT = (
    "a name has at most 32 small letters, digits, '.', '_' and '-', and begins with no sign"
)
MOST_MIB = 1 << 33
"""The largest size of a disk: 8 PiB."""


def _tidy_unit(text: str) -> str:
    return tidy_path(text) if text.startswith("/") else text


def _unless_empty(check: Callable[[str], str | None]) -> Callable[[str], str | None]:
    return lambda text: check(text) if text else None


_NEWER_KEYS = ("name", "unit", "size_mib", "by_hand")


def without_empty(row: dict[str, Any]) -> dict[str, Any]:
    """A disk or a NIC as JSON without keys that are empty, and that an older Brine does not know:
    that may read it after a downgrade."""
    newer = (*_NEWER_KEYS, "filter")
    return {key: value for key, value in row.items() if value or key not in newer}


def as_plugged(row: Mapping[str, Any]) -> dict[str, Any]:
    """A disk or a NIC as JSON without what QEMU is not told of it."""
    return {key: value for key, value in row.items() if key not in _NEWER_KEYS}


class Interface(StrEnum):
    """The interface of a disk."""

    VIRTIO = "virtio"
    SCSI = "scsi"
    IDE = "ide"


class FormatSource(StrEnum):
    """How the format of a disk is known: the administrator gave it, a start found it (and what the
    disk holds since is the guest's), or neither did."""

    ADMIN = "admin"
    START = "start"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backing:
    """A backing file: the image with the parts that an overlay has not written. It is only read."""

    path: str = path_key()
    format: str = key(choices=FORMATS)
    backing: Backing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk.

    :param uuid: made from the path where it is not given.
    :param name: by which people call it; unique in its spec.
    :param unit: the storage unit of its volume, if Brine has made or adopted one.
    :param size_mib: of that volume as it was made, in MiB; 0 is not known.
    :param path: a block device, or an image file.
    :param backing: the nearest backing file. Brine follows no image's header.
    :param serial: that the guest sees; empty is the beginning of the UUID.
    :param slot: where the guest has it since it was started first: of ``pci.0``, the root port's
        or the LUN; -1 is none yet.
    :param by_hand: whether an administrator has added it on the node: a declaration that lacks it
        leaves it where it is.
    """

    OTHER_WORDS: ClassVar = {
        "file": "path",
        "device": "path",
        "driver": "format",
        "bus": "interface",
    }

    uuid: str = uuid_key()
    name: str = key("", check=_unless_empty(like(_NAME, _NAME_FAULT)))
    unit: str = key("", check=_unless_empty(unit_fault), tidy=_tidy_unit)
    size_mib: int = key(0, minimum=0, maximum=MOST_MIB)
    path: str = path_key()
    format: str = key("raw", choices=FORMATS)
    format_source: str = key("admin", choices=tuple(FormatSource))
    backing: Backing | None = None
    interface: str = key("virtio", choices=tuple(Interface))
    cache: str = key("none", choices=tuple(CACHE_MODES))
    aio: str = key("threads", choices=AIO_MODES)
    discard: bool = key(True)
    read_only: bool = key(False)
    serial: str = key("", check=like(_SERIAL, "a serial has at most 20 characters of ASCII"))
    slot: int = slot_key()
    by_hand: bool = key(False)

    def guest_serial(self) -> str:
        """The serial that the guest sees: at most 20 characters."""
        return self.serial or default_serial(self.uuid)

    def as_qemu_has_it(self) -> Disk:
        """It without what only Brine knows of it."""
        return replace(self, name="", unit="", size_mib=0, by_hand=False)

    def is_format_said(self) -> bool:
        """Whether a person named its format, or a start found it."""
        return self.format_source != FormatSource.DEFAULT

    def bus(self) -> Bus:
        """The bus that it is plugged into; IDE has no hotplug."""
        return Bus.SCSI if self.interface == Interface.SCSI else Bus.PCI

    def layers(self) -> list[Backing]:
        """Its backing files, the nearest first."""
        found, layer = [], self.backing
        while layer:
            found.append(layer)
            layer = layer.backing
        return found

    def own_layers(self) -> int:
        """How many of its nearest backing files are of its volume: snapshots are merged into these,
        and QEMU may write them then. Others are only read."""
        if not self.unit or self.read_only:
            return 0
        own = f"{self.unit}/{self.uuid}."
        chain = [self.path, *(one.path for one in self.layers())]
        count = sum(1 for _ in takewhile(lambda path: path.startswith(own), chain))
        # The lowest one is made by Brine, or else was adopted, whatever its name is.
        is_made = count > 0 and chain[count - 1] in (f"{own}raw", f"{own}qcow2")
        return count - 1 if is_made else count

    def identities(self) -> Iterator[Identity]:
        """What no other VM may have."""
        return identities_of({"disks": [self.recorded()]})

    def recorded(self) -> dict[str, Any]:
        """The disk as JSON, as QEMU keeps it beside the disk's descriptors."""
        backing: dict[str, Any] | None = None
        for layer in reversed(self.layers()):
            backing = {"path": layer.path, "format": layer.format, "backing": backing}
        found = {name: getattr(self, name) for name in _RECORDED}
        return {**found, "serial": self.serial or None, "backing": backing}

    def entry(self, size_mib: int, slot: Slot | None = None) -> dict[str, Any]:
        """The disk as a runtime file has it, with its slot if it has one."""
        found = {**self.recorded(), "size_mib": size_mib}
        if slot:
            device_id = slot.device_id(DeviceKind.DISK, self.uuid)
            found |= slot.recorded(DRIVERS[slot.kind()], device_id)
        return found

    @classmethod
    def from_recorded(cls, data: Mapping[str, Any]) -> Disk:
        """The disk that :meth:`recorded` or :meth:`entry` wrote. Its values are not checked.

        :raises KeyError: or TypeError, if it is not one.
        """
        uuid, path, form, cache, aio = (_text(data[name]) for name in _TEXTS)
        place, slot = data.get("hvinfo") or {}, data.get("pci")
        is_scsi = {**place}.get("driver") == DRIVERS[Bus.SCSI]
        return cls(
            uuid=uuid,
            path=path,
            format=form,
            cache=cache,
            aio=aio,
            read_only=data["read_only"],
            discard=data["discard"],
            serial=_text(data["serial"] or ""),
            backing=_backing_of(data.get("backing")),  # older versions knew of none
            interface=(Interface.SCSI if is_scsi else Interface.VIRTIO).value,
            slot=slot if isinstance(slot, int) else -1,
        )


def _backing_of(data: Any, most: int = MOST_BACKING) -> Backing | None:
    if not (isinstance(data, Mapping) and data and most):
        return None
    behind = _backing_of(data.get("backing"), most - 1)
    return Backing(path=_text(data["path"]), format=_text(data["format"]), backing=behind)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text: {value!r:.60}")
    return value
