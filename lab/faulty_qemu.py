"""A fake QEMU with a memory, for the faults of plugging that a real one won't show on demand.

It keeps devices, back ends and the descriptors that it is given, as QEMU does, and misbehaves where
it is told to:

    with FaultyQemu(path) as qemu:
        qemu.fail_at(5, Fault.REFUSED)
        ...
        assert qemu.holds() == []

Its guest gives devices up at once, unless told otherwise (`guest`).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

from lab.fake_qemu import NO_ANSWER, FakeQemu, FakeQemus, Refused

Json = dict[str, Any]

_COMMANDS = frozenset(
    {
        *("query-name", "query-status", "query-commands", "query-pci", "query-fdsets"),
        *("qom-list", "qom-get", "getfd", "closefd", "netdev_add", "netdev_del"),
        *("query-named-block-nodes", "x-debug-query-block-graph", "query-jobs"),
        *("add-fd", "remove-fd", "blockdev-add", "blockdev-del", "device_add", "device_del"),
    }
)


class Fault(Enum):
    """The ways in which a command can fail."""

    REFUSED = auto()  # QEMU has something against it
    UNHEARD = auto()  # the connection ends before QEMU does anything
    UNANSWERED = auto()  # the connection ends when QEMU has done it
    HANGS = auto()  # QEMU does it, and does not answer
    DIES = auto()  # QEMU ends, with all that it has


class Guest(Enum):
    """The guest's reaction to a request to give up a device."""

    OBEYS = auto()
    OBEYS_BEFORE_THE_ANSWER = auto()
    OBEYS_INSTEAD_OF_THE_ANSWER = auto()
    OBEYS_IN_SILENCE = auto()  # the event is lost
    TALKS_OF_ANOTHER = auto()  # of another device's end, before this one's
    REFUSES = auto()
    IGNORES = auto()


@dataclass
class _State:
    devices: dict[str, Json] = field(default_factory=dict)
    netdevs: dict[str, list[int]] = field(default_factory=dict)
    nodes: dict[str, Json] = field(default_factory=dict)
    fdsets: dict[int, list[tuple[int, str]]] = field(default_factory=dict)


class _RefusedError(Exception):
    def __init__(self, description: str, error_class: str = "GenericError") -> None:
        super().__init__(description)
        self.error_class = error_class


class _OverError(Exception):
    """The connection is to end."""


class FaultyQemu(FakeQemu):
    """The peer, in a thread of its own."""

    def __init__(self, path: Path, *, lacks: frozenset[str] = frozenset()) -> None:
        self._qemus = FakeQemus()
        super().__init__(path, self._qemus.loop)
        self._faults: dict[int, Fault] = {}
        self._lets_go_at: int | None = None
        self.guest = Guest.OBEYS
        self._lacks = lacks
        self._state = _State()
        self._named: dict[str, int] = {}
        self._releasing: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self.path.unlink(missing_ok=True)
        self._qemus.__enter__()
        return self._qemus.add(self)

    def __exit__(self, *_: object) -> None:
        self._qemus.__exit__()
        self._forget()

    def fail_at(self, number: int, fault: Fault) -> None:
        """Misbehave once, at the command that is given so many commands from now; 0 is the next."""
        self._faults = {len(self.received) + number: fault}

    def has_failed(self) -> bool:
        """Whether it did; if not, it does not any more."""
        faults, self._faults = self._faults, {}
        return not faults

    def holds(self) -> list[str]:
        """All that was plugged in or handed over and is still there when the client has left."""
        self.wait_left()
        state = self._state
        found = [*(f"device {name}" for name in state.devices)]
        found += [f"netdev {name}" for name in state.netdevs]
        found += [f"node {name}" for name in state.nodes]
        found += [f"fdset {number}" for number in state.fdsets]
        found += [f"descriptor {name}" for name in self._named]
        return found

    async def obey(self, command: str, arguments: Json) -> Any:
        """Do it, unless something is to go wrong with it."""
        number = len(self.received) - 1
        if self._lets_go_at == number:
            self.let_go()
        fault = self._faults.pop(number, None)
        if fault is Fault.UNHEARD:
            raise ConnectionError
        if fault is Fault.DIES:
            self._listener.close()
            self._forget()
            raise ConnectionError
        if fault is Fault.REFUSED:
            return Refused("it does not suit me")
        try:
            value = await self._do(command, arguments)
        except _RefusedError as refused:
            return Refused(str(refused), refused.error_class)
        if fault is Fault.UNANSWERED:
            raise ConnectionError
        return NO_ANSWER if fault is Fault.HANGS else value

    async def obeyed(self, command: str, arguments: Json) -> None:
        """The guest's reaction after QEMU has answered `device_del`."""
        device_id = arguments.get("id", "")
        if command != "device_del" or device_id not in self._state.devices:
            return
        if self.guest is Guest.OBEYS:
            await self._release(device_id)
        elif self.guest is Guest.OBEYS_IN_SILENCE:
            del self._state.devices[device_id]
        elif self.guest is Guest.TALKS_OF_ANOTHER:
            await self.tell("DEVICE_DELETED", path="/machine/peripheral-anon/device[0]")
            await self.tell("DEVICE_DELETED", device="another", path="/machine/peripheral/a")
            self._releasing = self._loop.create_task(self._release(device_id, after_s=0.3))
        elif self.guest is Guest.REFUSES:
            await self.tell("DEVICE_UNPLUG_GUEST_ERROR", device=device_id, path="")

    async def _do(self, name: str, arguments: Json) -> Any:
        if name == "qmp_capabilities":
            return {}
        if name not in _COMMANDS or name in self._lacks:
            raise _RefusedError(f"The command {name} has not been found", "CommandNotFound")
        if name == "device_del":
            return await self._device_del(arguments)
        return getattr(self, "_" + name.replace("-", "_"))(arguments)

    def _query_name(self, _: Json) -> Json:
        return {"name": self.path.stem}

    def _query_status(self, _: Json) -> Json:
        return {"status": "running", "running": True}

    def _query_commands(self, _: Json) -> list[Json]:
        return [{"name": name} for name in _COMMANDS if name not in self._lacks]

    def _query_pci(self, _: Json) -> list[Json]:
        slots = [int(one["addr"], 16) for one in self._state.devices.values() if "addr" in one]
        return [{"bus": 0, "devices": [{"slot": slot} for slot in [0, 1, *slots]]}]

    def _query_fdsets(self, _: Json) -> list[Json]:
        return [
            {"fdset-id": number, "fds": [{"fd": fd, "opaque": opaque} for fd, opaque in all_of_it]}
            for number, all_of_it in self._state.fdsets.items()
        ]

    def _qom_list(self, arguments: Json) -> list[Json]:
        if arguments["path"] != "/machine/peripheral":
            return []
        return [
            {"name": name, "type": f"child<{device['driver']}>"}
            for name, device in self._state.devices.items()
        ]

    def _qom_get(self, arguments: Json) -> Any:
        if arguments["path"] == "/machine":
            return "pc-i440fx-7.2-machine"
        name = arguments["path"].rpartition("/")[2]
        if name not in self._state.devices:
            raise _RefusedError(f"Device '{arguments['path']}' not found", "DeviceNotFound")
        device = self._state.devices[name]
        if arguments["property"] == "parent_bus":
            return f"/machine/i440fx/{device['bus']}"
        return device[arguments["property"]]

    def _getfd(self, arguments: Json) -> Json:
        if not self.descriptors:
            raise _RefusedError("No file descriptor supplied via SCM_RIGHTS")
        self._named[arguments["fdname"]] = self.descriptors.pop(0)
        return {}

    def _closefd(self, arguments: Json) -> Json:
        os.close(self._taken(arguments["fdname"]))
        return {}

    def _netdev_add(self, arguments: Json) -> Json:
        names = f"{arguments.get('fd', '')}:{arguments.get('fds', '')}".strip(":").split(":")
        self._state.netdevs[arguments["id"]] = [self._taken(name) for name in names]
        return {}

    def _netdev_del(self, arguments: Json) -> Json:
        if arguments["id"] not in self._state.netdevs:
            raise _RefusedError(f"Device '{arguments['id']}' not found", "DeviceNotFound")
        for descriptor in self._state.netdevs.pop(arguments["id"]):
            os.close(descriptor)
        return {}

    def _add_fd(self, arguments: Json) -> Json:
        if not self.descriptors:
            raise _RefusedError("No file descriptor supplied via SCM_RIGHTS")
        fdsets = self._state.fdsets
        number = arguments.get("fdset-id", max(fdsets, default=-1) + 1)
        fd = self.descriptors.pop(0)
        fdsets.setdefault(number, []).append((fd, arguments["opaque"]))
        return {"fdset-id": number, "fd": fd}

    def _remove_fd(self, arguments: Json) -> Json:
        for fd, _ in self._state.fdsets.pop(arguments["fdset-id"], []):
            os.close(fd)
        return {}

    def _query_named_block_nodes(self, _: Json) -> list[Json]:
        return [
            {"node-name": name, "drv": node["driver"], "file": node.get("filename", "")}
            for name, node in self._state.nodes.items()
        ]

    def _x_debug_query_block_graph(self, _: Json) -> Json:
        edges = [
            {"parent": name, "child": node[edge], "name": edge}
            for name, node in self._state.nodes.items()
            for edge in ("file", "backing")
            if node.get(edge)
        ]
        return {"nodes": [{"id": name, "name": name} for name in self._state.nodes], "edges": edges}

    def _query_jobs(self, _: Json) -> list[Json]:
        return []

    def _blockdev_add(self, arguments: Json) -> Json:
        self._state.nodes[arguments["node-name"]] = arguments
        return {}

    def _blockdev_del(self, arguments: Json) -> Json:
        name = arguments["node-name"]
        if name not in self._state.nodes:
            raise _RefusedError(f"Failed to find node with node-name='{name}'")
        if any(device.get("drive") == name for device in self._state.devices.values()):
            raise _RefusedError(f"Node {name} is in use")
        del self._state.nodes[name]
        return {}

    def _device_add(self, arguments: Json) -> Json:
        if arguments["id"] in self._state.devices:
            raise _RefusedError(f"Duplicate device ID '{arguments['id']}'")
        self._state.devices[arguments["id"]] = arguments
        return {}

    async def _device_del(self, arguments: Json) -> Any:
        device_id = arguments["id"]
        if device_id not in self._state.devices:
            raise _RefusedError(f"Device '{device_id}' not found", "DeviceNotFound")
        if self.guest is Guest.OBEYS_BEFORE_THE_ANSWER:
            await self._release(device_id)
        elif self.guest is Guest.OBEYS_INSTEAD_OF_THE_ANSWER:
            await self._release(device_id)
            return NO_ANSWER
        return {}

    async def _release(self, device_id: str, *, after_s: float = 0) -> None:
        await asyncio.sleep(after_s)
        del self._state.devices[device_id]
        await self.tell("DEVICE_DELETED", device=device_id, path="/machine/peripheral/x")

    def let_go(self) -> None:
        """Have the guest give up all devices, late."""
        self._state.devices.clear()

    def let_go_at(self, number: int) -> None:
        """Have the guest do so right before QEMU obeys the command that comes so many from now."""
        self._lets_go_at = len(self.received) + number

    def has_let_go(self) -> bool:
        """Whether QEMU was given so many commands; if not, the guest keeps its devices."""
        number, self._lets_go_at = self._lets_go_at, None
        return number is not None and len(self.received) > number

    def _taken(self, name: str) -> int:
        if name not in self._named:
            raise _RefusedError(f"File descriptor named '{name}' not found")
        return self._named.pop(name)

    def _forget(self) -> None:
        """Close all that QEMU has, as its end does."""
        state, self._state = self._state, _State()
        named, self._named = self._named, {}
        for descriptor in named.values():
            os.close(descriptor)
        for descriptors in state.netdevs.values():
            for descriptor in descriptors:
                os.close(descriptor)
        for fdset in state.fdsets.values():
            for descriptor, _ in fdset:
                os.close(descriptor)
