"""Who ended instances, where only brine-kvmd knows: in order, and without a mark.

Its verdict is a mark that names the run. The journal has it, too, but loses records where it is
slow: it is asked for what an older brine-kvmd, which made no such marks, has said.
"""

from __future__ import annotations

from collections.abc import Iterable

from brine.common import marks
from brine.common.marks import Kind
from brine.common.printable import printable
from brine.instance import journal
from brine.instance.journal import Verdict
from brine.instance.spec import AdminState
from brine.instance.state import Oper
from brine.instance.states import Seen
from brine.instance.unit import Active

_IN_ORDER = ("success", "exec-condition")


def ended_in_order(seen: Seen) -> bool:
    """Whether systemd saw no fault. Where it saw one, its process crashed or did not start."""
    return seen.unit is None or seen.unit.result in _IN_ORDER


def failed_to_start(seen: Seen) -> bool:
    """Whether its last run failed before it counted as started."""
    unit = seen.unit
    return bool(unit and unit.active is Active.FAILED and not unit.came_up())


def may_have_verdict(seen: Seen) -> bool:
    """Whether kvmd may know who ended an instance that should be up."""
    return (
        seen.spec.admin_state == AdminState.UP
        and not seen.spec.is_xen()
        and seen.state.oper is Oper.DOWN
        and seen.has_run
        and not seen.was_stopped
        and not failed_to_start(seen)
    )


def needs_verdict(seen: Seen) -> bool:
    """Whether only kvmd knows who ended an instance that should be up."""
    return may_have_verdict(seen) and ended_in_order(seen)


def needed_verdicts(several: Iterable[Seen]) -> dict[str, Verdict]:
    """The verdicts on those that need one. What has none is left out.

    :raises OSError: if the journal can't be read.
    """
    return _verdicts(seen for seen in several if needs_verdict(seen))


def known_verdicts(several: Iterable[Seen]) -> dict[str, Verdict]:
    """The same of all that may have one.

    :raises OSError: if the journal can't be read.
    """
    return _verdicts(seen for seen in several if may_have_verdict(seen))


def verdict_on(seen: Seen) -> Verdict | None:
    """The verdict on the last end of an instance; None if there is none.

    :raises OSError: if the journal can't be read.
    """
    return _verdicts([seen]).get(seen.spec.name)


def marked_verdict(name: str, run: str) -> Verdict | None:
    """The verdict on the end of a run, as its mark has it; None if there is none."""
    if run == marks.UNKNOWN_RUN:
        return None  # such a mark is of a VM that Brine does not run
    mark = marks.read_mark(Kind.VERDICT, name, run=run)
    if mark is None:
        return None
    who, cause = mark.facts.get("who"), mark.facts.get("cause")
    return Verdict(printable(str(who)), printable(str(cause)))


def _verdicts(several: Iterable[Seen]) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    ends = {}
    for seen in several:
        name = seen.spec.name
        if verdict := marked_verdict(name, seen.run):
            found[name] = verdict
        # Without it, it has not run, was started anew just now, or undefined.
        elif mark := marks.read_mark(Kind.STARTED, name):
            ends[name] = journal.End(mark.made_at, seen.run)
    try:
        return found | (journal.last_verdicts(ends) if ends else {})
    except OSError:
        if not found:
            raise
        return found  # that nobody knows of the others is told by itself
