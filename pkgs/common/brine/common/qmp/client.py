"""A client of a QEMU monitor, for commands with time limits, events, and passed descriptors."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from brine.common.qmp import wire
from brine.common.qmp.wire import (
    LINE_LIMIT,
    READ_SIZE,
    Greeting,
    QmpClosedError,
    QmpCommandError,
    QmpError,
    QmpEvent,
    QmpProtocolError,
    QmpReply,
    QmpTimeoutError,
)
from brine.common.unix_socket import peer_process

LIMIT_S = 30.0
"""For a program that asks a few questions: how long all of them may take."""

_EVENTS_KEPT = 1000
_EVENTS_LIMIT = 256 * 1024  # of their lines, in bytes
_NUMBER_BYTES = 6  # whatever reads JSON has whole numbers of that size
_PAUSE_S = 0.01


class QmpClient:
    """A connection to one QMP socket, past its greeting.

    Each call blocks until its answer or event has come, or until its time is over. Events that come
    before they are asked for are kept, the newest 1,000 of them, or fewer if they are large. Once
    the connection has ended, every call fails; :meth:`connect` makes a new client.

    Source: QEMU's qmp-spec; descriptors travel as SCM_RIGHTS (:manpage:`unix(7)`) with the first
    byte of the command that uses them.

    Example::

        with QmpClient.connect(Path("/run/brine/control/web1.qmp"), timeout_s=5.0) as qmp:
            qmp.execute("system_powerdown")
            event = qmp.next_event(timeout_s=60.0)
            print(event.name, qmp.execute("query-status")["status"])

    :ivar path: of the socket, which errors name.
    """

    def __init__(
        self, path: Path, connection: socket.socket, timeout_s: float, limit_s: float
    ) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + limit_s
        self._socket = connection
        self._peer = 0
        # Numbers such as no other connection has: QEMU gives its answer to whoever is connected by
        # the time that it has one, also to commands of an earlier client that went away.
        self._numbers = itertools.count(int.from_bytes(os.urandom(_NUMBER_BYTES), "big"))
        self._buffer = bytearray()
        self._answers: dict[int, QmpReply | None] = {}  # None: not yet
        self._events: deque[tuple[QmpEvent, int]] = deque()  # with the length of its line
        self._events_bytes = 0
        self._closed: str | None = None

    @classmethod
    @contextlib.contextmanager
    def connect(
        cls,
        path: Path,
        *,
        timeout_s: float = 10,
        limit_s: float = math.inf,
        check_peer: Callable[[int], object] | None = None,
        through: Callable[[socket.socket], socket.socket] | None = None,
    ) -> Iterator[QmpClient]:
        """Connect to the socket at *path* and negotiate; disconnect when the block ends.

        A QMP socket serves one client. While another has it the connection succeeds, but no
        greeting comes.

        :param timeout_s: for the greeting and the negotiation together, and then for the answer to
            each command.
        :param limit_s: for all of it: then each command, and each wait, is out of time.
        :param check_peer: is given the id of the process that listens, before that is told
            anything; an exception of it ends the connection.
        :param through: is given the connection, and returns the one to be used in its place.
        :raises QmpError: if no process listens, no greeting came in time, or it is no QMP server.
        """
        client = cls(path, socket.socket(socket.AF_UNIX), timeout_s, limit_s)
        deadline = time.monotonic() + timeout_s
        try:
            try:
                client._connect(deadline)
                client._peer = peer_process(client._socket)
                if check_peer:
                    check_peer(client._peer)
                if through:
                    client._socket = through(client._socket)
                client._negotiate(deadline)
            except (TimeoutError, QmpTimeoutError):
                raise client._no_greeting(timeout_s) from None
            except QmpCommandError as error:
                raise QmpProtocolError(f"{path}: {error}") from error
            except OSError as error:
                raise QmpClosedError(f"{path}: {error.strerror or error}") from error
            yield client
        finally:
            client._socket.close()

    @classmethod
    @contextlib.contextmanager
    def over(
        cls, connection: socket.socket, path: Path, *, timeout_s: float, limit_s: float = math.inf
    ) -> Iterator[QmpClient]:
        """Negotiate with a monitor over a connection that there is; disconnect when the block ends.

        :param path: of the program at its other end, which errors name.
        :param timeout_s: as for :meth:`connect`, and so is *limit_s*.
        :raises QmpError: if no greeting came in time, or it is no QMP server.
        """
        client = cls(path, connection, timeout_s, limit_s)
        try:
            try:
                client._negotiate(time.monotonic() + timeout_s)
            except (TimeoutError, QmpTimeoutError):
                raise client._no_greeting(timeout_s) from None
            except QmpCommandError as error:
                raise QmpProtocolError(f"{path}: {error}") from error
            yield client
        finally:
            connection.close()

    def execute(
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
        :param timeout_s: None is the connection's.
        :raises QmpCommandError: if QEMU refused it.
        :raises QmpTimeoutError: if no answer came; QEMU may still carry the command out. A command
            that is out of time from the start is not sent.
        :raises QmpError: if the connection ended first, or the peer said something that is no QMP.
        """
        limit_s = self._within(self._timeout_s if timeout_s is None else timeout_s)
        if not self._within(None):
            raise QmpTimeoutError(f"{self.path}: no time is left for {command}")
        deadline = time.monotonic() + limit_s
        try:
            number = self._send(command, arguments, descriptors, deadline)
            try:
                while (reply := self._answers[number]) is None:
                    self._take_in(deadline)
            finally:
                del self._answers[number]
        except TimeoutError:
            raise QmpTimeoutError(
                f"{self.path}: no answer to {command} within {limit_s:g} s"
            ) from None
        return _value(command, reply)

    def begin(self, command: str, arguments: Mapping[str, Any] | None = None) -> int:
        """Give a command, and do not wait for its answer; returns its number."""
        try:
            deadline = time.monotonic() + self._within(self._timeout_s)
            return self._send(command, arguments, (), deadline)
        except TimeoutError:
            raise QmpTimeoutError(f"{self.path}: QEMU does not take {command}") from None

    def answer(self, number: int, command: str) -> Any:
        """The answer to a command that was begun, if it has come; None until then."""
        reply = self._answers[number]
        if reply is None:
            return None
        del self._answers[number]
        return _value(command, reply)

    def next_event(
        self, *, timeout_s: float | None = None, or_answer: int | None = None
    ) -> QmpEvent | None:
        """The oldest event that is not taken yet; waits for one if need be.

        :param or_answer: the number of a command that was begun: if its answer comes before an
            event does, None is returned.
        :raises QmpError: if none came in time, or the connection ended, and no event is left.
        """
        limit_s = self._within(timeout_s)
        deadline = time.monotonic() + limit_s
        try:
            while not self._events and (or_answer is None or self._answers.get(or_answer) is None):
                self._take_in(deadline)
        except TimeoutError:
            raise QmpTimeoutError(f"{self.path}: no event within {limit_s:g} s") from None
        return self._oldest_event() if self._events else None

    def peer_process(self) -> int:
        """The id of the process that made the socket; 0 if it can't be seen from here."""
        return self._peer

    def drop_events(self) -> None:
        """Forget the events that are not taken yet."""
        self._events.clear()
        self._events_bytes = 0

    def _within(self, timeout_s: float | None) -> float:
        """A time limit, or what the whole connection has left."""
        left_s = max(self._deadline - time.monotonic(), 0)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _no_greeting(self, timeout_s: float) -> QmpTimeoutError:
        return QmpTimeoutError(
            f"{self.path}: QEMU does not answer: no greeting within {timeout_s:g} s",
            hint="see whether it hangs or is stopped; or another client has this monitor, "
            "which serves one at a time",
        )

    def _connect(self, deadline: float) -> None:
        self._socket.setblocking(False)
        while True:
            try:
                return self._socket.connect(str(self.path))
            except BlockingIOError:  # as many clients wait as the monitor lets wait
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_PAUSE_S)

    def _negotiate(self, deadline: float) -> None:
        # An event that QEMU emits while it accepts a connection can arrive ahead of the greeting.
        while isinstance(message := wire.message_of(line := self._read_line(deadline)), QmpEvent):
            pass
        if not isinstance(message, Greeting):
            raise QmpProtocolError(f"{self.path}: no QMP greeting: {wire.excerpt(line)}")
        self.execute("qmp_capabilities", timeout_s=max(deadline - time.monotonic(), 0.001))

    def _send(
        self,
        command: str,
        arguments: Mapping[str, Any] | None,
        descriptors: Sequence[int],
        deadline: float,
    ) -> int:
        """Send a command; returns its number, or raises TimeoutError."""
        if self._closed:
            raise QmpClosedError(self._closed)
        number = next(self._numbers)
        left = wire.command(command, arguments, number=number)
        # Until all of it is out, nothing sensible can follow.
        self._closed = f"{self.path}: a command was interrupted"
        try:
            while left:
                self._limit(deadline)
                if descriptors:
                    sent = socket.send_fds(self._socket, [left], list(descriptors))
                    descriptors = ()
                else:
                    sent = self._socket.send(left)
                left = left[sent:]
        except TimeoutError:
            raise
        except OSError as error:
            self._closed = f"{self.path}: {error.strerror}"
            raise QmpClosedError(self._closed) from error
        self._closed = None
        self._answers[number] = None
        return number

    def _take_in(self, deadline: float) -> None:
        """Take in one message, or raise TimeoutError."""
        if self._closed:
            raise QmpClosedError(self._closed)
        try:
            line = self._read_line(deadline)
            message = wire.message_of(line)
        except QmpError as error:
            self._closed = str(error)
            raise
        if isinstance(message, QmpEvent) and len(line) <= _EVENTS_LIMIT:  # QEMU has no larger one
            self._events.append((message, len(line)))
            self._events_bytes += len(line)
            while len(self._events) > _EVENTS_KEPT or self._events_bytes > _EVENTS_LIMIT:
                self._oldest_event()
        # An answer with another number, or after its time limit, is dropped.
        elif (
            isinstance(message, QmpReply)
            and isinstance(message.id, int)
            and message.id in self._answers
        ):
            self._answers[message.id] = message

    def _oldest_event(self) -> QmpEvent:
        event, size = self._events.popleft()
        self._events_bytes -= size
        return event

    def _read_line(self, deadline: float) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > LINE_LIMIT:
                raise QmpProtocolError(f"{self.path}: a line of more than {LINE_LIMIT} bytes")
            self._limit(deadline)
            try:
                data = self._socket.recv(READ_SIZE)
            except TimeoutError:
                raise
            except OSError as error:
                raise QmpClosedError(f"{self.path}: {error.strerror}") from error
            if not data:
                raise QmpClosedError(f"{self.path}: QEMU closed the connection")
            self._buffer += data
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line

    def _limit(self, deadline: float) -> None:
        """Have the next call of the socket end by then, or raise TimeoutError."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(None if left_s == math.inf else left_s)


def _value(command: str, reply: QmpReply) -> Any:
    if reply.refusal:
        raise QmpCommandError(command, *reply.refusal)
    return reply.value
