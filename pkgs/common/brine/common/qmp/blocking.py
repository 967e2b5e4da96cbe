"""A client of a QEMU monitor for programs that only ask, one question after the other.

asyncio takes longer to load than such a program takes to run.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from brine.common.peer import peer_process
from brine.common.qmp import wire
from brine.common.qmp.wire import (
    LINE_LIMIT,
    READ_SIZE,
    Greeting,
    QmpClosedError,
    QmpCommandError,
    QmpProtocolError,
    QmpRefusal,
    QmpReply,
    QmpTimeoutError,
    no_greeting,
)

T = TypeVar("T")

LIMIT_S = 30.0
"""What talks so to a QEMU asks few questions: so long may all of them take."""

_PAUSE_S = 0.01


def without_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run what awaits nothing but a blocking client.

    :raises RuntimeError: if it does wait for something else.
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("this needs an event loop")


class BlockingQmpClient:
    """A connection to one QMP socket, past its greeting; events are not kept.

    Its commands are coroutines as those of :class:`brine.common.qmp.client.QmpClient` are, so that
    the same questions can be asked through both, but they block: :func:`without_loop` runs them.
    """

    def __init__(
        self, path: Path, connection: socket.socket, answer_timeout_s: float, limit_s: float
    ) -> None:
        self.path = path
        self._deadline = time.monotonic() + limit_s
        self._socket = connection
        self._answer_timeout_s = answer_timeout_s
        self._numbers = wire.numbers()
        self._buffer = bytearray()

    @classmethod
    @contextlib.contextmanager
    def connect(
        cls,
        path: Path,
        *,
        timeout_s: float = 10,
        answer_timeout_s: float = 10,
        limit_s: float = LIMIT_S,
        check_peer: Callable[[int], object] | None = None,
    ) -> Iterator[BlockingQmpClient]:
        """Connect and negotiate; disconnect when the block ends.

        Other parameters and errors are those of :meth:`brine.common.qmp.client.QmpClient.connect`.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            client = cls(path, connection, answer_timeout_s, limit_s)
            client._open(timeout_s, check_peer)
            yield client

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Give a command and return QEMU's answer; errors are those of the other client."""
        return self._execute(command, arguments, self._answer_timeout_s)

    def _open(self, timeout_s: float, check_peer: Callable[[int], object] | None) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._connect(deadline)
            if check_peer:
                check_peer(peer_process(self._socket))
            if not isinstance(wire.parse(self._read_line(deadline)), Greeting):
                raise QmpProtocolError(f"{self.path}: no QMP greeting")
            self._execute("qmp_capabilities", None, max(deadline - time.monotonic(), 0.001))
        except (TimeoutError, QmpTimeoutError):
            raise no_greeting(self.path, timeout_s) from None
        except QmpCommandError as error:
            raise QmpProtocolError(f"{self.path}: {error}") from error
        except OSError as error:
            raise QmpClosedError(f"{self.path}: {error.strerror or error}") from error

    def _connect(self, deadline: float) -> None:
        self._socket.setblocking(False)
        while True:
            try:
                return self._socket.connect(str(self.path))
            except BlockingIOError:  # as many clients wait as the monitor lets wait
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_PAUSE_S)

    def _execute(self, command: str, arguments: Mapping[str, Any] | None, timeout_s: float) -> Any:
        deadline = min(time.monotonic() + timeout_s, self._deadline)
        number = next(self._numbers)
        try:
            self._limit(deadline)
            self._socket.sendall(wire.command(command, arguments, number=number))
            outcome = self._answer(number, deadline)
        except TimeoutError:
            raise QmpTimeoutError(
                f"{self.path}: no answer to {command} within {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise QmpClosedError(f"{self.path}: {error.strerror}") from error
        if isinstance(outcome, QmpRefusal):
            raise QmpCommandError(command, outcome.error_class, outcome.description)
        return outcome.value

    def _answer(self, number: int, deadline: float) -> QmpReply | QmpRefusal:
        while True:
            message = wire.parse(self._read_line(deadline))
            if isinstance(message, QmpReply | QmpRefusal) and message.id == number:
                return message

    def _read_line(self, deadline: float) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > LINE_LIMIT:
                raise QmpProtocolError(f"{self.path}: a line of more than {LINE_LIMIT} bytes")
            self._limit(deadline)
            data = self._socket.recv(READ_SIZE)
            if not data:
                raise QmpClosedError(f"{self.path}: QEMU closed the connection")
            self._buffer += data
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line

    def _limit(self, deadline: float) -> None:
        """Have the next call of the socket end by then."""
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
