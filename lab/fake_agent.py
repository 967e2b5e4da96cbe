"""A fake guest agent, on the socket that QEMU would pass on."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONG_S = 30.0


class Agent:
    """The guest's end of the channel, as QEMU passes it on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.heard: list[dict[str, Any]] = []

    def hear(self) -> dict[str, Any]:
        """The next command; an empty one when there is none any more."""
        line = self._lines.readline()
        command: dict[str, Any] = json.loads(line) if line else {}
        if command:
            self.heard.append(command)
        return command

    def say(self, message: dict[str, Any] | bytes) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        self._connection.sendall(data)

    def answer(self, *before: dict[str, Any] | bytes) -> None:
        """Answer the next command, after something else."""
        command = self.hear()
        for message in before:
            self.say(message)
        self.say({"return": command["arguments"]["id"]})

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


Script = Callable[[Agent], object]


@contextmanager
def agent(path: Path, script: Script) -> Iterator[list[dict[str, Any]]]:
    """An agent that plays `script` to one client; what it has heard is in the list, whole when the
    block has ended."""
    heard: list[dict[str, Any]] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # no client connected
            connection.settimeout(LONG_S)
            it = Agent(connection)
            try:
                script(it)
                while it.hear():  # until the other end has gone
                    pass
            except ConnectionError:
                pass  # it has gone while this one still spoke
            finally:
                heard.extend(it.heard)
                it.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(2 * LONG_S)
    assert not thread.is_alive()
