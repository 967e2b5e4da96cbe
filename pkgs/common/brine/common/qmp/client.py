"""A client of a QEMU monitor, for commands with time limits, events, and passed descriptors."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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

LIMIT_S = 30.0
"""For a program that asks a few questions: how long all of them may take."""

_EVENTS_KEPT = 1000
_PAUSE_S = 0.01


class QmpClient:
    """A connection to one QMP socket, past its greeting.

    Each call blocks until it has what it asks for, or until its time is over. Events that come
    meanwhile are kept, the newest 1,000 of them, or fewer if they are large.

    Source: QEMU's qmp-spec; descriptors travel as SCM_RIGHTS (:manpage:`unix(7)`) with the first
    byte of the command that uses them.
    """

    def __init__(
        self, path: Path, connection: socket.socket, answer_timeout_s: float, limit_s: float
    ) -> None:
        self.path = path
        self.greeting = Greeting((0, 0, 0), ())
        self._answer_timeout_s = answer_timeout_s
        self._deadline = time.monotonic() + limit_s
        self._socket = connection
        self._peer = 0
        self._numbers = wire.numbers()
        self._buffer = bytearray()
        self._answers: dict[int, QmpReply | QmpRefusal | None] = {}  # None: not yet
        self._events: deque[tuple[QmpEvent, int]] = deque()
        self._events_bytes = 0
        self._closed: str | None = None

    @classmethod
    @contextlib.contextmanager
    def connect(
        cls,
        path: Path,
        *,
        timeout_s: float = 10,
        answer_timeout_s: float = 10,
        limit_s: float = math.inf,
        check_peer: Callable[[int], object] | None = None,
        through: Callable[[socket.socket], socket.socket] | None = None,
    ) -> Iterator[QmpClient]:
        """Connect to the socket at *path* and negotiate; disconnect when the block ends.

        A QMP socket serves one client. While another has it the connection succeeds, but no
        greeting comes.

        :param timeout_s: for the greeting and the negotiation together.
        :param answer_timeout_s: for the answer to each command.
        :param limit_s: for all of it: from then on each command, and each wait for an event, is out
            of time.
        :param check_peer: is given the id of the process that listens, before that is told
            anything; an exception of it ends the connection.
        :param through: is given the connection, and returns the one to be used in its place.
        :raises QmpClosedError: if nobody listens at *path*.
        :raises QmpTimeoutError: if no greeting came in time.
        :raises QmpProtocolError: if what listens there is no QMP server.
        """
        client = cls(path, socket.socket(socket.AF_UNIX), answer_timeout_s, limit_s)
        try:
            client._open(timeout_s, check_peer, through)
            yield client
        finally:
            client._socket.close()

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
        :param timeout_s: None is the connection's ``answer_timeout_s``.
        :raises QmpCommandError: if QEMU refused it.
        :raises QmpTimeoutError: if no answer came; QEMU may still carry the command out. A command
            that is out of time from the start is not sent.
        :raises QmpClosedError: if the connection ended first.
        :raises QmpProtocolError: if the peer said something that is no QMP, which ends it.
        """
        limit_s = self._within(self._answer_timeout_s if timeout_s is None else timeout_s)
        if not self._within(None):
            raise QmpTimeoutError(f"{self.path}: no time is left for {command}")
        deadline = time.monotonic() + limit_s
        try:
            number = self._send(command, arguments, descriptors, deadline)
            try:
                while (outcome := self._answers[number]) is None:
                    self._take_in(deadline)
            finally:
                del self._answers[number]
        except TimeoutError:
            raise QmpTimeoutError(
                f"{self.path}: no answer to {command} within {limit_s:g} s"
            ) from None
        return _value(command, outcome)

    def begin(self, command: str, arguments: Mapping[str, Any] | None = None) -> int:
        """Give a command, and do not wait for its answer; returns its number.

        :raises QmpTimeoutError: if QEMU does not even take it.
        """
        try:
            deadline = time.monotonic() + self._within(self._answer_timeout_s)
            return self._send(command, arguments, (), deadline)
        except TimeoutError:
            raise QmpTimeoutError(f"{self.path}: QEMU does not take {command}") from None

    def answer(self, number: int, command: str) -> Any:
        """The answer to a command that was begun, if it has come; None until then.

        :raises QmpCommandError: if QEMU refused it.
        """
        outcome = self._answers[number]
        if outcome is None:
            return None
        del self._answers[number]
        return _value(command, outcome)

    def next_event(
        self, *, timeout_s: float | None = None, or_answer: int | None = None
    ) -> QmpEvent | None:
        """The oldest event that nobody has taken yet; waits for one if need be.

        :param or_answer: the number of a command that was begun: if its answer comes before an
            event does, None is returned.
        :raises QmpTimeoutError: if none came in time.
        :raises QmpClosedError: if the connection ended, and no event is left.
        """
        limit_s = self._within(timeout_s)
        deadline = time.monotonic() + limit_s
        try:
            while not self._events and (or_answer is None or self._answers.get(or_answer) is None):
                self._take_in(deadline)
        except TimeoutError:
            raise QmpTimeoutError(f"{self.path}: no event within {limit_s:g} s") from None
        if not self._events:
            return None
        event, size = self._events.popleft()
        self._events_bytes -= size
        return event

    def peer_process(self) -> int:
        """The id of the process that made the socket; 0 if it can't be seen from here."""
        return self._peer

    def drop_events(self) -> None:
        """Forget the events that nobody has taken yet."""
        self._events.clear()
        self._events_bytes = 0

    def _within(self, timeout_s: float | None) -> float:
        """A time limit, or what the whole connection has left."""
        left_s = max(self._deadline - time.monotonic(), 0)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _open(
        self,
        timeout_s: float,
        check_peer: Callable[[int], object] | None,
        through: Callable[[socket.socket], socket.socket] | None,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._connect(deadline)
            self._peer = peer_process(self._socket)
            if check_peer:
                check_peer(self._peer)
            if through:
                self._socket = through(self._socket)
            self.greeting = self._read_greeting(deadline)
            self.execute("qmp_capabilities", timeout_s=max(deadline - time.monotonic(), 0.001))
        except (TimeoutError, QmpTimeoutError):
            raise no_greeting(self.path, timeout_s) from None
        except QmpCommandError as error:
            raise QmpProtocolError(f"{self.path}: {error}") from error
        except OSError as error:
            raise QmpClosedError(f"{self.path}: {error.strerror or error}") from error

    def _read_greeting(self, deadline: float) -> Greeting:
        # An event that QEMU emits while it accepts a connection can arrive ahead of the greeting.
        while isinstance(message := wire.parse(line := self._read_line(deadline)), QmpEvent):
            pass
        if not isinstance(message, Greeting):
            raise QmpProtocolError(f"{self.path}: no QMP greeting: {wire.excerpt(line)}")
        return message

    def _connect(self, deadline: float) -> None:
        self._socket.setblocking(False)
        while True:
            try:
                return self._socket.connect(str(self.path))
            except BlockingIOError:  # as many clients wait as the monitor lets wait
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_PAUSE_S)

    def _send(
        self,
        command: str,
        arguments: Mapping[str, Any] | None,
        descriptors: Sequence[int],
        deadline: float,
    ) -> int:
        """Send a command; returns its number.

        :raises TimeoutError: if the peer does not take it in time.
        """
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
        """Take in one message.

        :raises TimeoutError: if none comes in time.
        """
        if self._closed:
            raise QmpClosedError(self._closed)
        try:
            line = self._read_line(deadline)
            self._take(wire.parse(line), len(line))
        except QmpError as error:
            self._closed = str(error)
            raise

    def _take(self, message: Greeting | QmpEvent | QmpReply | QmpRefusal | None, size: int) -> None:
        if isinstance(message, QmpEvent):
            if size > EVENTS_LIMIT:
                return  # none that QEMU has is so large
            self._events.append((message, size))
            self._events_bytes += size
            while len(self._events) > _EVENTS_KEPT or self._events_bytes > EVENTS_LIMIT:
                _, dropped = self._events.popleft()
                self._events_bytes -= dropped
        # An answer without our number, or after its time limit, is nobody's.
        elif (
            isinstance(message, QmpReply | QmpRefusal)
            and isinstance(message.id, int)
            and message.id in self._answers
        ):
            self._answers[message.id] = message

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
        """Have the next call of the socket end by then.

        :raises TimeoutError: if that is past.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(None if left_s == math.inf else left_s)


def _value(command: str, outcome: QmpReply | QmpRefusal) -> Any:
    if isinstance(outcome, QmpRefusal):
        raise QmpCommandError(command, outcome.error_class, outcome.description)
    return outcome.value
