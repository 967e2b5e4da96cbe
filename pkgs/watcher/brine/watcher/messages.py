"""Journal messages of the watcher; brine-watcher.catalog explains each."""

from __future__ import annotations

import logging

from brine.common.errors import BrineError
from brine.common.journal import log_command, tell
from brine.common.message import NOTICE, Message
from brine.instance.observe import Observed
from brine.instance.xen.xl import Domain
from brine.watcher.decide import STARTS, Action, Decision, end_of, life_of
from brine.watcher.restart_counter import Tries

SET_DOWN = Message("4924ab8c9a064d188756700967877e17", "user-down", NOTICE)
CLEANED_UP = Message("d9e0c75f21654a50bf1878e43e3681b3", "cleaned-up", NOTICE)
STARTED_AGAIN = Message("a0c2459a999249128d96c4237759ebf3", "started-again", NOTICE)
TRIED = Message("3bb173a423d54b70b5e01d8b5efa9a4c", "restart-tried", logging.WARNING)
CONTINUED = Message("4aa6e15a44034b9d9a8b3ee4a1c0f8d2", "continued", NOTICE)
ODD = Message("5b8a6a1bbd6f4f0e9d2c84c7f1e03a76", "odd", logging.WARNING)
GIVEN_UP = Message("ba679af32a3c4d28a3dd7e165c0ba718", "given-up", logging.ERROR)

_TOLD = {
    Action.SET_DOWN: (SET_DOWN, "its user shut it down: it stays so"),
    Action.CLEAN_UP: (CLEANED_UP, "its leftovers are removed"),
    Action.START: (STARTED_AGAIN, "starts again, for its user"),
    Action.TRY: (TRIED, "not running, should be: start attempt {count}"),
    Action.CONTINUE: (CONTINUED, "its storage was full, and has room again: it goes on"),
    Action.GIVE_UP: (GIVEN_UP, "did not stay up after {count} tries: it is tried rarely now"),
}

log = logging.getLogger("brine.watcher")


def log_pass() -> None:
    """Send this command's records to the journal, and other warnings to the person, too."""
    log_command("brine-watcher")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            # The command itself prints its work on an instance.
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
