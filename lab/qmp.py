"""A minimal, synchronous QMP client for what the lab needs; see QEMU's docs/interop/qmp-spec.

The lab has one of its own so that Brine's client is not tested with itself.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from pathlib import Path
from typing import Any, Self

from lab.errors import LabError


class Qmp:
    """A connection to a QMP socket, ready for commands. Used as a context manager.

    `events` holds every event that arrived so far, as QEMU sent it.
    """

    def __init__(self, path: Path, *, timeout_s: float = 10) -> None:
        """Connect and negotiate; raises LabError when nothing answers within `timeout_s`."""
        self.path = path
        self.events: list[dict[str, Any]] = []
        # QEMU may still send answers to an earlier client that was killed meanwhile.
        self._numbers = itertools.count(time.monotonic_ns())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
            self._lines = self._socket.makefile("rb")
            self._receive()  # the greeting
            self.command("qmp_capabilities")
        except OSError as error:
            self._socket.close()
            raise LabError(f"no QMP at {path}: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def command(self, name: str, **arguments: object) -> Any:
        """Execute a command and return its `return`; raises LabError when QEMU refuses it."""
        number = next(self._numbers)
        request = {"execute": name, "arguments": arguments, "id": number}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            message = self._receive()
            if "event" in message:
                self.events.append(message)
            elif message.get("id") != number:
                continue
            elif "return" in message:
                return message["return"]
            else:
                raise LabError(f"QMP {name} at {self.path}: {message['error']['desc']}")

    def wait_event(self, name: str, **data: object) -> dict[str, Any]:
        """The first event of that name with these data, past or to come."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event["event"] == name and data.items() <= event.get("data", {}).items():
                    return event
            seen = len(self.events)
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise LabError(f"QEMU at {self.path} does not answer") from None
        except ConnectionResetError:
            line = b""
        if not line:
            raise LabError(f"QEMU at {self.path} closed the connection")
        message: dict[str, Any] = json.loads(line)
        return message
