"""What was plugged into an instance while it ran, and what was taken out: its next start has it so.

The runtime file says what QEMU was started with, and what it has been plugged since. The difference
goes into the spec, unless that was defined anew meanwhile: then that is what its admin wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from brine.common import paths
from brine.hotplug.device_names import Bus, Kind
from brine.hotplug.disk import DRIVERS
from brine.hotplug.runtime import Runtime, RuntimeFileError
from brine.hotplug.wish import Wish
from brine.instance.definition import check
from brine.instance.schema import SpecError, parse
from brine.instance.spec import DiskSpec, Interface, NicSpec, Spec
from brine.instance.spec_files import InstanceError

Device = TypeVar("Device", bound=DiskSpec | NicSpec)


def with_hot_changes(spec: Spec) -> Spec:
    """The spec with what has been plugged since the instance was started.

    A runtime file that does not say what the instance was started as is another's work, such as
    Ganeti's, and says nothing of it.

    :raises InstanceError: if the runtime file can't be used, or what was plugged does not go
        together with the spec.
    """
    file = paths.RUNTIME_DIR / f"{spec.name}.json"
    if not file.exists():
        return spec
    hint = f"remove {file}, and what was plugged in by hand is forgotten"
    try:
        runtime = Runtime.load(file)
        if not isinstance(runtime.rest, dict) or "spec" not in runtime.rest:
            return spec
        changed = _changed(spec, runtime)
        if changed != spec:
            check(changed)
    except RuntimeFileError as error:
        raise InstanceError(spec.name, str(error), hint=hint) from error
    except SpecError as error:
        raise InstanceError(spec.name, f"{file}: {error}", hint=hint) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InstanceError(spec.name, f"{file}: is damaged: {error}", hint=hint) from error
    return changed


def _changed(spec: Spec, runtime: Runtime) -> Spec:
    started = {key: runtime.rest["spec"][key] for key in ("disks", "nics")}
    before = parse(Spec, {"name": spec.name, **started})
    if (spec.disks, spec.nics) != (before.disks, before.nics):
        return spec
    fixed = {disk.uuid: disk for disk in spec.disks if disk.interface == Interface.IDE}
    disks = {one["uuid"]: _disk_of(one) for one in runtime.devices[Kind.DISK]}
    nics = {one["uuid"]: _nic_of(one) for one in runtime.devices[Kind.NIC]}
    return replace(
        spec,
        disks=_merged(spec.disks, {**fixed, **disks}),
        nics=_merged(spec.nics, nics),
    )


def _merged(before: tuple[Device, ...], now: Mapping[str, Device]) -> tuple[Device, ...]:
    """Those that are left, in their order, and the new ones after them."""
    kept = [now[device.uuid] for device in before if device.uuid in now]
    uuids = {device.uuid for device in before}
    return (*kept, *(device for uuid, device in now.items() if uuid not in uuids))


def _disk_of(entry: Mapping[str, Any]) -> DiskSpec:
    is_scsi = (entry.get("hvinfo") or {}).get("driver") == DRIVERS[Bus.SCSI]
    same = ("uuid", "path", "format", "cache", "aio", "discard", "read_only")
    data = {
        **{key: entry[key] for key in same},
        "interface": (Interface.SCSI if is_scsi else Interface.VIRTIO).value,
        "serial": entry["serial"] or "",
    }
    return parse(DiskSpec, data, f"/disks/{entry['uuid']}")


def _nic_of(entry: Mapping[str, Any]) -> NicSpec:
    wish = Wish.from_json(entry)
    wiring = wish.wiring
    data = {
        "uuid": wish.nic.uuid,
        "mac": wish.nic.mac,
        "model": wish.nic.model,
        "mode": wiring.mode.value,
        "link": wiring.link,
        "vlan": wiring.vlan,
        "ips": list(wiring.ips),
        "queues": wish.queues,
        "vhost": wish.vhost,
        "mtu": wiring.mtu or 0,
    }
    return parse(NicSpec, data, f"/nics/{entry['uuid']}")
