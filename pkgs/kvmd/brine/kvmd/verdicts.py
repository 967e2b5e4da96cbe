"""Giving verdicts: in the control directory first, then on record.

When many VMs end at once, what others wait for comes first: all shutdown files are written, and
only then, one by one, verdicts get a file each, are put in the journal and kept for a restart.
Until then their events are held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from brine.common import marks
from brine.common.journal import NOTICE, tell
from brine.common.marks import Kind
from brine.common.printable import printable
from brine.common.qmp_errors import QmpProtocolError
from brine.common.qmp_wire import Event
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import ControlDir, Identity
from brine.kvmd.keeper import Keeper
from brine.kvmd.records import Record
from brine.kvmd.verdict import Verdict, fold, judge
from brine.kvmd.verdict_files import VerdictFiles, printable_cause

log = logging.getLogger(__name__)
# Verdicts are on record whatever level an administrator chose for the rest.
verdict_log = logging.getLogger(f"{__name__}.given")
verdict_log.setLevel(NOTICE)

_KEEP_RETRY_S = 1.0
# A guest that ended can't be set going again, and end again, twice in this time.
_SHORTEST_LIFE_S = 1.0


class Verdicts:
    """What was seen of each VM, and the verdict when it ends.

    :param directory: may be replaced, and so may *marks_dir*.
    :param current: the connection of the VM that has a name, if there is one.
    :param powerdown_stale_s: may be replaced.
    """

    def __init__(
        self,
        directory: ControlDir,
        marks_dir: Path,
        keeper: Keeper,
        current: Callable[[str], Connection | None],
        *,
        powerdown_stale_s: float,
    ) -> None:
        self.powerdown_stale_s = powerdown_stale_s
        self._loop = asyncio.get_running_loop()
        self._files = VerdictFiles(directory, marks_dir, self._settled)
        self._keeper = keeper
        self._current = current
        self._to_record: deque[Connection] = deque()
        self._not_kept: set[Connection] = set()  # to be tried again
        self._runs_since: dict[Connection, float] = {}  # of those set going again; loop's clock

    @property
    def directory(self) -> ControlDir:
        """Where verdicts are written."""
        return self._files.directory

    @directory.setter
    def directory(self, directory: ControlDir) -> None:
        self._files.directory = directory

    @property
    def marks_dir(self) -> Path:
        """Where marks are."""
        return self._files.marks_dir

    @marks_dir.setter
    def marks_dir(self, folder: Path) -> None:
        self._files.marks_dir = folder

    def take_over(self, connection: Connection, record: Record) -> None:
        """Go on with what an earlier daemon knew of a VM."""
        connection.seen, connection.verdict = record.seen, record.verdict
        connection.run = record.run
        connection.replaced = connection.replaced or record.replaced
        if record.verdict and not record.written and not connection.replaced:
            self._write_later(connection.name, connection.identity, record)

    def take_over_leftovers(self) -> None:
        """Write what an earlier daemon could not, of VMs that are gone."""
        for name, identity, record in self._keeper.leftovers():
            if record.verdict and not self._current(name):
                self._write_later(name, identity, record)

    def runs(self, connection: Connection) -> None:
        """A VM was found running: what was said of an earlier one of its name holds no more."""
        self._find_run(connection)
        if not connection.verdict and not connection.replaced:
            self._files.withdraw(connection.name, connection.identity, connection.run)

    def is_stopping(self, connection: Connection) -> bool:
        """Whether an administrator means to stop a VM, by a mark that names its run; or by a file
        without any, which anybody who may write to the control directory can make, where Brine did
        not start the VM."""
        name, run, folder = connection.name, connection.run, self.marks_dir
        if run and marks.read_mark(Kind.STOP, name, run=run, folder=folder):
            return True
        if connection.replaced or not self.directory.is_stopping(name):
            return False
        if not run:
            return True
        # Tools of an older version, which started it, may be stopping it.
        start = marks.read_mark(Kind.START, name, run=run, folder=folder)
        return bool(start and start.facts.get("adopted"))

    def event(self, connection: Connection, event: Event) -> None:
        """Something happened to a VM.

        :raises QmpProtocolError: if it is nothing that happens to a VM.
        """
        seen = fold(connection.seen, event)
        if seen == connection.seen:
            return
        connection.seen = seen
        if seen.shutdown and not connection.verdict:
            self._give(connection)
            connection.hold()
            if not self._to_record:
                self._loop.call_soon(self._record_next)
            self._to_record.append(connection)
            return
        if connection.verdict and not seen.shutdown:
            self._take_back(connection)
        self.keep(connection)

    def ended(self, connection: Connection) -> None:
        """A VM's connection ended."""
        if connection.ready and not connection.verdict:
            verdict = self._give(connection)
            self._put_on_file(connection, verdict)
            self._put_in_journal(connection, verdict)
            if not self._files.is_written(connection.name, connection.identity):
                self.keep(connection)

    def finish(self, connection: Connection) -> None:
        """Put a verdict on record, if one was given and was not yet, and let its VM go on."""
        if connection in self._to_record:
            self._to_record.remove(connection)
            self._record(connection)

    def finish_all(self) -> None:
        """Put all verdicts on record."""
        while self._to_record:
            self._record(self._to_record.popleft())

    def keep(self, connection: Connection) -> bool:
        """Remember what was seen for a later start; tried again, and said once, if it can't be.

        :returns: whether it was kept.
        """
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

    def forget(self, connection: Connection) -> None:
        """A connection is over."""
        written = self._files.is_written(connection.name, connection.identity)
        self._keeper.forget(connection, written=written)
        self._not_kept.discard(connection)
        self._runs_since.pop(connection, None)

    def _give(self, connection: Connection) -> Verdict:
        """Say who ended a VM, in the control directory."""
        self._find_run(connection)
        verdict = judge(
            connection.seen,
            stopping=self.is_stopping(connection),
            powerdown_stale_s=self.powerdown_stale_s,
            is_brines=connection.run is not None,
        )
        now_usec = time.time_ns() // 1000
        verdict = Verdict(verdict.who, verdict.cause, verdict.time_usec, now_usec)
        connection.verdict = verdict
        if not connection.replaced:
            self._files.write(connection.name, connection.identity, connection.run, verdict)
        return verdict

    def _find_run(self, connection: Connection) -> None:
        """Have it be known which run of Brine's unit a VM is, once that can be known."""
        if connection.run is None:
            pid, folder = connection.peer_pid(), self.marks_dir
            connection.run = marks.run_of(connection.name, pid, folder=folder)

    def _record_next(self) -> None:
        """Put one verdict on record, then look whether another VM ends before the next."""
        if self._to_record:
            connection = self._to_record.popleft()
            if self._to_record:
                self._loop.call_soon(self._record_next)
            self._record(connection)

    def _record(self, connection: Connection) -> None:
        assert connection.verdict
        self._put_on_file(connection, connection.verdict)
        self._put_in_journal(connection, connection.verdict)
        # Where it can't be kept the event stays held: a later start would find it there.
        if self.keep(connection):
            connection.go_on()

    def _put_on_file(self, connection: Connection, verdict: Verdict) -> None:
        if not connection.replaced:
            run = connection.run
            self._files.write_verdict(connection.name, connection.identity, run, verdict)

    def _put_in_journal(self, connection: Connection, verdict: Verdict) -> None:
        cause = printable_cause(verdict)
        fields = {"BRINE_VERDICT": str(verdict.who), "BRINE_CAUSE": cause}
        fields["BRINE_GIVEN_USEC"] = str(verdict.given_usec)
        # A reader takes a verdict without any for that of an older version of this daemon.
        fields["BRINE_RUN"] = printable(connection.run or marks.UNKNOWN_RUN)
        if verdict.time_usec is not None:
            fields["BRINE_EVENT_TIME_USEC"] = str(verdict.time_usec)
        message, text = messages.VERDICTS[verdict.who], f"ended: {verdict.who}, {cause}"
        tell(verdict_log, message, text, instance=connection.name, **fields)

    def _take_back(self, connection: Connection) -> None:
        """A VM that had ended without its QEMU (``-no-shutdown``) was set going again."""
        now = self._loop.time()
        if now - self._runs_since.get(connection, -_SHORTEST_LIFE_S) < _SHORTEST_LIFE_S:
            raise QmpProtocolError("a guest that ends and runs again without a pause")
        self._runs_since[connection] = now
        connection.verdict = None
        self.runs(connection)
        tell(log, messages.RUNS_AGAIN, "runs again", instance=connection.name)

    def _write_later(self, name: str, identity: Identity, record: Record) -> None:
        self._files.write_later(name, identity, record.run, record.verdict)

    def _settled(self, name: str, identity: Identity) -> None:
        connection = self._current(name)
        if connection and connection.identity == identity:
            self.keep(connection)
        else:
            self._keeper.forget_record(name, identity)

    def _keep_again(self) -> None:
        for connection in list(self._not_kept):
            if self.keep(connection):
                connection.go_on()
        if self._not_kept:
            self._loop.call_later(_KEEP_RETRY_S, self._keep_again)
