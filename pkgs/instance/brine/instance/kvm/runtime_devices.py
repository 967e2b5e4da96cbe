"""The devices of an instance by its runtime file: those of now, and what its next start keeps.

The runtime file has the spec of the start, and the devices of now. The difference is what was
plugged in or unplugged meanwhile. It goes into the spec of the next start, unless an admin has
redefined the disks, or the NICs, since: then these win.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from brine.common.errors import BrineError, printable, warn
from brine.instance import messages
from brine.instance.devices import with_formats_found
from brine.instance.kvm.layout import layout_of, with_slots
from brine.instance.store import InstanceError, keep_runtime_aside
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk, Interface
from brine.vm.files import InstanceFiles
from brine.vm.nic import Nic
from brine.vm.runtime_file import Runtime, RuntimeFileError
from brine.vm.spec import Spec, SpecError, known_part, parse, to_json
from brine.vm.vif import Vif

Device = TypeVar("Device", bound=Disk | Nic)

KEYS = ("disks", "nics")
_COMPLETED_BY_START = ("slot", "format_source")
_NOT_IN_ENTRIES = ("format_source", "name", "unit", "size_mib", "by_hand")  # of runtime files


class UnusableError(InstanceError):
    """A runtime file that can't be used for its instance."""


def with_last_run(spec: Spec) -> Spec:
    """The spec for the next start: with the devices of the last run, their slots and formats. The
    caller holds the instance's lock."""
    changed, fault = hot_changes_or_aside(spec)
    if fault:
        warn(f"{spec.name}: {fault}", program="brine-instance")
    if gone := dropped(changed):
        text = f"not in its spec, and plugged no more: {', '.join(gone)}"
        warn(f"{spec.name}: {text}", program="brine-instance")
    if said := device_changes(spec, changed):
        messages.tell(messages.HOT_CHANGES, spec.name, how=", ".join(said))
    changed = with_formats_found(changed)
    return with_slots(changed, layout_of(changed))


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
    with _faults_of(spec.name, file):
        changed = _changed(spec, _load(spec.name, file))
        if changed != spec:
            from brine.instance.validate import check  # most have none

            check(changed)
    return changed


def hot_changes_or_aside(spec: Spec) -> tuple[Spec, str]:
    """The same; a runtime file that can't be used is kept under another name, for people.

    :returns: the spec, and the fault of that file; empty if there is none.
    """
    try:
        return with_hot_changes(spec), ""
    except UnusableError:
        file = keep_runtime_aside(spec.name)
    messages.tell(messages.RUNTIME_ASIDE, spec.name, file=file, reason=_fault_of(spec, file))
    return spec, why_aside(spec, file)


def why_aside(spec: Spec, file: Path) -> str:
    """Why a runtime file is kept aside as *file*, for people."""
    return f"its runtime file is not used, and kept as {file}: {_fault_of(spec, file)}"


def _fault_of(spec: Spec, file: Path) -> str:
    """The fault of a runtime file, and its devices that the spec lacks."""
    fault = "it could not be used"
    try:
        with_hot_changes(spec, file)
    except InstanceError as error:
        fault = str(error).removeprefix(f"{spec.name}: ").removeprefix(f"{file}: ")
    devices = ", ".join(_unknown_devices(spec, file))
    return f"{fault}; its spec does not have {devices}" if devices else fault


def _unknown_devices(spec: Spec, file: Path) -> Iterator[str]:
    """The devices of a file that the spec lacks, as far as they can be read, in words."""
    try:
        runtime = Runtime.load(file)
    except RuntimeFileError:
        return
    known = {text.lower() for one in spec.disks for text in (one.uuid, one.path)}
    for disk in runtime.devices[DeviceKind.DISK]:
        names = [one for one in runtime.paths_of(disk) if one]
        if not {str(name).lower() for name in (disk["uuid"], *names)} & known:
            yield printable(f"disk {names[0] if names else disk['uuid']}")
    known = {text.lower() for one in spec.nics for text in (one.uuid, one.mac)}
    for nic in runtime.devices[DeviceKind.NIC]:
        if not {str(name).lower() for name in (nic["uuid"], nic.get("mac"))} & known:
            yield printable(f"NIC {nic.get('mac') or nic['uuid']}")


def device_changes(before: Spec, after: Spec) -> list[str]:
    """The differences of the devices, in words."""
    kinds = (("disk", "path", before.disks, after.disks), ("NIC", "mac", before.nics, after.nics))
    found = []
    for noun, name, olds, news in kinds:
        old, new = ({one.uuid: one for one in devices} for devices in (olds, news))
        for uuid in {**old, **new}:
            word = "taken out" if uuid not in new else "plugged in" if uuid not in old else ""
            if not word and replace(old[uuid], slot=new[uuid].slot) != new[uuid]:
                word = "changed"
            if word:
                found.append(f"{noun} {getattr(new.get(uuid) or old[uuid], name)} {word}")
    return found


def dropped(spec: Spec) -> list[str]:
    """The plugged devices that the next start drops because the spec was redefined, in words."""
    file = InstanceFiles(spec.name).runtime
    if not os.path.lexists(file):
        return []
    try:
        runtime, after = Runtime.load(file), with_hot_changes(spec)
    except BrineError:
        return []  # a start tells its fault
    if not (started := runtime.started_with()):
        return []
    kinds = (
        (DeviceKind.DISK, "disk", "path", started["disks"], after.disks),
        (DeviceKind.NIC, "NIC", "mac", started["nics"], after.nics),
    )
    found = []
    for kind, noun, name, before, devices in kinds:
        known = {one["uuid"] for one in before} | {one.uuid for one in devices}
        gone = [one for one in runtime.devices[kind] if one["uuid"] not in known]
        found += [printable(f"{noun} {one.get(name) or one['uuid']}") for one in gone]
    return found


def plugged_already(spec: Spec) -> list[str]:
    """The keys of devices (``disks``, ``nics``) that are the same now and at the next start: an
    admin has both redefined and plugged them."""
    try:
        now = devices_now(spec.name).now
        later = with_hot_changes(spec)
    except BrineError:
        return []  # the next start tells its fault

    def compared(of: Spec, key: str) -> list[dict[str, Any]]:
        return [as_asked(one) for one in getattr(of, key)]

    return [key for key in KEYS if compared(now, key) == compared(later, key)]


@dataclass(frozen=True, slots=True)
class DevicesNow:
    """The disks and NICs of a running instance.

    :param declared: those of the definitions that it runs with.
    :param now: those that it has.
    """

    declared: Spec
    now: Spec
    runtime: Runtime


def devices_now(name: str) -> DevicesNow:
    """The disks and NICs of a running instance, by its runtime file.

    :raises InstanceError: if that can't be used.
    """
    file = InstanceFiles(name).runtime
    with _faults_of(name, file):
        runtime = _load(name, file)
        declared = _started_with(name, runtime)
        return DevicesNow(declared, _changed(declared, runtime), runtime)


def spec_now(name: str, runtime: Runtime) -> Spec:
    """What a running QEMU has, as a spec: that of its start, with the devices of now.

    :param runtime: of any node's QEMU.
    :raises InstanceError: if it does not tell.
    """
    with _faults_of(name, runtime.file):
        declared = parse(Spec, {**known_part(Spec, runtime.started_with()), "name": name})
        return _changed(declared, runtime)


def as_asked(device: Disk | Nic) -> dict[str, Any]:
    """A device as JSON, without what a start completes, and what QEMU is not told."""
    return {**to_json(device.as_qemu_has_it()), **dict.fromkeys(_COMPLETED_BY_START)}


@contextlib.contextmanager
def _faults_of(name: str, file: Path) -> Iterator[None]:
    """Turn faults of a runtime file into errors of its instance."""
    try:
        yield
    except RuntimeFileError as error:
        cause = error.__cause__
        # Something other than a file can never be read; a file may be readable later.
        if isinstance(cause, OSError) and cause.errno not in (errno.EINVAL, errno.ENXIO):
            raise InstanceError(name, str(error)) from error
        raise UnusableError(name, str(error)) from error
    except SpecError as error:
        raise UnusableError(name, f"{file}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnusableError(name, f"{file}: is damaged: {error}") from error


def _load(name: str, file: Path) -> Runtime:
    runtime = Runtime.load(file)
    if runtime.started_with() is None:
        raise UnusableError(name, f"{file}: lacks the settings of its start")
    return runtime


def _changed(spec: Spec, runtime: Runtime) -> Spec:
    before = _started_with(spec.name, runtime)
    fixed = {disk.uuid: disk for disk in spec.disks if disk.interface == Interface.IDE}
    known = {disk.uuid: disk for disk in spec.disks}
    disks = {
        one["uuid"]: _known_as(known.get(one["uuid"]), _disk_of(one))
        for one in runtime.devices[DeviceKind.DISK]
    }
    known_nics = {nic.uuid: nic for nic in spec.nics}
    nics = {
        one["uuid"]: _known_as(known_nics.get(one["uuid"]), _nic_of(one))
        for one in runtime.devices[DeviceKind.NIC]
    }
    # If the admin has redefined the disks, or the NICs, the spec wins for these.
    # One on IDE can't be taken out before the next start, and its removal says nothing of others.
    left = [one for one in before.disks if one.interface != Interface.IDE or one.uuid in known]
    is_same_disks = _as_qemu_has_them(spec.disks) == _as_qemu_has_them(left)
    is_same_nics = _as_qemu_has_them(spec.nics) == _as_qemu_has_them(before.nics)
    return replace(
        spec,
        disks=_merged(spec.disks, {**fixed, **disks}) if is_same_disks else spec.disks,
        nics=_merged(spec.nics, nics) if is_same_nics else spec.nics,
    )


def _known_as(known: Device | None, now: Device) -> Device:
    """A device of the runtime file, with what only the spec knows of it. One that the spec lacks
    was plugged in by hand."""
    if known is None:
        return replace(now, by_hand=True)
    names = [name for name in _NOT_IN_ENTRIES if hasattr(now, name)]
    return replace(now, **{name: getattr(known, name) for name in names})


def _as_qemu_has_them(devices: Iterable[Disk | Nic]) -> list[Disk | Nic]:
    return [one.as_qemu_has_it() for one in devices]


def _started_with(name: str, runtime: Runtime) -> Spec:
    started = runtime.started_with() or {}
    return parse(Spec, {"name": name, **{key: started[key] for key in KEYS}})


def _merged(before: tuple[Device, ...], now: Mapping[str, Device]) -> tuple[Device, ...]:
    """The remaining devices in their order, then the new ones."""
    kept = {device.uuid: now[device.uuid] for device in before if device.uuid in now}
    return tuple({**kept, **now}.values())


def _disk_of(entry: Mapping[str, Any]) -> Disk:
    return parse(Disk, to_json(Disk.from_recorded(entry)), f"/disks/{entry['uuid']}")


def _nic_of(entry: Mapping[str, Any]) -> Nic:
    slot = entry.get("pci")  # there is none of a device that was recorded for the next start
    nic = Vif.from_recorded(entry).as_nic(slot if isinstance(slot, int) else -1)
    return parse(Nic, to_json(nic), f"/nics/{entry['uuid']}")
