"""Messages between the two nodes of a move, without the master: over a connection of
:mod:`brine.moves.channel` whose purpose is CONTROL.

The source asks, and the target answers each message before the next one. Both are lines of JSON,
``[number, body, proof]``: numbers count from 1 in each connection. The body is the message, sealed
by the key of the move for its direction, the connection's name and its number, in base64; and the
proof is by that key over these three and the body. So a stranger can't read a line, and a line can
be neither changed, nor left out, nor sent again: whoever receives such a line ends the connection.

All messages may be repeated, on another connection, too: an answer may have been lost.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from brine.common.errors import BrineError, printable
from brine.moves import channel
from brine.moves.channel import CONTROL, MEMORY, Call
from brine.moves.migration import MoveError
from brine.moves.move_key import MoveKey

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long an answer may take."""

_QUIET_S = 900.0  # the source asks nothing while a large disk is copied
_LARGEST = 24 << 20  # UEFI variables may be the largest of what comes along
_TALKS = 4  # at a time
_AFTER_FAULT_S = 1.0
_ASKS, _ANSWERS = b"source", b"target"

Message = dict[str, Any]
"""A message: ``told`` says which, see :class:`Topic`; or the answer to one."""


class Topic(StrEnum):
    """What a message is about: its ``told``."""

    ADMIT = "admit"
    """``ports``: the addresses and ports from which the source's QEMU connects for disks."""
    BRING = "bring"
    """``files``: what comes along beside the disks, in base64, see
    :mod:`brine.moves.belongings`; ``word`` is ``held`` or ``refused``."""
    RECEIVE = "receive"
    """The next connection for memory is the guest."""
    HOLD = "hold"
    """Whether the target holds all; ``word`` of the answer is ``wait``, ``held`` or ``refused``."""
    GO = "go"
    """The claim with ``serial`` is the target's; ``word`` is ``wait``, ``runs`` or ``refused``."""
    COPY = "copy"
    """The file ``role`` of the ``disk`` comes next, of ``size`` bytes, while no guest uses it: the
    answer has the ``port`` where it is written, and whether ``is_zero`` until then."""
    COPIED = "copied"
    """``disks``: of each file of each disk, by UUID and role, its ``size_bytes`` and ``sha256``, of
    a guest that is off; ``word`` is ``wait`` while they are compared, ``whole`` or ``differs``."""
    CLEARED = "cleared"
    """The source has nothing of the instance any more, and asks no more."""
    LEAVE = "leave"
    """The guest stays on the source, durably: the target ends its QEMU, if it has one."""


class TalkError(MoveError):
    """A conversation that the other node has broken off, or that can't be trusted."""


class TalkEndedError(TalkError):
    """The other node has ended the connection, between two messages."""


class TalkSilentError(TalkError):
    """The other node has not begun another message in time."""


class _Lines:
    """Signed lines over one connection, each way with its own count."""

    def __init__(self, call: Call, key: MoveKey, own: bytes, other: bytes) -> None:
        self._connection = call.connection
        self._session = call.session
        self._key = key
        self._own, self._other = own, other
        self._sent = self._received = 0
        self._rest = bytearray()

    def send(self, message: Message, timeout_s: float) -> None:
        self._sent += 1
        sealed = self._sealed(self._own, self._sent, json.dumps(message).encode())
        body = base64.b64encode(sealed).decode()
        line = json.dumps([self._sent, body, self._proof(self._own, self._sent, body)])
        self._connection.settimeout(timeout_s)
        self._connection.sendall(line.encode() + b"\n")

    def receive(self, timeout_s: float) -> Message:
        """:raises TalkError: if the line is not the other side's next one, or none comes."""
        line = self._line(time.monotonic() + timeout_s)
        try:
            number, body, proof = json.loads(line)
            is_theirs = type(number) is int and hmac.compare_digest(
                str(proof).encode(), self._proof(self._other, number, str(body)).encode()
            )
            if not is_theirs:
                raise TalkError("a message that the other node has not signed")
            if number != self._received + 1:
                raise TalkError(f"message {number} came again, or before others")
            self._received = number
            sealed = base64.b64decode(body, validate=True)
            message = json.loads(self._sealed(self._other, number, sealed))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise TalkError("a message that can't be read") from None
        if not isinstance(message, dict):
            raise TalkError("a message that is none")
        return message

    def _line(self, deadline: float) -> bytes:
        seen = 0
        while (end := self._rest.find(b"\n", seen)) < 0:
            if (seen := len(self._rest)) > _LARGEST:
                raise TalkError("a message without an end")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                kind = TalkError if self._rest else TalkSilentError
                raise kind("the other node does not answer")
            self._connection.settimeout(left_s)
            try:
                data = self._connection.recv(64 * 1024)
            except TimeoutError:
                continue
            except OSError as error:
                kind = TalkError if self._rest else TalkEndedError
                raise kind(f"the connection has ended: {error.strerror}") from error
            if not data:
                kind = TalkError if self._rest else TalkEndedError
                raise kind("the other node has ended the connection")
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    def _sealed(self, side: bytes, number: int, body: bytes) -> bytes:
        count = number.to_bytes(8, "big", signed=False)
        return self._key.sealed(body, b"talk", side, self._session, count)

    def _proof(self, side: bytes, number: int, body: str) -> str:
        count = number.to_bytes(8, "big", signed=False)
        return self._key.proof(b"talk", side, self._session, count, body.encode()).hex()


class Asker:
    """The source's side. It connects when it first asks, and again after a fault."""

    def __init__(self, address: str, port: int, key: MoveKey) -> None:
        self._address, self._port, self._key = address, port, key
        self._call: Call | None = None
        self._lines: _Lines | None = None

    def ask(self, topic: Topic, *, timeout_s: float = ANSWER_S, **more: Any) -> Message:
        """Send a message, and return its answer. It may have been done, if this fails.

        An earlier connection may have ended meanwhile, such as during a long copy: then the message
        is sent again, on a new one.

        :raises MoveError: if there is no answer.
        """
        message = {"told": topic.value, **more}
        if self._lines:
            with contextlib.suppress(TalkEndedError):
                return self._asked(message, timeout_s)
        return self._asked(message, timeout_s)

    def _asked(self, message: Message, timeout_s: float) -> Message:
        try:
            lines = self._lines or self._connected(timeout_s)
            try:
                lines.send(message, timeout_s)
            except OSError as error:
                raise TalkEndedError(f"the connection has ended: {error}") from error
            return lines.receive(timeout_s)
        except BaseException:
            self.close()  # a late answer must not be taken for that to the next message
            raise

    def memory(self, *, timeout_s: float = 10.0) -> socket.socket:
        """A connection for the guest's memory: RECEIVE was answered before."""
        return channel.connect(
            self._address, self._port, key=self._key, purpose=MEMORY, timeout_s=timeout_s
        )

    def _connected(self, timeout_s: float) -> _Lines:
        limit_s = min(timeout_s, 10.0)
        self._call = channel.call(
            self._address, self._port, key=self._key, purpose=CONTROL, timeout_s=limit_s
        )
        self._lines = _Lines(self._call, self._key, _ASKS, _ANSWERS)
        return self._lines

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._call:
            self._call.connection.close()
        self._call = self._lines = None


Answer = Callable[[Message], Message]
"""Does what a message says, and answers it. It is called by one thread at a time."""


class Listener:
    """The target's side: a thread takes connections until :meth:`close`.

    :param listener: of :func:`brine.moves.channel.listen`; it is closed with this.
    :param answer: a :class:`BrineError` of it is logged, and the source gets it as the ``error``.
    :param take_memory: gets a connection for a guest's memory, which it has to close.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: MoveKey,
        answer: Answer,
        take_memory: Callable[[socket.socket], object],
    ) -> None:
        self._listener = listener
        self._key = key
        self._answer = answer
        self._take_memory = take_memory
        self._one_by_one = threading.Lock()
        self._talks: list[Call] = []
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="talk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all conversations, and listen no more."""
        self._is_open = False
        self._listener.close()
        for one in list(self._talks):
            _end(one.connection)

    def _run(self) -> None:
        while self._is_open:
            try:
                call = channel.accept_call(
                    self._listener, key=self._key, purposes=[CONTROL, MEMORY], timeout_s=60.0
                )
            except (MoveError, OSError, ValueError):
                continue  # none came for long; or it was closed
            except Exception:  # without this thread, the source would never be answered again
                log.exception("a fault of Brine's, at the port of a move")
                time.sleep(_AFTER_FAULT_S)
                continue
            if call.purpose == CONTROL:
                self._begin(call)
            else:
                self._memory(call.connection)

    def _memory(self, connection: socket.socket) -> None:
        try:
            with self._one_by_one:
                self._take_memory(connection)
        except (BrineError, OSError) as error:
            connection.close()
            log.warning("a connection for memory is not taken: %s", printable(str(error)))

    def _begin(self, call: Call) -> None:
        while len(self._talks) >= _TALKS:  # the source has forgotten the oldest
            _end(self._talks.pop(0).connection)
        self._talks.append(call)
        threading.Thread(target=self._talk, args=(call,), name="talk", daemon=True).start()

    def _talk(self, call: Call) -> None:
        lines = _Lines(call, self._key, _ANSWERS, _ASKS)
        try:
            while self._is_open:
                message = lines.receive(_QUIET_S)
                with self._one_by_one:
                    answer = self._answered(message)
                lines.send(answer, ANSWER_S)
        except (TalkEndedError, TalkSilentError):
            pass  # it comes again if it has more to say; of a large copy there is nothing for hours
        except (BrineError, OSError) as error:
            if self._is_open:
                log.warning("the source's conversation ends: %s", printable(str(error)))
        finally:
            call.connection.close()
            with contextlib.suppress(ValueError):
                self._talks.remove(call)

    def _answered(self, message: Message) -> Message:
        try:
            return self._answer(message)
        except BrineError as error:
            log.warning("what the source asked for is not done: %s", printable(str(error)))
            return {"error": str(error)}
        except (LookupError, TypeError, ValueError) as error:
            raise TalkError(f"a message that lacks something: {error!r:.100}") from error


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
