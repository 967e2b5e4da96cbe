"""Operators' programs in ``/etc/brine/events.d``, each run for an event as a unit of its own.

``brine-event@PROGRAM:ID.service`` is a user that exists while the program runs, with little memory,
few processes and a limit of time; systemd ends whatever the program leaves behind.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import write_whole
from brine.common.node_event import NodeEvent
from brine.common.process import run_bounded
from brine.common.script_folder import FoundProgram, programs_in

MOST_PROGRAMS = 10
"""So many are run, the first by name."""

TIMEOUT_S = 60
"""Of each program; the unit has the same."""

_SYSTEMD_S = 60.0
_WHY = re.compile(r"^Job for \S+ failed because (.*?)\.$", re.MULTILINE)


class ProgramError(BrineError):
    """A program that could not be run, or failed.

    :param has_hung: whether it took too long.
    """

    def __init__(self, program: str, text: str, *, has_hung: bool = False) -> None:
        hint = "its output is in the journal: journalctl -u 'brine-event@*'"
        super().__init__(f"{paths.EVENT_PROGRAMS_DIR}/{program}: {text}", hint=hint)
        self.program = program
        self.has_hung = has_hung


def event_programs() -> Iterator[FoundProgram]:
    """The programs, and why some of them are not run."""
    for number, found in enumerate(programs_in(paths.EVENT_PROGRAMS_DIR)):
        if found.fault:
            yield found
        elif number >= MOST_PROGRAMS:
            yield FoundProgram(found.path, f"there are more than {MOST_PROGRAMS} programs")
        elif not stat.S_IMODE(found.path.stat().st_mode) & stat.S_IXOTH:
            yield FoundProgram(found.path, "its own user may not run it (chmod 755)")
        else:
            yield found


def run_programs(event: NodeEvent, programs: list[str]) -> list[ProgramError]:
    """Run programs for an event, all at once, and wait for them; returns what failed."""
    if not programs:
        return []

    def fault(program: str) -> ProgramError | None:
        try:
            _run(event, program)
        except ProgramError as error:
            return error
        return None

    with ThreadPoolExecutor(len(programs)) as pool:
        return [error for error in pool.map(fault, programs) if error]


def _run(event: NodeEvent, program: str) -> None:
    """Run a program, and wait until it has ended."""
    instance = f"{program}:{event.id}"
    file = paths.EVENTS_DIR / f"{instance}.json"
    try:
        _put(file, event)
        command = ["systemctl", "start", f"brine-event@{instance}.service"]
        try:
            done = run_bounded(command, timeout_s=TIMEOUT_S + _SYSTEMD_S, environment=_english())
        except TimeoutError:
            raise ProgramError(program, "systemd does not end it", has_hung=True) from None
        if done.returncode:
            why = _WHY.search(done.stderr)
            has_hung = why is not None and "timeout" in why[1]
            text = f"it took longer than {TIMEOUT_S} s, and was ended" if has_hung else ""
            raise ProgramError(program, text or _failure(done.stderr, why), has_hung=has_hung)
    except OSError as error:
        raise ProgramError(program, f"can't be run: {error.strerror}") from error
    finally:
        file.unlink(missing_ok=True)


def _failure(said: str, why: re.Match[str] | None) -> str:
    if why:
        return f"failed: {why[1]}"
    lines = said.strip().splitlines()
    return f"failed: {lines[0][:200]}" if lines else "failed"


def _english() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"}


def _put(file: Path, event: NodeEvent) -> None:
    """Leave an event for the program's unit, which reads it from its standard input."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(event.to_json()) + "\n"
    write_whole(file, text.encode(), mode=0o600, durable=False)
