"""Giving verdicts: writing them to the journal, to markers and to the control directory.

When many VMs end at once, the shutdown files come first, as other programs wait for them. Then each
verdict gets a file, a journal record and a record for a restart. Until then its event is held.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from brine.common import markers
from brine.common.errors import printable
from brine.common.journal import tell
from brine.common.markers import MarkerKind
from brine.common.message import NOTICE
from brine.common.qmp.wire import QmpEvent, QmpProtocolError
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.control_dir import ControlDir, SocketIdentity
from brine.kvmd.handover import Keeper, VmRecord
from brine.kvmd.verdict import Verdict, Who, fold, judge

# Writing verdicts to the control directory and as markers, with retries.

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
_LONGEST_CAUSE = 60


@dataclass(frozen=True)
class Unwritten:
    """A change of the control directory that could not be made yet.

    :param identity: of the VM.
    :param run: of the instance's unit; None if Brine did not start the VM.
    :param verdict: on its end; None while it runs.
    """

    identity: SocketIdentity
    run: str | None
    verdict: Verdict | None

    @property
    def deed(self) -> str:
        """The change of the shutdown file, in a word."""
        return "made" if _is_by_user(self.verdict) else "removed"


class VerdictFiles:
    """The files that report ends.

    The empty ``<name>.shutdown`` in the control directory is for other programs, such as Ganeti's
    tools: it exists after a user's shutdown only. Brine itself trusts markers: the verdict, and the
    user's shutdown of a run. They name the run.

    A file that can't be made or removed (a full or read-only file system, a missing control
    directory) is tried again, until that succeeds or a newer VM of that name makes it obsolete.

    :param marks_dir: may be replaced.
    :param settled: called with the name and identity of a VM when nothing is left to be written.
    """

    def __init__(
        self, directory: ControlDir, marks_dir: Path, settled: Callable[[str, SocketIdentity], None]
    ) -> None:
        self.directory = directory
        self.marks_dir = marks_dir
        self._settled = settled
        self._unwritten: dict[str, Unwritten] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._delay_s = _FIRST_RETRY_S

    def is_written(self, name: str, identity: SocketIdentity) -> bool:
        """Whether all is written for this VM."""
        unwritten = self._unwritten.get(name)
        return unwritten is None or unwritten.identity != identity

    def write(
        self, name: str, identity: SocketIdentity, run: str | None, verdict: Verdict | None
    ) -> None:
        """Make or remove the shutdown files, now if possible, later if not."""
        try:
            self._put(name, run, verdict)
        except OSError as error:
            self.write_later(name, identity, run, verdict)
            deed = self._unwritten[name].deed
            text = f"its shutdown file can't be {deed}, trying again: {error.strerror}"
            tell(log, messages.NOT_WRITTEN, text, instance=name)

    def write_verdict(
        self, name: str, identity: SocketIdentity, run: str | None, verdict: Verdict
    ) -> None:
        """Write the verdict's own file, now if possible, later if not. It takes longer than a
        shutdown file, so the shutdown files of all waiting VMs come first."""
        try:
            self._put_verdict(name, run, verdict)
        except OSError as error:
            self.write_later(name, identity, run, verdict)
            text = f"its verdict's file can't be made, trying again: {error.strerror}"
            tell(log, messages.NOT_WRITTEN, text, instance=name)

    def write_later(
        self, name: str, identity: SocketIdentity, run: str | None, verdict: Verdict | None
    ) -> None:
        """Write the files later."""
        self._unwritten[name] = Unwritten(identity, run, verdict)
        if not self._timer:
            self._delay_s = _FIRST_RETRY_S
            self._set_timer()

    def withdraw(self, name: str, identity: SocketIdentity, run: str | None) -> None:
        """Withdraw verdicts on earlier ends under this name: this VM runs."""
        obsolete = self._unwritten.pop(name, None)
        if obsolete and obsolete.identity != identity:
            self._settled(name, obsolete.identity)
        self.write(name, identity, run, None)

    def _put(self, name: str, run: str | None, verdict: Verdict | None) -> None:
        if self._is_over(name, run):
            return
        if _is_by_user(verdict):
            self.directory.mark_shutdown(name)  # first, as it takes the least time
            if run:
                markers.write_marker(MarkerKind.SHUTDOWN, name, run=run, folder=self.marks_dir)
        else:
            # The marker of an earlier run stays: other programs still have to note it.
            if run:
                self._withdraw(MarkerKind.SHUTDOWN, name, run)
            self.directory.clear_shutdown(name)
        if verdict is None:
            self._withdraw(MarkerKind.VERDICT, name, run or markers.UNKNOWN_RUN)

    def _put_verdict(self, name: str, run: str | None, verdict: Verdict) -> None:
        folder = self.marks_dir
        if self._is_over(name, run):
            return
        if not run and markers.read_marker(MarkerKind.START, name, folder=folder):
            return  # an instance of Brine's has the name, and this is not its QEMU
        try:
            markers.write_marker(
                MarkerKind.VERDICT,
                name,
                run=run or markers.UNKNOWN_RUN,
                folder=folder,
                durable=True,
                who=verdict.who,
                cause=printable_cause(verdict),
                time_usec=verdict.time_usec,
                given_usec=verdict.given_usec,
            )
        except (FileNotFoundError, PermissionError):
            # A trial daemon with a control directory of its own may have no folder of markers.
            if run:
                raise

    def _is_over(self, name: str, run: str | None) -> bool:
        """Whether a later run has begun, which the files are about."""
        if run is None:
            return False
        return markers.last_run(name, folder=self.marks_dir) not in (run, markers.UNKNOWN_RUN)

    def _withdraw(self, kind: MarkerKind, name: str, run: str) -> None:
        # Most VMs have none, and there may be thousands.
        if not os.path.lexists(f"{self.marks_dir}/{name}.{kind}"):
            return
        if markers.read_marker(kind, name, run=run, folder=self.marks_dir):
            markers.remove_marker(kind, name, folder=self.marks_dir)

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._delay_s, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        for name, wanted in list(self._unwritten.items()):
            try:
                self._put(name, wanted.run, wanted.verdict)
                if wanted.verdict:
                    self._put_verdict(name, wanted.run, wanted.verdict)
            except OSError:
                continue
            del self._unwritten[name]
            text = f"its shutdown file is {wanted.deed} at last"
            tell(log, messages.WRITTEN_LATE, text, instance=name)
            self._settled(name, wanted.identity)
        if self._unwritten:
            self._delay_s = min(self._delay_s * 2, _LONGEST_RETRY_S)
            self._set_timer()


def printable_cause(verdict: Verdict) -> str:
    """The cause as printable text: an unknown cause is the peer's word."""
    return printable(verdict.cause)[:_LONGEST_CAUSE]


def _is_by_user(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.who is Who.USER


# Verdicts are logged at every log level.
verdict_log = logging.getLogger(f"{__name__}.given")
verdict_log.setLevel(NOTICE)

_KEEP_RETRY_S = 1.0
# A guest that has ended can't run again, and end again, twice in this time.
_SHORTEST_LIFE_S = 1.0


class Verdicts:
    """The event history of each VM, and the verdict when it ends.

    :param directory: may be replaced, and so may *marks_dir*.
    :param current: the connection of the VM with a name, if there is one.
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
        """The directory of shutdown files."""
        return self._files.directory

    @directory.setter
    def directory(self, directory: ControlDir) -> None:
        self._files.directory = directory

    @property
    def marks_dir(self) -> Path:
        """The folder of markers."""
        return self._files.marks_dir

    @marks_dir.setter
    def marks_dir(self, folder: Path) -> None:
        self._files.marks_dir = folder

    def take_over(self, connection: Connection, record: VmRecord) -> None:
        """Restore an earlier daemon's record of a VM."""
        connection.seen, connection.verdict = record.seen, record.verdict
        connection.run = record.run
        connection.replaced = connection.replaced or record.replaced
        if record.verdict and not record.written and not connection.replaced:
            self._write_later(connection.name, connection.identity, record)

    def take_over_leftovers(self) -> None:
        """Write the verdicts that an earlier daemon could not write, of VMs that are gone."""
        for name, identity, record in self._keeper.leftovers():
            if record.verdict and not self._current(name):
                self._write_later(name, identity, record)

    def runs(self, connection: Connection) -> None:
        """A VM was found running: verdicts on earlier VMs of its name are withdrawn."""
        self._find_run(connection)
        if not connection.verdict and not connection.replaced:
            self._files.withdraw(connection.name, connection.identity, connection.run)

    def is_stopping(self, connection: Connection) -> bool:
        """Whether an administrator stops a VM: a stop marker names its run. If Brine did not start
        the VM, a file in the control directory counts, which anybody who may write there can
        make."""
        name, run, folder = connection.name, connection.run, self.marks_dir
        if run and markers.read_marker(MarkerKind.STOP, name, run=run, folder=folder):
            return True
        if connection.replaced or not self.directory.is_stopping(name):
            return False
        if not run:
            return True
        # A tool of the older version that started it may be stopping it.
        start = markers.read_marker(MarkerKind.START, name, run=run, folder=folder)
        return bool(start and start.facts.get("adopted"))

    def event(self, connection: Connection, event: QmpEvent) -> None:
        """Take an event of a VM.

        :raises QmpProtocolError: if no VM sends such an event.
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
        """Record a verdict, if it is given and not recorded yet, and release its VM's events."""
        if connection in self._to_record:
            self._to_record.remove(connection)
            self._record(connection)

    def finish_all(self) -> None:
        """Record all verdicts."""
        while self._to_record:
            self._record(self._to_record.popleft())

    def keep(self, connection: Connection) -> bool:
        """Record a VM's history for a later start; a failure is reported once, and tried again.

        :returns: whether it was recorded.
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
        """Forget a connection that has ended."""
        written = self._files.is_written(connection.name, connection.identity)
        self._keeper.forget(connection, written=written)
        self._not_kept.discard(connection)
        self._runs_since.pop(connection, None)

    def _give(self, connection: Connection) -> Verdict:
        """Give the verdict on a VM, and write its shutdown files."""
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
        """Find the run of the instance's unit that a VM is."""
        if connection.run is None:
            pid, folder = connection.peer_pid(), self.marks_dir
            connection.run = markers.run_of(connection.name, pid, folder=folder)

    def _record_next(self) -> None:
        """Record one verdict; other VMs' ends come before the next."""
        if self._to_record:
            connection = self._to_record.popleft()
            if self._to_record:
                self._loop.call_soon(self._record_next)
            self._record(connection)

    def _record(self, connection: Connection) -> None:
        assert connection.verdict
        self._put_on_file(connection, connection.verdict)
        self._put_in_journal(connection, connection.verdict)
        # If it can't be recorded, the event stays unread, and a later start finds it.
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
        # Readers take a verdict without a run for that of an older version of this daemon.
        fields["BRINE_RUN"] = printable(connection.run or markers.UNKNOWN_RUN)
        if verdict.time_usec is not None:
            fields["BRINE_EVENT_TIME_USEC"] = str(verdict.time_usec)
        message, text = messages.VERDICTS[verdict.who], f"ended: {verdict.who}, {cause}"
        tell(verdict_log, message, text, instance=connection.name, **fields)

    def _take_back(self, connection: Connection) -> None:
        """Withdraw the verdict on a guest that runs again: its QEMU had not ended
        (``-no-shutdown``)."""
        now = self._loop.time()
        if now - self._runs_since.get(connection, -_SHORTEST_LIFE_S) < _SHORTEST_LIFE_S:
            raise QmpProtocolError("a guest that ends and runs again without a pause")
        self._runs_since[connection] = now
        connection.verdict = None
        self.runs(connection)
        tell(log, messages.RUNS_AGAIN, "runs again", instance=connection.name)

    def _write_later(self, name: str, identity: SocketIdentity, record: VmRecord) -> None:
        self._files.write_later(name, identity, record.run, record.verdict)

    def _settled(self, name: str, identity: SocketIdentity) -> None:
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
