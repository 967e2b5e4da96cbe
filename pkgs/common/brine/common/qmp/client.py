"""A client of a QEMU monitor, for commands with time limits, events, and passed descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brine.common.peer import peer_process
from brine.common.qmp import wire
from brine.common.qmp.wire import (
    EVENTS_LIMIT,
    LINE_LIMIT,
    READ_SIZE,
    Greeting,
    QmpClosedError,
    QmpCommandError,
    QmpError,
    QmpEvent,
    QmpProtocolError,
    QmpRefusal,
    QmpReply,
    QmpTimeoutError,
    no_greeting,
)

_EVENTS_KEPT = 1000
_PAUSE_S = 0.01


class QmpClient:
    """A connection to one QMP socket, past its greeting.

    Commands may be given from several tasks at once; each gets its own answer. Events that come
    while nobody waits for them are kept, the newest 1,000 of them, or less if they are large.

    Source: QEMU's qmp-spec; descriptors travel as SCM_RIGHTS (:manpage:`unix(7)`) with the first
    byte of the command that uses them.
    """

    def __init__(
        self,
        path: Path,
        connection: socket.socket,
        answer_timeout_s: float,
        limit_s: float = math.inf,
    ) -> None:
        self.path = path
        self._answer_timeout_s = answer_timeout_s
        self._deadline = time.monotonic() + limit_s
        self.greeting = Greeting((0, 0, 0), ())
        self._socket = connection
        self._peer = 0
        self._numbers = wire.numbers()
        self._answers: dict[int, asyncio.Future[QmpReply | QmpRefusal]] = {}
        self._events: asyncio.Queue[tuple[QmpEvent, int] | None] = asyncio.Queue()
        self._events_bytes = 0
        self._sending = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._closed: QmpClosedError | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        path: Path,
        *,
        timeout_s: float = 10,
        answer_timeout_s: float = 10,
        limit_s: float = math.inf,
        check_peer: Callable[[int], object] | None = None,
        through: Callable[[socket.socket], socket.socket] | None = None,
    ) -> AsyncIterator[QmpClient]:
        """Connect to the socket at *path* and negotiate; disconnect when the block ends.

        A QMP socket serves one client. While another has it the connection succeeds, but no
        greeting comes.

        :param timeout_s: for the greeting and the negotiation together.
        :param answer_timeout_s: for the answer to each command.
        :param limit_s: for all of it: from then on each command, and each wait for an event, is out
            of time.
        :param check_peer: is given the id of the process that listens before that is told anything;
            what it raises ends the connection.
        :param through: is given the connection, and returns the one to be used in its place.
        :raises QmpClosedError: if nobody listens at *path*.
        :raises QmpTimeoutError: if no greeting came in time.
        :raises QmpProtocolError: if what listens there is no QMP server.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        client = cls(path, connection, answer_timeout_s, limit_s)
        try:
            await client._open(timeout_s, check_peer, through)
            yield client
        finally:
            await client._close()

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        descriptors: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Any:
        """Give a command and return QEMU's answer.

        :param descriptors: file descriptors that go with the command (``getfd``, ``add-fd``);
            QEMU gets copies, the caller keeps its own.
        :param timeout_s: None is the connection's ``answer_timeout_s``.
        :raises QmpCommandError: if QEMU refused it.
        :raises QmpTimeoutError: if no answer came; QEMU may still carry the command out. A command
            that is out of time from the start is not sent.
        :raises QmpClosedError: if the connection ended first.
        """
        if not self._within(None):
            raise QmpTimeoutError(f"{self.path}: no time is left for {command}")
        timeout_s = self._within(self._answer_timeout_s if timeout_s is None else timeout_s)
        number = next(self._numbers)
        answer: asyncio.Future[QmpReply | QmpRefusal] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(wire.command(command, arguments, number=number), descriptors)
                outcome = await answer
        except TimeoutError:
            raise QmpTimeoutError(
                f"{self.path}: no answer to {command} within {timeout_s:g} s"
            ) from None
        finally:
            del self._answers[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # whoever asked has it from elsewhere already
        if isinstance(outcome, QmpRefusal):
            raise QmpCommandError(command, outcome.error_class, outcome.description)
        return outcome.value

    async def next_event(self, *, timeout_s: float | None = None) -> QmpEvent:
        """The oldest event that nobody has taken yet; waits for one if need be.

        :raises QmpTimeoutError: if none came in time.
        :raises QmpClosedError: if the connection ended, and no event is left.
        """
        try:
            async with asyncio.timeout(limit_s := self._within(timeout_s)):
                kept = await self._events.get()
        except TimeoutError:
            raise QmpTimeoutError(f"{self.path}: no event within {limit_s:g} s") from None
        if kept is None:
            self._events.put_nowait(None)  # for whoever asks next
            raise self._closed or QmpClosedError(f"{self.path}: closed")
        event, size = kept
        self._events_bytes -= size
        return event

    def peer_process(self) -> int:
        """The id of the process that made the socket; 0 if it can't be seen from here."""
        return self._peer

    def drop_events(self) -> None:
        """Forget the events that nobody has taken yet."""
        while not self._events.empty():
            self._events.get_nowait()
        self._events_bytes = 0
        if self._closed:
            self._events.put_nowait(None)

    def _within(self, timeout_s: float | None) -> float:
        """A time limit, or what the whole connection has left."""
        left_s = max(self._deadline - time.monotonic(), 0)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    async def _open(
        self,
        timeout_s: float,
        check_peer: Callable[[int], object] | None,
        through: Callable[[socket.socket], socket.socket] | None,
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect()
                self._peer = peer_process(self._socket)
                if check_peer:
                    check_peer(self._peer)
                if through:
                    self._socket = through(self._socket)
                buffer = bytearray()
                greeting = wire.parse(await self._read_line(buffer))
                if not isinstance(greeting, Greeting):
                    raise QmpProtocolError(f"{self.path}: no QMP greeting")
                self.greeting = greeting
                self._reader = asyncio.create_task(self._read(buffer), name=f"qmp {self.path}")
                await self.execute("qmp_capabilities", timeout_s=timeout_s)
        except TimeoutError:
            raise no_greeting(self.path, timeout_s) from None
        except QmpCommandError as error:
            raise QmpProtocolError(f"{self.path}: {error}") from error
        except OSError as error:
            raise QmpClosedError(f"{self.path}: {error.strerror or error}") from error

    async def _connect(self) -> None:
        while True:
            try:
                return self._socket.connect(str(self.path))
            except BlockingIOError:  # as many clients wait as the monitor lets wait
                await asyncio.sleep(_PAUSE_S)

    async def _send(self, line: bytes, descriptors: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            if self._closed:
                raise self._closed
            try:
                sent = 0
                while descriptors and not sent:
                    try:
                        sent = socket.send_fds(self._socket, [line], list(descriptors))
                    except BlockingIOError:
                        await asyncio.sleep(_PAUSE_S)
                await loop.sock_sendall(self._socket, line[sent:])
            except asyncio.CancelledError:
                # Half a command may be out: nothing sensible can follow it.
                self._closed = QmpClosedError(f"{self.path}: a command was interrupted")
                raise
            except OSError as error:
                raise QmpClosedError(f"{self.path}: {error.strerror}") from error

    async def _read(self, buffer: bytearray) -> None:
        """Hand out what QEMU says until the connection ends."""
        reason = QmpClosedError(f"{self.path}: QEMU closed the connection")
        try:
            while True:
                line = await self._read_line(buffer)
                self._take(wire.parse(line), len(line))
        except QmpClosedError as error:
            reason = error
        except QmpError as error:
            reason = QmpClosedError(f"{self.path}: {error}")
        finally:
            self._closed = reason
            self._events.put_nowait(None)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(reason)

    def _take(self, message: Greeting | QmpEvent | QmpReply | QmpRefusal | None, size: int) -> None:
        if isinstance(message, QmpEvent):
            if size > EVENTS_LIMIT:
                return  # none that QEMU has is so large
            while self._events.qsize() >= _EVENTS_KEPT or self._events_bytes + size > EVENTS_LIMIT:
                if oldest := self._events.get_nowait():
                    self._events_bytes -= oldest[1]
            self._events.put_nowait((message, size))
            self._events_bytes += size
        elif isinstance(message, QmpReply | QmpRefusal):
            # An answer without our number, or after its time limit, is nobody's.
            answer = self._answers.get(message.id) if isinstance(message.id, int) else None
            if answer and not answer.done():
                answer.set_result(message)

    async def _read_line(self, buffer: bytearray) -> bytes:
        loop = asyncio.get_running_loop()
        searched = 0
        while (end := buffer.find(b"\n", searched)) < 0:
            searched = len(buffer)
            if searched > LINE_LIMIT:
                raise QmpProtocolError(f"{self.path}: a line of more than {LINE_LIMIT} bytes")
            try:
                data = await loop.sock_recv(self._socket, READ_SIZE)
            except OSError as error:
                raise QmpClosedError(f"{self.path}: {error.strerror}") from error
            if not data:
                raise QmpClosedError(f"{self.path}: QEMU closed the connection")
            buffer += data
        line = bytes(buffer[: end + 1])
        del buffer[: end + 1]
        return line

    async def _close(self) -> None:
        if self._reader:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._closed = self._closed or QmpClosedError(f"{self.path}: closed")
        # While a command is being sent asyncio watches the descriptor, whose number would be
        # another's after close(). Shut down, the socket makes whoever sends fail first.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        async with self._sending:
            self._socket.close()
