"""Journal messages of the watcher; brine-watcher.catalog explains each."""

from __future__ import annotations

import logging

from brine.common.errors import BrineError, printable
from brine.common.journal import log_command, tell
from brine.common.message import NOTICE, EventKind, Message
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

VOLUME_DEGRADED = Message("2ee011018f69409f9bc8ed96c3a8408d", "volume-degraded", logging.ERROR)
VOLUME_RECOVERED = Message("6542e045869349a1b6d4f44a7b8ac16d", "volume-recovered", NOTICE)
SNAPSHOT_FILLS = Message("8d9ba8c2b23141fc8f67272f4a08f9d6", "snapshot-fills", logging.WARNING)
SNAPSHOT_LOST = Message("687fb86d4bdb49a8988657a0076181b4", "snapshot-lost", logging.ERROR)
SNAPSHOT_RECOVERED = Message("541fec69f6734e36a0d4d64c94558c1c", "snapshot-recovered", NOTICE)

EVENTS = (
    EventKind(GIVEN_UP, "given-up"),
    EventKind(VOLUME_DEGRADED, "volume-degraded"),
    EventKind(SNAPSHOT_LOST, "snapshot-lost"),
)
"""What operators' programs are told of."""

_OF_VOLUMES = {
    "degraded": (VOLUME_DEGRADED, "is degraded: {why}"),
    "missing": (VOLUME_DEGRADED, "is missing: {why}"),
    "": (VOLUME_RECOVERED, "is ok again"),
}
_OF_SNAPSHOTS = {
    "filling": (SNAPSHOT_FILLS, "has little space left: {why}"),
    "lost": (SNAPSHOT_LOST, "is lost: {why}"),
    "": (SNAPSHOT_RECOVERED, "has space again: {why}"),
}
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


def tell_volume(instance: str, disk: str, unit: str, snapshot: str, fault: str, why: str) -> None:
    """Report that a volume of an instance, or a snapshot of one, has a fault, or has none any more.

    :param disk: its name or UUID.
    :param snapshot: its name; empty is the volume itself.
    :param fault: a word of :class:`brine.watcher.volume_watch.VolumeFault`; empty if it is well.
    """
    message, text = (_OF_SNAPSHOTS if snapshot else _OF_VOLUMES)[fault]
    subject = f"snapshot {snapshot} of its disk" if snapshot else "its disk"
    fields = {
        "BRINE_DISK": disk,
        "BRINE_UNIT": unit,
        "BRINE_SNAPSHOT": snapshot,
        "BRINE_STATUS": fault or "ok",
        "BRINE_REASON": why,
    }
    text = f"{subject} {disk} in {unit} {text.format(why=why)}"
    tell(log, message, printable(text), instance=instance, **fields)
