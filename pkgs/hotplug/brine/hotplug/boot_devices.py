"""NICs and disks that a VM has and that were not plugged in by us: it was started with them.

They are in three folders of QEMU's objects: those with an id, those without, and what options such
as ``-nic`` make.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from brine.common.qmp_errors import QmpCommandError
from brine.hotplug.device_names import DeviceName, Kind
from brine.hotplug.disk_uses import ide_disks, is_same
from brine.hotplug.errors import HotplugError
from brine.hotplug.machine import Machine
from brine.hotplug.references import is_path
from brine.hotplug.runtime import Runtime, qemu_id

_FOLDERS = ("/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached")
_TYPES = {
    Kind.NIC: re.compile(r".*(net|e1000|rtl8139|ne2k|pcnet|i82[58]|igb|tulip|sungem)"),
    Kind.DISK: re.compile(r"(virtio-blk|scsi-|ide-|nvme|usb-storage)"),
}
_KNOWN_BY = {Kind.NIC: "mac", Kind.DISK: "serial"}


async def has_boot_device(machine: Machine, kind: Kind, reference: str) -> bool:
    """Whether there is such a device that is known by that: its id, or its MAC or serial.

    :raises brine.common.qmp.QmpError: if QEMU does not answer, or not as it should.
    """
    wanted = reference.lower()
    async for name, value in _boot_devices(machine, kind):
        if wanted in (name.lower(), value.lower()):
            return True
    return False


async def refuse_boot_device(
    machine: Machine, kind: Kind, reference: str, runtime: Path | None
) -> None:
    """Refuse to take a device out that the VM was started with.

    :param runtime: its runtime file, if there is one: a device there that has no id of ours was not
        plugged in by us.
    :raises HotplugError: if the reference is such a device's.
    """
    is_one = await has_boot_device(machine, kind, reference)
    if not is_one and runtime:
        recorded = Runtime.load(runtime)
        is_one = kind is Kind.DISK and is_path(reference) and _is_ide(recorded, reference)
        for device in recorded.known_as(kind, reference):
            is_one = is_one or await _is_there(machine, kind, device)
    if is_one:
        raise HotplugError(
            f"{reference}: was there when the VM started, and can't be unplugged before its next"
            " start",
            hint="--no-hotplug takes it out of the runtime file" if runtime else None,
        )


def _is_ide(runtime: Runtime, path: str) -> bool:
    started = runtime.rest if isinstance(runtime.rest, dict) else {}
    return any(is_same(use.path, path) for use in ide_disks(started))


async def _is_there(machine: Machine, kind: Kind, device: dict[str, Any]) -> bool:
    """Whether a device that the runtime file has may be in the VM since its start.

    A NIC's MAC says it. Of a disk nothing may be known: rather one that is not there is refused
    than one taken for unplugged that is.
    """
    if qemu_id(device):
        return False
    if kind is Kind.NIC and device.get("mac"):
        return await has_boot_device(machine, kind, str(device["mac"]))
    return True


async def _boot_devices(machine: Machine, kind: Kind) -> AsyncIterator[tuple[str, str]]:
    """What is there of that kind: name, and MAC or serial."""
    for folder in _FOLDERS:
        for name, type_ in (await machine.children(folder)).items():
            ours = DeviceName.parse(name)
            if _TYPES[kind].match(type_) and not (ours and ours.kind is kind):
                yield name, await _property(machine, f"{folder}/{name}", _KNOWN_BY[kind])


async def _property(machine: Machine, path: str, name: str) -> str:
    try:
        return str(await machine.qmp.execute("qom-get", {"path": path, "property": name}))
    except QmpCommandError:
        return ""  # not every type has it
