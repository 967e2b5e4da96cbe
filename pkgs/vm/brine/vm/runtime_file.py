"""Runtime files: what a running QEMU was started with, and what was plugged since.

Brine reads three forms. Its own is an object with the lists ``nics`` and ``disks``, and more.
Ganeti's is a list: the command, NICs, hypervisor parameters, and disks, each with its link and URI.
An older list of Ganeti's has no disks, because they are in the command; it gets an empty list. A
device without ``pci`` has no recorded slot, and cannot be unplugged before the next start.

Source: "How to deal with existing instances?" in the hotplug design.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from brine.common import paths
from brine.common.digest import sha256
from brine.common.errors import BrineError
from brine.common.files import place_of, read_json, read_regular, write_whole
from brine.common.locks import LockError, node_lock
from brine.vm.address import DeviceKind, DeviceName, default_serial, uuid_of_mac
from brine.vm.files import InstanceFiles
from brine.vm.identities import rows_in

if TYPE_CHECKING:
    from brine.vm.disk import Disk

Json = dict[str, Any]

_MODE = 0o600
_GANETI_LENGTHS = (3, 4)
_NICS, _DISKS = 1, 3  # places in Ganeti's list
_PLACE = ("pci", "bus", "hvinfo")


class RuntimeFileError(BrineError):
    def __init__(self, file: Path, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{file}: {message}", hint=hint)
        self.file = file


class Runtime(NamedTuple):
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
            data = json.loads(read_regular(file, safely=True))
        except OSError as error:
            raise RuntimeFileError(file, f"can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise RuntimeFileError(file, f"not valid JSON: {error}") from error
        return cls.of(data, file)

    @classmethod
    def of(cls, data: Any, file: Path) -> Runtime:
        """What a file says, of any form.

        :param data: its JSON.
        :raises RuntimeFileError: if it has none of the forms.
        """
        links: dict[str, tuple[Any, Any]] = {}
        try:
            if isinstance(data, dict):
                nics, disks = data.get("nics", []), data.get("disks", [])
            else:
                nics, disks, links = _of_ganeti(data)
            both = {DeviceKind.NIC: _devices(nics), DeviceKind.DISK: _devices(disks)}
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            hint = "a runtime file is an object with nics and disks, or Ganeti's list"
            raise RuntimeFileError(file, "is no runtime file", hint=hint) from None
        return cls(file, both, data, links)

    def find(self, kind: DeviceKind, uuid: str) -> Json | None:
        return next((one for one in self.devices[kind] if one["uuid"] == uuid), None)

    def known_as(self, kind: DeviceKind, reference: str) -> list[Json]:
        """The devices that a reference names: a UUID, MAC, serial, path, or QEMU's id."""
        path = None
        if kind is DeviceKind.DISK and "/" in reference:
            path = os.path.abspath(reference)
        return [
            one
            for one in self.devices[kind]
            if reference.lower() in _names(kind, one) or (path and path in self.paths_of(one))
        ]

    def started_with(self) -> Json | None:
        """The spec of the start, as JSON; None if the file does not have it, such as Ganeti's."""
        spec = self.rest.get("spec") if isinstance(self.rest, dict) else None
        return spec if isinstance(spec, dict) else None

    def command(self) -> list[str]:
        """The command of QEMU's start; empty if the file does not have it."""
        words = self.rest.get("command") if isinstance(self.rest, dict) else None
        return list(map(str, words)) if isinstance(words, list) else []

    def with_started(self, **changes: Any) -> Runtime:
        """The file with changes to the spec of the start; the same if it has none."""
        spec = self.started_with()
        if spec is None:
            return self
        return self._replace(rest={**self.rest, "spec": {**spec, **changes}})

    def ide_disks(self) -> list[Mapping[str, Any]]:
        """The IDE disks. IDE has no hotplug, so they are only in the spec of the start."""
        return _ide_disks(self.started_with())

    def content(self) -> Any:
        """The file as JSON, in the form in which it was read; of Ganeti's two forms, the newer."""
        nics, disks = list(self.devices[DeviceKind.NIC]), list(self.devices[DeviceKind.DISK])
        if isinstance(self.rest, dict):
            return {**self.rest, "nics": nics, "disks": disks}
        rows = [[disk, *self.links.get(disk["uuid"], (None, None))] for disk in disks]
        return [self.rest[0], nics, self.rest[2], rows]

    def with_device(self, kind: DeviceKind, device: Json, *, link: str | None = None) -> Runtime:
        """The file with a further device, which replaces the one with its UUID.

        :param device: a device without a slot keeps that of its predecessor.
        :param link: the path by which QEMU opens a disk.
        """
        uuid = device["uuid"]
        others, links = self.devices[kind], self.links
        uuids = [one["uuid"] for one in others]
        index = uuids.index(uuid) if uuid in uuids else len(uuids)
        if old := self.find(kind, uuid):
            known = self.paths_of(old) if kind is DeviceKind.DISK else []
            if known and device["path"] not in known:
                text = f"disk {uuid} is {known[0]} there, not {device['path']}"
                hint = "give it another --uuid, or remove the other one first"
                raise RuntimeFileError(self.file, text, hint=hint)
            if "pci" not in device:
                device = {**{key: old[key] for key in _PLACE if key in old}, **device}
        if not isinstance(self.rest, dict):
            device = _to_ganeti(kind, device, index)
            if kind is DeviceKind.DISK:
                links = {**links, uuid: (link, links.get(uuid, (None, None))[1])}
        changed = (*others[:index], device, *others[index + 1 :])
        return self._replace(devices={**self.devices, kind: changed}, links=links)

    def with_image(self, disk: Disk, size_mib: int) -> Runtime:
        """The file with another image of a disk, also where it has the spec of the start. The same
        if it does not have the disk, or has Ganeti's form.

        :param size_mib: as the guest sees it, rounded up.
        """
        if not isinstance(self.rest, dict):
            return self
        recorded = disk.recorded()
        image = {key: recorded[key] for key in ("path", "format", "backing")}

        def changed(row: Any, **more: Any) -> Any:
            is_it = isinstance(row, dict) and row.get("uuid") == disk.uuid
            return {**row, **image, **more} if is_it else row

        disks = tuple(changed(one, size_mib=size_mib) for one in self.devices[DeviceKind.DISK])
        known = self._replace(devices={**self.devices, DeviceKind.DISK: disks})
        rows = (self.started_with() or {}).get("disks")
        if not isinstance(rows, list):
            return known
        own = {"name": disk.name, "unit": disk.unit, "size_mib": disk.size_mib}
        own |= {"format_source": disk.format_source}
        return known.with_started(disks=[changed(row, **own) for row in rows])

    def paths_of(self, disk: Json) -> list[str]:
        """The known paths of a disk."""
        link, _ = self.links.get(disk["uuid"], (None, None))
        known = [disk.get("path"), link, _path_of_disk(disk)]
        return [one for one in known if isinstance(one, str)]

    def without_device(self, kind: DeviceKind, uuid: str) -> Runtime:
        kept = tuple(one for one in self.devices[kind] if one["uuid"] != uuid)
        links = {key: value for key, value in self.links.items() if key != uuid}
        return self._replace(devices={**self.devices, kind: kept}, links=links)

    def save(self, file: Path) -> None:
        """Write it, as :meth:`content` has it.

        The file keeps its owner and mode, and a symbolic link stays a link.
        """
        text = json.dumps(self.content()).encode() + b"\n"
        mode, owner, group = _MODE, None, None
        try:
            with place_of(file) as place:
                if place.file is not None:
                    status = os.fstat(place.file)
                    mode, owner, group = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
                name, folder = Path(place.name), place.folder
                write_whole(
                    name, text, mode=mode, owner=owner, group=group, alone=True, folder=folder
                )
        except OSError as error:
            raise RuntimeFileError(file, f"can't be written: {error.strerror}") from error


class LastStart(NamedTuple):
    """What an instance was started with, and what it has now, as far as its runtime file tells:
    what is damaged is left out.

    :param spec: of the start, as JSON.
    :param user: the id of QEMU's user.
    :param nics: those of now; so are *disks*, without those of the interface IDE.
    """

    spec: Mapping[str, Any] | None
    user: Any
    nics: tuple[Mapping[str, Any], ...]
    disks: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, name: str) -> LastStart | None:
        """What the runtime file of an instance tells; None if it is Ganeti's.

        :raises OSError: if it can't be read; or ValueError or RecursionError, if it is damaged.
        """
        data = json.loads(read_regular(InstanceFiles(name).runtime))
        if not isinstance(data, dict | list):
            raise ValueError("is no runtime file")
        return cls._of(data)

    @classmethod
    def known(cls, name: str) -> LastStart | None:
        """The same; None also if the file can't be read."""
        return cls._of(read_json(InstanceFiles(name).runtime))

    @classmethod
    def _of(cls, data: Any) -> LastStart | None:
        if not isinstance(data, Mapping):
            return None
        spec, nics, disks = data.get("spec"), rows_in(data, "nics"), rows_in(data, "disks")
        spec = spec if isinstance(spec, Mapping) else None
        return cls(spec, data.get("user"), tuple(nics), tuple(disks))

    def said(self, key: str) -> Any:
        """Its *spec* or its *user*.

        :raises ValueError: if the file does not tell it.
        """
        if (value := getattr(self, key)) is None:
            raise ValueError(f"does not tell the {key} of the start")
        return value

    def devices(self) -> dict[str, list[Mapping[str, Any]]]:
        """All that it has now, by the keys of specs."""
        return {"disks": [*self.disks, *_ide_disks(self.spec)], "nics": list(self.nics)}


def _ide_disks(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return [row for row in rows_in(spec, "disks") if row.get("interface") == "ide"]


def write_first(
    name: str,
    spec: Json,
    command: list[str],
    user: int | None,
    nics: list[Json],
    disks: list[Json],
) -> None:
    """Write the runtime file of an instance that is being started, in Brine's form.

    :param user: the id of QEMU's user; None is root.
    :param nics: with their slots; so are *disks*.
    """
    data = {"spec": spec, "command": command, "user": user, "nics": nics, "disks": disks}
    paths.RUNTIME_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = json.dumps(data, indent=1).encode() + b"\n"
    write_whole(InstanceFiles(name).runtime, content, mode=_MODE, alone=True)


def qemu_id(device: Json) -> str | None:
    """QEMU's id of a device that Brine plugged in; None for any other."""
    hvinfo = device.get("hvinfo")
    device_id = hvinfo.get("id") if isinstance(hvinfo, dict) else None
    return device_id if isinstance(device_id, str) and DeviceName.parse(device_id) else None


def _path_of_disk(device: Json) -> str | None:
    """The path of a disk in Ganeti's form that Brine recorded; None for any other disk."""
    match device.get("logical_id"):
        case ["manual" | "loop", str(path)]:
            return path
    return None


def _devices(items: Any) -> tuple[Json, ...]:
    if type(items) is not list or any(type(item["uuid"]) is not str for item in items):
        raise ValueError
    return tuple(items)


def _names(kind: DeviceKind, device: Json) -> list[str]:
    """The names of a device, in lower case."""
    names = [device["uuid"], qemu_id(device), device.get(kind.key)]
    if kind is DeviceKind.DISK and not device.get("serial"):
        with contextlib.suppress(ValueError):
            names.append(default_serial(device["uuid"]))
    return [str(name).lower() for name in names if name]


# Devices in the form of Ganeti's runtime files. Ganeti refuses a file with unknown keys.


def in_brines_form(nic: Json, usual: Json) -> Json:
    """A NIC of a file of any form in Brine's form.

    :param usual: what Ganeti's form lacks.
    """
    given = {key: value for key, value in (nic.get("nicparams") or {}).items() if value}
    ips = nic.get("ips") or ([nic["ip"]] if nic.get("ip") else [])
    return {**usual, **nic, "ips": ips, "nicparams": {**usual["nicparams"], **given}}


def _of_ganeti(data: Any) -> tuple[list[Json], list[Json], dict[str, tuple[Any, Any]]]:
    """The NICs and disks of Ganeti's list, and the link and URI of each disk by UUID."""
    if type(data) is not list or len(data) not in _GANETI_LENGTHS:
        raise ValueError
    rows = data[_DISKS] if len(data) > _DISKS else []
    nics = [_with_uuid(DeviceKind.NIC, nic) for nic in data[_NICS]]
    disks = [_with_uuid(DeviceKind.DISK, row[0]) for row in rows]
    links = {
        disk["uuid"]: (row[1], row[2] if len(row) > 2 else None)
        for disk, row in zip(disks, rows, strict=True)
    }
    return nics, disks, links


def _with_uuid(kind: DeviceKind, device: Json) -> Json:
    """A device with a UUID, the same each time: before 2.8 Ganeti's had none, and it invents some.

    A NIC gets the UUID that :program:`brine nic` derives from its MAC.
    """
    if device.get("uuid") is not None:
        return device
    if kind is DeviceKind.NIC and isinstance(device.get("mac"), str):
        return {**device, "uuid": uuid_of_mac(device["mac"])}
    told = json.dumps(device.get("logical_id") or device, sort_keys=True)
    import uuid  # takes long to load, and only old files need it

    return {**device, "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, told))}


def _to_ganeti(kind: DeviceKind, device: Json, index: int) -> Json:
    """A device of Brine's in Ganeti's form.

    :param index: its place among the devices of its kind, from 0.
    """
    found: Json = {"uuid": device["uuid"], "name": None}
    if kind is DeviceKind.NIC:
        found |= {key: device.get(key) for key in ("mac", "ip", "nicparams")}
        found |= {"network": None, "netinfo": None}
    else:
        is_device = device["path"].startswith("/dev/")
        found |= {
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
    return found | {key: device[key] for key in ("pci", "hvinfo") if key in device}


# Updating runtime files: a writer holds the lock from reading to writing.

LOCK_TIMEOUT_S = 10.0
"""A change takes milliseconds."""


def lock_name(purpose: str, file: Path) -> str:
    """The name of a file's or a socket's lock, the same for every path that leads to it."""
    real = os.path.realpath(file)
    digest = sha256(os.fsencode(real)).hex()[:12]
    readable = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(real).stem)[:40]
    return f"{purpose}-{readable}-{digest}"


def change_file(
    file: Path, how: Callable[[Runtime], Runtime], *, timeout_s: float = LOCK_TIMEOUT_S
) -> bool:
    """Change a runtime file; False if nothing had to change.

    :param how: returns the new content for the old.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(node_lock(lock_name("runtime", file), timeout_s=timeout_s))
        except LockError as error:
            raise RuntimeFileError(file, f"can't be locked: {error}", hint=error.hint) from error
        old = Runtime.load(file)
        new = how(old)
        if new == old:
            return False
        new.save(file)
    return True
