"""The journal records of the watcher, and its pause.

The file of the pause has one number, the epoch second at which it ends, as Ganeti's watcher reads
it.
"""

from __future__ import annotations

import logging
import math
from datetime import datetime

from brine.common import paths
from brine.common.cli import length_of_time
from brine.common.errors import BrineError, UsageError
from brine.common.files import write_whole
from brine.common.journal import log_command, tell
from brine.common.message import NOTICE, Message
from brine.instance.observe import Observed
from brine.instance.restart_counter import Tries
from brine.instance.xen.xl import Domain
from brine.watcher.decide import STARTS, Action, Decision, end_of, life_of

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


def tell_action(seen: Observed | Domain, action: Action, tries: Tries) -> None:
    """Report what was done about an instance, or is about to be."""
    if action not in _TOLD:
        return
    message, text = _TOLD[action]
    fields = {"BRINE_REASON": str(end_of(seen) or life_of(seen))}
    if action in (Action.TRY, Action.GIVE_UP):
        fields["BRINE_TRIES"] = str(tries.count)
    tell(log, message, text.format(count=tries.count), instance=seen.name, **fields)


def tell_odd(
    seen: Observed | Domain,
    decision: Decision,
    done: tuple[Action, ...],
    fault: BrineError | None,
) -> None:
    """Report what the watcher can't mend, or what failed, unless the journal has it already."""
    is_new = decision.is_odd and not decision.was_told and Action.GIVE_UP not in done
    # Why it did not start the instance itself has told.
    is_other = fault and STARTS.isdisjoint(done)
    if is_new or is_other:
        text = str(fault).removeprefix(f"{seen.name}: ") if fault else decision.why
        tell(log, ODD, text, instance=seen.name, BRINE_REASON=str(life_of(seen)))


# The pause.

PAUSE_FILE = paths.STATE_DIR / "watcher.pause"

_LONGEST_S = 365 * 86400
_CLOCK_S = 86400  # by which the node's clock may have been set back since
_HINT = "brine watcher resume removes it"


def paused_until(now: float) -> float | None:
    """The end of the pause, in seconds since 1970; None if the watcher is not paused.

    An end more than a year ahead (milliseconds, say) is an error, as a file without a number.
    """
    try:
        text = PAUSE_FILE.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BrineError(f"{PAUSE_FILE}: can't be read: {error}", hint=_HINT) from error
    try:
        until = float(text)
        datetime.fromtimestamp(until)
    except (ValueError, OverflowError, OSError):
        fault = f"has no number of seconds: {text[:40]!r}"
        raise BrineError(f"{PAUSE_FILE}: {fault}", hint=_HINT) from None
    if until > now + _LONGEST_S + _CLOCK_S:
        fault = f"ends more than a year ahead, which no pause does: {text[:40]!r}"
        raise BrineError(f"{PAUSE_FILE}: {fault}", hint=_HINT)
    return until if until > now else None


def pause(for_s: float, now: float) -> float:
    """Pause the watcher; returns the end of the pause, in seconds since 1970."""
    until = math.ceil(now + for_s)
    try:
        PAUSE_FILE.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(PAUSE_FILE, f"{until}\n".encode(), alone=True)
    except OSError as error:
        raise _unchangeable("written", error) from error
    return until


def resume() -> None:
    """End a pause, if there is one."""
    try:
        PAUSE_FILE.unlink(missing_ok=True)
    except OSError as error:
        raise _unchangeable("removed", error) from error


def _unchangeable(what: str, error: OSError) -> BrineError:
    hint = "be root" if isinstance(error, PermissionError) else None
    return BrineError(f"{PAUSE_FILE}: can't be {what}: {error.strerror}", hint=hint)


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``2h``, ``3d`` or ``1w``; a year at most."""
    seconds = length_of_time(text.strip())
    if seconds is not None and 0 < seconds <= _LONGEST_S:
        return float(seconds)
    raise UsageError(f"not a length of time: {text!r}", hint="try 90s, 30m, 2h, 3d or 1w")
