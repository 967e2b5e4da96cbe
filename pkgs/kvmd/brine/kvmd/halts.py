"""VMs that stand still without an administrator's doing: the marker ``halted``, and the journal.

Events tell that a VM stops, and why its disk failed, but not in which RunState QEMU is. So QEMU is
asked soon after such an event, at most once at a time, however often a guest suspends itself or a
peer that is no QEMU says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from dataclasses import replace

from brine.common.journal import tell
from brine.kvmd import messages
from brine.kvmd.connection import Connection
from brine.kvmd.settings import KvmdSettings
from brine.kvmd.tally import Tally
from brine.kvmd.verdict import EventHistory
from brine.vm import markers
from brine.vm.halt import GOING_STATES, IO_ERROR, PAUSED, Halt, printable_excerpt
from brine.vm.markers import MarkerKind
from brine.vm.run import Run

log = logging.getLogger(__name__)

_ASK_AFTER_S = 0.1
_AGAIN_AFTER_S = 5.0
"""A marker that could not be written is tried again then."""
_RECORDS, _RECORDS_S = 10, 60.0
"""So many records of a VM in so many seconds reach the journal."""
_OLD_AFTER_S, _NEXT_OLD_S = 3.0, 0.01
"""When the VMs are asked that were there before, and how long the next one waits: their events come
first, and there may be thousands."""

_STOPS = frozenset({"STOP", "SUSPEND"})
_GOES_ON = frozenset({"RESUME", "WAKEUP", "RESET"})


class HaltRecorder:
    """Notes which VMs stand still, in which state, and why."""

    def __init__(self, settings: KvmdSettings, tally: Tally) -> None:
        self.settings = settings
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Connection, asyncio.TimerHandle] = {}
        self._told: dict[Connection, deque[float]] = {}  # when; loop's clock
        self._old: deque[Connection] = deque()
        self._without_run: dict[Connection, Halt] = {}  # of VMs that Brine does not run

    def was_there(self, connection: Connection) -> None:
        """A VM was found that may have stopped before: ask it, but nothing waits for that."""
        if not self._old:
            self._loop.call_later(_OLD_AFTER_S, self._ask_next_old)
        self._old.append(connection)

    def event(self, connection: Connection, name: str, before: EventHistory) -> None:
        """Take an event of a VM.

        :param before: what was seen until then.
        """
        if name in _STOPS or (name in _GOES_ON and before.stands_still):
            self._ask_soon(connection)

    def restored(self, connection: Connection) -> None:
        """A VM has the record of an earlier daemon, which may not have come to ask."""
        if connection.record.seen.stands_still:
            self._ask_soon(connection)

    def state(self, connection: Connection, state: str) -> bool:
        """Take a VM's RunState; returns whether its record changes."""
        seen = connection.record.seen
        is_wanted = state in GOING_STATES or (state == PAUSED and self._is_paused(connection))
        if state == "prelaunch" and seen.paused:  # it was reset meanwhile, and not set going
            is_wanted = self._is_paused(connection)
        halt = None if is_wanted else _halt(seen, state)
        before = self._noted(connection)
        if halt and before and halt == Halt(before.state):
            halt = before  # an earlier daemon noted why, and was killed before it kept that
        if halt != before:
            if halt and halt.is_fault:
                self._tally.count_halt(halt)
            self._tell(connection, halt, before)
            self._put(connection, halt)
        halted = halt.state if halt else ""
        if seen.halted == halted:
            return False
        connection.record.seen = replace(seen, halted=halted)
        return True

    def ended(self, connection: Connection) -> None:
        """A VM has ended, or its connection has."""
        if timer := self._timers.pop(connection, None):
            timer.cancel()
        self._told.pop(connection, None)
        if connection.record.seen.stands_still or timer:
            self._put(connection, None)
        self._without_run.pop(connection, None)

    def _ask_next_old(self) -> None:
        connection = self._old.popleft()
        if not connection.closed:
            connection.ask_state()
        if self._old:
            self._loop.call_later(_NEXT_OLD_S, self._ask_next_old)

    def _ask_soon(self, connection: Connection, after_s: float = _ASK_AFTER_S) -> None:
        if connection not in self._timers:
            self._timers[connection] = self._loop.call_later(after_s, self._ask, connection)

    def _ask(self, connection: Connection) -> None:
        self._timers.pop(connection, None)
        if not connection.closed:
            connection.ask_state()

    def _is_paused(self, connection: Connection) -> bool:
        """Whether an administrator has paused this run by Brine's command."""
        run = self._run(connection)
        return run is not None and run.is_paused()

    def _noted(self, connection: Connection) -> Halt | None:
        """The halt that was noted last, without its time."""
        run = self._run(connection)
        if run is None:
            return self._without_run.get(connection)
        found = run.halt()
        return Halt(found.state, found.reason, found.device, found.no_space) if found else None

    def _run(self, connection: Connection) -> Run | None:
        """The run of a VM, of which nothing is read yet; None if Brine did not start the VM."""
        name, run = connection.name, connection.record.run
        return Run(name, run, self.settings.marks_dir) if run else None

    def _put(self, connection: Connection, halt: Halt | None) -> None:
        """Note a halt, or that there is none."""
        name, run, folder = connection.name, connection.record.run, self.settings.marks_dir
        if not run and halt:
            self._without_run[connection] = halt
        elif not run:
            self._without_run.pop(connection, None)
        if not run or connection.record.replaced:
            return
        try:
            if halt:
                facts = halt.facts()
                markers.write_marker(MarkerKind.HALTED, name, run=run, folder=folder, **facts)
            elif self._noted(connection):
                os.unlink(markers.file_of(MarkerKind.HALTED, name, folder=folder))
        except FileNotFoundError:
            return
        except OSError as error:
            text = f"that it stands still can't be noted, trying again: {error.strerror}"
            if self._may_tell(connection):
                tell(log, messages.NOT_WRITTEN, text, instance=name)
            if not connection.closed:
                self._ask_soon(connection, _AGAIN_AFTER_S)

    def _tell(self, connection: Connection, halt: Halt | None, before: Halt | None) -> None:
        if not self._may_tell(connection):
            return
        if halt:
            message = messages.HALTED if halt.is_fault else messages.RESTS
            fields = {"BRINE_STATE": halt.state, "BRINE_REASON": halt.reason or "-"}
            fields["BRINE_DEVICE"] = halt.device or "-"
            tell(log, message, halt.why(), instance=connection.name, **fields)
        elif before:
            fields = {"BRINE_STATE": before.state}
            text = f"goes on; before: {before.state}"
            tell(log, messages.GOES_ON, text, instance=connection.name, **fields)

    def _may_tell(self, connection: Connection) -> bool:
        """Whether a VM may have one more record: a guest may suspend itself without end."""
        now = self._loop.time()
        told = self._told.setdefault(connection, deque(maxlen=_RECORDS))
        if len(told) == _RECORDS and now - told[0] < _RECORDS_S:
            return False
        told.append(now)
        return True


def _halt(seen: EventHistory, state: str) -> Halt:
    if state == IO_ERROR and seen.io_error:
        return Halt(state, seen.io_error.reason, seen.io_error.device, seen.io_error.no_space)
    return Halt(printable_excerpt(state))
