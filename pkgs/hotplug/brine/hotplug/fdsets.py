"""The descriptors that QEMU was given in sets, and what it was told of each."""

from __future__ import annotations

import json
from dataclasses import dataclass

from brine.common.printable import printable
from brine.common.qmp_errors import QmpCommandError, QmpProtocolError
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

    def path(self) -> str | None:
        """Where the disk is; None if that was not said, as by others than us."""
        try:
            path = json.loads(self.disk)["path"]
        except (ValueError, TypeError, KeyError):
            return None
        return printable(path) if isinstance(path, str) else None


async def fdsets(inventory: Inventory) -> list[FdSet]:
    """All descriptors that QEMU has in sets, ours and others'."""
    try:
        answer = await inventory.list_of("query-fdsets")
    except QmpCommandError as error:
        if error.error_class != "CommandNotFound":
            raise
        return []  # this QEMU has none
    found = []
    try:
        for fdset in answer:
            for each in fdset["fds"]:
                device_id, _, rest = str(each.get("opaque", "")).partition(" ")
                uuid, _, text = rest.partition(" ")
                found.append(FdSet(int(fdset["fdset-id"]), device_id, printable(uuid), text))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise QmpProtocolError(f"{inventory.monitor.path}: no answer to query-fdsets") from error
    return found


async def disk_sets(inventory: Inventory) -> dict[str, FdSet]:
    """What QEMU was told of each disk that it was given, by device id."""
    return {one.device_id: one for one in await fdsets(inventory) if one.uuid}
