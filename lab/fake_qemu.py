"""Fake QEMUs: sockets that behave as QEMU's do, for what real ones won't produce on demand.

What they imitate: bind before listen, one client at a time, a greeting, nothing but errors before
`qmp_capabilities`, events that are lost when there is no client, lines that end in CR LF.

One that answers by itself is cheap enough to have thousands of; they live in one thread:

    with FakeQemus() as qemus:
        web1 = qemus.start(control_dir / "web1.kvmd")
        web1.wait_connected()
        web1.emit("SHUTDOWN", guest=True, reason="guest-shutdown")
        web1.end()

:mod:`lab.faulty_qemu` has one that remembers what is plugged into it. A `Peer` is played by hand.
The methods of all may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from lab.errors import LabError

T = TypeVar("T")
Q = TypeVar("Q", bound="FakeQemu")


@dataclass(frozen=True)
class Refused:
    """An answer that is none: QEMU has something against a command."""

    description: str
    error_class: str = "GenericError"


NO_ANSWER = object()
"""QEMU does not answer."""


Answers = Mapping[str, Any]
"""A peer's answers, by command: JSON, a Refused, or a function that is called for one of these.
It is called in the peers' own thread. To all other commands the answer is empty."""

_TIMEOUT_S = 30.0
_VERSION = {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg"}


def event_line(name: str, /, **data: object) -> bytes:
    """The line that QEMU sends for an event of now."""
    return _event_line(name, data, time.time_ns() // 1000)


def _event_line(name: str, data: dict[str, object], usec: int) -> bytes:
    seconds, microseconds = divmod(usec, 1_000_000)
    stamp = {"seconds": seconds, "microseconds": microseconds}
    message: dict[str, object] = {"timestamp": stamp, "event": name}
    return line_of({**message, "data": data} if data else message)


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as QEMU sends it."""
    return json.dumps(message).encode() + b"\r\n"


GREETING = line_of({"QMP": {"version": _VERSION, "capabilities": ["oob"]}})


class FakeQemus:
    """A thread with any number of peers; leaving the context kills those that still stand."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fake-qemus")
        self._peers: list[FakeQemu] = []

    def __enter__(self) -> Self:
        # Two descriptors a peer: more than the usual soft limit, which is low for select's sake.
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def start(
        self,
        path: Path,
        *,
        listen_delay_s: float = 0,
        greet: bool = True,
        answers: Answers | None = None,
    ) -> FakeQemu:
        """A peer whose socket stands at `path` when this returns.

        It listens `listen_delay_s` after that, and a connection until then is refused. Without
        `greet` it accepts connections and stays silent.
        """
        return self.add(
            FakeQemu(path, self.loop, greet=greet, answers=answers), listen_delay_s=listen_delay_s
        )

    def add(self, peer: Q, *, listen_delay_s: float = 0) -> Q:
        """Have a peer that was made for this thread's loop begin; see `start`."""
        self._peers.append(peer)
        peer.bind(listen_delay_s)
        return peer


class FakeQemu:
    """One peer. `received` are the names of the commands it got, over all connections, and
    `requests` all of what was said with them; `descriptors` came with them from the client that is
    there."""

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
        self.descriptors: list[int] = []
        self._loop = loop
        self._greet = greet
        self._answers = answers or {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._client: socket.socket | None = None
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._server: asyncio.Task[None] | None = None

    def bind(self, listen_delay_s: float) -> None:
        """Make the socket, and listen after the delay; see FakeQemus.start."""
        self._listener.bind(str(self.path))
        self._await(self._begin(listen_delay_s))

    def wait_connected(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait for a client that has negotiated, and so hears events."""
        if not self._ready.wait(timeout_s):
            raise LabError(f"no client connected to {self.path} within {timeout_s:g} s")

    def wait_left(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until no client is there."""
        if not self._idle.wait(timeout_s):
            raise LabError(f"the client stays at {self.path}")

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
        except TimeoutError:
            raise LabError(f"fake QEMU at {self.path}: the client does not read") from None

    async def _begin(self, listen_delay_s: float) -> None:
        if not listen_delay_s:
            self._listener.listen(1)
        self._server = self._loop.create_task(self._serve(listen_delay_s))

    async def _serve(self, listen_delay_s: float) -> None:
        if listen_delay_s:
            await asyncio.sleep(listen_delay_s)
            self._listener.listen(1)
        while self._listener.fileno() >= 0:
            self._client, _ = await self._loop.sock_accept(self._listener)
            self._idle.clear()
            self.connections += 1
            try:
                await self._converse(self._client)
            except OSError:
                pass  # the client is gone, or is to be
            finally:
                self._ready.clear()
                self._client.close()
                self._client = None
                self.left()
                self._idle.set()

    async def _converse(self, client: socket.socket) -> None:
        """Answer one client's commands until it leaves."""
        if self._greet:
            await self._loop.sock_sendall(client, GREETING)
        pending = b""
        negotiated = False
        while received := await self._receive(client):
            *lines, pending = (pending + received).split(b"\n")
            for line in filter(bytes.strip, lines):
                request = json.loads(line)
                command = request.get("execute", "")
                self.received.append(command)
                self.requests.append(request)
                negotiated = negotiated or command == "qmp_capabilities"
                if negotiated:
                    reply = await self.obey(command, request.get("arguments", {}))
                else:
                    description = "Expecting capabilities negotiation with 'qmp_capabilities'"
                    reply = Refused(description, "CommandNotFound")
                if reply is NO_ANSWER:
                    continue
                await self._answer(client, reply, request)
                if negotiated:
                    self._ready.set()
                if not isinstance(reply, Refused):
                    await self.obeyed(command, request.get("arguments", {}))

    async def _receive(self, client: socket.socket) -> bytes:
        """The client's next message. Descriptors that come with it go to `descriptors`."""
        readable = asyncio.Event()
        while True:
            self._loop.add_reader(client, readable.set)
            try:
                await readable.wait()
            finally:
                self._loop.remove_reader(client)
            readable.clear()
            with contextlib.suppress(BlockingIOError):
                data, descriptors, *_ = socket.recv_fds(client, 65536, 16)
                self.descriptors += descriptors
                return data

    async def _answer(self, client: socket.socket, reply: Any, request: dict[str, Any]) -> None:
        if isinstance(reply, Refused):
            answer = {"error": {"class": reply.error_class, "desc": reply.description}}
        else:
            answer = {"return": reply}
        number = {"id": request["id"]} if "id" in request else {}
        await self._loop.sock_sendall(client, line_of({**answer, **number}))

    async def obey(self, command: str, arguments: dict[str, Any]) -> Any:
        """Do what a command says; returns the answer, a Refused, or NO_ANSWER.

        An OSError from here ends the connection.
        """
        answer = self._answers.get(command, {})
        return answer() if callable(answer) else answer

    async def obeyed(self, command: str, arguments: dict[str, Any]) -> None:
        """The events that follow a command's answer."""

    def left(self) -> None:
        """The client has left."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    async def _emit(self, event: str, data: dict[str, object], *, over: bool) -> int:
        now_usec = await self.tell(event, **data)
        if over:
            await self._end(unlink=True)
        return now_usec

    async def tell(self, event: str, /, **data: object) -> int:
        """Send an event, in the peers' own thread; see `emit`."""
        now_usec = time.time_ns() // 1000
        if self._client is not None and self._ready.is_set():
            message = _event_line(event, data, now_usec)
            # A client that went away in between hears as little as one that never came.
            with contextlib.suppress(ConnectionError):
                await self._loop.sock_sendall(self._client, message)
        return now_usec

    async def _send(self, raw: bytes) -> None:
        if self._client is None:
            raise LabError(f"fake QEMU at {self.path} has no client to send to")
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


class Peer:
    """A listening socket that a test plays QEMU on, by hand."""

    def __init__(self, path: Path, *, listen: bool = True) -> None:
        self.path = path
        self.descriptors: list[int] = []
        self.connection: socket.socket | None = None
        self._heard = b""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.settimeout(_TIMEOUT_S)
        if listen:
            self.listener.listen(1)

    def accept(self) -> socket.socket:
        """Wait for the next client."""
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(_TIMEOUT_S)
        self._heard = b""
        return self.connection

    def negotiate(self) -> socket.socket:
        """Greet the client, which is waited for if there is none, and agree with it."""
        connection = self.connection or self.accept()
        self.say(GREETING)
        self.answer_negotiation()
        return connection

    def answer_negotiation(self) -> None:
        """Agree with a client that was greeted."""
        command = self.hear()
        assert command.pop("execute") == "qmp_capabilities"
        self.say({"return": {}, **command})

    def say(self, *messages: Mapping[str, Any] | bytes) -> None:
        """Send messages to the client, or bytes as they are."""
        assert self.connection
        for message in messages:
            self.connection.sendall(message if isinstance(message, bytes) else line_of(message))

    def event(self, name: str, **data: object) -> None:
        """Send an event of now."""
        self.say(event_line(name, **data))

    def hear(self) -> dict[str, Any]:
        """The client's next command; raises ConnectionError if there is none any more."""
        assert self.connection
        while b"\n" not in self._heard:
            data, descriptors, *_ = socket.recv_fds(self.connection, 65536, 16)
            self.descriptors += descriptors
            if not data:
                raise ConnectionError
            self._heard += data
        line, self._heard = self._heard.split(b"\n", 1)
        command: dict[str, Any] = json.loads(line)
        return command

    def end(self, *, leave_file: bool = False) -> None:
        """End as QEMU does: unlink, then close; or as a killed one."""
        if not leave_file:
            self.path.unlink(missing_ok=True)
        self.listener.close()
        if self.connection:
            self.connection.close()


@contextlib.contextmanager
def played(path: Path, script: Callable[[Peer], None]) -> Iterator[None]:
    """A peer that plays `script` to its clients, one after another, in a thread.

    What the script raises is raised at the end of the block.
    """
    it = Peer(path)
    it.listener.settimeout(None)

    def serve() -> None:
        while True:
            try:
                connection = it.accept()
            except OSError:  # the listener's end
                return
            with connection:
                script(it)
            it.connection = None

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(serve)
        try:
            yield
        finally:
            it.listener.shutdown(socket.SHUT_RDWR)
        done.result(_TIMEOUT_S)
    it.listener.close()
