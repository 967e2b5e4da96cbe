"""The journal's records of what the watcher did; brine-watcher.catalog explains each kind.

They have the fields ``BRINE_INSTANCE=``, ``BRINE_EVENT=``, ``BRINE_REASON=``, and ``BRINE_TRIES=``
where it counts. Where there is no journal they go nowhere.
"""

from __future__ import annotations

import logging

from brine.common.journal import NOTICE, Message, log_command, tell
from brine.instance.tries import Tries
from brine.watcher.decisions import Action
from brine.watcher.passes import STARTS, Case, Outcome

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
    fields = {"BRINE_REASON": str(case.sight.end or case.sight.life)}
    if action in (Action.TRY, Action.GIVE_UP):
        fields["BRINE_TRIES"] = str(tries.count)
    tell(log, message, text.format(count=tries.count), instance=case.name, **fields)


def tell_odd(outcome: Outcome) -> None:
    """Something is as the watcher can't mend it, or failed, which the journal does not have yet."""
    decision, fault = outcome.decision, outcome.fault
    is_new = decision.is_odd and not decision.was_told and Action.GIVE_UP not in outcome.actions
    # Why it did not start the instance itself has told.
    is_other = fault and STARTS.isdisjoint(outcome.actions)
    if outcome.name and (is_new or is_other):
        reason = str(outcome.sight.life) if outcome.sight else ""
        text = str(fault).removeprefix(f"{outcome.name}: ") if fault else decision.why
        tell(log, ODD, text, instance=outcome.name, BRINE_REASON=reason)
