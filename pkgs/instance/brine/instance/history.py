"""Why instances are down that should be up: kvmd's verdicts, and the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from brine.instance.failed_starts import noted_failure, start_failures
from brine.instance.observe import Observed, Oper, Status
from brine.instance.supervisor import supervisor
from brine.vm.end import EndCause
from brine.vm.markers import UNKNOWN_RUN, WHO_UNKNOWN
from brine.vm.run import RecordedVerdict
from brine.vm.spec import AdminState

# Ends of which only brine-kvmd knows the cause: QEMU exited cleanly, and there is no marker.


def may_have_verdict(seen: Observed) -> bool:
    """Whether kvmd may have a verdict on an instance that should be up."""
    return (
        seen.spec.admin_state == AdminState.UP
        and not seen.spec.is_xen()
        and seen.state.oper is Oper.DOWN
        and seen.has_run
        and not seen.run.was_stopped()
        and not seen.failed_to_start()
    )


def needs_verdict(seen: Observed) -> bool:
    """Whether only kvmd can have the verdict on an instance that should be up."""
    return may_have_verdict(seen) and seen.ended_in_order()


def verdicts_on(several: Iterable[Observed]) -> dict[str, RecordedVerdict]:
    """The verdicts on the last ends of instances, by name, from their markers."""
    found = ((seen.name, _marked_verdict(seen)) for seen in several)
    return {name: verdict for name, verdict in found if verdict}


def _marked_verdict(seen: Observed) -> RecordedVerdict | None:
    # One of an unknown run is on a VM that Brine does not run.
    return seen.run.again().verdict if seen.run.id != UNKNOWN_RUN else None


_ENDED_FOR_GOOD = (EndCause.ADMIN, EndCause.USER)
"""Ends after which the watcher tries no start."""

# The reasons why instances are down that should be up.

_SILENCE = "eof"
_ENDS = {
    "crash": "it crashed",
    "admin": "it was ended on the admin's behalf",
    "user": "its user shut it down",
    WHO_UNKNOWN: "who ended it is unknown",
}


def with_reasons(several: Sequence[Observed]) -> list[Observed]:
    """The same instances, with a more exact reason in their states if one is known."""
    down = [seen for seen in several if seen.state.status is Status.ERROR_DOWN]
    whys: dict[str, str] = {}
    with contextlib.suppress(OSError):  # there is no journal that could be asked
        whys = {**_failed_starts(down), **_kvmd_verdicts(down)}
    attempts = supervisor().attempts() if down and not supervisor().pause() else {}
    for seen in down:
        found = attempts.get(seen.name)
        if found and seen.last_end().ended_by() not in _ENDED_FOR_GOOD:
            why, coming = whys.get(seen.name, seen.state.why), found.next_text()
            if found.given_up:
                coming = (
                    f"given up after {found.count} tries: {coming}, "
                    f"or soon after brine watcher forget {seen.name}"
                )
            whys[seen.name] = f"{why}; {coming}"
    return [
        replace(seen, reason=whys[seen.name]) if seen.name in whys else seen for seen in several
    ]


def _failed_starts(several: Sequence[Observed]) -> dict[str, str]:
    runs = {
        seen.unit.invocation: seen.name
        for seen in several
        if seen.unit and seen.unit.invocation and seen.failed_to_start()
    }
    noted = {run: noted_failure(name, run) for run, name in runs.items()}
    found = {run: failure.text for run, failure in noted.items() if failure}
    # The journal may lack what a process said whose end it did not wait for.
    if left := runs.keys() - found.keys():
        found |= start_failures(left)
    return {
        runs[invocation]: f"it should be up but did not start: {reason}"
        for invocation, reason in found.items()
        if reason and invocation in runs
    }


def _kvmd_verdicts(several: Sequence[Observed]) -> dict[str, str]:
    of_systemd = {seen.name for seen in several if not seen.ended_in_order()}
    return {
        name: f"it should be up but is down: {_ENDS.get(end.who, end.who)} ({end.cause})"
        for name, end in verdicts_on(filter(may_have_verdict, several)).items()
        # systemd names the signal.
        if not (name in of_systemd and end.cause == _SILENCE)
    }
