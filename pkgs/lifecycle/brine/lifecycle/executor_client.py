"""The handler's requests to the executor: sent when they are due, and again until they are done.

The executor listens at a socket that only the handler may use. Each packet is a request,
``NAME end CAUSE`` or ``NAME start``; the answer is a packet ``NAME VERB RESULT TEXT``.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from brine.common import paths
from brine.lifecycle.owner_watch import EndReason

log = logging.getLogger(__name__)

SOCKET = paths.LIFECYCLE_DIR.parent / "lifecycle-executor"
LONGEST_PACKET = 4096

_RETRY_S = 5.0
_UNANSWERED_S = 2 * 3600.0  # no stop takes so long
_CONNECT_S = 1.0
_MOST_LOST = 12  # connections, one after another


class Verb(StrEnum):
    """A request."""

    END = "end"
    START = "start"


class Outcome(StrEnum):
    """An answer. ``IDLE``: there was nothing to do."""

    DONE = "done"
    IDLE = "idle"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """The executor's answer.

    :param cause: why the instance was to end; None if it was to start.
    :param text: why that failed.
    """

    name: str
    cause: EndReason | None
    outcome: Outcome
    text: str


@dataclass(slots=True)
class _Request:
    """A request.

    :param cause: why an instance is to end; None if it is to start.
    :param due_s: when it is sent, by the monotonic clock; None once it is.
    :param sent_s: when it was.
    """

    cause: EndReason | None
    due_s: float | None
    sent_s: float = 0.0


class ExecutorClient:
    """The requests, at most one for each instance, and the connection, which lasts while there are
    any.

    :param poll: gets the descriptor of the connection.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._requests: dict[str, _Request] = {}
        self._connection: socket.socket | None = None
        self._lost = 0

    @property
    def descriptor(self) -> int:
        """Of the connection; -1 if there is none."""
        return self._connection.fileno() if self._connection else -1

    @property
    def is_lost(self) -> bool:
        """Whether the executor could not be reached, and has not answered since."""
        return self._lost > 0

    @property
    def names(self) -> set[str]:
        """The instances with a request."""
        return set(self._requests)

    @property
    def ends(self) -> int:
        """How many instances are to end."""
        return sum(request.cause is not None for request in self._requests.values())

    def ask(self, name: str, cause: EndReason | None, *, after_s: float = 0.0) -> bool:
        """Have an instance end for a cause, or start; returns whether that is a new request. An end
        that was asked for goes on, and takes the place of a start."""
        request = self._requests.get(name)
        if request and request.cause:
            return False
        self._requests[name] = _Request(cause, time.monotonic() + after_s)
        return True

    def call_off(self, name: str, cause: EndReason) -> None:
        """Do not try (again) to end an instance for a cause that is no more."""
        request = self._requests.get(name)
        if request and request.cause is cause and request.due_s is not None:
            del self._requests[name]

    def send_due(self, is_obsolete: Callable[[str, EndReason | None], bool]) -> None:
        """Send the requests that are due.

        :param is_obsolete: whether the reason for a request is no more.
        :raises OSError: if the executor can't be reached for long.
        """
        now_s = time.monotonic()
        for name, request in list(self._requests.items()):
            if request.due_s is None and now_s > request.sent_s + _UNANSWERED_S:
                request.due_s = now_s
            if request.due_s is None or request.due_s > now_s:
                continue
            if is_obsolete(name, request.cause):
                del self._requests[name]
                continue
            cause = request.cause
            words = (name, Verb.START) if cause is None else (name, Verb.END, cause)
            if not self._send(" ".join(words)):
                return
            request.due_s, request.sent_s = None, now_s
        if not self._requests:
            self._disconnect()

    def answer(self) -> Answer | None:
        """Read the answer that has come. A request that failed is sent again later."""
        assert self._connection
        try:
            packet = self._connection.recv(LONGEST_PACKET)
        except OSError:
            packet = b""
        if not packet:
            self._disconnect()
            return None
        self._lost = 0
        name, verb, outcome, text = packet.decode(errors="replace").split(" ", 3)
        request = self._requests.get(name)
        if request is None or (request.cause is None) != (verb == Verb.START):
            return None
        if outcome == Outcome.FAILED:
            request.due_s = time.monotonic() + _RETRY_S
        else:
            del self._requests[name]
        return Answer(name, request.cause, Outcome(outcome), text)

    def _send(self, request: str) -> bool:
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._connection.settimeout(_CONNECT_S)
                self._connection.connect(str(SOCKET))
                self._poll.register(self._connection, select.POLLIN)
            self._connection.send(request.encode())
        except OSError as error:
            log.error("%s: %s; trying again", SOCKET, error.strerror or error)
            self._disconnect()
            self._lost += 1
            if self._lost >= _MOST_LOST:
                raise
            return False
        return True

    def _disconnect(self) -> None:
        """Close the connection. Requests without an answer, or not sent, wait a while."""
        if self._connection:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._connection)
            self._connection.close()
            self._connection = None
        again_s = time.monotonic() + _RETRY_S
        for request in self._requests.values():
            request.due_s = max(request.due_s or 0.0, again_s)
