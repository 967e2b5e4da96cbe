"""The connection to a VM's QMP event socket.

The daemon peeks at an event (MSG_PEEK), acts on it, and only then consumes it. If the daemon is
killed in between, its successor gets the same connection from systemd, and finds the event again.
Lines are consumed one by one, so at most one event is seen twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from typing import Protocol

from brine.common.journal import tell
from brine.common.qmp import wire
from brine.common.qmp.wire import Greeting, QmpEvent, QmpProtocolError, QmpReply
from brine.common.unix_socket import peer_process, peer_user
from brine.kvmd import messages
from brine.kvmd.control_dir import ControlDir, SocketIdentity
from brine.kvmd.handover import VmRecord, key_of

log = logging.getLogger(__name__)

_LINE_LIMIT = 64 * 1024  # QEMU's longest events are a few KiB
_LINES_AT_ONCE = 100  # then it is others' turn
_HALF_LINE_GRACE_S = 0.01

# One buffer for all: it is filled and emptied within one callback.
_buffer = bytearray(_LINE_LIMIT)
_view = memoryview(_buffer)
_NEGOTIATE = wire.command("qmp_capabilities")
_STATE = 1  # the number of this command, by which its answer is known
_ASK_STATE = wire.command("query-status", number=_STATE)


class ConnectionState(enum.Enum):
    """The state of a connection."""

    GREETING = enum.auto()
    NEGOTIATING = enum.auto()
    READY = enum.auto()


class ConnectionOwner(Protocol):
    """What a connection reports to."""

    def greeted(self, connection: Connection) -> None:
        """Its peer is a QEMU: it sends events when it has our answer, and none may be lost."""

    def ready(self, connection: Connection) -> None:
        """Its peer sends events from now on: its VM runs."""

    def event(self, connection: Connection, event: QmpEvent) -> None:
        """Something happened to its VM. The event is consumed when this returns, unless the
        connection is told to hold it."""

    def state(self, connection: Connection, state: str) -> None:
        """Its VM is in a RunState: the answer to :meth:`Connection.ask_state`."""

    def ended(self, connection: Connection, fault: str) -> None:
        """It is closed: its peer is gone, or does not speak QMP, which is its *fault*."""


class Connection:
    """A connection to one event socket of the directory *place*, with what was seen on it.

    :param peer: connected and non-blocking; the connection closes it.
    :param restored: whether an earlier daemon had this connection.
    """

    def __init__(
        self,
        name: str,
        place: ControlDir,
        identity: SocketIdentity,
        peer: socket.socket,
        owner: ConnectionOwner,
        *,
        restored: bool = False,
    ) -> None:
        self.name = name
        self.place = place
        self.identity = identity
        self.key = key_of(name, identity)
        self.record = VmRecord()
        self.state = ConnectionState.READY if restored else ConnectionState.GREETING
        self._socket = peer
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._restored = restored
        self._half_line: bytes | None = None  # b"" while one is left unread for a moment
        self._held = False
        self._unread = 0  # the length of a line that was acted on but is held

    @property
    def ready(self) -> bool:
        """Whether the peer sends events."""
        return self.state is ConnectionState.READY

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, from either side."""
        return self._socket.fileno() < 0

    def start(self, *, greeting_timeout_s: float) -> None:
        """Begin to listen."""
        if self._restored:
            # The earlier daemon may have been killed before it sent this; twice does no harm.
            self._send(_NEGOTIATE)
        else:
            self._timer = self._loop.call_later(greeting_timeout_s, self._tell_of_silence)
        self._listen()

    def close(self) -> None:
        """Close the connection. May be called twice."""
        if not self.closed:
            if self._timer:
                self._timer.cancel()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def fileno(self) -> int:
        """The descriptor, or -1 once closed."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """The process that listens at the socket; 0 if that is not known."""
        try:
            return peer_process(self._socket)
        except OSError:
            return 0

    def ask_state(self) -> None:
        """Ask QEMU for its RunState: :meth:`ConnectionOwner.state` gets an answer."""
        self._send(_ASK_STATE)

    def is_roots(self) -> bool:
        """Whether root's process listens at the socket."""
        try:
            return peer_user(self._socket) == 0
        except OSError:
            return False

    def hold(self) -> None:
        """Within :meth:`ConnectionOwner.event`: leave this event unread, and all after it."""
        self._held = True

    def go_on(self) -> None:
        """Consume the event that was held, and listen for more."""
        self._held = False
        if self._unread and not self.closed:
            self._socket.recv(self._unread)
            self._unread = 0
            self._half_line = None
            self._listen()

    def act_on_pending(self) -> bool:
        """Act now on some of the pending input, or on the peer's end; False if there is none of
        both."""
        if self.closed or self._unread or self._half_line is not None:
            return False
        return self._readable()

    def _readable(self) -> bool:
        try:
            return self._read()
        except QmpProtocolError as error:
            self._end(str(error))
        except Exception:
            # The input of one peer must not come again and again, nor stop the others.
            log.exception("a fault of ours")
            self._end("see the fault above")
        return True

    def _read(self) -> bool:
        """Act on pending input; False if there is none."""
        try:
            count = self._socket.recv_into(_buffer, _LINE_LIMIT, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            count = 0  # a peer that ended without reading what we sent resets the connection
        if count == 0:
            self._end()
            return True
        data = _view[:count].tobytes()
        start = 0
        for _ in range(_LINES_AT_ONCE):
            stop = data.find(b"\n", start) + 1
            if not stop:
                break
            self._take((self._half_line or b"") + data[start:stop])
            if self.closed:
                return True
            if self._held:
                self._unread = stop - start
                self._loop.remove_reader(self._socket.fileno())
                return True
            self._socket.recv(stop - start)
            self._half_line = None
            start = stop
        if start == 0:
            self._half_a_line(data)
        return True

    def _take(self, line: bytes) -> None:
        if line.isspace():
            return
        try:
            message = wire.message_of(line)
        except QmpProtocolError:
            if not self._restored:
                raise
            message = None  # the rest of a line whose half the daemon before us took
        self._restored = False
        if self.state is ConnectionState.GREETING:
            if isinstance(message, QmpEvent):
                return  # QEMU emitted it while it accepted this connection: it came before
            if not isinstance(message, Greeting):
                raise QmpProtocolError(f"no QMP greeting: {wire.excerpt(line)}")
            self.state = ConnectionState.NEGOTIATING
            self._owner.greeted(self)
            self._send(_NEGOTIATE)
        elif self.state is ConnectionState.NEGOTIATING and isinstance(message, QmpReply | QmpEvent):
            # A refusal means that the negotiation was done before, and an event may overtake the
            # reply. Either way the peer sends events.
            self.state = ConnectionState.READY
            if self._timer:
                self._timer.cancel()
            self._owner.ready(self)
        if isinstance(message, QmpEvent):
            self._owner.event(self, message)
        elif isinstance(message, QmpReply) and message.id == _STATE:
            state = message.value.get("status") if isinstance(message.value, dict) else None
            if isinstance(state, str):
                self._owner.state(self, state)

    def _send(self, command: bytes) -> None:
        with contextlib.suppress(OSError):  # a peer that has ended: reading will tell
            self._socket.send(command)

    def _end(self, fault: str = "") -> None:
        self.close()
        self._owner.ended(self, fault)

    def _tell_of_silence(self) -> None:
        text = "no QMP greeting yet: another client may have the socket; still waiting"
        tell(log, messages.NO_GREETING, text, instance=self.name)

    def _half_a_line(self, data: bytes) -> None:
        """Handle an incomplete line.

        Unread it is safe if the daemon is killed, but polling the socket would spin. QEMU writes a
        line at once, so the rest comes soon. If it does not, the half is consumed, because unread
        input may fill the socket.
        """
        if self._half_line is None and len(data) < _LINE_LIMIT:
            self._half_line = b""
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(_HALF_LINE_GRACE_S, self._listen)
            return
        self._half_line = (self._half_line or b"") + data
        if len(self._half_line) >= _LINE_LIMIT:
            start = wire.excerpt(self._half_line)
            raise QmpProtocolError(f"a line of more than {_LINE_LIMIT} bytes: {start}")
        self._socket.recv(len(data))

    def _listen(self) -> None:
        if not self.closed and not self._unread:
            # By number: asyncio would format the repr() of a socket object.
            self._loop.add_reader(self._socket.fileno(), self._readable)
