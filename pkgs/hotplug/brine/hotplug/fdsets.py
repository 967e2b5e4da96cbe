"""The descriptors that QEMU was given in sets, and what it was told of each."""

from __future__ import annotations

from dataclasses import dataclass

from brine.common.qmp_errors import QmpCommandError
from brine.hotplug.inventory import Inventory


@dataclass(frozen=True, slots=True)
class FdSet:
    """A descriptor of a set, and what QEMU was told of it.

    :param disk: as JSON.
    """

    number: int
    device_id: str
    uuid: str
    disk: str


async def fdsets(inventory: Inventory) -> list[FdSet]:
    """All descriptors that QEMU has in sets, ours and others'."""
    try:
        answer = await inventory.monitor.execute("query-fdsets")
    except QmpCommandError as error:
        if error.error_class != "CommandNotFound":
            raise
        return []  # this QEMU has none
    found = []
    for fdset in answer:
        for each in fdset["fds"]:
            device_id, _, rest = str(each.get("opaque", "")).partition(" ")
            uuid, _, text = rest.partition(" ")
            found.append(FdSet(fdset["fdset-id"], device_id, uuid, text))
    return found


async def whole_uuids(inventory: Inventory) -> dict[str, str]:
    """The UUIDs of the disks that QEMU was given, by device id, which has but a part of them."""
    return {one.device_id: one.uuid for one in await fdsets(inventory) if one.uuid}
