"""The floor: a QMP client that sends what it is told, reads what comes, and does nothing else.

Source: QEMU's qmp-spec.
"""

import json
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.errors import BenchError

GONE = "DEVICE_DELETED"
NO_ANSWER_S = 60.0
_ASK_AGAIN_S = 2.0


@dataclass
class Order:
    """A command.

    :param descriptors: how many go with it.
    :param is_refused: whether QEMU says no, as it does of something that is not there.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    descriptors: int = 0
    is_refused: bool = False


@dataclass(frozen=True)
class Gone:
    """The event that a device is gone is waited for here."""

    device: str


Step = Order | Gone


@dataclass
class Trip:
    """One connection to a monitor, and how much of its time was the guest's."""

    total_s: float = 0.0
    guest_s: float | None = None
    """From when the device's removal was asked for until QEMU said that it is gone."""


class Monitor:
    """A connection to a QMP socket, past its greeting."""

    def __init__(self, path: Path) -> None:
        self._events: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(NO_ANSWER_S)
        self._socket.connect(str(path))
        self._buffer = b""
        self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def execute(self, order: Order, descriptors: Sequence[int] = ()) -> Any:
        """Give a command, and read on until its answer."""
        line = json.dumps({"execute": order.name, "arguments": order.arguments}).encode() + b"\n"
        if descriptors:
            sent = socket.send_fds(self._socket, [line], list(descriptors))
            line = line[sent:]
        self._socket.sendall(line)
        while True:
            message = self._receive()
            if "return" in message:
                return message["return"]
            if "error" in message and order.is_refused:
                return None
            if "error" in message:
                raise RefusedError(f"QEMU refused {order.name}: {message['error']['desc']}")
            self._events.append(message)

    def wait_gone(self, device: str, patience_s: float) -> bool:
        """Read on until the event that a device is gone; False if it does not come so long."""
        self._socket.settimeout(patience_s)
        try:
            while True:
                while self._events:
                    event = self._events.pop(0)
                    if event["event"] == GONE and event["data"].get("device") == device:
                        return True
                self._events.append(self._receive())
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(NO_ANSWER_S)

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            data = self._socket.recv(64 * 1024)
            if not data:
                raise BenchError("QEMU closed the monitor", hint="see libvirt's log of the guest")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class RefusedError(BenchError):
    """QEMU refused a command."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="the bench plays back what the library asked for before")


def play(path: Path, steps: Iterable[Step], descriptors: Sequence[int]) -> Trip:
    """Connect, give these commands, and disconnect; the descriptors go with them in turn."""
    left = list(descriptors)
    trip = Trip()
    asked_at = 0.0
    began_at = time.perf_counter()
    with Monitor(path) as monitor:
        for step in steps:
            if isinstance(step, Gone):
                _wait(monitor, step.device)
                trip.guest_s = time.perf_counter() - asked_at
                continue
            if step.name == "device_del":
                asked_at = time.perf_counter()
            given, left = left[: step.descriptors], left[step.descriptors :]
            monitor.execute(step, given)
    trip.total_s = time.perf_counter() - began_at
    return trip


def _wait(monitor: Monitor, device: str) -> None:
    """As the library does, ask again: a guest may have been too busy to hear of it."""
    deadline = time.perf_counter() + NO_ANSWER_S
    while not monitor.wait_gone(device, _ASK_AGAIN_S):
        if time.perf_counter() > deadline:
            raise BenchError(f"the guest keeps {device}", hint="is the machine busy? try again")
        try:
            monitor.execute(Order("device_del", {"id": device}))
        except RefusedError:
            continue  # it is in the middle of it
