"""The daemon: keeps a connection to every VM, and gives a verdict when one ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque

from brine.common.journal import printable, tell
from brine.common.qmp_wire import Event
from brine.common.service import ServiceManager
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import ControlDir, same_inode
from brine.kvmd.finder import Finder
from brine.kvmd.seen_store import (
    Record,
    SeenStore,
    descriptor_name,
    parse_descriptor_name,
)
from brine.kvmd.settings import Settings
from brine.kvmd.verdict import NOTHING, fold, judge
from brine.kvmd.verdict_files import VerdictFiles

log = logging.getLogger(__name__)

_STATUS_DELAY_S = 0.2
_LONGEST_CAUSE = 60
_LONGEST_DRAIN = 1000


class Daemon:
    """Everything that kvmd does between its start and its end. Needs a running event loop.

    :param settings: may be replaced, with :meth:`reload`.
    :param service: who keeps connections for us and shows our status.
    """

    def __init__(self, settings: Settings, service: ServiceManager) -> None:
        self._settings = settings
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._store = SeenStore(service.runtime_dir)
        self._records: dict[str, Record] = {}  # of earlier runs, until the VM is found again
        self._watched: dict[str, Connection] = {}
        self._replaced: set[Connection] = set()
        self._to_record: deque[Connection] = deque()
        self._files = VerdictFiles(_directory(settings), self._written_late)
        self._finder = self._new_finder()
        self._status_due = False

    def start(self) -> None:
        """Take up what an earlier run left, find what is there, and go on from then."""
        self._records = self._store.load()
        self._restore()
        self._finder.start()
        self._forget_the_gone()
        self._loop.call_later(self._settings.rescan_interval_s, self._rescan)
        if self._service.watchdog_s:
            self._feed_watchdog(self._service.watchdog_s / 3)
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
        self._service.ready(self._status())

    def stop(self) -> None:
        """Put on record what was decided. Connections end with the process, or go on in systemd."""
        while self._to_record:
            self._record_next()

    # What the finder tells.

    def _known(self, name: str, identity: str) -> bool:
        connection = self._watched.get(name)
        return connection is not None and same_inode(connection.identity, identity)

    def _found(self, name: str, identity: str, peer: socket.socket) -> None:
        self._make_room(name)
        connection = Connection(name, identity, peer, self)
        record = self._records.pop(name, None)
        if record and record.identity == identity:
            connection.seen, connection.verdict = record.seen, record.verdict
        else:
            self._store.drop(name)
            self._files.withdraw(name)
        self._watch(connection)

    def _make_room(self, name: str) -> None:
        """A newer socket of this name is there: finish with the VM that had it before."""
        older = self._watched.get(name)
        if older:
            self._drain(older)
        older = self._watched.pop(name, None)
        if older:
            self._replaced.add(older)
            tell(log, messages.REPLACED, "runs on behind another's socket", instance=name)

    def _watch(self, connection: Connection) -> None:
        self._watched[connection.name] = connection
        connection.start(greeting_timeout_s=self._settings.greeting_timeout_s)

    # What a connection tells.

    def ready(self, connection: Connection) -> None:
        """Its events flow: from now on nothing of it may be lost."""
        self._finder.settled(connection.name)
        stored = descriptor_name(connection.name, connection.identity)
        if stored:
            self._service.store(stored, connection.fileno())
        tell(log, messages.WATCHING, "watching", instance=connection.name)
        self._show_status()

    def silent(self, connection: Connection) -> None:
        """Its greeting is late: another client has the monitor, or it is none."""
        text = "no QMP greeting yet: another client may have the socket; still waiting"
        tell(log, messages.NO_GREETING, text, instance=connection.name)

    def event(self, connection: Connection, event: Event) -> bool:
        """Something happened to its VM.

        When many VMs end at once, what others wait for comes first: all verdicts are written, and
        only then, one by one, put on record. Until then their events stay unread.
        """
        seen = fold(connection.seen, event)
        if seen == connection.seen:
            return True
        connection.seen = seen
        if seen.shutdown and not connection.verdict:
            self._give_verdict(connection)
            if not self._to_record:
                self._loop.call_soon(self._record_next)
            self._to_record.append(connection)
            return False
        if connection.verdict and not seen.shutdown:
            self._take_back(connection)
        self._remember(connection)
        return True

    def broken(self, connection: Connection, reason: str) -> None:
        """Its peer does not speak QMP."""
        self._finder.reject(connection.name, connection.identity)
        tell(log, messages.BROKEN_PEER, f"left alone: {reason}", instance=connection.name)
        self._forget(connection)

    def ended(self, connection: Connection) -> None:
        """Its peer is gone."""
        if connection.ready and not connection.verdict:
            self._give_verdict(connection)
            self._record_verdict(connection)
            if not self._files.is_written(connection.name):
                self._remember(connection)
        replaced = connection in self._replaced
        self._forget(connection)
        if replaced:
            return
        if connection.ready:
            self._finder.ended(connection.name, connection.identity)
        else:
            self._finder.failed(connection.name, connection.identity)

    def _drain(self, connection: Connection) -> None:
        """Act on what was sent so far, before anything else happens."""
        for _ in range(_LONGEST_DRAIN):  # a peer that sends for ever must not keep us here
            if connection in self._to_record:
                self._to_record.remove(connection)
                self._record(connection)
            if not connection.act_on_pending():
                return

    # Verdicts.

    def _give_verdict(self, connection: Connection) -> None:
        """Say who ended a VM, in the control directory."""
        name = connection.name
        current = connection not in self._replaced
        verdict = judge(
            connection.seen,
            stopping=current and self._files.directory.is_stopping(name),
            powerdown_stale_s=self._settings.powerdown_stale_s,
        )
        connection.verdict = verdict
        # The name belongs to a newer VM once there is one: then only the journal hears of it.
        if current:
            self._files.write(name, verdict)

    def _record_next(self) -> None:
        """Put one verdict on record, then look whether another VM ends before the next."""
        if not self._to_record:
            return  # drained meanwhile
        connection = self._to_record.popleft()
        if self._to_record:
            self._loop.call_soon(self._record_next)
        self._record(connection)

    def _record(self, connection: Connection) -> None:
        self._record_verdict(connection)
        self._remember(connection)
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
        tell(log, messages.VERDICTS[verdict.who], text, instance=connection.name, **fields)

    def _take_back(self, connection: Connection) -> None:
        """A VM that had ended without its QEMU (``-no-shutdown``) was set going again."""
        connection.verdict = None
        if connection not in self._replaced:
            self._files.withdraw(connection.name)
        tell(log, messages.RUNS_AGAIN, "runs again", instance=connection.name)

    def _written_late(self, name: str) -> None:
        connection = self._watched.get(name)
        if connection:
            self._remember(connection)
        else:
            self._store.drop(name)

    # What is kept for the next start.

    def _remember(self, connection: Connection) -> None:
        if connection in self._replaced:
            return  # its name is another's now
        if connection.seen == NOTHING and not connection.verdict:
            self._store.drop(connection.name)
            return
        written = self._files.is_written(connection.name)
        record = Record(connection.identity, connection.seen, connection.verdict, written)
        try:
            self._store.save(connection.name, record)
        except OSError as error:
            text = f"what was seen is not kept over a restart: {error.strerror}"
            tell(log, messages.NOT_KEPT, text, instance=connection.name)

    def _forget(self, connection: Connection) -> None:
        stored = descriptor_name(connection.name, connection.identity)
        if stored and connection.ready:
            self._service.discard(stored)
        if connection in self._replaced:
            self._replaced.discard(connection)
        else:
            del self._watched[connection.name]
            if self._files.is_written(connection.name):
                self._store.drop(connection.name)
        self._show_status()

    def _restore(self) -> None:
        """Go on with the connections that systemd kept, and act on what came in meanwhile."""
        restored = []
        for descriptor, stored in self._service.stored().items():
            parsed = parse_descriptor_name(stored)
            if not parsed:
                os.close(descriptor)
                self._service.discard(stored)
                continue
            name, identity = parsed
            peer = socket.socket(fileno=descriptor)
            peer.setblocking(False)
            restored.append(Connection(name, identity, peer, self, ready=True))
        # Of two with one name the one whose socket file stands is the VM of that name.
        restored.sort(key=self._stands)
        for connection in restored:
            self._make_room(connection.name)
            record = self._records.get(connection.name)
            if record and record.identity == connection.identity:
                connection.seen, connection.verdict = record.seen, record.verdict
                del self._records[connection.name]
            self._watch(connection)
        for connection in restored:
            self._drain(connection)

    def _stands(self, connection: Connection) -> bool:
        return self._files.directory.identity(connection.name) == connection.identity

    def _forget_the_gone(self) -> None:
        """Of a VM that was not found again only a verdict that was not written matters."""
        for name, record in self._records.items():
            if record.verdict and not record.written:
                self._files.keep(name, record.verdict)
            else:
                self._store.drop(name)
        self._records.clear()

    # What happens at intervals.

    def _rescan(self) -> None:
        self._finder.rescan()
        self._loop.call_later(self._settings.rescan_interval_s, self._rescan)

    def _feed_watchdog(self, interval_s: float) -> None:
        self._service.alive()
        self._loop.call_later(interval_s, self._feed_watchdog, interval_s)

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
            self._files.directory,
            retry_s=self._settings.connect_retry_s,
            known=self._known,
            found=self._found,
        )


def _directory(settings: Settings) -> ControlDir:
    return ControlDir(settings.control_dir, settings.suffix)
