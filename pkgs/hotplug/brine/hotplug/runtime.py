"""Runtime files: what a running QEMU was started with, and has been plugged since.

Three forms are read. Ours is an object with the lists ``nics`` and ``disks``, and more. Ganeti's is
a list: the command, NICs, hypervisor parameters, and disks, each with its link and URI. An older
one of Ganeti's lacks the disks, which are in the command; it gets an empty list. A device without
``pci`` was there before anybody noted where, and can't be unplugged before the next start.

Source: "How to deal with existing instances?" in the hotplug design.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.common.wholefile import write_whole
from brine.hotplug.device_names import Kind
from brine.hotplug.ganeti_devices import to_ganeti

Json = dict[str, Any]

_MODE = 0o600
_GANETI_LENGTHS = (3, 4)
_NICS, _DISKS = 1, 3  # places in Ganeti's list


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

    :param devices: by kind, in order; each with the ``uuid`` and perhaps ``pci``, its slot.
    :param rest: the file's JSON.
    :param links: of Ganeti's form: what each disk is linked as, and its URI, by UUID.
    """

    devices: dict[Kind, tuple[Json, ...]]
    rest: Any
    links: dict[str, tuple[Any, Any]]

    @classmethod
    def load(cls, file: Path) -> Runtime:
        """Read a file of any form.

        :raises RuntimeFileError: if it can't be read, or is of none.
        """
        try:
            data = json.loads(file.read_bytes())
        except OSError as error:
            raise RuntimeFileError(file, f"can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise RuntimeFileError(file, f"not valid JSON: {error}") from error
        try:
            return cls._of_ours(data) if isinstance(data, dict) else cls._of_ganeti(data)
        except _NoUuidError:
            hint = "restart the instance, and its file is written anew"
            raise RuntimeFileError(file, "a device has no UUID", hint=hint) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            hint = "a runtime file is an object with nics and disks, or Ganeti's list"
            raise RuntimeFileError(file, "is no runtime file", hint=hint) from None

    @classmethod
    def _of_ours(cls, data: Json) -> Runtime:
        devices = {
            Kind.NIC: _devices(data.get("nics", [])),
            Kind.DISK: _devices(data.get("disks", [])),
        }
        return cls(devices, data, {})

    @classmethod
    def _of_ganeti(cls, data: Any) -> Runtime:
        if type(data) is not list or len(data) not in _GANETI_LENGTHS:
            raise ValueError
        rows = data[_DISKS] if len(data) > _DISKS else []
        devices = {
            Kind.NIC: _devices(data[_NICS]),
            Kind.DISK: _devices([row[0] for row in rows]),
        }
        links = {row[0]["uuid"]: (row[1], row[2] if len(row) > 2 else None) for row in rows}
        return cls(devices, data, links)

    def _is_ganetis(self) -> bool:
        return not isinstance(self.rest, dict)

    def find(self, kind: Kind, uuid: str) -> Json | None:
        """The device with that UUID."""
        return next((one for one in self.devices[kind] if one["uuid"] == uuid), None)

    def uuid_of(self, kind: Kind, reference: str) -> str:
        """The UUID of the device that is known by that, by its MAC, or by its serial; without one,
        the reference itself."""
        for device in self.devices[kind]:
            known_as = (device["uuid"], device.get("mac"), device.get("serial"))
            if reference.lower() in [str(one).lower() for one in known_as if one]:
                return str(device["uuid"])
        return reference

    def with_device(self, kind: Kind, device: Json, *, link: str | None = None) -> Runtime:
        """With one device more, or another in the place of that with its UUID.

        :param link: of a disk, what it is opened as.
        """
        uuid = device["uuid"]
        others, links = self.devices[kind], self.links
        uuids = [one["uuid"] for one in others]
        index = uuids.index(uuid) if uuid in uuids else len(uuids)
        if self._is_ganetis():
            device = to_ganeti(kind, device, index=index)
            links = {**links, uuid: (link, None)} if kind is Kind.DISK else links
        changed = (*others[:index], device, *others[index + 1 :])
        return replace(self, devices={**self.devices, kind: changed}, links=links)

    def without_device(self, kind: Kind, uuid: str) -> Runtime:
        """Without the device of that UUID."""
        kept = tuple(one for one in self.devices[kind] if one["uuid"] != uuid)
        links = {key: value for key, value in self.links.items() if key != uuid}
        return replace(self, devices={**self.devices, kind: kept}, links=links)

    def save(self, file: Path) -> None:
        """Write it in the form that it was read in; of Ganeti's two, the newer.

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
            write_whole(file, json.dumps(data).encode() + b"\n", mode=_MODE)
        except OSError as error:
            raise RuntimeFileError(file, f"can't be written: {error.strerror}") from error


class _NoUuidError(Exception):
    """Ganeti before 2.8 gave devices none."""


def _devices(items: Any) -> tuple[Json, ...]:
    if type(items) is not list or any(type(item) is not dict for item in items):
        raise ValueError
    if any(type(item.get("uuid")) is not str for item in items):
        raise _NoUuidError
    return tuple(items)
