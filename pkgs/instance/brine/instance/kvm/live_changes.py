"""Devices that were plugged in or unplugged while an instance ran, which its next start keeps.

The runtime file says what QEMU was started with, and what was plugged since. The difference goes
into the spec, unless an admin has redefined its disks, or its NICs, meanwhile: then these win.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from brine.common.errors import BrineError, printable
from brine.common.paths import InstanceFiles
from brine.hotplug.address import Bus, DeviceKind
from brine.hotplug.disk import DRIVERS
from brine.hotplug.runtime_file import Runtime, RuntimeFileError, path_of_disk
from brine.instance import messages
from brine.instance.spec import DiskSpec, Interface, NicSpec, Spec, SpecError, parse
from brine.instance.store import InstanceError, keep_runtime_aside

Device = TypeVar("Device", bound=DiskSpec | NicSpec)


class UnusableError(InstanceError):
    """A runtime file that can't be used for its instance."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A runtime file that could not be used, and is kept under another name.

    :param file: its new name.
    :param reason: why it could not be used.
    :param devices: the devices in it that the spec lacks, as far as they can be read.
    """

    file: Path
    reason: str
    devices: tuple[str, ...]

    def __str__(self) -> str:
        text = f"its runtime file is not used, and kept as {self.file}: {self.reason}"
        return f"{text}; {_missing(self.devices)}" if self.devices else text


def with_hot_changes(spec: Spec, file: Path | None = None) -> Spec:
    """The spec with the devices that were plugged since the instance was started.

    :param file: None is the instance's runtime file.
    :raises UnusableError: if the runtime file is damaged, its devices conflict with the spec, or
        another program wrote it, such as Ganeti, which does not record the spec of the start.
    :raises InstanceError: if it can't be read now.
    """
    file = file or InstanceFiles(spec.name).runtime
    if not os.path.lexists(file):
        return spec
    try:
        runtime = Runtime.load(file)
        if not isinstance(runtime.rest, dict) or "spec" not in runtime.rest:
            raise UnusableError(spec.name, f"{file}: does not say what it was started as")
        changed = _changed(spec, runtime)
        if changed != spec:
            from brine.instance.validate import check  # most have none

            check(changed)
    except RuntimeFileError as error:
        cause = error.__cause__
        # Something other than a file can never be read; a file may be readable later.
        if isinstance(cause, OSError) and cause.errno not in (errno.EINVAL, errno.ENXIO):
            raise InstanceError(spec.name, str(error)) from error
        raise UnusableError(spec.name, str(error)) from error
    except SpecError as error:
        raise UnusableError(spec.name, f"{file}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnusableError(spec.name, f"{file}: is damaged: {error}") from error
    return changed


def devices_now(name: str) -> Spec:
    """A spec with the disks and NICs of a running instance, and nothing else.

    :raises InstanceError: if its runtime file does not have them.
    """
    file = InstanceFiles(name).runtime
    try:
        runtime = Runtime.load(file)
        return _changed(_started_with(name, runtime), runtime)
    except RuntimeFileError as error:
        raise UnusableError(name, str(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError, SpecError) as error:
        raise UnusableError(name, f"{file}: is damaged: {error}") from error


def hot_changes_or_aside(spec: Spec) -> tuple[Spec, SetAside | None]:
    """The same; a runtime file that can't be used is kept aside for people.

    :raises InstanceError: if it can't be read now, or can't be kept.
    """
    file = InstanceFiles(spec.name).runtime
    try:
        return with_hot_changes(spec), None
    except UnusableError as error:
        reason = _reason(spec, file, error)
    devices = tuple(_unknown_devices(spec, file))
    aside = SetAside(keep_runtime_aside(spec.name), reason, devices)
    said = "; ".join([reason, *([_missing(devices)] if devices else [])])
    messages.tell(messages.RUNTIME_ASIDE, spec.name, file=aside.file, reason=said)
    return spec, aside


def why_aside(spec: Spec, file: Path) -> SetAside:
    """Why a runtime file is kept aside.

    :param spec: of that time.
    :param file: its new name.
    """
    try:
        with_hot_changes(spec, file)
        reason = "it could not be used"
    except InstanceError as error:
        reason = _reason(spec, file, error)
    return SetAside(file, reason, tuple(_unknown_devices(spec, file)))


def _reason(spec: Spec, file: Path, error: InstanceError) -> str:
    return str(error).removeprefix(f"{spec.name}: ").removeprefix(f"{file}: ")


def differences(before: Spec, after: Spec) -> list[str]:
    """The differences of the devices, in words."""
    kinds = (("disk", "path", before.disks, after.disks), ("NIC", "mac", before.nics, after.nics))
    found = []
    for noun, name, olds, news in kinds:
        old, new = ({one.uuid: one for one in devices} for devices in (olds, news))
        for uuid in (*old, *(uuid for uuid in new if uuid not in old)):
            word = "taken out" if uuid not in new else "plugged in" if uuid not in old else ""
            if not word and replace(old[uuid], slot=new[uuid].slot) != new[uuid]:
                word = "changed"
            if word:
                found.append(f"{noun} {getattr(new.get(uuid) or old[uuid], name)} {word}")
    return found


def _unknown_devices(spec: Spec, file: Path) -> Iterator[str]:
    """The devices of a file that the spec lacks, as far as they can be read, in words."""
    try:
        runtime = Runtime.load(file)
    except RuntimeFileError:
        return
    disks = {value.lower() for one in spec.disks for value in (one.uuid, one.path)}
    nics = {value.lower() for one in spec.nics for value in (one.uuid, one.mac)}
    for disk in runtime.devices[DeviceKind.DISK]:
        link, _ = runtime.links.get(disk["uuid"], (None, None))
        names = [one for one in (disk.get("path"), link, path_of_disk(disk)) if one]
        if not {str(name).lower() for name in (disk["uuid"], *names)} & disks:
            yield printable(f"disk {names[0] if names else disk['uuid']}")
    for nic in runtime.devices[DeviceKind.NIC]:
        if not {str(name).lower() for name in (nic["uuid"], nic.get("mac"))} & nics:
            yield printable(f"NIC {nic.get('mac') or nic['uuid']}")


def _missing(devices: Sequence[str]) -> str:
    return f"its spec does not have {', '.join(devices)}"


def _changed(spec: Spec, runtime: Runtime) -> Spec:
    before = _started_with(spec.name, runtime)
    fixed = {disk.uuid: disk for disk in spec.disks if disk.interface == Interface.IDE}
    sources = {disk.uuid: disk.format_source for disk in spec.disks}
    disks = {one["uuid"]: _disk_of(one) for one in runtime.devices[DeviceKind.DISK]}
    for uuid in disks.keys() & sources.keys():
        disks[uuid] = replace(disks[uuid], format_source=sources[uuid])
    nics = {one["uuid"]: _nic_of(one) for one in runtime.devices[DeviceKind.NIC]}
    # If the admin has redefined the disks, or the NICs, the spec wins for these.
    is_same_disks, is_same_nics = spec.disks == before.disks, spec.nics == before.nics
    return replace(
        spec,
        disks=_merged(spec.disks, {**fixed, **disks}) if is_same_disks else spec.disks,
        nics=_merged(spec.nics, nics) if is_same_nics else spec.nics,
    )


def _started_with(name: str, runtime: Runtime) -> Spec:
    started = {key: runtime.rest["spec"][key] for key in ("disks", "nics")}
    return parse(Spec, {"name": name, **started})


def dropped(spec: Spec) -> list[str]:
    """The plugged devices that the next start drops because the spec was redefined, in words."""
    file = InstanceFiles(spec.name).runtime
    if not os.path.lexists(file):
        return []
    try:
        runtime, after = Runtime.load(file), with_hot_changes(spec)
        started = runtime.rest["spec"]
    except (BrineError, TypeError, KeyError):
        return []  # a start says what is wrong with it
    kinds = (
        (DeviceKind.DISK, "disk", "path", started["disks"], after.disks),
        (DeviceKind.NIC, "NIC", "mac", started["nics"], after.nics),
    )
    found = []
    for kind, noun, name, before, devices in kinds:
        known = {one["uuid"] for one in before} | {one.uuid for one in devices}
        for one in runtime.devices[kind]:
            if one["uuid"] not in known:
                found.append(printable(f"{noun} {one.get(name) or one['uuid']}"))
    return found


def _merged(before: tuple[Device, ...], now: Mapping[str, Device]) -> tuple[Device, ...]:
    """The remaining devices in their order, then the new ones."""
    kept = [now[device.uuid] for device in before if device.uuid in now]
    uuids = {device.uuid for device in before}
    return (*kept, *(device for uuid, device in now.items() if uuid not in uuids))


def _disk_of(entry: Mapping[str, Any]) -> DiskSpec:
    is_scsi = (entry.get("hvinfo") or {}).get("driver") == DRIVERS[Bus.SCSI]
    same = ("uuid", "path", "format", "cache", "aio", "discard", "read_only")
    data = {
        **{key: entry[key] for key in same},
        "backing": entry.get("backing"),  # older versions knew of none
        "interface": (Interface.SCSI if is_scsi else Interface.VIRTIO).value,
        "serial": entry["serial"] or "",
        "slot": _slot_of(entry),
    }
    return parse(DiskSpec, data, f"/disks/{entry['uuid']}")


def _slot_of(entry: Mapping[str, Any]) -> int:
    """The slot of a device; -1 for a device that was recorded for the next start."""
    slot = entry.get("pci")
    return slot if isinstance(slot, int) else -1


def _nic_of(entry: Mapping[str, Any]) -> NicSpec:
    from brine.hotplug.nic import Nic

    nic = Nic.from_json(entry)
    data = {
        "uuid": nic.uuid,
        "mac": nic.mac,
        "model": nic.model,
        "mode": nic.mode.value,
        "link": nic.link,
        "vlan": nic.vlan,
        "ips": list(nic.ips),
        "queues": nic.queues,
        "vhost": nic.vhost,
        "mtu": nic.mtu or 0,
        "slot": _slot_of(entry),
    }
    return parse(NicSpec, data, f"/nics/{entry['uuid']}")
