"""Writing verdicts to the control directory, again and again if need be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from brine.common.journal import tell
from brine.kvmd import messages
from brine.kvmd.control_dir import ControlDir
from brine.kvmd.verdict import Verdict, Who

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


class VerdictFiles:
    """The ``<name>.shutdown`` files: there for a user's shutdown, absent otherwise.

    A verdict that can't be written (a full or read-only file system, a control directory that is
    gone) is kept and tried again until it can, or until a new VM of that name makes it obsolete.

    :param written_late: told the name of an instance whose verdict was written at last.
    """

    def __init__(self, directory: ControlDir, written_late: Callable[[str], None]) -> None:
        self.directory = directory
        self._written_late = written_late
        self._unwritten: dict[str, Verdict] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._delay_s = _FIRST_RETRY_S

    def is_written(self, name: str) -> bool:
        """Whether no verdict of this instance still waits to be written."""
        return name not in self._unwritten

    def write(self, name: str, verdict: Verdict) -> None:
        """Write a verdict, now if possible, later if not."""
        try:
            self._put(name, verdict)
        except OSError as error:
            self.keep(name, verdict)
            reason = f"verdict {verdict.who} can't be written, trying again: {error.strerror}"
            tell(log, messages.NOT_WRITTEN, reason, instance=name)

    def keep(self, name: str, verdict: Verdict) -> None:
        """Try again, later, to write a verdict."""
        self._unwritten[name] = verdict
        if not self._timer:
            self._delay_s = _FIRST_RETRY_S
            self._set_timer()

    def withdraw(self, name: str) -> None:
        """A VM of this name runs: whatever was said of an earlier end holds no more."""
        self._unwritten.pop(name, None)
        try:
            self.directory.clear_shutdown(name)
        except OSError as error:
            text = f"an earlier shutdown file can't be removed: {error.strerror}"
            tell(log, messages.NOT_WRITTEN, text, instance=name)

    def _put(self, name: str, verdict: Verdict) -> None:
        if verdict.who is Who.USER:
            self.directory.mark_shutdown(name)
        else:
            self.directory.clear_shutdown(name)

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._delay_s, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        for name, verdict in list(self._unwritten.items()):
            try:
                self._put(name, verdict)
            except OSError:
                continue
            del self._unwritten[name]
            tell(log, messages.WRITTEN_LATE, f"verdict {verdict.who} is written", instance=name)
            self._written_late(name)
        if self._unwritten:
            self._delay_s = min(self._delay_s * 2, _LONGEST_RETRY_S)
            self._set_timer()
