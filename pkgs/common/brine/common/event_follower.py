"""``brine-events.service``: follows the journal, and has operators' programs run for events.

How far it has come is in a file, which it changes when the programs have ended: an event at which
it was killed is told again, with the same id. What is older than an hour is news no more, and is
left out, as is what exceeds so many events in a minute.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from systemd import journal

from brine.common import messages, paths
from brine.common.event_programs import event_programs, run_programs
from brine.common.files import text_of, write_whole
from brine.common.journal import setup, tell
from brine.common.node_event import NodeEvent, event_kinds, event_of

log = logging.getLogger(__name__)

MOST_IN_MINUTE = 60
_OLDEST_S = 3600.0
_LOOK_S = 10.0
_HUNG_S = 600.0
"""So long a program that took too long is left out."""
_EMPTY_S = 60.0
"""So long after the folder has become empty the follower ends; the path unit starts it again."""


class Dispatcher:
    """Decides which programs are told of an event, and tells of those that are not."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._hung: dict[str, float] = {}  # until when; monotonic clock
        self._recent: deque[float] = deque(maxlen=MOST_IN_MINUTE)
        self._left_out = 0
        self._left_out_since = 0.0

    def programs(self) -> list[str]:
        """The names of programs that may be run now. Each fault of others is told once."""
        now = time.monotonic()
        found = []
        for program, fault in event_programs():
            if fault and (str(program), fault) not in self._told:
                self._told.add((str(program), fault))
                text = f"{program} is not run for events: {fault}"
                tell(log, messages.PROGRAM_REFUSED, text, BRINE_PROGRAM=str(program))
            if not fault and self._hung.get(program.name, 0.0) <= now:
                found.append(program.name)
        return found

    def take(self, event: NodeEvent) -> None:
        """Have the programs run for an event, unless it is old or one of too many."""
        now = time.monotonic()
        age_s = (datetime.now(UTC) - datetime.fromisoformat(event.time)).total_seconds()
        is_flood = len(self._recent) == MOST_IN_MINUTE and now - self._recent[0] < 60
        if age_s > _OLDEST_S or is_flood:
            self._left_out_since = self._left_out_since or now
            self._left_out += 1
            return
        self._recent.append(now)
        for error in run_programs(event, self.programs()):
            text = str(error)
            if error.has_hung:
                self._hung[error.program] = time.monotonic() + _HUNG_S
                text = f"{text}; it is left out for {_HUNG_S / 60:.0f} minutes"
            fields = {"BRINE_PROGRAM": error.program, "BRINE_REASON": str(error)}
            tell(log, messages.PROGRAM_FAILED, f"{text} (event {event.id})", **fields)

    def tell_left_out(self) -> None:
        """Tell how many events were left out, once a minute."""
        if self._left_out and time.monotonic() - self._left_out_since >= _LOOK_S:
            text = (
                f"{self._left_out} events are too old or too many, and no program is told of them"
            )
            tell(log, messages.EVENTS_LEFT_OUT, text, BRINE_COUNT=str(self._left_out))
            self._left_out, self._left_out_since = 0, 0.0


def follow_journal(_arguments: argparse.Namespace) -> int:
    """``brine events follow``."""
    setup("brine-events", logging.INFO)
    follow()
    return 0


def follow() -> None:
    """Follow the journal until the folder of programs has been empty for a while."""
    dispatcher, kinds = Dispatcher(), event_kinds()
    reader = journal.Reader()
    for message_id in kinds:
        reader.add_match(MESSAGE_ID=message_id)
    place = _Place()
    place.seek(reader)
    empty_since: float | None = None
    while True:
        passed: Mapping[str, Any] | None = None
        while entry := reader.get_next():
            event = event_of(entry, kinds)
            if event:
                dispatcher.take(event)
                place.keep(entry)
            # Of records that only look like events there may be many.
            passed = None if event else entry
        if passed:
            place.keep(passed)
        dispatcher.tell_left_out()
        dispatcher.programs()  # for what is wrong with them
        if not _is_folder_empty():
            empty_since = None
        elif empty_since is None:
            empty_since = time.monotonic()
        elif time.monotonic() - empty_since > _EMPTY_S:
            return
        reader.wait(_LOOK_S)


def _is_folder_empty() -> bool:
    """Whether the path unit would not start this, which does not look at hidden files either."""
    try:
        return not any(name[:1] != "." for name in os.listdir(paths.EVENT_PROGRAMS_DIR))
    except OSError:
        return True


class _Place:
    """How far the follower has come in the journal."""

    def __init__(self) -> None:
        self._is_fault_told = False

    def seek(self, reader: Any) -> None:
        """Go to where the follower was last; the first time, to the end."""
        if cursor := text_of(paths.EVENTS_CURSOR_FILE):
            try:
                reader.seek_cursor(cursor)
                entry = reader.get_next()
                if entry and entry["__CURSOR"] != cursor:
                    reader.seek_cursor(cursor)  # that record is gone, and this is the next
            except (OSError, ValueError) as error:
                log.warning("%s: can't be used: %s", paths.EVENTS_CURSOR_FILE, error)
            else:
                return
        reader.seek_tail()
        if entry := reader.get_previous():
            self.keep(entry)
        else:
            # There is no such record yet. From the end itself, a reader finds none that comes.
            reader.seek_head()

    def keep(self, entry: Mapping[str, Any]) -> None:
        """Note a record as the last one. Where that can't be written, as on a full disk, events go
        on; those of the last hour may be told again after a restart."""
        file = paths.EVENTS_CURSOR_FILE
        try:
            file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_whole(file, f"{entry['__CURSOR']}\n".encode(), mode=0o600, alone=True)
        except OSError as error:
            if not self._is_fault_told:
                log.error("%s: can't be written: %s", file, error.strerror)
            self._is_fault_told = True
        else:
            self._is_fault_told = False
