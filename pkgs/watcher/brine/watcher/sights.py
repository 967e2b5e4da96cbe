"""What the watcher makes of an instance, as systemd, kvmd and Xen show it."""

from __future__ import annotations

from brine.instance.spec import AdminState, Spec
from brine.instance.state import Oper
from brine.instance.states import Seen
from brine.watcher.decisions import End, Life, Sight, Wish

_LIVES = {
    Oper.RUNNING: Life.RUNNING,
    Oper.STARTING: Life.STARTING,
    Oper.STOPPING: Life.STOPPING,
}
# What systemd calls an end in order; any other is a crash, or a start that failed.
_IN_ORDER = ("success", "exec-condition")
_ENDS = {"user": End.USER, "admin": End.ADMIN, "crash": End.CRASH}


def wish_of(spec: Spec) -> Wish:
    """What is wanted of an instance."""
    return Wish(spec.admin_state == AdminState.UP, restart=spec.user_shutdown == "restart")


def needs_verdict(seen: Seen) -> bool:
    """Whether only kvmd knows who ended an instance that should be up: it left no mark, and its
    process ended in order."""
    return (
        seen.spec.admin_state == AdminState.UP
        and seen.state.oper is Oper.DOWN
        and seen.has_run
        and not seen.was_stopped
        and _ended_in_order(seen)
    )


def sight_of(seen: Seen, verdict: str | None) -> Sight:
    """A KVM instance, as a decision has it.

    :param verdict: kvmd's, of its last run; None if there is none, or it was not asked for.
    """
    oper = seen.state.oper
    if oper in _LIVES:
        return Sight(_LIVES[oper], said=oper)
    return Sight(Life.DOWN, _end_of(seen, verdict), said=seen.state.why)


def _end_of(seen: Seen, verdict: str | None) -> End:
    if seen.state.oper is Oper.USER_SHUTDOWN:
        return End.USER
    if seen.was_stopped:
        return End.ADMIN
    if not _ended_in_order(seen):
        return End.CRASH
    if not seen.has_run:
        return End.NEVER
    return _ENDS.get(verdict or "", End.UNTOLD)


def _ended_in_order(seen: Seen) -> bool:
    return seen.unit is None or seen.unit.result in _IN_ORDER
