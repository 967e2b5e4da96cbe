"""Who ended instances, where only brine-kvmd knows: in order, and without a mark."""

from __future__ import annotations

from collections.abc import Iterable

from brine.common import marks
from brine.common.marks import Kind
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


def needs_verdict(seen: Seen) -> bool:
    """Whether only kvmd knows who ended an instance that should be up."""
    return (
        seen.spec.admin_state == AdminState.UP
        and not seen.spec.is_xen()
        and seen.state.oper is Oper.DOWN
        and seen.has_run
        and not seen.was_stopped
        and ended_in_order(seen)
    )


def needed_verdicts(several: Iterable[Seen]) -> dict[str, Verdict]:
    """kvmd's verdicts on those that need one, all in one question. What has none is left out.

    :raises OSError: if the journal can't be read.
    """
    return _verdicts(seen for seen in several if needs_verdict(seen))


def verdict_on(seen: Seen) -> Verdict | None:
    """kvmd's verdict on the last end of an instance; None if there is none.

    :raises OSError: if the journal can't be read.
    """
    return _verdicts([seen]).get(seen.spec.name)


def _verdicts(several: Iterable[Seen]) -> dict[str, Verdict]:
    ends = {}
    for seen in several:
        # Without it, it has not run, was started anew just now, or undefined.
        if mark := marks.read_mark(Kind.STARTED, seen.spec.name):
            ends[seen.spec.name] = journal.End(mark.made_at, seen.run)
    return journal.last_verdicts(ends) if ends else {}
