"""Writing verdicts to the control directory and as marks, again and again if need be."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from brine.common import marks
from brine.common.journal import tell
from brine.common.marks import Kind
from brine.common.printable import printable
from brine.kvmd import messages
from brine.kvmd.control_dir import ControlDir, Identity
from brine.kvmd.verdict import Verdict, Who

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

    identity: Identity
    run: str | None
    verdict: Verdict | None

    @property
    def deed(self) -> str:
        """What is to be done to the shutdown file."""
        return "made" if _is_by_user(self.verdict) else "removed"


class VerdictFiles:
    """What stands in files of each end.

    The empty ``<name>.shutdown`` in the control directory is for others, such as Ganeti's tools: it
    is there for a user's shutdown, and absent otherwise. Marks are what Brine itself trusts: the
    verdict, and that the user has shut a run down. They name the run.

    A file that can't be made or removed (a full or read-only file system, a control directory that
    is gone) is tried again until it can, or until a newer VM of that name makes it obsolete.

    :param marks_dir: may be replaced.
    :param settled: told the name and identity of a VM for which nothing is left to be written.
    """

    def __init__(
        self, directory: ControlDir, marks_dir: Path, settled: Callable[[str, Identity], None]
    ) -> None:
        self.directory = directory
        self.marks_dir = marks_dir
        self._settled = settled
        self._unwritten: dict[str, Unwritten] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._delay_s = _FIRST_RETRY_S

    def is_written(self, name: str, identity: Identity) -> bool:
        """Whether nothing waits to be written for this VM."""
        unwritten = self._unwritten.get(name)
        return unwritten is None or unwritten.identity != identity

    def write(
        self, name: str, identity: Identity, run: str | None, verdict: Verdict | None
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
        self, name: str, identity: Identity, run: str | None, verdict: Verdict
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
        self, name: str, identity: Identity, run: str | None, verdict: Verdict | None
    ) -> None:
        """Have the files say so, but not at once."""
        self._unwritten[name] = Unwritten(identity, run, verdict)
        if not self._timer:
            self._delay_s = _FIRST_RETRY_S
            self._set_timer()

    def withdraw(self, name: str, identity: Identity, run: str | None) -> None:
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
                marks.write_mark(Kind.SHUTDOWN, name, run=run, folder=self.marks_dir)
        else:
            # That of an earlier run explains nothing, and is for those to note who look after it.
            if run:
                self._withdraw(Kind.SHUTDOWN, name, run)
            self.directory.clear_shutdown(name)
        if verdict is None:
            self._withdraw(Kind.VERDICT, name, run or marks.UNKNOWN_RUN)

    def _put_verdict(self, name: str, run: str | None, verdict: Verdict) -> None:
        folder = self.marks_dir
        if self._is_over(name, run):
            return
        if not run and marks.read_mark(Kind.START, name, folder=folder):
            return  # an instance of Brine's has the name, and this is not its QEMU
        try:
            marks.write_mark(
                Kind.VERDICT,
                name,
                run=run or marks.UNKNOWN_RUN,
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
        return marks.last_run(name, folder=self.marks_dir) not in (run, marks.UNKNOWN_RUN)

    def _withdraw(self, kind: Kind, name: str, run: str) -> None:
        # Most have none, and there may be thousands.
        if not os.path.lexists(f"{self.marks_dir}/{name}.{kind}"):
            return
        if marks.read_mark(kind, name, run=run, folder=self.marks_dir):
            marks.remove_mark(kind, name, folder=self.marks_dir)

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
