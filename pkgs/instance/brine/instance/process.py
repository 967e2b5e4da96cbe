"""A process that is meant, and never another one that has its number by now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

from brine.common import instance_units


class Process:
    """A process by a descriptor of it (:manpage:`pidfd_open(2)`)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def of(cls, pid: int, *, unit: str) -> Iterator[Process | None]:
        """The process of a unit that has that number; None if none has.

        Who has the number by now may be another one: it is looked at when it can't change any more.

        :param unit: whose control group it is in.
        """
        try:
            descriptor = os.pidfd_open(pid) if pid > 0 else -1
        except ProcessLookupError:
            descriptor = -1
        if descriptor < 0:
            yield None
            return
        try:
            process = cls(descriptor)
            yield process if instance_units.runs_in(pid, unit) and not process.ended() else None
        finally:
            os.close(descriptor)

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; that it has ended is no fault."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


def main_pid() -> int:
    """The main process of the unit that this one is of, as systemd says; 0 if it has ended."""
    text = os.environ.get("MAINPID", "")
    return int(text) if text.isdecimal() else 0
