"""A monitor that says what a test has it say, on a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.scripted_qemu import GREETING, line_of

Script = Callable[["Peer"], None]

_TIMEOUT_S = 30.0


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self.descriptors: list[int] = []

    def say(self, *messages: dict[str, Any] | bytes) -> None:
        for message in messages:
            self._socket.sendall(message if isinstance(message, bytes) else line_of(message))

    def hear(self) -> dict[str, Any]:
        """The client's next command.

        :raises ConnectionError: if there is none any more.
        """
        while b"\n" not in self._buffer:
            data, descriptors, *_ = socket.recv_fds(self._socket, 65536, 16)
            self.descriptors += descriptors
            if not data:
                raise ConnectionError
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        command: dict[str, Any] = json.loads(line)
        return command

    def negotiate(self) -> None:
        self.say(GREETING)
        command = self.hear()
        assert command["execute"] == "qmp_capabilities"
        self.say({"return": {}, "id": command["id"]})


@contextmanager
def peer(path: Path, script: Script) -> Iterator[None]:
    """A monitor at `path` that plays `script` to the first client; it has to end by itself."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(_TIMEOUT_S)

        def serve() -> None:
            connection, _ = listener.accept()
            connection.settimeout(_TIMEOUT_S)
            with connection:
                script(Peer(connection))

        played = thread.submit(serve)
        yield
        played.result(_TIMEOUT_S)
