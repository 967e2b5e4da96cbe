"""One VM's QMP event socket, from the greeting to its end.

An event is looked at (MSG_PEEK), acted on, and only then consumed: if the daemon is killed in
between, its successor, which gets the same connection from systemd, finds the event again. Lines
are consumed one by one, so that what is seen twice is at most one event.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import select
import socket
from typing import Protocol

from brine.common import qmp_wire
from brine.common.qmp_wire import Event, Greeting, QmpProtocolError, Refusal, Reply
from brine.kvmd.verdict import NOTHING, Seen, Verdict

_LINE_LIMIT = 64 * 1024  # QEMU's longest events are a few KiB
_HALF_LINE_GRACE_S = 0.01

# One buffer for all: it is filled and emptied within one callback.
_buffer = bytearray(_LINE_LIMIT)
_view = memoryview(_buffer)
_NEGOTIATE = qmp_wire.command("qmp_capabilities")


class State(enum.Enum):
    """How far a connection has come."""

    GREETING = enum.auto()
    NEGOTIATING = enum.auto()
    READY = enum.auto()


class Owner(Protocol):
    """Who is told what happens on a connection."""

    def ready(self, connection: Connection) -> None:
        """Events flow from now on."""

    def silent(self, connection: Connection) -> None:
        """The greeting is late. The connection goes on waiting for it."""

    def event(self, connection: Connection, event: Event) -> bool:
        """An event came.

        :returns: True if it may be consumed now; False if it is to stay unread, and nothing after
            it be read, until :meth:`Connection.go_on`.
        """

    def broken(self, connection: Connection, reason: str) -> None:
        """The peer does not speak QMP. The connection is closed."""

    def ended(self, connection: Connection) -> None:
        """The peer ended the connection. It is closed."""


class Connection:
    """A connection to one event socket, with what was seen on it.

    :param name: the instance's.
    :param identity: the socket file's, see :meth:`ControlDir.identity`.
    :param peer: connected and non-blocking; closed by the connection.
    :param ready: True for a connection that was negotiated before the daemon was restarted.
    """

    # There may be thousands of these.
    __slots__ = (
        "_after_restart",
        "_half_line",
        "_kept",
        "_loop",
        "_owner",
        "_socket",
        "_timer",
        "identity",
        "name",
        "seen",
        "state",
        "verdict",
    )

    def __init__(
        self, name: str, identity: str, peer: socket.socket, owner: Owner, *, ready: bool = False
    ) -> None:
        self.name = name
        self.identity = identity
        self.state = State.READY if ready else State.GREETING
        self.seen: Seen = NOTHING
        self.verdict: Verdict | None = None
        self._socket = peer
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._half_line: bytes | None = None  # b"" while one stays unread
        self._kept = 0  # the length of a line that was acted on and stays unread
        self._after_restart = ready

    @property
    def ready(self) -> bool:
        """Whether the peer's events flow."""
        return self.state is State.READY

    def start(self, *, greeting_timeout_s: float) -> None:
        """Begin to listen."""
        self._listen()
        if not self.ready:
            self._timer = self._loop.call_later(greeting_timeout_s, self._owner.silent, self)

    def close(self) -> None:
        """Leave the peer alone. May be called twice."""
        if self._socket.fileno() < 0:
            return
        self._set_timer(None)
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def fileno(self) -> int:
        """The descriptor, or -1 once closed."""
        return self._socket.fileno()

    def go_on(self) -> None:
        """Consume the event that was to stay unread, and listen for more."""
        if self._kept and self._socket.fileno() >= 0:
            self._socket.recv(self._kept)
            self._kept = 0
            self._half_line = None
            self._listen()

    def act_on_pending(self) -> bool:
        """Act at once on what the peer has sent, or on its end.

        :returns: False if there is nothing of either.
        """
        if self._socket.fileno() < 0 or self._kept:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return False
        self._readable()
        return True

    def _listen(self) -> None:
        # By number: for a socket object asyncio would format its repr() in passing.
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(_buffer, _LINE_LIMIT, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            count = 0  # a peer that ended without reading what we sent resets the connection
        if count == 0:
            self.close()
            self._owner.ended(self)
            return
        data = _view[:count].tobytes()
        start = 0
        while stop := data.find(b"\n", start) + 1:
            try:
                consume = self._take((self._half_line or b"") + data[start:stop])
            except QmpProtocolError as error:
                self._break(str(error))
            if self._socket.fileno() < 0:
                return
            if not consume:
                self._kept = stop - start
                self._loop.remove_reader(self._socket.fileno())
                return
            self._socket.recv(stop - start)
            self._half_line = None
            start = stop
        if start == 0:
            self._half_a_line(data)

    def _take(self, line: bytes) -> bool:
        if line.isspace():
            return True
        try:
            message = qmp_wire.parse(line)
        except QmpProtocolError:
            if not self._after_restart:
                raise
            message = None  # the rest of a line whose half the daemon before us took
        self._after_restart = False
        if self.state is State.GREETING:
            if not isinstance(message, Greeting):
                raise QmpProtocolError(f"no QMP greeting: {qmp_wire.excerpt(line)}")
            self._negotiate()
        elif self.state is State.NEGOTIATING and isinstance(message, Reply | Refusal | Event):
            # A refusal says that negotiation was done already, and an event may overtake the
            # reply: either way events flow.
            self.state = State.READY
            self._set_timer(None)
            self._owner.ready(self)
        return not isinstance(message, Event) or self._owner.event(self, message)

    def _negotiate(self) -> None:
        self.state = State.NEGOTIATING
        with contextlib.suppress(OSError):  # a peer that has ended: reading will tell
            self._socket.send(_NEGOTIATE)

    def _break(self, reason: str) -> None:
        self.close()
        self._owner.broken(self, reason)

    def _half_a_line(self, data: bytes) -> None:
        """The start of a line is there, and nothing else.

        While it stays unread, listening would only spin; yet unread it is safe should the daemon
        be killed. QEMU writes a line at once, so the rest comes in no time. From a peer that takes
        longer the half is taken, since what stays unread may fill up the socket.
        """
        if self._half_line is None and len(data) < _LINE_LIMIT:
            self._half_line = b""
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(_HALF_LINE_GRACE_S, self._look_again)
            return
        self._half_line = (self._half_line or b"") + data
        if len(self._half_line) >= _LINE_LIMIT:
            start = qmp_wire.excerpt(self._half_line)
            self._break(f"a line of more than {_LINE_LIMIT} bytes: {start}")
        else:
            self._socket.recv(len(data))

    def _look_again(self) -> None:
        if self._socket.fileno() >= 0 and not self._kept:
            self._listen()

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = timer
