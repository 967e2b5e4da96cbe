"""The daemon: keeps a connection to every VM, and gives a verdict when one ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque

from brine.common.journal import NOTICE, printable, tell
from brine.common.qmp_wire import Event, QmpProtocolError
from brine.common.service import ServiceManager
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import ControlDir, Identity
from brine.kvmd.finder import Finder
from brine.kvmd.keeper import Keeper
from brine.kvmd.records import Record
from brine.kvmd.settings import Settings
from brine.kvmd.verdict import Who, fold, judge
from brine.kvmd.verdict_files import VerdictFiles

log = logging.getLogger(__name__)
# Verdicts are on record whatever level an administrator chose for the rest.
verdict_log = logging.getLogger(f"{__name__}.verdicts")
verdict_log.setLevel(NOTICE)

_STATUS_DELAY_S = 0.2
_KEEP_RETRY_S = 1.0
_LONGEST_CAUSE = 60
# Of what is pending on a connection, at most this many looks: a hundred lines each, more than the
# socket of a peer that does not go on sending can hold.
_LONGEST_DRAIN = 10
# A guest that ended can't be set going again, and end again, twice in this time.
_SHORTEST_LIFE_S = 1.0


class Daemon:
    """Everything that kvmd does between its start and its end. Needs a running event loop.

    :param settings: may be replaced, with :meth:`reload`.
    :param service: who keeps connections for us and shows our status.
    """

    def __init__(self, settings: Settings, service: ServiceManager) -> None:
        self._settings = settings
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._keeper = Keeper(service)
        self._watched: dict[str, Connection] = {}  # those that have their name
        self._files = VerdictFiles(_directory(settings), self._settled)
        self._finder = self._new_finder()
        self._to_record: deque[Connection] = deque()  # ended, and the event still held
        self._not_kept: set[Connection] = set()  # to be tried again
        self._runs_since: dict[Connection, float] = {}  # of those set going again; loop's clock
        self._status_due = False
        self._rescan_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take up what an earlier run left, find what is there, and go on from then."""
        if self._service.watchdog_s:
            self._feed_watchdog(self._service.watchdog_s / 3)
        self._restore()
        self._finder.start()
        for name, identity, record in self._keeper.leftovers():
            if record.verdict and name not in self._watched:
                by_user = record.verdict.who is Who.USER
                self._files.write_later(name, identity, by_user=by_user)
        self._set_rescan_timer()
        self._service.ready(self._status())
        log.info("%s", self._status())

    def reload(self, settings: Settings) -> None:
        """Go on with other settings. Connections stay as they are."""
        self._settings = settings
        directory = _directory(settings)
        if directory != self._finder.directory:
            self._finder.close()
            self._files.directory = directory
            self._finder = self._new_finder()
            self._finder.start()
        self._finder.retry_s = settings.connect_retry_s
        self._set_rescan_timer()
        self._service.ready(self._status())

    def stop(self) -> None:
        """Put on record what was decided. Connections end with the process, or go on in systemd."""
        while self._to_record:
            self._record_next()

    # What the finder tells.

    def _known(self, name: str, identity: Identity) -> bool:
        connection = self._watched.get(name)
        return connection is not None and connection.identity.same_file(identity)

    def _found(self, name: str, identity: Identity, peer: socket.socket) -> None:
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
            # Its socket is looked for elsewhere by now: it is the same VM, not a newer one.
            older.close()
            self._forget(older)
            return
        older.replaced = True
        self._keep_record(older)
        tell(log, messages.REPLACED, "runs on behind another's socket", instance=older.name)

    def _watch(self, connection: Connection) -> None:
        record = self._keeper.recall(connection.name, connection.identity)
        if record:
            self._take_over(connection, record)
        if not connection.replaced:
            self._watched[connection.name] = connection
        connection.start(greeting_timeout_s=self._settings.greeting_timeout_s)

    def _take_over(self, connection: Connection, record: Record) -> None:
        connection.seen, connection.verdict = record.seen, record.verdict
        connection.replaced = connection.replaced or record.replaced
        if record.verdict and not record.written and not connection.replaced:
            by_user = record.verdict.who is Who.USER
            self._files.write_later(connection.name, connection.identity, by_user=by_user)

    def _restore(self) -> None:
        """Go on with the connections that systemd kept, and act on what came in meanwhile."""
        restored = self._keeper.restore()
        place = self._finder.directory
        # Of several with one name, the VM of that name is the one whose socket file stands, or
        # else the newest.
        restored.sort(
            key=lambda one: (place.identity(one.name) == one.identity, one.identity.modified_ns)
        )
        connections = []
        for one in restored:
            older = self._watched.pop(one.name, None)
            if older:
                older.replaced = True
            connection = Connection(one.name, place, one.identity, one.peer, self, restored=True)
            self._watch(connection)
            connections.append(connection)
        for connection in connections:
            self._drain(connection)

    def _drain(self, connection: Connection) -> None:
        """Act on what was sent so far, before anything else happens."""
        for _ in range(_LONGEST_DRAIN):
            if connection in self._to_record:
                self._to_record.remove(connection)
                self._record(connection)
            if not connection.act_on_pending():
                return

    # What a connection tells.

    def greeted(self, connection: Connection) -> None:
        """Its peer is a QEMU: from now on nothing of it may be lost."""
        self._keeper.keep_connection(connection)

    def ready(self, connection: Connection) -> None:
        """Its VM runs."""
        self._finder.settled(connection.name)
        if not connection.verdict and not connection.replaced:
            self._files.withdraw(connection.name, connection.identity)
        tell(log, messages.WATCHING, "watching", instance=connection.name)
        self._show_status()

    def silent(self, connection: Connection) -> None:
        """Its greeting is late: another client has the monitor, or it is none."""
        text = "no QMP greeting yet: another client may have the socket; still waiting"
        tell(log, messages.NO_GREETING, text, instance=connection.name)

    def event(self, connection: Connection, event: Event) -> None:
        """Something happened to its VM.

        When many VMs end at once, what others wait for comes first: all verdicts are written, and
        only then, one by one, put on record. Until then their events are held.
        """
        seen = fold(connection.seen, event)
        if seen == connection.seen:
            return
        connection.seen = seen
        if seen.shutdown and not connection.verdict:
            self._give_verdict(connection)
            connection.hold()
            if not self._to_record:
                self._loop.call_soon(self._record_next)
            self._to_record.append(connection)
            return
        if connection.verdict and not seen.shutdown:
            self._take_back(connection)
        self._keep_record(connection)

    def broken(self, connection: Connection, reason: str) -> None:
        """Its peer does not speak QMP."""
        if not connection.replaced:
            self._finder.reject(connection.name, connection.identity)
        tell(log, messages.BROKEN_PEER, f"left alone: {reason}", instance=connection.name)
        self._forget(connection)

    def ended(self, connection: Connection) -> None:
        """Its peer is gone."""
        if connection.ready and not connection.verdict:
            self._give_verdict(connection)
            self._record_verdict(connection)
            if not self._files.is_written(connection.name, connection.identity):
                self._keep_record(connection)
        self._forget(connection)
        if connection.replaced or connection.place != self._finder.directory:
            return
        if connection.ready:
            self._finder.ended(connection.name, connection.identity)
        else:
            self._finder.failed(connection.name, connection.identity)

    # Verdicts.

    def _give_verdict(self, connection: Connection) -> None:
        """Say who ended a VM, in the control directory."""
        name, current = connection.name, not connection.replaced
        verdict = judge(
            connection.seen,
            stopping=current and self._files.directory.is_stopping(name),
            powerdown_stale_s=self._settings.powerdown_stale_s,
        )
        connection.verdict = verdict
        if current:
            self._files.write(name, connection.identity, by_user=verdict.who is Who.USER)

    def _record_next(self) -> None:
        """Put one verdict on record, then look whether another VM ends before the next."""
        if not self._to_record:
            return  # it was drained meanwhile
        connection = self._to_record.popleft()
        if self._to_record:
            self._loop.call_soon(self._record_next)
        self._record(connection)

    def _record(self, connection: Connection) -> None:
        self._record_verdict(connection)
        # Where it can't be kept the event stays held: a later start would find it there.
        if self._keep_record(connection):
            connection.go_on()

    def _record_verdict(self, connection: Connection) -> None:
        """Say who ended a VM, in the journal."""
        verdict = connection.verdict
        assert verdict
        cause = printable(verdict.cause)[:_LONGEST_CAUSE]  # a peer's word, if it is a strange one
        fields = {"BRINE_VERDICT": str(verdict.who), "BRINE_CAUSE": cause}
        if verdict.time_usec is not None:
            fields["BRINE_EVENT_TIME_USEC"] = str(verdict.time_usec)
        text = f"ended: {verdict.who}, {cause}"
        tell(verdict_log, messages.VERDICTS[verdict.who], text, instance=connection.name, **fields)

    def _take_back(self, connection: Connection) -> None:
        """A VM that had ended without its QEMU (``-no-shutdown``) was set going again."""
        now = self._loop.time()
        if now - self._runs_since.get(connection, -_SHORTEST_LIFE_S) < _SHORTEST_LIFE_S:
            raise QmpProtocolError("a guest that ends and runs again without a pause")
        self._runs_since[connection] = now
        connection.verdict = None
        if not connection.replaced:
            self._files.withdraw(connection.name, connection.identity)
        tell(log, messages.RUNS_AGAIN, "runs again", instance=connection.name)

    def _settled(self, name: str, identity: Identity) -> None:
        connection = self._watched.get(name)
        if connection and connection.identity == identity:
            self._keep_record(connection)
        else:
            self._keeper.forget_record(name, identity)

    # What is kept for the next start.

    def _keep_record(self, connection: Connection) -> bool:
        """Remember what was seen; tried again, and said once, where that can't be."""
        written = self._files.is_written(connection.name, connection.identity)
        try:
            self._keeper.keep_record(connection, written=written)
        except OSError as error:
            if connection not in self._not_kept:
                text = f"what was seen can't be kept for a restart yet: {error.strerror}"
                tell(log, messages.NOT_KEPT, text, instance=connection.name)
            if not self._not_kept:
                self._loop.call_later(_KEEP_RETRY_S, self._keep_again)
            self._not_kept.add(connection)
            return False
        self._not_kept.discard(connection)
        return True

    def _keep_again(self) -> None:
        for connection in list(self._not_kept):
            if self._keep_record(connection):
                connection.go_on()
        if self._not_kept:
            self._loop.call_later(_KEEP_RETRY_S, self._keep_again)

    def _forget(self, connection: Connection) -> None:
        written = self._files.is_written(connection.name, connection.identity)
        self._keeper.forget(connection, written=written)
        self._not_kept.discard(connection)
        self._runs_since.pop(connection, None)
        if self._watched.get(connection.name) is connection:
            del self._watched[connection.name]
        self._show_status()

    # What happens at intervals.

    def _set_rescan_timer(self) -> None:
        if self._rescan_timer:
            self._rescan_timer.cancel()
        interval_s = self._settings.rescan_interval_s
        self._rescan_timer = self._loop.call_later(interval_s, self._rescan)

    def _rescan(self) -> None:
        self._set_rescan_timer()
        self._finder.rescan()

    def _feed_watchdog(self, interval_s: float) -> None:
        self._loop.call_later(interval_s, self._feed_watchdog, interval_s)
        self._service.alive()

    def _show_status(self) -> None:
        # A node that starts a hundred VMs at once needs one new status, not a hundred.
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
        status = f"watching {count} {noun} in {self._files.directory.path}"
        return f"{status}, {waiting} without a greeting yet" if waiting else status

    def _new_finder(self) -> Finder:
        return Finder(
            _directory(self._settings),
            retry_s=self._settings.connect_retry_s,
            known=self._known,
            found=self._found,
        )


def _directory(settings: Settings) -> ControlDir:
    return ControlDir(settings.control_dir, settings.suffix)
