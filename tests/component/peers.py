"""Sockets that a test plays QEMU on by hand, to do what no QEMU would do on demand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from component.kvmd_process import Kvmd
from lab.scripted_qemu import GREETING as GREETING_MESSAGE
from lab.scripted_qemu import event_line, line_of

GREETING = line_of(GREETING_MESSAGE)


class Peer:
    """A listening socket that a test plays QEMU on, by hand."""

    def __init__(self, path: Path, *, listen: bool = True) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.settimeout(30)
        self.connection: socket.socket | None = None
        if listen:
            self.listener.listen(1)

    def accept(self) -> socket.socket:
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(30)
        return self.connection

    def negotiate(self) -> socket.socket:
        connection = self.accept()
        connection.sendall(GREETING)
        self.answer_negotiation()
        return connection

    def answer_negotiation(self) -> None:
        assert self.connection
        assert json.loads(self.connection.recv(4096)) == {"execute": "qmp_capabilities"}
        self.say(b'{"return": {}}\r\n')

    def say(self, data: bytes) -> None:
        """Send that to the client."""
        assert self.connection
        self.connection.sendall(data)

    def event(self, name: str, **data: object) -> None:
        assert self.connection
        self.connection.sendall(event_line(name, **data))

    def end(self, *, leave_file: bool = False) -> None:
        """End as QEMU does: unlink, then close; or as a killed one."""
        if not leave_file:
            self.path.unlink(missing_ok=True)
        self.listener.close()
        if self.connection:
            self.connection.close()


def poweroff() -> bytes:
    return event_line("SHUTDOWN", guest=True, reason="guest-shutdown")


@contextmanager
def peer(kvmd: Kvmd, name: str, *, listen: bool = True) -> Iterator[Peer]:
    it = Peer(kvmd.control / f"{name}.kvmd", listen=listen)
    try:
        yield it
    finally:
        it.end()


@contextmanager
def pouring(it: Peer, data: bytes) -> Iterator[None]:
    """The peer sends *data* over and over, as fast as it is read."""
    connection = it.connection
    assert connection
    connection.setblocking(False)
    over = threading.Event()

    def pour() -> None:
        unsent = data
        while not over.is_set():
            try:
                unsent = unsent[connection.send(unsent) :] or data
            except BlockingIOError:
                time.sleep(0.0005)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def two_of_one_name(kvmd: Kvmd) -> Iterator[tuple[Peer, Peer]]:
    """A VM, and a newer one whose socket took the place of its own; both are watched."""
    with peer(kvmd, "web") as old:
        old.negotiate()
        kvmd.watches("web")
        old.path.unlink()
        with peer(kvmd, "web") as new:
            new.negotiate()
            kvmd.watches("web", times=2)
            yield old, new
