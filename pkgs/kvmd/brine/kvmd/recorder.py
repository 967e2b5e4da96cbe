"""Recording verdicts: in the journal, as markers, and in the control directory.

When many VMs end at once, the shutdown files come first, as other programs wait for them. Then each
verdict gets a file, a journal record and a record for a restart. Until then its event is held.

The empty ``<name>.shutdown`` in the control directory is for other programs, as Ganeti's tools are:
it exists after a user's shutdown only. Brine itself trusts markers: the verdict, and the user's
shutdown of a run. They name the run.

A file that can't be made or removed (a full or read-only file system, a missing control directory)
is tried again, until that succeeds or a newer VM of that name makes it obsolete.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable

from brine.common.errors import printable
from brine.common.journal import tell
from brine.common.message import NOTICE
from brine.common.qmp.wire import QmpEvent, QmpProtocolError
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.handover import Keeper, VmRecord, parse_key
from brine.kvmd.settings import KvmdSettings
from brine.kvmd.tally import Tally
from brine.kvmd.verdict import MOVING, STOPPING, Verdict, Who, fold, judge
from brine.vm import markers
from brine.vm.markers import MarkerKind
from brine.vm.run import Run

log = logging.getLogger(__name__)
# Verdicts are logged at every log level.
verdict_log = logging.getLogger(f"{__name__}.given")
verdict_log.setLevel(NOTICE)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
_LONGEST_CAUSE = 60
_KEEP_RETRY_S = 1.0
# A guest that has ended can't run again, and end again, twice in this time.
_SHORTEST_LIFE_S = 1.0


class VerdictRecorder:
    """The event history of each VM, and the verdict when it ends.

    :param current: the connection of the VM with a name, if there is one.
    """

    def __init__(
        self,
        settings: KvmdSettings,
        keeper: Keeper,
        current: Callable[[str], Connection | None],
        tally: Tally,
    ) -> None:
        self.settings = settings
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._keeper = keeper
        self._current = current
        self._to_record: deque[Connection] = deque()
        self._not_kept: set[Connection] = set()  # to be tried again
        self._runs_since: dict[Connection, float] = {}  # of those set going again; loop's clock
        # The key and record of each VM whose files could not be written yet, by name.
        self._unwritten: dict[str, tuple[str | None, VmRecord]] = {}
        self._write_timer: asyncio.TimerHandle | None = None
        self._write_delay_s = _FIRST_RETRY_S

    # Over a restart.

    def take_over(self, connection: Connection, record: VmRecord) -> None:
        """Restore an earlier daemon's record of a VM."""
        connection.record = record
        if record.verdict and not record.written and not record.replaced:
            self._write_later(connection.name, connection.key, record)

    def take_over_leftovers(self) -> None:
        """Write the verdicts that an earlier daemon could not write, of VMs that are gone."""
        for key, record in self._keeper.leftovers():
            name, _ = parse_key(key)
            if record.verdict and not self._current(name):
                self._write_later(name, key, record)

    def keep(self, connection: Connection) -> bool:
        """Record a VM's history for a later start; returns whether it could. A failure is reported
        once, and tried again."""
        connection.record.written = self._is_written(connection)
        try:
            self._keeper.keep_record(connection.key, connection.record)
        except OSError as error:
            if connection not in self._not_kept:
                text = f"its record can't be kept for a restart yet: {error.strerror}"
                tell(log, messages.NOT_KEPT, text, instance=connection.name)
            if not self._not_kept:
                self._loop.call_later(_KEEP_RETRY_S, self._keep_again)
            self._not_kept.add(connection)
            return False
        self._not_kept.discard(connection)
        return True

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended. Its record stays until its verdict is written."""
        self._keeper.discard_connection(connection.key)
        if self._is_written(connection):
            self._keeper.drop(connection.key)
        self._not_kept.discard(connection)
        self._runs_since.pop(connection, None)

    def _keep_again(self) -> None:
        for connection in list(self._not_kept):
            if self.keep(connection):
                connection.go_on()
        if self._not_kept:
            self._loop.call_later(_KEEP_RETRY_S, self._keep_again)

    # What happens to a VM.

    def runs(self, connection: Connection) -> None:
        """A VM was found running: verdicts on earlier VMs of its name are withdrawn."""
        self._find_run(connection)
        record = connection.record
        if not record.verdict and not record.replaced:
            obsolete, _ = self._unwritten.pop(connection.name, (connection.key, record))
            if obsolete != connection.key:
                self._settled(connection.name, obsolete)
            self._write(connection)

    def stop_cause(self, connection: Connection) -> str:
        """Why an administrator stops a VM, as the stop marker of its run says; empty if none does.
        If Brine did not start the VM, a file in the control directory counts, which every user
        who may write there can make."""
        run = self._run(connection.name, connection.record)
        if run and run.was_stopped():
            return run.stop_cause or STOPPING
        if connection.record.replaced or not self.settings.directory.is_stopping(connection.name):
            return ""
        return "" if run else STOPPING

    def _moving(self, connection: Connection) -> str:
        """The cause of the end of a QEMU that still waits for a guest of another node's."""
        run = self._run(connection.name, connection.record)
        return MOVING if run and run.awaits_from else ""

    def event(self, connection: Connection, event: QmpEvent) -> None:
        """Take an event of a VM. A QmpProtocolError means that no VM sends such an event."""
        record = connection.record
        seen = fold(record.seen, event)
        if seen == record.seen:
            return
        record.seen = seen
        if seen.shutdown and not record.verdict:
            self._give(connection)
            connection.hold()
            if not self._to_record:
                self._loop.call_soon(self._record_next)
            self._to_record.append(connection)
            return
        if record.verdict and not seen.shutdown:
            self._take_back(connection)
        self.keep(connection)

    def ended(self, connection: Connection) -> None:
        """A VM's connection ended."""
        if connection.ready and not connection.record.verdict:
            self._give(connection)
            self._publish(connection)
            if not self._is_written(connection):
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

    def _find_run(self, connection: Connection) -> None:
        """Find the run of the instance's unit that a VM is."""
        if connection.record.run is None:
            pid, folder = connection.peer_pid(), self.settings.marks_dir
            run = Run.of_process(connection.name, pid, folder=folder)
            connection.record.run = run.id if run else None

    def _run(self, name: str, record: VmRecord) -> Run | None:
        """The run of a VM, of which nothing is read yet; None if Brine did not start the VM."""
        return Run(name, record.run, self.settings.marks_dir) if record.run else None

    def _give(self, connection: Connection) -> None:
        """Give the verdict on a VM, and write its shutdown files."""
        self._find_run(connection)
        record = connection.record
        verdict = judge(
            record.seen,
            stop_cause=self.stop_cause(connection) or self._moving(connection),
            powerdown_stale_s=self.settings.powerdown_stale_s,
            is_brines=record.run is not None,
        )
        now_usec = time.time_ns() // 1000
        record.verdict = Verdict(verdict.who, verdict.cause, verdict.time_usec, now_usec)
        if not record.replaced:
            self._write(connection)

    def _take_back(self, connection: Connection) -> None:
        """Withdraw the verdict on a guest that runs again: its QEMU had not ended
        (``-no-shutdown``)."""
        now = self._loop.time()
        if now - self._runs_since.get(connection, -_SHORTEST_LIFE_S) < _SHORTEST_LIFE_S:
            raise QmpProtocolError("a guest that ends and runs again without a pause")
        self._runs_since[connection] = now
        connection.record.verdict = None
        self.runs(connection)
        tell(log, messages.RUNS_AGAIN, "runs again", instance=connection.name)

    def _record_next(self) -> None:
        """Record one verdict; other VMs' ends come before the next."""
        if self._to_record:
            connection = self._to_record.popleft()
            if self._to_record:
                self._loop.call_soon(self._record_next)
            self._record(connection)

    def _record(self, connection: Connection) -> None:
        self._publish(connection)
        # If it can't be recorded, the event stays unread, and a later start finds it.
        if self.keep(connection):
            connection.go_on()

    def _publish(self, connection: Connection) -> None:
        """Write a verdict's own file and its journal record."""
        name, record, verdict = connection.name, connection.record, connection.record.verdict
        assert verdict
        if not record.replaced:
            try:
                self._put_verdict(name, record)
            except OSError as error:
                self._tell_not_written(connection, "its verdict's file can't be made", error)
        cause = _printable_cause(verdict)
        fields = {"BRINE_VERDICT": str(verdict.who), "BRINE_CAUSE": cause}
        fields["BRINE_GIVEN_USEC"] = str(verdict.given_usec)
        # Readers take a verdict without a run for that of an older version of this daemon.
        fields["BRINE_RUN"] = printable(record.run or markers.UNKNOWN_RUN)
        if verdict.time_usec is not None:
            fields["BRINE_EVENT_TIME_USEC"] = str(verdict.time_usec)
        self._tally.count_verdict(verdict, cause)
        message, text = messages.VERDICTS[verdict.who], f"ended: {verdict.who}, {cause}"
        tell(verdict_log, message, text, instance=name, **fields)

    # The files, with retries.

    def _is_written(self, connection: Connection) -> bool:
        """Whether all files are written for this VM."""
        unwritten = self._unwritten.get(connection.name)
        return unwritten is None or unwritten[0] != connection.key

    def _write(self, connection: Connection) -> None:
        """Make or remove the shutdown files, now if possible, later if not."""
        name, record = connection.name, connection.record
        try:
            self._put(name, record)
        except OSError as error:
            what = f"its shutdown file can't be {_deed(record)}"
            self._tell_not_written(connection, what, error)

    def _tell_not_written(self, connection: Connection, what: str, error: OSError) -> None:
        """Have it written later, and say so."""
        self._write_later(connection.name, connection.key, connection.record)
        text = f"{what}, trying again: {error.strerror}"
        tell(log, messages.NOT_WRITTEN, text, instance=connection.name)

    def _write_later(self, name: str, key: str | None, record: VmRecord) -> None:
        self._unwritten[name] = (key, record)
        if not self._write_timer:
            self._write_delay_s = _FIRST_RETRY_S
            self._write_timer = self._loop.call_later(self._write_delay_s, self._write_again)

    def _write_again(self) -> None:
        self._write_timer = None
        for name, (key, record) in list(self._unwritten.items()):
            try:
                self._put(name, record)
                if record.verdict:
                    self._put_verdict(name, record)
            except OSError:
                continue
            del self._unwritten[name]
            text = f"its shutdown file is {_deed(record)} at last"
            tell(log, messages.WRITTEN_LATE, text, instance=name)
            self._settled(name, key)
        if self._unwritten:
            self._write_delay_s = min(self._write_delay_s * 2, _LONGEST_RETRY_S)
            self._write_timer = self._loop.call_later(self._write_delay_s, self._write_again)

    def _settled(self, name: str, key: str | None) -> None:
        """Nothing is left to be written for a VM."""
        connection = self._current(name)
        if connection and connection.key == key:
            self.keep(connection)
        else:
            self._keeper.drop(key)

    def _put(self, name: str, record: VmRecord) -> None:
        """Make or remove the shutdown files."""
        if self._is_over(name, record):
            return
        if _is_by_user(record):
            self.settings.directory.mark_shutdown(name)  # first, as it takes the least time
            if record.run:
                folder = self.settings.marks_dir
                markers.write_marker(MarkerKind.SHUTDOWN, name, run=record.run, folder=folder)
        else:
            # The marker of an earlier run stays: other programs still have to note it.
            if record.run:
                self._withdraw(MarkerKind.SHUTDOWN, name, record.run)
            self.settings.directory.clear_shutdown(name)
        if record.verdict is None:
            self._withdraw(MarkerKind.VERDICT, name, record.run or markers.UNKNOWN_RUN)

    def _put_verdict(self, name: str, record: VmRecord) -> None:
        """Write the verdict's own file. It takes longer than a shutdown file, so the shutdown files
        of all waiting VMs come first."""
        run, verdict, folder = record.run, record.verdict, self.settings.marks_dir
        assert verdict
        if self._is_over(name, record):
            return
        if not run and Run.marked(MarkerKind.START, name, folder=folder):
            return  # an instance of Brine's has the name, and this is not its QEMU
        try:
            markers.write_marker(
                MarkerKind.VERDICT,
                name,
                run=run or markers.UNKNOWN_RUN,
                folder=folder,
                durable=True,
                who=verdict.who,
                cause=_printable_cause(verdict),
                time_usec=verdict.time_usec,
                given_usec=verdict.given_usec,
            )
        except (FileNotFoundError, PermissionError):
            # A trial daemon with a control directory of its own may have no folder of markers.
            if run:
                raise

    def _is_over(self, name: str, record: VmRecord) -> bool:
        """Whether a later run has begun, which the files are about."""
        run = self._run(name, record)
        return run is not None and run.is_followed()

    def _withdraw(self, kind: MarkerKind, name: str, run: str) -> None:
        folder = self.settings.marks_dir
        # Most VMs have none, and there may be thousands.
        if not os.path.lexists(f"{folder}/{name}.{kind}"):
            return
        if Run(name, run, folder).has(kind):
            markers.remove_marker(kind, name, folder=folder)


def _printable_cause(verdict: Verdict) -> str:
    """The cause as printable text: an unknown cause is the peer's word."""
    return printable(verdict.cause)[:_LONGEST_CAUSE]


def _is_by_user(record: VmRecord) -> bool:
    return record.verdict is not None and record.verdict.who is Who.USER


def _deed(record: VmRecord) -> str:
    """The change of the shutdown file, in a word."""
    return "made" if _is_by_user(record) else "removed"
