"""Writing verdicts to the control directory and as marks, again and again if need be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from brine.common import marks
from brine.common.journal import tell
from brine.common.marks import Kind
from brine.kvmd import messages
from brine.kvmd.control_dir import ControlDir, Identity

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


@dataclass(frozen=True)
class Unwritten:
    """What should be so in the control directory, and is not yet.

    :param identity: of the VM that it is about.
    :param run: the run of Brine's unit that it is about, if it is about one.
    :param by_user: whether its shutdown file should be there.
    """

    identity: Identity
    run: str | None
    by_user: bool

    @property
    def deed(self) -> str:
        """What is to be done to the shutdown file."""
        return "made" if self.by_user else "removed"


class VerdictFiles:
    """The ``<name>.shutdown`` files: there for a user's shutdown, absent otherwise.

    There are two. The empty one in the control directory is for others, such as Ganeti's tools. The
    mark is what Brine itself trusts, and says which run the user has shut down.

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

    def write(self, name: str, identity: Identity, run: str | None, *, by_user: bool) -> None:
        """Make or remove the shutdown file, now if possible, later if not."""
        try:
            self._put(name, run, by_user=by_user)
        except OSError as error:
            self.write_later(name, identity, run, by_user=by_user)
            deed = self._unwritten[name].deed
            text = f"its shutdown file can't be {deed}, trying again: {error.strerror}"
            tell(log, messages.NOT_WRITTEN, text, instance=name)

    def write_later(self, name: str, identity: Identity, run: str | None, *, by_user: bool) -> None:
        """Try to make or remove the shutdown file, but not at once."""
        self._unwritten[name] = Unwritten(identity, run, by_user)
        if not self._timer:
            self._delay_s = _FIRST_RETRY_S
            self._set_timer()

    def withdraw(self, name: str, identity: Identity, run: str | None) -> None:
        """This VM runs: whatever was said of an earlier end under its name holds no more."""
        obsolete = self._unwritten.pop(name, None)
        if obsolete and obsolete.identity != identity:
            self._settled(name, obsolete.identity)
        self.write(name, identity, run, by_user=False)

    def _put(self, name: str, run: str | None, *, by_user: bool) -> None:
        folder = self.marks_dir
        if by_user:
            if run:
                marks.write_mark(Kind.SHUTDOWN, name, run=run, folder=folder)
            self.directory.mark_shutdown(name)
            return
        # That of an earlier run explains nothing, and is for those to note who look after it.
        if run and marks.read_mark(Kind.SHUTDOWN, name, run=run, folder=folder):
            marks.remove_mark(Kind.SHUTDOWN, name, folder=folder)
        self.directory.clear_shutdown(name)

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._delay_s, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        for name, wanted in list(self._unwritten.items()):
            try:
                self._put(name, wanted.run, by_user=wanted.by_user)
            except OSError:
                continue
            del self._unwritten[name]
            text = f"its shutdown file is {wanted.deed} at last"
            tell(log, messages.WRITTEN_LATE, text, instance=name)
            self._settled(name, wanted.identity)
        if self._unwritten:
            self._delay_s = min(self._delay_s * 2, _LONGEST_RETRY_S)
            self._set_timer()
