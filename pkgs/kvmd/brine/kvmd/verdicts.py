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

# Writing verdicts to the control directory and as markers, again and again if need be.

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
_LONGEST_CAUSE = 60


@dataclass(frozen=True)
class Unwritten:
    """What should be so in the control directory, and is not yet.

    :param identity: of the VM that it is about.
    :param run: the run of Brine's unit that it is about, if it is about one.
    :param verdict: on its end; None while it runs.
    """

    identity: SocketIdentity
    run: str | None
    verdict: Verdict | None

    @property
    def deed(self) -> str:
        """What to do with the shutdown file."""
        return "made" if _is_by_user(self.verdict) else "removed"


class VerdictFiles:
    """What stands in files of each end.

    The empty ``<name>.shutdown`` in the control directory is for others, such as Ganeti's tools: it
    is there for a user's shutdown, and absent otherwise. Markers are what Brine itself trusts: the
    verdict, and that the user has shut a run down. They name the run.

    A file that can't be made or removed (a full or read-only file system, a control directory that
    is gone) is tried again until it can, or until a newer VM of that name makes it obsolete.

    :param marks_dir: may be replaced.
    :param settled: told the name and identity of a VM for which nothing is left to be written.
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
        """Whether nothing waits to be written for this VM."""
        unwritten = self._unwritten.get(name)
        return unwritten is None or unwritten.identity != identity

    def write(
        self, name: str, identity: SocketIdentity, run: str | None, verdict: Verdict | None
    ) -> None:
        """Have the shutdown files say so, now if possible, later if not."""
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
        """Have the verdict's own file say so, now if possible, later if not. It takes longer than a
        shutdown file, so all of those that wait for one come before."""
        try:
            self._put_verdict(name, run, verdict)
        except OSError as error:
            self.write_later(name, identity, run, verdict)
            text = f"its verdict's file can't be made, trying again: {error.strerror}"
            tell(log, messages.NOT_WRITTEN, text, instance=name)

    def write_later(
        self, name: str, identity: SocketIdentity, run: str | None, verdict: Verdict | None
    ) -> None:
        """Have the files say so, but not at once."""
        self._unwritten[name] = Unwritten(identity, run, verdict)
        if not self._timer:
            self._delay_s = _FIRST_RETRY_S
            self._set_timer()

    def withdraw(self, name: str, identity: SocketIdentity, run: str | None) -> None:
        """This VM runs: whatever was said of an earlier end under its name holds no more."""
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
            # That of an earlier run explains nothing, and is for those to note who look after it.
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
            # A daemon on trial, say, with a control directory of its own, has no folder of marks.
            if run:
                raise

    def _is_over(self, name: str, run: str | None) -> bool:
        """Whether a later run has begun, and what the files say is about that."""
        if run is None:
            return False
        return markers.last_run(name, folder=self.marks_dir) not in (run, markers.UNKNOWN_RUN)

    def _withdraw(self, kind: MarkerKind, name: str, run: str) -> None:
        # Most have none, and there may be thousands.
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
    """The cause, which is a peer's word if it is a strange one."""
    return printable(verdict.cause)[:_LONGEST_CAUSE]


def _is_by_user(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.who is Who.USER


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
        """Where markers are."""
        return self._files.marks_dir

    @marks_dir.setter
    def marks_dir(self, folder: Path) -> None:
        self._files.marks_dir = folder

    def take_over(self, connection: Connection, record: VmRecord) -> None:
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
        """Whether an administrator means to stop a VM, by a marker that names its run; or by a file
        without any, which anybody who may write to the control directory can make, where Brine did
        not start the VM."""
        name, run, folder = connection.name, connection.run, self.marks_dir
        if run and markers.read_marker(MarkerKind.STOP, name, run=run, folder=folder):
            return True
        if connection.replaced or not self.directory.is_stopping(name):
            return False
        if not run:
            return True
        # Tools of an older version, which started it, may be stopping it.
        start = markers.read_marker(MarkerKind.START, name, run=run, folder=folder)
        return bool(start and start.facts.get("adopted"))

    def event(self, connection: Connection, event: QmpEvent) -> None:
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
            connection.run = markers.run_of(connection.name, pid, folder=folder)

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
        fields["BRINE_RUN"] = printable(connection.run or markers.UNKNOWN_RUN)
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
