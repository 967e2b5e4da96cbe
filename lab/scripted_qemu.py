"""Scripted QMP peers: sockets that behave as QEMU's do, cheap enough to have thousands of.

They are for the faults and the numbers that real guests won't produce on demand. What they imitate:
bind before listen, one client at a time, a greeting, nothing but errors before `qmp_capabilities`,
events that nobody hears when there is no client, lines that end in CR LF.

    with ScriptedQemus() as qemus:
        web1 = qemus.start(control_dir / "web1.kvmd")
        web1.wait_connected()
        web1.emit("SHUTDOWN", guest=True, reason="guest-shutdown")
        web1.end()

The methods may be called from any thread; the peers live in one thread of their own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from lab.errors import LabError

T = TypeVar("T")


@dataclass(frozen=True)
class Refused:
    """An answer that is none: QEMU has something against a command."""

    description: str


Answers = Mapping[str, Any]
"""What a peer answers, by command: JSON, a Refused, or a function that is called for one of these.
It is called in the peers' own thread. To all other commands the answer is empty."""

_TIMEOUT_S = 30.0
_VERSION = {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg"}
GREETING = {"QMP": {"version": _VERSION, "capabilities": ["oob"]}}


class ScriptedQemus:
    """A thread with any number of peers; leaving the context kills those that still stand."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-qemus")
        self._peers: list[ScriptedQemu] = []

    def __enter__(self) -> Self:
        # Two descriptors a peer: more than the usual soft limit, which is low for select's sake.
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(
        self,
        path: Path,
        *,
        listen_delay_s: float = 0,
        greet: bool = True,
        answers: Answers | None = None,
    ) -> ScriptedQemu:
        """A peer whose socket stands at `path` when this returns.

        It listens `listen_delay_s` after that, and a connection until then is refused. Without
        `greet` it accepts connections and stays silent.
        """
        peer = ScriptedQemu(path, self._loop, greet=greet, answers=answers or {})
        self._peers.append(peer)
        peer.bind(listen_delay_s)
        return peer


class ScriptedQemu:
    """One peer. `received` are the names of the commands it got, over all connections, and
    `requests` all of what was said with them."""

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        *,
        greet: bool = True,
        answers: Answers | None = None,
    ) -> None:
        self.path = path
        self.received: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self._loop = loop
        self._greet = greet
        self._answers = answers or {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._client: socket.socket | None = None
        self._ready = threading.Event()
        self._server: asyncio.Task[None] | None = None

    def bind(self, listen_delay_s: float) -> None:
        """Make the socket, and listen after the delay; see ScriptedQemus.start."""
        self._listener.bind(str(self.path))
        self._await(self._begin(listen_delay_s))

    def wait_connected(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait for a client that has negotiated, and so hears events."""
        if not self._ready.wait(timeout_s):
            raise LabError(f"nobody connected to {self.path} within {timeout_s:g} s")

    def connected(self) -> bool:
        """Whether there is a client that hears events."""
        return self._ready.is_set()

    def emit(self, event: str, /, **data: object) -> int:
        """Send an event, stamped with the present time, and return that time in microseconds."""
        return self._await(self._emit(event, data, over=False))

    def emit_last(self, event: str, /, **data: object) -> int:
        """Send an event and end at once, as QEMU does with SHUTDOWN; return the event's time."""
        return self._await(self._emit(event, data, over=True))

    def send(self, raw: bytes) -> None:
        """Send bytes as they are, to a client that may not have negotiated yet."""
        self._await(self._send(raw))

    def end(self) -> None:
        """End as QEMU does by itself: the socket's file goes, then the connection."""
        self._await(self._end(unlink=True))

    def kill(self) -> None:
        """End as a killed QEMU does: the connection goes, the socket's file is left behind."""
        self._await(self._end(unlink=False))

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise LabError(f"scripted QEMU at {self.path}: the client does not read") from None

    async def _begin(self, listen_delay_s: float) -> None:
        if not listen_delay_s:
            self._listener.listen(1)
        self._server = self._loop.create_task(self._serve(listen_delay_s))

    async def _serve(self, listen_delay_s: float) -> None:
        if listen_delay_s:
            await asyncio.sleep(listen_delay_s)
            self._listener.listen(1)
        while True:
            self._client, _ = await self._loop.sock_accept(self._listener)
            self.connections += 1
            try:
                await self._converse(self._client)
            except OSError:
                pass  # the client is gone
            finally:
                self._ready.clear()
                self._client.close()
                self._client = None

    async def _converse(self, client: socket.socket) -> None:
        """Answer one client's commands until it leaves."""
        if self._greet:
            await self._loop.sock_sendall(client, line_of(GREETING))
        pending = b""
        negotiated = False
        while received := await self._loop.sock_recv(client, 4096):
            *lines, pending = (pending + received).split(b"\n")
            for line in filter(bytes.strip, lines):
                request = json.loads(line)
                command = request.get("execute", "")
                self.received.append(command)
                self.requests.append(request)
                negotiated = negotiated or command == "qmp_capabilities"
                reply = self._reply(command)
                if not negotiated:
                    description = "Expecting capabilities negotiation with 'qmp_capabilities'"
                    reply = {"error": {"class": "CommandNotFound", "desc": description}}
                if "id" in request:
                    reply["id"] = request["id"]
                await self._loop.sock_sendall(client, line_of(reply))
                if negotiated:
                    self._ready.set()

    def _reply(self, command: str) -> dict[str, object]:
        answer = self._answers.get(command, {})
        if callable(answer):
            answer = answer()
        if isinstance(answer, Refused):
            return {"error": {"class": "GenericError", "desc": answer.description}}
        return {"return": answer}

    async def _emit(self, event: str, data: dict[str, object], *, over: bool) -> int:
        now_usec = time.time_ns() // 1000
        if self._client is not None and self._ready.is_set():
            message = _event_line(event, data, now_usec)
            # A client that went away in between hears as little as one that never came.
            with contextlib.suppress(ConnectionError):
                await self._loop.sock_sendall(self._client, message)
        if over:
            await self._end(unlink=True)
        return now_usec

    async def _send(self, raw: bytes) -> None:
        if self._client is None:
            raise LabError(f"scripted QEMU at {self.path} has no client to send to")
        await self._loop.sock_sendall(self._client, raw)

    async def _end(self, *, unlink: bool) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        if unlink:
            self.path.unlink(missing_ok=True)
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server
        self._listener.close()


def event_line(name: str, /, **data: object) -> bytes:
    """What QEMU sends for an event of now."""
    return _event_line(name, data, time.time_ns() // 1000)


def _event_line(name: str, data: dict[str, object], usec: int) -> bytes:
    seconds, microseconds = divmod(usec, 1_000_000)
    stamp = {"seconds": seconds, "microseconds": microseconds}
    message: dict[str, object] = {"timestamp": stamp, "event": name}
    return line_of({**message, "data": data} if data else message)


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as QEMU sends it."""
    return json.dumps(message).encode() + b"\r\n"
