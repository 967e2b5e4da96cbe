"""A monitor that says what a test has it say, on a real socket."""

from __future__ import annotations

import array
import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

GREETING = (
    b'{"QMP": {"version": {"qemu": {"micro": 0, "minor": 0, "major": 10}}, "capabilities": []}}\r\n'
)

Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self.descriptors: list[int] = []

    async def say(self, *messages: dict[str, Any] | bytes) -> None:
        loop = asyncio.get_running_loop()
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\r\n"
            await loop.sock_sendall(self._socket, line)

    async def hear(self) -> dict[str, Any]:
        """The client's next command."""
        while b"\n" not in self._buffer:
            await asyncio.sleep(0)
            try:
                data, ancillary, *_ = self._socket.recvmsg(65536, socket.CMSG_SPACE(64))
            except BlockingIOError:
                await asyncio.sleep(0.002)
                continue
            for _, _, payload in ancillary:
                self.descriptors += array.array("i", payload)
            if not data:
                raise ConnectionError
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        command: dict[str, Any] = json.loads(line)
        return command

    async def negotiate(self) -> None:
        await self.say(GREETING)
        command = await self.hear()
        assert command["execute"] == "qmp_capabilities"
        await self.say({"return": {}, "id": command["id"]})


@asynccontextmanager
async def peer(path: Path, script: Script) -> AsyncIterator[None]:
    """A monitor at `path` that plays `script` to the first client; it has to end by itself."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    listener.setblocking(False)

    async def serve() -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        connection.setblocking(False)
        with connection:
            await script(Peer(connection))

    server = asyncio.create_task(serve())
    try:
        yield
        await asyncio.wait_for(server, 30)
    finally:
        server.cancel()
        listener.close()
