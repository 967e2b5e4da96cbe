"""Operators' programs in ``/etc/brine/events.d``, each run for an event as a unit of its own.

``brine-event@PROGRAM:ID.service`` is a user that exists while the program runs, with little memory,
few processes and a limit of time; systemd ends whatever the program leaves behind.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
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
_RESULTS = {
    "timeout": f"took longer than {TIMEOUT_S} s, and was ended",
    "exit-code": "failed with status {status}",
    "signal": "was ended by signal {status}",
    "core-dump": "crashed, by signal {status}",
    "oom-kill": "wanted too much memory",
}
"""By systemd's result of the unit."""


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
    file, unit = paths.EVENTS_DIR / f"{instance}.json", f"brine-event@{instance}.service"
    try:
        _put(file, event)
        try:
            done = _systemctl("start", unit, timeout_s=TIMEOUT_S + _SYSTEMD_S)
            if done.returncode:
                raise _error(program, unit, done.stderr)
        except TimeoutError:
            raise ProgramError(program, "systemd does not end it", has_hung=True) from None
    except OSError as error:
        raise ProgramError(program, f"can't be run: {error.strerror}") from error
    finally:
        file.unlink(missing_ok=True)


def _error(program: str, unit: str, said: str) -> ProgramError:
    """Why a program's unit has failed, which systemd is then told to forget."""
    shown = _systemctl("show", "--property=Result,ExecMainStatus", unit).stdout
    found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    _systemctl("reset-failed", unit)
    result, status = found.get("Result", "success"), found.get("ExecMainStatus", "0")
    if result == "success":  # it was not even begun
        lines = said.strip().splitlines()
        return ProgramError(program, f"can't be run: {lines[0][:200] if lines else 'no reason'}")
    text = _RESULTS.get(result, "failed: {result}").format(result=result, status=status)
    return ProgramError(program, text, has_hung=result == "timeout")


def _systemctl(*words: str, timeout_s: float = _SYSTEMD_S) -> subprocess.CompletedProcess[str]:
    """:raises TimeoutError: if it takes longer. :raises OSError: if it can't be run."""
    return run_bounded(["systemctl", *words], timeout_s=timeout_s, environment=_english())


def _english() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"}


def _put(file: Path, event: NodeEvent) -> None:
    """Leave an event for the program's unit, which reads it from its standard input."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(event.to_json()) + "\n"
    write_whole(file, text.encode(), mode=0o600, durable=False)
