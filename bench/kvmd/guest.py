"""One scripted VM: as much of QEMU's event socket as a KVM daemon talks to."""

import json
import os
import socket
import time
from pathlib import Path

GREETING = (
    b'{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, '
    b'"package": "Debian 1:7.2+dfsg"}, "capabilities": ["oob"]}}\r\n'
)


class Guest:
    """Greets one client at a time, answers its commands, and ends as a user's poweroff does."""

    __slots__ = ("connection", "listener", "path", "ready", "received", "verdict_path")

    def __init__(self, folder: Path, name: str, suffix: str) -> None:
        self.path = f"{folder}/{name}{suffix}"
        self.verdict_path = f"{folder}/{name}.shutdown"
        self.connection: socket.socket | None = None
        self.ready = False
        """The client has been through qmp_capabilities: from now on it gets events."""
        self.received = b""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # As with QEMU the path is there from bind() on, and who comes before listen() is refused.
        self.listener.bind(self.path)
        self.listener.listen(1)

    def greet(self) -> socket.socket:
        """Accept the waiting client."""
        self.connection, _ = self.listener.accept()
        self.connection.setblocking(False)
        self.connection.send(GREETING)
        return self.connection

    def answer(self) -> bool:
        """Read what the client sent and answer whole lines. False: it has hung up."""
        assert self.connection is not None
        try:
            data = self.connection.recv(4096)
        except ConnectionResetError:
            data = b""
        if not data:
            self.connection.close()
            self.connection = None
            self.ready = False
            self.received = b""
            return False
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            self._answer_line(line)
        return True

    def _answer_line(self, line: bytes) -> None:
        assert self.connection is not None
        command = json.loads(line)
        reply: dict[str, object] = {"return": {}}
        if command["execute"] == "query-status":
            reply["return"] = {"status": "running", "singlestep": False, "running": True}
        if "id" in command:
            reply["id"] = command["id"]
        self.connection.send(json.dumps(reply).encode() + b"\r\n")
        if command["execute"] == "qmp_capabilities":
            self.ready = True

    def power_off(self) -> float:
        """Send the event of a user's poweroff and end the connection.

        Returns when the event set out, monotonic.
        """
        assert self.connection is not None
        seconds, fraction = divmod(time.time(), 1)
        event = (
            f'{{"timestamp": {{"seconds": {int(seconds)}, "microseconds": {int(fraction * 1e6)}}}, '
            '"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}}\r\n'
        ).encode()
        sent_at = time.monotonic()
        self.connection.send(event)
        self.connection.close()
        self.connection = None
        self.ready = False
        return sent_at

    def vanish(self) -> None:
        """Close what is left and remove the socket, as QEMU does last."""
        self.listener.close()
        os.unlink(self.path)
