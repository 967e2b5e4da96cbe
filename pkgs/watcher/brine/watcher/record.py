"""The journal records of the watcher, and its pause.

The file has one number, the epoch second at which the rest ends, as Ganeti's watcher reads it.
"""

from __future__ import annotations

import logging
import math
from datetime import datetime
from pathlib import Path

from brine.common import paths
from brine.common.cli import length_of_time
from brine.common.errors import BrineError, UsageError
from brine.common.files import write_whole
from brine.common.journal import log_command, tell
from brine.common.message import NOTICE, Message
from brine.instance.restart_counter import Tries
from brine.watcher.decide import Action, Case
from brine.watcher.passes import STARTS, PassOutcome

# The journal's records of what the watcher did; brine-watcher.catalog explains each kind.

SET_DOWN = Message("4924ab8c9a064d188756700967877e17", "user-down", NOTICE)
CLEANED_UP = Message("d9e0c75f21654a50bf1878e43e3681b3", "cleaned-up", NOTICE)
STARTED_AGAIN = Message("a0c2459a999249128d96c4237759ebf3", "started-again", NOTICE)
TRIED = Message("3bb173a423d54b70b5e01d8b5efa9a4c", "restart-tried", logging.WARNING)
ODD = Message("5b8a6a1bbd6f4f0e9d2c84c7f1e03a76", "odd", logging.WARNING)
GIVEN_UP = Message("ba679af32a3c4d28a3dd7e165c0ba718", "given-up", logging.ERROR)

_TOLD = {
    Action.SET_DOWN: (SET_DOWN, "its user shut it down: it stays so"),
    Action.CLEAN_UP: (CLEANED_UP, "what was left of it is removed"),
    Action.START: (STARTED_AGAIN, "starts again, for its user"),
    Action.TRY: (TRIED, "is to run, and does not: try {count} to start it"),
    Action.GIVE_UP: (GIVEN_UP, "did not stay up after {count} tries: it is tried rarely now"),
}

log = logging.getLogger("brine.watcher")


def log_to_journal() -> None:
    """Send this command's records to the journal, and other warnings to the person, too."""
    log_command("brine-watcher")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            # What was done about an instance the command itself prints.
            handler.addFilter(lambda record: not hasattr(record, "fields"))


def tell_action(case: Case, action: Action, tries: Tries) -> None:
    """Something was done about an instance, or is about to be."""
    if action not in _TOLD:
        return
    message, text = _TOLD[action]
    fields = {"BRINE_REASON": str(case.end or case.life)}
    if action in (Action.TRY, Action.GIVE_UP):
        fields["BRINE_TRIES"] = str(tries.count)
    tell(log, message, text.format(count=tries.count), instance=case.name, **fields)


def tell_odd(outcome: PassOutcome) -> None:
    """Something is as the watcher can't mend it, or failed, which the journal does not have yet."""
    decision, fault = outcome.decision, outcome.fault
    is_new = decision.is_odd and not decision.was_told and Action.GIVE_UP not in outcome.actions
    # Why it did not start the instance itself has told.
    is_other = fault and STARTS.isdisjoint(outcome.actions)
    if outcome.name and (is_new or is_other):
        reason = str(outcome.case.life) if outcome.case else ""
        text = str(fault).removeprefix(f"{outcome.name}: ") if fault else decision.why
        tell(log, ODD, text, instance=outcome.name, BRINE_REASON=reason)


FILE = paths.STATE_DIR / "watcher.pause"

_LONGEST_S = 365 * 86400
_CLOCK_S = 86400  # by which the node's clock may have been set back since


class PauseError(BrineError):
    """The pause file can't be read, written or removed."""


def paused_until(now: float, *, file: Path = FILE) -> float | None:
    """When the rest ends, in seconds since 1970; None if the watcher does not rest.

    :raises PauseError: if that is not known: the file can't be read, has no such number, or one
        that is more than a year ahead (a number of milliseconds, say).
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PauseError(f"{file}: can't be read: {error}", hint=_HINT) from error
    try:
        until = float(text)
        datetime.fromtimestamp(until)
    except (ValueError, OverflowError, OSError):
        raise PauseError(f"{file}: has no number of seconds: {text[:40]!r}", hint=_HINT) from None
    if until > now + _LONGEST_S + _CLOCK_S:
        what = "ends more than a year ahead, which no pause does"
        raise PauseError(f"{file}: {what}: {text[:40]!r}", hint=_HINT)
    return until if until > now else None


_HINT = "brine watcher resume removes it"


def pause(for_s: float, now: float, *, file: Path = FILE) -> float:
    """Pause the watcher; returns the end of the pause, in seconds since 1970.

    :raises PauseError: if the file can't be written.
    """
    until = math.ceil(now + for_s)
    try:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(file, f"{until}\n".encode(), alone=True)
    except OSError as error:
        raise PauseError(
            f"{file}: can't be written: {error.strerror}", hint=_root(error)
        ) from error
    return until


def resume(*, file: Path = FILE) -> bool:
    """End a pause; returns whether there was one.

    :raises PauseError: if the file can't be removed.
    """
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PauseError(
            f"{file}: can't be removed: {error.strerror}", hint=_root(error)
        ) from error
    return True


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``2h``, ``3d`` or ``1w``.

    :raises UsageError: if it is none of these, or longer than a year.
    """
    seconds = length_of_time(text.strip())
    if seconds is not None and 0 < seconds <= _LONGEST_S:
        return float(seconds)
    raise UsageError(f"not a length of time: {text!r}", hint="try 90s, 30m, 2h, 3d or 1w")


def _root(error: OSError) -> str | None:
    return "be root" if isinstance(error, PermissionError) else None
