"""What a running QEMU says of itself, to whoever asks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from brine.common.printable import printable
from brine.common.qmp_errors import QmpProtocolError

PERIPHERAL = "/machine/peripheral"
"""Where QEMU has the devices that have an id."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LONGEST_VALUE = 1024
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
        """What the VM is called: as its socket is. QEMU must not say otherwise by its ``-name``.

        :raises QmpProtocolError: if it does, or the socket's name can be no VM's.
        """
        name = self.monitor.path.stem
        if not _NAME.fullmatch(name):
            raise QmpProtocolError(f"{self.monitor.path}: no VM can be called {printable(name)!r}")
        answer = await self.monitor.execute("query-name")
        said = answer.get("name", name) if type(answer) is dict else None
        if said != name:
            raise QmpProtocolError(
                f"{self.monitor.path}: QEMU calls itself {said!r:.80}, and not {name}",
                hint="a QMP socket has its VM's name, with .qmp after it",
            )
        return name

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
        """A property of a device, such as its serial: a string of some length, or a number.

        :raises QmpProtocolError: if QEMU says it is something else.
        """
        path = f"{folder}/{device_id}"
        value = await self.monitor.execute("qom-get", {"path": path, "property": name})
        if type(value) not in (str, int, bool) or len(str(value)) > _LONGEST_VALUE:
            raise QmpProtocolError(f"{self.monitor.path}: no {name} of {device_id}: {value!r:.60}")
        return value
