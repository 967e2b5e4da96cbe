"""The daemon: keeps a connection to every VM of its control directory."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque

from brine.common.errors import printable
from brine.common.figures import INTERVAL_S, FiguresFile
from brine.common.journal import tell
from brine.common.qmp.wire import QmpEvent
from brine.common.systemd import ServiceManager
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import SocketIdentity
from brine.kvmd.discovery import Finder
from brine.kvmd.halts import HaltRecorder
from brine.kvmd.handover import Keeper
from brine.kvmd.recorder import VerdictRecorder
from brine.kvmd.settings import KvmdSettings
from brine.kvmd.tally import Tally

log = logging.getLogger(__name__)

_STATUS_DELAY_S = 0.2
# The most reads of a connection's pending input. Each takes a hundred lines, and all together more
# than the socket of a peer that has stopped sending can hold.
_LONGEST_DRAIN = 10
# A VM whose socket is younger has just begun: what it does from now on its events tell.
_NEW_NS = 10 * 10**9
_LONGEST_EVENT = 60
_LAGS = 12
"""Of so many last times the longest delay is told: of a minute, as figures are asked for once in
that."""


class Daemon:
    """Everything that kvmd does between its start and its end. Needs a running event loop.

    It is the owner of its finder and of its connections: see
    :class:`brine.kvmd.discovery.FinderOwner` and :class:`brine.kvmd.connection.ConnectionOwner`.
    """

    def __init__(self, settings: KvmdSettings, service: ServiceManager) -> None:
        self._settings = settings
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, Connection] = {}  # those that have their name
        self._foreign: set[Connection] = set()  # those to processes of others than root
        self._keeper = Keeper(service)
        self._figures = FiguresFile(service.runtime_dir)
        self._tally = Tally(self._figures.earlier())
        self._lags_s: deque[float] = deque([0.0], maxlen=_LAGS)
        self._recorder = VerdictRecorder(settings, self._keeper, self._watched.get, self._tally)
        self._halts = HaltRecorder(settings, self._tally)
        self._finder = Finder(settings.directory, settings.connect_retry_s, self)
        self._status_due = False
        self._rescan_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Restore the state of an earlier run, find sockets, and watch for new ones."""
        if self._service.watchdog_s:
            self._feed_watchdog(self._service.watchdog_s / 3)
        self._restore()
        self._finder.start()
        self._recorder.take_over_leftovers()
        self._set_rescan_timer()
        self._keep_figures()
        self._service.ready(self._status())
        log.info("%s", self._status())

    def reload(self, settings: KvmdSettings) -> None:
        """Apply other settings. Connections stay."""
        self._settings = self._recorder.settings = self._halts.settings = settings
        if settings.directory != self._finder.directory:
            self._finder.close()
            self._finder = Finder(settings.directory, settings.connect_retry_s, self)
            self._finder.start()
        self._finder.retry_s = settings.connect_retry_s
        self._set_rescan_timer()
        self._service.ready(self._status())

    def stop(self) -> None:
        """Record all verdicts. Connections end with the process, or stay in systemd."""
        self._recorder.finish_all()
        self._write_figures()

    # Calls of the finder.

    def knows(self, name: str, identity: SocketIdentity) -> bool:
        """Whether there is a connection to this socket file."""
        connection = self._watched.get(name)
        return connection is not None and connection.identity.same_file(identity)

    def foreign(self) -> int:
        """How many connections lead to processes of others than root."""
        return len(self._foreign)

    def found(self, name: str, identity: SocketIdentity, peer: socket.socket) -> None:
        """Take a new connection."""
        older = self._watched.get(name)
        if older:
            self._drain(older)
            if not older.closed:
                self._replace(older)
        self._watch(Connection(name, self._finder.directory, identity, peer, self))

    def _replace(self, older: Connection) -> None:
        """A newer socket has the name of a VM that has not ended."""
        del self._watched[older.name]
        if older.place != self._finder.directory:
            # The control directory has changed since: it is the same VM, not a newer one.
            older.close()
            self._forget(older)
            return
        older.record.replaced = True
        self._recorder.keep(older)
        tell(log, messages.REPLACED, "runs on behind another's socket", instance=older.name)

    def _watch(self, connection: Connection) -> None:
        if record := self._keeper.recall(connection.key):
            self._recorder.take_over(connection, record)
        if not connection.record.replaced:
            self._watched[connection.name] = connection
        if not connection.is_roots():
            self._foreign.add(connection)
        connection.start(greeting_timeout_s=self._settings.greeting_timeout_s)

    def _restore(self) -> None:
        """Restore the connections that systemd kept, and act on their pending events."""
        place = self._finder.directory
        # Of several VMs with one name, the one whose socket file exists counts, else the newest.
        restored = sorted(
            self._keeper.restore(),
            key=lambda one: (place.identity(one[0]) == one[1], one[1].modified_ns),
        )
        connections = []
        for name, identity, peer in restored:
            if older := self._watched.pop(name, None):
                older.record.replaced = True
                self._recorder.keep(older)
            connection = Connection(name, place, identity, peer, self, restored=True)
            self._watch(connection)
            connections.append(connection)
        for connection in connections:
            self._drain(connection)
            if not connection.closed:
                self._halts.restored(connection)

    def _drain(self, connection: Connection) -> None:
        """Act on pending events, before anything else happens."""
        for _ in range(_LONGEST_DRAIN):
            self._recorder.finish(connection)
            if not connection.act_on_pending():
                return

    # Calls of a connection.

    def greeted(self, connection: Connection) -> None:
        """Its peer is a QEMU: it sends events when it has our answer, and none may be lost."""
        self._keeper.keep_connection(connection.key, connection.fileno())

    def ready(self, connection: Connection) -> None:
        """Its peer sends events from now on: its VM runs."""
        self._finder.settled(connection.name)
        self._recorder.runs(connection)
        run = connection.record.run
        if run:
            self._recorder.keep(connection)
        if time.time_ns() - connection.identity.modified_ns > _NEW_NS:
            self._halts.was_there(connection)
        tell(log, messages.WATCHING, "watching", instance=connection.name)
        if self._recorder.stop_cause(connection):
            mark = f"{connection.name}.{'stop' if run else 'stopping'}"
            text = f"{mark} is there: its end will be the administrator's"
            tell(log, messages.STOPPING, printable(text), instance=connection.name)
        self.show_status()

    def event(self, connection: Connection, event: QmpEvent) -> None:
        """Something happened to its VM. The event is consumed when this returns, unless the
        connection is told to hold it."""
        if log.isEnabledFor(logging.DEBUG):
            _log_event(connection.name, event)
        before = connection.record.seen
        self._recorder.event(connection, event)
        self._halts.event(connection, event.name, before)

    def state(self, connection: Connection, state: str) -> None:
        """Its VM is in a RunState: the answer to :meth:`Connection.ask_state`."""
        if self._halts.state(connection, state):
            self._recorder.keep(connection)

    def ended(self, connection: Connection, fault: str) -> None:
        """It is closed: its peer is gone, or does not speak QMP, which is its *fault*."""
        name, identity, is_replaced = (
            connection.name,
            connection.identity,
            connection.record.replaced,
        )
        if fault:
            if not is_replaced:
                self._finder.reject(name, identity)
            tell(log, messages.BROKEN_PEER, f"left alone: {fault}", instance=name)
            self._forget(connection)
            return
        self._recorder.ended(connection)
        self._forget(connection)
        if is_replaced or connection.place != self._finder.directory:
            return
        if connection.ready:
            self._finder.ended(name, identity)
        else:
            self._finder.failed(name, identity)

    def _forget(self, connection: Connection) -> None:
        self._halts.ended(connection)
        self._recorder.forget(connection)
        self._foreign.discard(connection)
        if self._watched.get(connection.name) is connection:
            del self._watched[connection.name]
        self.show_status()

    # Timers.

    def _set_rescan_timer(self) -> None:
        if self._rescan_timer:
            self._rescan_timer.cancel()
        interval_s = self._settings.rescan_interval_s
        self._rescan_timer = self._loop.call_later(interval_s, self._rescan)

    def _rescan(self) -> None:
        self._set_rescan_timer()
        self._finder.rescan()

    def _keep_figures(self, due_s: float | None = None) -> None:
        """Write the figures now and from time to time, also how late this was done at worst."""
        now_s = self._loop.time()
        if due_s is not None:
            self._lags_s.append(max(now_s - due_s, 0.0))
        self._write_figures()
        due_s = self._loop.time() + INTERVAL_S
        self._loop.call_at(due_s, self._keep_figures, due_s)

    def _write_figures(self) -> None:
        ready = sum(connection.ready for connection in self._watched.values())
        values = {
            "watched": ready,
            "waiting": len(self._watched) - ready,
            "out_of_reach": self._finder.out_of_reach(),
            "left_out": self._finder.left_out(),
            "lag_s": round(max(self._lags_s), 6),
        }
        self._figures.write(values | self._tally.values())

    def _feed_watchdog(self, interval_s: float) -> None:
        self._loop.call_later(interval_s, self._feed_watchdog, interval_s)
        self._service.alive()

    def show_status(self) -> None:
        """Show a new status soon."""
        # A hundred VMs that start at once need one new status, not a hundred.
        if not self._status_due:
            self._status_due = True
            self._loop.call_later(_STATUS_DELAY_S, self._update_status)

    def _update_status(self) -> None:
        self._status_due = False
        self._service.status(self._status())

    def _status(self) -> str:
        count = sum(connection.ready for connection in self._watched.values())
        waiting = len(self._watched) - count
        noun = "instance" if count == 1 else "instances"
        status = f"watching {count} {noun} in {self._finder.directory.path}"
        if waiting:
            status = f"{status}, {waiting} without a greeting yet"
        trouble = self._finder.trouble()
        return f"{status}, {trouble}" if trouble else status


def _log_event(name: str, event: QmpEvent) -> None:
    """Log an event with QEMU's time: the history of a VM, for those who look into it."""
    fields = {"BRINE_INSTANCE": name, "BRINE_QMP_EVENT": event.name[:_LONGEST_EVENT]}
    if event.time_usec is not None:
        fields["BRINE_EVENT_TIME_USEC"] = str(event.time_usec)
    text = printable(f"{name}: QEMU's event {fields['BRINE_QMP_EVENT']}")
    log.debug("%s", text, extra={"fields": fields})
