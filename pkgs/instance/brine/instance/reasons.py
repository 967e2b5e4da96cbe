"""Why instances are down that should not be, in the words of what failed.

systemd knows how a process ended. What it had to say is in the journal, and so is the verdict of
kvmd on who ended its guest. It is asked once for all of them, where it may know more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from brine.common.marks import WHO_UNKNOWN
from brine.instance.journal import Verdict, start_failures
from brine.instance.state import Status
from brine.instance.states import Seen
from brine.instance.tries import given_up
from brine.instance.verdicts import ended_in_order, failed_to_start, known_verdicts

_SILENCE = "eof"
_ENDS = {
    "crash": "it crashed",
    "admin": "it was ended on the admin's behalf",
    "user": "its user shut it down",
    WHO_UNKNOWN: "who ended it is unknown",
}


def with_reasons(several: Sequence[Seen]) -> list[Seen]:
    """The same instances, whose state says why more exactly where that is known."""
    down = [seen for seen in several if seen.state.status is Status.ERROR_DOWN]
    whys = {seen.spec.name: seen.state.why for seen in down}
    with contextlib.suppress(OSError):  # there is no journal that could be asked
        whys |= {**_failed_starts(down), **_verdicts(down)}
    for name, tries in (given_up() if down else {}).items():
        if name in whys:
            what = f"given up after {tries} tries: the next comes late"
            whys[name] += f"; {what}, or soon after brine watcher forget {name}"
    return [_with_why(seen, whys.get(seen.spec.name)) for seen in several]


def _failed_starts(several: Sequence[Seen]) -> dict[str, str]:
    runs = {
        seen.unit.invocation: seen.spec.name
        for seen in several
        if seen.unit and seen.unit.invocation and failed_to_start(seen)
    }
    found = start_failures(runs) if runs else {}
    return {
        runs[invocation]: f"it should be up but did not start: {reason}"
        for invocation, reason in found.items()
        if reason and invocation in runs
    }


def _verdicts(several: Sequence[Seen]) -> dict[str, str]:
    of_systemd = {seen.spec.name for seen in several if not ended_in_order(seen)}
    return {
        name: f"it should be up but is down: {_ended(verdict)}"
        for name, verdict in known_verdicts(several).items()
        # systemd knows by which signal.
        if not (name in of_systemd and verdict.cause == _SILENCE)
    }


def _ended(verdict: Verdict) -> str:
    return f"{_ENDS.get(verdict.who, verdict.who)} ({verdict.cause})"


def _with_why(seen: Seen, why: str | None) -> Seen:
    return replace(seen, state=replace(seen.state, why=why)) if why else seen
