"""What a running QEMU says of itself, to whoever asks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from brine.common.qmp_errors import QmpProtocolError

PERIPHERAL = "/machine/peripheral"
"""Where QEMU has the devices that have an id."""

_CHILD = re.compile(r"child<(?P<type>[^<>]+)>")


class Monitor(Protocol):
    """A client of a QEMU monitor, as far as it takes to ask."""

    path: Path

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Give a command and return QEMU's answer."""


class Inventory:
    """What can be asked about a VM."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    async def vm_name(self) -> str:
        """What the VM is called: QEMU's ``-name``, or else its socket's."""
        answer = await self.monitor.execute("query-name")
        name = answer.get("name") if type(answer) is dict else None
        return str(name or self.monitor.path.stem)

    async def devices(self) -> dict[str, str]:
        """The types of the devices that have an id, by that."""
        return await self.children(PERIPHERAL)

    async def children(self, path: str) -> dict[str, str]:
        """The types of an object's children, by their names."""
        found = {}
        for item in await self.list_of("qom-list", {"path": path}):
            if match := _CHILD.fullmatch(str(item.get("type"))):
                found[str(item.get("name"))] = match["type"]
        return found

    async def list_of(self, command: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """What a command answers that lists objects.

        :raises brine.common.qmp.QmpProtocolError: if it answers something else.
        """
        answer = await self.monitor.execute(command, arguments)
        if type(answer) is not list or any(type(item) is not dict for item in answer):
            raise QmpProtocolError(f"{self.monitor.path}: no answer to {command}: {answer!r:.60}")
        return answer

    async def has_device(self, device_id: str) -> bool:
        """Whether there is a device of that id."""
        return device_id in await self.devices()

    async def property(self, device_id: str, name: str, folder: str = PERIPHERAL) -> Any:
        """A property of a device, such as its serial."""
        path = f"{folder}/{device_id}"
        return await self.monitor.execute("qom-get", {"path": path, "property": name})
