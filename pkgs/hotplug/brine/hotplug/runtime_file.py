"""Runtime files: what a running QEMU was started with, and what was plugged since.

Brine reads three forms. Its own is an object with the lists ``nics`` and ``disks``, and more.
Ganeti's is a list: the command, NICs, hypervisor parameters, and disks, each with its link and URI.
An older list of Ganeti's has no disks, because they are in the command; it gets an empty list. A
device without ``pci`` has no recorded slot, and cannot be unplugged before the next start.

Source: "How to deal with existing instances?" in the hotplug design.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import read_regular, write_whole
from brine.common.locks import LockedError, locked
from brine.hotplug.address import DeviceKind, DeviceName, default_serial, is_path, uuid_of_mac

if TYPE_CHECKING:
    from brine.hotplug.transaction import Pending


# Devices in the form of Ganeti's runtime files. Ganeti refuses a file with unknown keys.

Json = dict[str, Any]


def to_ganeti(kind: DeviceKind, device: Json, *, index: int) -> Json:
    """A device of Brine's in Ganeti's form.

    :param index: its place among the devices of its kind, from 0.
    """
    place: Json = {key: device[key] for key in ("pci", "hvinfo") if key in device}
    inner = _nic(device) if kind is DeviceKind.NIC else _disk(device, index)
    return {"uuid": device["uuid"], "name": None, **inner, **place}


def _nic(device: Json) -> Json:
    known = ("mac", "ip", "nicparams")
    return {**{key: device.get(key) for key in known}, "network": None, "netinfo": None}


def _disk(device: Json, index: int) -> Json:
    is_device = device["path"].startswith("/dev/")
    return {
        "dev_type": "blockdev" if is_device else "file",
        "logical_id": ["manual" if is_device else "loop", device["path"]],
        "children": [],
        "nodes": [],
        "iv_name": f"disk/{index}",
        "size": device.get("size_mib", 0),
        "mode": "ro" if device.get("read_only") else "rw",
        "params": {},
        "spindles": None,
    }


def with_uuid(kind: DeviceKind, device: Json) -> Json:
    """A device of Ganeti's with a UUID. Before 2.8 they had none, and Ganeti invents some, too.

    The UUID is the same each time. A NIC gets the UUID that :program:`brine nic` derives from its
    MAC.

    :raises TypeError: or AttributeError, if it is no device.
    """
    if device.get("uuid") is not None:
        return device
    if kind is DeviceKind.NIC and isinstance(device.get("mac"), str):
        return {**device, "uuid": uuid_of_mac(device["mac"])}
    told = json.dumps(device.get("logical_id") or device, sort_keys=True)
    import uuid  # takes long to load, and only old files need it

    return {**device, "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, told))}


def path_of_disk(device: Json) -> str | None:
    """The path of a disk that :func:`to_ganeti` made; None for any other disk."""
    match device.get("logical_id"):
        case ["manual" | "loop", str(path)]:
            return path
    return None


# Locks for a file or a socket; the same lock for every path that leads to it.


def lock_of(purpose: str, file: Path) -> Path:
    """The lock for a purpose: its name has a readable part, and a hash of the real path."""
    real = os.path.realpath(file)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    readable = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(real).stem)[:40]
    return paths.LOCK_DIR / f"{purpose}-{readable}-{digest}.lock"


_MODE = 0o600
_GANETI_LENGTHS = (3, 4)
_NICS, _DISKS = 1, 3  # places in Ganeti's list
_PLACE = ("pci", "bus", "hvinfo")


class RuntimeFileError(BrineError):
    """A runtime file that can't be used.

    :param file: the file.
    """

    def __init__(self, file: Path, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{file}: {message}", hint=hint)
        self.file = file


@dataclass(frozen=True, slots=True)
class Runtime:
    """The devices in a runtime file, and its other content, which is kept.

    :param file: the file that it was read from.
    :param devices: by kind, in order; each with the ``uuid`` and perhaps ``pci``, its slot.
    :param rest: the file's JSON.
    :param links: of Ganeti's form: the link and the URI of each disk, by UUID.
    """

    file: Path
    devices: dict[DeviceKind, tuple[Json, ...]]
    rest: Any
    links: dict[str, tuple[Any, Any]]

    @classmethod
    def load(cls, file: Path) -> Runtime:
        """Read a file of any form.

        :raises RuntimeFileError: if it can't be read, or has none of the forms.
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
            DeviceKind.NIC: _devices(data.get("nics", [])),
            DeviceKind.DISK: _devices(data.get("disks", [])),
        }
        return cls(file, devices, data, {})

    @classmethod
    def _of_ganeti(cls, file: Path, data: Any) -> Runtime:
        if type(data) is not list or len(data) not in _GANETI_LENGTHS:
            raise ValueError
        rows = data[_DISKS] if len(data) > _DISKS else []
        nics = [with_uuid(DeviceKind.NIC, nic) for nic in data[_NICS]]
        disks = [with_uuid(DeviceKind.DISK, row[0]) for row in rows]
        links = {
            disk["uuid"]: (row[1], row[2] if len(row) > 2 else None)
            for disk, row in zip(disks, rows, strict=True)
        }
        return cls(
            file, {DeviceKind.NIC: _devices(nics), DeviceKind.DISK: _devices(disks)}, data, links
        )

    def _is_ganetis(self) -> bool:
        return not isinstance(self.rest, dict)

    def find(self, kind: DeviceKind, uuid: str) -> Json | None:
        """The device with that UUID."""
        return next((one for one in self.devices[kind] if one["uuid"] == uuid), None)

    def known_as(self, kind: DeviceKind, reference: str) -> list[Json]:
        """The devices that a reference names: a UUID, MAC, serial, path, or QEMU's id."""
        wanted = reference.lower()
        path = os.path.abspath(reference) if is_path(reference) else None
        return [
            one
            for one in self.devices[kind]
            if wanted in _names(kind, one)
            or (path and kind is DeviceKind.DISK and path in self._paths(one))
        ]

    def with_device(self, kind: DeviceKind, device: Json, *, link: str | None = None) -> Runtime:
        """The file with a further device, which replaces the one with its UUID.

        :param device: a device without a slot keeps that of its predecessor.
        :param link: the path by which QEMU opens a disk.
        :raises RuntimeFileError: if another disk has that UUID.
        """
        uuid = device["uuid"]
        others, links = self.devices[kind], self.links
        uuids = [one["uuid"] for one in others]
        index = uuids.index(uuid) if uuid in uuids else len(uuids)
        if old := self.find(kind, uuid):
            if kind is DeviceKind.DISK:
                self._check_same_disk(old, device["path"])
            if "pci" not in device:
                device = {**{key: old[key] for key in _PLACE if key in old}, **device}
        if self._is_ganetis():
            device = to_ganeti(kind, device, index=index)
            uri = self.links.get(uuid, (None, None))[1]
            links = {**links, uuid: (link, uri)} if kind is DeviceKind.DISK else links
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
        """The known paths of a disk."""
        link, _ = self.links.get(disk["uuid"], (None, None))
        known = [disk.get("path"), link, path_of_disk(disk)]
        return [one for one in known if isinstance(one, str)]

    def without_device(self, kind: DeviceKind, uuid: str) -> Runtime:
        """The file without the device of that UUID."""
        kept = tuple(one for one in self.devices[kind] if one["uuid"] != uuid)
        links = {key: value for key, value in self.links.items() if key != uuid}
        return replace(self, devices={**self.devices, kind: kept}, links=links)

    def save(self, file: Path) -> None:
        """Write it in the form in which it was read; of Ganeti's two forms, the newer.

        The file keeps its owner and mode, and a symbolic link stays a link.

        :raises RuntimeFileError: if it can't be written; then the old file is unchanged.
        """
        nics, disks = list(self.devices[DeviceKind.NIC]), list(self.devices[DeviceKind.DISK])
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
    """QEMU's id of a device that Brine plugged in; None for any other."""
    hvinfo = device.get("hvinfo")
    device_id = hvinfo.get("id") if isinstance(hvinfo, dict) else None
    return device_id if isinstance(device_id, str) and DeviceName.parse(device_id) else None


class _NoUuidError(Exception):
    """A device in the file has no UUID."""


def _devices(items: Any) -> tuple[Json, ...]:
    if type(items) is not list or any(type(item) is not dict for item in items):
        raise ValueError
    if any(type(item.get("uuid")) is not str for item in items):
        raise _NoUuidError
    return tuple(items)


def _names(kind: DeviceKind, device: Json) -> list[str]:
    """The names of a device, in lower case."""
    names = [device["uuid"], qemu_id(device)]
    if kind is DeviceKind.NIC:
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


# Updating runtime files: a writer holds the lock from reading to writing.

LOCK_TIMEOUT_S = 10.0
"""A change takes milliseconds."""


def change(
    file: Path, how: Callable[[Runtime], Runtime], *, timeout_s: float = LOCK_TIMEOUT_S
) -> bool:
    """Change a runtime file; False if nothing had to change.

    :param how: returns the new content for the old.
    :param timeout_s: how long to wait for other writers.
    :raises RuntimeFileError: if it can't be read, written or locked.
    """
    with _alone(file, timeout_s):
        old = Runtime.load(file)
        new = how(old)
        if new == old:
            return False
        new.save(file)
    return True


def record(pending: Pending, *, plugged: bool) -> None:
    """Record in the runtime file what was plugged or unplugged.

    :raises RuntimeFileError: if it can't be read, written or locked.
    """
    if pending.runtime is None:
        return

    def how(runtime: Runtime) -> Runtime:
        if plugged:
            link = pending.device.get("path")
            return runtime.with_device(pending.kind, pending.device, link=link)
        gone = _uuid_of(pending, runtime)
        return runtime.without_device(pending.kind, gone) if gone else runtime

    change(Path(pending.runtime), how)


def is_recorded(file: Path | None, kind: DeviceKind, uuid: str, device_id: str) -> bool:
    """Whether a runtime file has a device in its slot, or there is no runtime file.

    :param device_id: QEMU's.
    :raises RuntimeFileError: if it can't be read.
    """
    if file is None:
        return True
    found = Runtime.load(file).find(kind, uuid)
    return found is not None and qemu_id(found) == device_id


def _uuid_of(pending: Pending, runtime: Runtime) -> str | None:
    """The UUID of a removed device in the file."""
    devices = runtime.devices[pending.kind]
    by_id = [one["uuid"] for one in devices if qemu_id(one) == pending.device_id]
    # Of a device that another program plugged in, only the beginning of the UUID is known.
    by_uuid = [one["uuid"] for one in devices if one["uuid"].lower().startswith(pending.uuid)]
    return next((found[0] for found in (by_id, by_uuid) if len(found) == 1), None)


@contextlib.contextmanager
def _alone(file: Path, timeout_s: float) -> Iterator[None]:
    lock = lock_of("runtime", file)
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            stack.enter_context(locked(lock, timeout_s=timeout_s))
        except LockedError as error:
            raise RuntimeFileError(file, f"can't be locked: {error}", hint=error.hint) from error
        except OSError as error:
            hint = "be root" if isinstance(error, PermissionError) else None
            text = f"can't be locked: {lock}: {error.strerror}"
            raise RuntimeFileError(file, text, hint=hint) from error
        yield
