"""Plugging disks: descriptors go to QEMU as a set, then the block node, then what the guest sees.

QEMU opens nothing by itself, so it may run as any user, and in any root. Source: "Dealing with
chroot and uid pool (and disks in general)" in the hotplug design.
"""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from brine.common.qmp_errors import QmpCommandError, QmpProtocolError
from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.disk import (
    MOST_BACKING,
    Disk,
    block_node_names,
    block_nodes,
    disk_device,
    fdset_opaque,
)
from brine.hotplug.errors import HotplugError
from brine.hotplug.fdsets import fdsets
from brine.hotplug.machine import Machine
from brine.hotplug.slots import Slot
from brine.hotplug.undo import Undo
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device

if TYPE_CHECKING:
    from brine.hotplug.disk_files import Opened


async def plug_disk(
    machine: Machine,
    disk: Disk,
    files: Opened,
    slot: Slot,
    undo: Undo,
    *,
    bus: Bus = Bus.PCI,
    timeout_s: float = UNPLUG_TIMEOUT_S,
) -> str:
    """Plug a disk in; returns its device id.

    :param undo: learns what undoes each step.
    :param bus: of *slot*.
    :param timeout_s: how long the guest may take to give it up again, if a later step fails.
    :raises HotplugError: if this QEMU can't be given descriptors.
    :raises brine.common.qmp.QmpError: what failed.
    """
    device_id = str(DeviceName.of(Kind.DISK, disk.uuid, bus, slot.number))
    opaque = fdset_opaque(device_id, disk)
    undo.by(partial(_remove_fdsets, machine, device_id), asks_qemu=True)
    fdset = await hand_over(machine, opaque, files.descriptors)
    for node in reversed(block_node_names(device_id, backing=0)):
        # A device that is gone may keep it for a moment.
        close = partial(machine.remove, "blockdev-del", {"node-name": node})
        undo.by(close, asks_qemu=True)
    for layer in block_nodes(device_id, disk, [(fdset, files.is_device)]):
        await machine.qmp.execute("blockdev-add", layer)
    undo.by(partial(unplug_device, machine, device_id, timeout_s=timeout_s), asks_qemu=True)
    try:
        await machine.qmp.execute("device_add", disk_device(device_id, disk, slot, bus))
    except QmpCommandError as error:
        if " lock" not in error.description:
            raise
        hint = "another VM or program has it open for writing"
        raise HotplugError(f"{disk.path}: is in use: {error.description}", hint=hint) from error
    return device_id


async def remove_disk_back_end(machine: Machine, device_id: str) -> None:
    """Have QEMU close what a disk that is gone is kept in; nothing happens if it has."""
    sets = {one.number for one in await fdsets(machine) if one.device_id == device_id}
    for node in block_node_names(device_id, backing=min(max(len(sets) - 1, 0), MOST_BACKING)):
        await machine.remove("blockdev-del", {"node-name": node})
    await _remove_fdsets(machine, device_id)


async def plugged_disks(machine: Machine) -> dict[str, Disk]:
    """The disks as they were plugged in, by device id; without those that were somebody else's
    work, of which nothing is known."""
    found = {}
    for one in await fdsets(machine):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found[one.device_id] = Disk.from_json(json.loads(one.disk))
    return found


async def _remove_fdsets(machine: Machine, device_id: str) -> None:
    for number in {one.number for one in await fdsets(machine) if one.device_id == device_id}:
        await machine.remove("remove-fd", {"fdset-id": number})


async def hand_over(machine: Machine, opaque: str, descriptors: tuple[int, ...]) -> int:
    """Give QEMU a set of descriptors; returns its number.

    :param opaque: what it is told of each; the device's id comes first.

    :raises HotplugError: if this QEMU can't be given any.
    """
    arguments: dict[str, Any] = {"opaque": opaque}
    for descriptor in descriptors:
        try:
            added = await machine.qmp.execute("add-fd", arguments, descriptors=[descriptor])
        except QmpCommandError as error:
            if error.error_class != "CommandNotFound":
                raise
            raise HotplugError(
                "this QEMU has no add-fd, so it can't be given a disk",
                hint="restart the VM with a newer QEMU",
            ) from error
        number = added.get("fdset-id") if type(added) is dict else None
        if type(number) is not int:
            raise QmpProtocolError(f"{machine.qmp.path}: no answer to add-fd: {added!r:.60}")
        arguments["fdset-id"] = number
    return int(arguments["fdset-id"])
