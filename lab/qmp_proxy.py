"""A QMP socket that passes everything on to a QEMU, and can strike between two commands.

A client can't tell it from QEMU: one client at a time, descriptors go along with what they were
sent with. The proxy counts the commands that change something, and a test can set a trap at one of
them: the proxy then kills the client, for instance.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 65536
_MOST_DESCRIPTORS = 16
_QUESTIONS = ("qmp_capabilities", "query-", "qom-")
_REQUEST = "device_del"


class When(enum.Enum):
    """When to strike."""

    BEFORE = "before"
    """The client has sent the command, and QEMU has not got it."""
    AFTER = "after"
    """QEMU has carried it out, and the client has no answer."""


@dataclass(frozen=True)
class Trap:
    """The action at a command, in place of going on.

    :param number: of the command in its connection, from 1, among those that change something:
        how often QEMU is asked how things are, or the guest to let a device go, depends on how fast
        the guest is.
    :param strike: called once; what the client and QEMU would still have heard is lost.
    """

    when: When
    number: int
    strike: Callable[[], None]


class QmpProxy:
    """A proxy that runs in a thread of its own.

    :ivar changes: names of the commands of the latest connection that change something.
    :ivar connected: set whenever a client has come.
    """

    def __init__(self, front: Path, back: Path) -> None:
        self.trap: Trap | None = None
        self.changes: list[str] = []
        self.connected = threading.Event()
        self._back = back
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(front))
        self._listener.listen()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name=f"proxy {front.name}")
        self._thread.start()

    def close(self) -> None:
        """End it; raises nothing, whatever clients did."""
        os.close(self._stop_write)
        self._thread.join()
        self._listener.close()
        os.close(self._stop_read)

    def _serve(self) -> None:
        while self._listener in _readable(self._listener, self._stop_read):
            client, _ = self._listener.accept()
            qemu = socket.socket(socket.AF_UNIX)
            with client, qemu:
                # The other end may go away at any time; that ends this connection only.
                with contextlib.suppress(OSError):
                    qemu.connect(str(self._back))
                    self.changes = []
                    self.connected.set()
                    self._pass_on(client, qemu)

    def _pass_on(self, client: socket.socket, qemu: socket.socket) -> None:
        commands, answers = b"", b""
        changing = False  # whether the command that is not answered yet changes something
        with contextlib.ExitStack() as held:
            descriptors: list[int] = []
            held.callback(lambda: _close(descriptors))
            while True:
                ready = _readable(client, qemu, self._stop_read)
                if self._stop_read in ready:
                    return
                if qemu in ready:
                    data = qemu.recv(_CHUNK)
                    if not data:
                        return
                    *lines, answers = (answers + data).split(b"\n")
                    for line in lines:
                        if changing and _is_answer(line) and self._strikes(When.AFTER):
                            return
                        client.sendall(line + b"\n")
                if client in ready:
                    flags = socket.MSG_CMSG_CLOEXEC
                    data, received, _, _ = socket.recv_fds(client, _CHUNK, _MOST_DESCRIPTORS, flags)
                    descriptors += received
                    if not data:
                        return
                    *lines, commands = (commands + data).split(b"\n")
                    for line in lines:
                        name = str(json.loads(line)["execute"])
                        changing = not name.startswith(_QUESTIONS) and not self._is_reminder(name)
                        if changing:
                            self.changes.append(name)
                            if self._strikes(When.BEFORE):
                                return
                        if descriptors:
                            socket.send_fds(qemu, [line + b"\n"], descriptors)
                        else:
                            qemu.sendall(line + b"\n")
                        _close(descriptors)

    def _is_reminder(self, name: str) -> bool:
        """Whether a guest that did not hear it is asked once more."""
        return name == _REQUEST and self.changes[-1:] == [name]

    def _strikes(self, when: When) -> bool:
        trap = self.trap
        if trap is None or (trap.when, trap.number) != (when, len(self.changes)):
            return False
        self.trap = None
        trap.strike()
        return True


def _is_answer(line: bytes) -> bool:
    message: dict[str, Any] = json.loads(line)
    return "return" in message or "error" in message


@contextmanager
def qmp_proxy(front: Path, back: Path) -> Iterator[QmpProxy]:
    """A proxy at the path `front` for the QMP socket `back`."""
    proxy = QmpProxy(front, back)
    try:
        yield proxy
    finally:
        proxy.close()
        front.unlink(missing_ok=True)


def _readable(*sources: socket.socket | int) -> list[Any]:
    return select.select(sources, [], [])[0]


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
