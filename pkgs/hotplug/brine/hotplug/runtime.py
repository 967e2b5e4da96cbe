"""Runtime files: what a running QEMU was started with, and has been plugged since.

Three forms are read. Ours is an object with the lists ``nics`` and ``disks``, and more. Ganeti's is
a list: the command, NICs, hypervisor parameters, and disks, each with its link and URI. An older
one of Ganeti's lacks the disks, which are in the command; it gets an empty list. A device without
``pci`` was there before anybody noted where, and can't be unplugged before the next start.

Source: "How to deal with existing instances?" in the hotplug design.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.common.regular_file import read_regular
from brine.common.wholefile import write_whole
from brine.hotplug.device_names import DeviceName, Kind, default_serial
from brine.hotplug.ganeti_devices import path_of_disk, to_ganeti, with_uuid
from brine.hotplug.references import is_path

Json = dict[str, Any]

_MODE = 0o600
_GANETI_LENGTHS = (3, 4)
_NICS, _DISKS = 1, 3  # places in Ganeti's list
_PLACE = ("pci", "bus", "hvinfo")


class RuntimeFileError(BrineError):
    """A runtime file that can't be used.

    :param file: which.
    """

    def __init__(self, file: Path, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{file}: {message}", hint=hint)
        self.file = file


@dataclass(frozen=True, slots=True)
class Runtime:
    """The devices in a runtime file, and everything else, kept as it was.

    :param file: it was read from.
    :param devices: by kind, in order; each with the ``uuid`` and perhaps ``pci``, its slot.
    :param rest: the file's JSON.
    :param links: of Ganeti's form: what each disk is linked as, and its URI, by UUID.
    """

    file: Path
    devices: dict[Kind, tuple[Json, ...]]
    rest: Any
    links: dict[str, tuple[Any, Any]]

    @classmethod
    def load(cls, file: Path) -> Runtime:
        """Read a file of any form.

        :raises RuntimeFileError: if it can't be read, or is of none.
        """
        try:
            data = json.loads(read_regular(file))
        except OSError as error:
            raise RuntimeFileError(file, f"can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise RuntimeFileError(file, f"not valid JSON: {error}") from error
        try:
            if isinstance(data, dict):
                return cls._of_ours(file, data)
            return cls._of_ganeti(file, data)
        except _NoUuidError:
            hint = "restart the instance, and its file is written anew"
            raise RuntimeFileError(file, "a device has no UUID", hint=hint) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            hint = "a runtime file is an object with nics and disks, or Ganeti's list"
            raise RuntimeFileError(file, "is no runtime file", hint=hint) from None

    @classmethod
    def _of_ours(cls, file: Path, data: Json) -> Runtime:
        devices = {
            Kind.NIC: _devices(data.get("nics", [])),
            Kind.DISK: _devices(data.get("disks", [])),
        }
        return cls(file, devices, data, {})

    @classmethod
    def _of_ganeti(cls, file: Path, data: Any) -> Runtime:
        if type(data) is not list or len(data) not in _GANETI_LENGTHS:
            raise ValueError
        rows = data[_DISKS] if len(data) > _DISKS else []
        nics = [with_uuid(Kind.NIC, nic) for nic in data[_NICS]]
        disks = [with_uuid(Kind.DISK, row[0]) for row in rows]
        links = {
            disk["uuid"]: (row[1], row[2] if len(row) > 2 else None)
            for disk, row in zip(disks, rows, strict=True)
        }
        return cls(file, {Kind.NIC: _devices(nics), Kind.DISK: _devices(disks)}, data, links)

    def _is_ganetis(self) -> bool:
        return not isinstance(self.rest, dict)

    def find(self, kind: Kind, uuid: str) -> Json | None:
        """The device with that UUID."""
        return next((one for one in self.devices[kind] if one["uuid"] == uuid), None)

    def known_as(self, kind: Kind, reference: str) -> list[Json]:
        """The devices that are known by that: their UUID, MAC, serial or path, or QEMU's id."""
        wanted = reference.lower()
        path = os.path.abspath(reference) if is_path(reference) else None
        return [
            one
            for one in self.devices[kind]
            if wanted in _names(kind, one)
            or (path and kind is Kind.DISK and path in self._paths(one))
        ]

    def with_device(self, kind: Kind, device: Json, *, link: str | None = None) -> Runtime:
        """With one device more, or another in the place of that with its UUID.

        :param device: one without a place has that which its predecessor had.
        :param link: of a disk, what it is opened as.
        :raises RuntimeFileError: if that UUID is another disk's.
        """
        uuid = device["uuid"]
        others, links = self.devices[kind], self.links
        uuids = [one["uuid"] for one in others]
        index = uuids.index(uuid) if uuid in uuids else len(uuids)
        if old := self.find(kind, uuid):
            if kind is Kind.DISK:
                self._check_same_disk(old, device["path"])
            if "pci" not in device:
                device = {**{key: old[key] for key in _PLACE if key in old}, **device}
        if self._is_ganetis():
            device = to_ganeti(kind, device, index=index)
            uri = self.links.get(uuid, (None, None))[1]
            links = {**links, uuid: (link, uri)} if kind is Kind.DISK else links
        changed = (*others[:index], device, *others[index + 1 :])
        return replace(self, devices={**self.devices, kind: changed}, links=links)

    def _check_same_disk(self, old: Json, path: str) -> None:
        paths = self._paths(old)
        if paths and path not in paths:
            raise RuntimeFileError(
                self.file,
                f"disk {old['uuid']} is {paths[0]} there, not {path}",
                hint="give it another --uuid, or remove the other one first",
            )

    def _paths(self, disk: Json) -> list[str]:
        """What a disk is known to be at."""
        link, _ = self.links.get(disk["uuid"], (None, None))
        known = [disk.get("path"), link, path_of_disk(disk)]
        return [one for one in known if isinstance(one, str)]

    def without_device(self, kind: Kind, uuid: str) -> Runtime:
        """Without the device of that UUID."""
        kept = tuple(one for one in self.devices[kind] if one["uuid"] != uuid)
        links = {key: value for key, value in self.links.items() if key != uuid}
        return replace(self, devices={**self.devices, kind: kept}, links=links)

    def save(self, file: Path) -> None:
        """Write it in the form that it was read in; of Ganeti's two, the newer.

        Its owner and mode stay, and a symbolic link to it does.

        :raises RuntimeFileError: if it can't be written; the old one is as it was.
        """
        nics, disks = list(self.devices[Kind.NIC]), list(self.devices[Kind.DISK])
        data: Any
        if not self._is_ganetis():
            data = {**self.rest, "nics": nics, "disks": disks}
        else:
            rows = [[disk, *self.links.get(disk["uuid"], (None, None))] for disk in disks]
            data = [self.rest[0], nics, self.rest[2], rows]
        try:
            _write(Path(os.path.realpath(file)), json.dumps(data).encode() + b"\n")
        except OSError as error:
            raise RuntimeFileError(file, f"can't be written: {error.strerror}") from error


def qemu_id(device: Json) -> str | None:
    """QEMU's id of a device that was plugged in by us; None for any other."""
    hvinfo = device.get("hvinfo")
    device_id = hvinfo.get("id") if isinstance(hvinfo, dict) else None
    return device_id if isinstance(device_id, str) and DeviceName.parse(device_id) else None


class _NoUuidError(Exception):
    """Whoever wrote the file has left it out."""


def _devices(items: Any) -> tuple[Json, ...]:
    if type(items) is not list or any(type(item) is not dict for item in items):
        raise ValueError
    if any(type(item.get("uuid")) is not str for item in items):
        raise _NoUuidError
    return tuple(items)


def _names(kind: Kind, device: Json) -> list[str]:
    """What a device can be called, in small letters."""
    names = [device["uuid"], qemu_id(device)]
    if kind is Kind.NIC:
        names.append(device.get("mac"))
    else:
        names.append(device.get("serial") or _serial(device["uuid"]))
    return [str(name).lower() for name in names if name]


def _serial(uuid: str) -> str | None:
    try:
        return default_serial(uuid)
    except ValueError:
        return None


def _write(file: Path, data: bytes) -> None:
    mode, owner, group = _MODE, None, None
    if file.exists():
        status = file.stat()
        mode, owner, group = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    write_whole(file, data, mode=mode, owner=owner, group=group, alone=True)
