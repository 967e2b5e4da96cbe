"""A QMP peer with a memory, for the faults of plugging that a real QEMU won't show on demand.

It keeps devices, back ends and the descriptors that it is given, as QEMU does, and misbehaves where
it is told to:

    with FaultyQemu(path) as qemu:
        qemu.fail_at(5, Fault.REFUSED)
        ...
        assert qemu.holds() == []

Its guest gives devices up at once, unless told otherwise (`guest`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

from lab.scripted_qemu import GREETING, line_of

Json = dict[str, Any]

_COMMANDS = frozenset(
    {
        *("query-name", "query-status", "query-commands", "query-pci", "query-fdsets"),
        *("qom-list", "qom-get", "getfd", "closefd", "netdev_add", "netdev_del"),
        *("add-fd", "remove-fd", "blockdev-add", "blockdev-del", "device_add", "device_del"),
    }
)


class Fault(Enum):
    """What can go wrong with a command."""

    REFUSED = auto()  # QEMU has something against it
    UNHEARD = auto()  # the connection ends before QEMU does anything
    UNANSWERED = auto()  # the connection ends when QEMU has done it
    HANGS = auto()  # QEMU does it, and does not answer
    DIES = auto()  # QEMU ends, with all that it has


class Guest(Enum):
    """What the guest does when a device is to go."""

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


class FaultyQemu:
    """The peer. `commands` are the names of those that it was given, in order."""

    def __init__(self, path: Path, *, lacks: frozenset[str] = frozenset()) -> None:
        self.path = path
        self._faults: dict[int, Fault] = {}
        self._lets_go_at: int | None = None
        self.guest = Guest.OBEYS
        self.commands: list[str] = []
        self._lacks = lacks
        self._state = _State()
        self._named: dict[str, int] = {}
        self._received: list[int] = []
        self._client: socket.socket | None = None
        self._idle = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve, name="faulty-qemu", daemon=True)

    def __enter__(self) -> Self:
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._thread.join(10)

    def fail_at(self, number: int, fault: Fault) -> None:
        """Misbehave once, at the command that is given so many commands from now; 0 is the next."""
        self._faults = {len(self.commands) + number: fault}

    def has_failed(self) -> bool:
        """Whether it did; if not, it does not any more."""
        faults, self._faults = self._faults, {}
        return not faults

    def holds(self) -> list[str]:
        """All that was plugged in or handed over and is still there when the client has left."""
        assert self._idle.wait(10), "the client stays"
        state = self._state
        found = [*(f"device {name}" for name in state.devices)]
        found += [f"netdev {name}" for name in state.netdevs]
        found += [f"node {name}" for name in state.nodes]
        found += [f"fdset {number}" for number in state.fdsets]
        found += [f"descriptor {name}" for name in self._named]
        found += [f"descriptor {number}" for number in self._received]
        return found

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener's end
            while True:
                self._idle.set()
                client, _ = self._listener.accept()
                self._idle.clear()
                self._client = client
                with contextlib.suppress(_OverError, OSError):
                    self._talk(client)
                client.close()
                for descriptor in self._received:
                    os.close(descriptor)
                self._received.clear()

    def _talk(self, client: socket.socket) -> None:
        self._send(GREETING)
        buffer = b""
        while True:
            data, ancillary, *_ = client.recvmsg(65536, socket.CMSG_SPACE(64))
            if not data:
                return
            for _level, _kind, raw in ancillary:
                self._received += array.array("i", raw)
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def _obey(self, message: Json) -> None:
        name, number = message["execute"], message.get("id")
        self.commands.append(name)
        if self._lets_go_at == len(self.commands) - 1:
            self.let_go()
        fault = self._faults.pop(len(self.commands) - 1, None)
        if fault is Fault.UNHEARD:
            raise _OverError
        if fault is Fault.DIES:
            self._end()
            raise _OverError
        try:
            if fault is Fault.REFUSED:
                raise _RefusedError("it does not suit me")
            value = self._do(name, message.get("arguments", {}))
        except _RefusedError as refused:
            error = {"class": refused.error_class, "desc": str(refused)}
            self._send({"error": error, "id": number})
            return
        if fault is Fault.UNANSWERED:
            raise _OverError
        if fault is Fault.HANGS or value is _NO_ANSWER:
            return
        self._send({"return": value, "id": number})
        if name == "device_del":
            self._guest_after(message["arguments"]["id"])

    def _do(self, name: str, arguments: Json) -> Any:
        if name == "qmp_capabilities":
            return {}
        if name not in _COMMANDS or name in self._lacks:
            raise _RefusedError(f"The command {name} has not been found", "CommandNotFound")
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
        if not self._received:
            raise _RefusedError("No file descriptor supplied via SCM_RIGHTS")
        self._named[arguments["fdname"]] = self._received.pop(0)
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
        if not self._received:
            raise _RefusedError("No file descriptor supplied via SCM_RIGHTS")
        fdsets = self._state.fdsets
        number = arguments.get("fdset-id", max(fdsets, default=-1) + 1)
        fd = self._received.pop(0)
        fdsets.setdefault(number, []).append((fd, arguments["opaque"]))
        return {"fdset-id": number, "fd": fd}

    def _remove_fd(self, arguments: Json) -> Json:
        for fd, _ in self._state.fdsets.pop(arguments["fdset-id"], []):
            os.close(fd)
        return {}

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

    def _device_del(self, arguments: Json) -> Any:
        device_id = arguments["id"]
        if device_id not in self._state.devices:
            raise _RefusedError(f"Device '{device_id}' not found", "DeviceNotFound")
        if self.guest is Guest.OBEYS_BEFORE_THE_ANSWER:
            self._release(device_id)
        elif self.guest is Guest.OBEYS_INSTEAD_OF_THE_ANSWER:
            self._release(device_id)
            return _NO_ANSWER
        return {}

    def _guest_after(self, device_id: str) -> None:
        """What the guest does when QEMU has answered `device_del`."""
        if self.guest is Guest.OBEYS:
            self._release(device_id)
        elif self.guest is Guest.OBEYS_IN_SILENCE:
            del self._state.devices[device_id]
        elif self.guest is Guest.TALKS_OF_ANOTHER:
            self._event("DEVICE_DELETED", {"path": "/machine/peripheral-anon/device[0]"})
            self._event("DEVICE_DELETED", {"device": "another", "path": "/machine/peripheral/a"})
            threading.Timer(0.3, self._release, [device_id]).start()
        elif self.guest is Guest.REFUSES:
            self._event("DEVICE_UNPLUG_GUEST_ERROR", {"device": device_id, "path": ""})

    def _release(self, device_id: str) -> None:
        del self._state.devices[device_id]
        self._event("DEVICE_DELETED", {"device": device_id, "path": "/machine/peripheral/x"})

    def let_go(self) -> None:
        """Have the guest give up all devices, late."""
        self._state.devices.clear()

    def let_go_at(self, number: int) -> None:
        """Have the guest do so right before QEMU obeys the command that comes so many from now."""
        self._lets_go_at = len(self.commands) + number

    def has_let_go(self) -> bool:
        """Whether QEMU was given so many commands; if not, the guest keeps its devices."""
        number, self._lets_go_at = self._lets_go_at, None
        return number is not None and len(self.commands) > number

    def _taken(self, name: str) -> int:
        if name not in self._named:
            raise _RefusedError(f"File descriptor named '{name}' not found")
        return self._named.pop(name)

    def _event(self, name: str, data: Json) -> None:
        self._send({"event": name, "data": data, "timestamp": {"seconds": 1, "microseconds": 0}})

    def _send(self, message: Json) -> None:
        if self._client:
            self._client.sendall(line_of(message))

    def _end(self) -> None:
        """As a process that is killed does: its socket stays, and nobody listens."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._client:
            with contextlib.suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
        state, self._state = self._state, _State()
        for descriptor in self._named.values():
            os.close(descriptor)
        self._named.clear()
        for descriptors in state.netdevs.values():
            for descriptor in descriptors:
                os.close(descriptor)
        for fdset in state.fdsets.values():
            for descriptor, _ in fdset:
                os.close(descriptor)


_NO_ANSWER = object()
