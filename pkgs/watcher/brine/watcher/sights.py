"""What the watcher makes of an instance, as systemd, kvmd and Xen show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brine.common.marks import WHO_UNKNOWN
from brine.instance.spec import AdminState, Spec
from brine.instance.state import Oper
from brine.instance.states import Seen
from brine.instance.verdicts import ended_in_order, failed_to_start
from brine.watcher.decisions import End, Life, Sight, Wish

if TYPE_CHECKING:
    from brine.instance.xen.domains import Domain

_LIVES = {
    Oper.RUNNING: Life.RUNNING,
    Oper.STARTING: Life.STARTING,
    Oper.STOPPING: Life.STOPPING,
}
_KILLED = ("signal", "oom-kill")
_ENDS = {
    "user": End.USER,
    "admin": End.ADMIN,
    "crash": End.CRASH,
    WHO_UNKNOWN: End.UNKNOWN,
}


def wish_of(spec: Spec) -> Wish:
    """What is wanted of an instance."""
    return Wish(
        spec.admin_state == AdminState.UP,
        restart=spec.user_shutdown == "restart",
        by_user=spec.is_down_by_user(),
    )


def sight_of(seen: Seen, verdict: str | None) -> Sight:
    """An instance, as a decision has it.

    :param verdict: on its last run; None if there is none, or it was not asked for.
    """
    oper, domain = seen.state.oper, seen.domain
    is_busy, is_stale = seen.is_being_stopped, seen.has_stale_stop
    if oper in (Oper.STARTING, Oper.STOPPING):
        said = seen.state.why if seen.is_overdue else oper
        return Sight(_LIVES[oper], said=said, is_busy=is_busy, is_overdue=seen.is_overdue)
    if domain and not domain.is_zombie():  # that is told of by itself, and is in nobody's way
        life, end = life_of(domain), None
        if life is Life.PRESERVED:
            end = _ended_by(seen, End.ADMIN if seen.was_stopped else _end_of_domain(domain))
        return Sight(
            life,
            end,
            said=domain.state,
            is_busy=is_busy,
            has_stale_stop=is_stale,
            has_user_mark=seen.has_user_mark,
        )
    if oper in _LIVES:
        return Sight(_LIVES[oper], said=oper, is_busy=is_busy, has_stale_stop=is_stale)
    return Sight(
        Life.DOWN,
        _ended_by(seen, _end_of(seen, verdict)),
        said=seen.state.why,
        is_busy=is_busy,
        has_user_mark=seen.has_user_mark,
    )


def life_of(domain: Domain) -> Life:
    """What there is of a domain, whosever it is."""
    if domain.is_zombie():
        return Life.ZOMBIE
    if not domain.is_known():
        return Life.UNKNOWN
    if domain.is_dying():
        return Life.STOPPING
    if domain.is_over():
        return Life.PRESERVED
    if domain.has_ended():
        return Life.SUSPENDED if domain.is_suspended() else Life.UNKNOWN
    return Life.PAUSED if domain.has("p") else Life.RUNNING


def _ended_by(seen: Seen, end: End) -> End:
    """Who ended it, or what; its admin may have wanted it to come back."""
    return End.REBOOT if end is End.ADMIN and seen.is_to_reboot else end


def _end_of_domain(domain: Domain) -> End:
    if domain.has_crashed():
        return End.CRASH
    return End.USER if domain.was_powered_off() else End.REBOOT


def _has_lost_its_xl(seen: Seen) -> bool:
    """Whether the xl of a domain was killed, not the domain. As that is gone, somebody has moved or
    destroyed it since: what ends by itself stays there."""
    is_killed = seen.unit is not None and seen.unit.result in _KILLED
    return is_killed and seen.spec.is_xen() and seen.has_run


def _end_of(seen: Seen, verdict: str | None) -> End:
    if seen.state.oper is Oper.USER_SHUTDOWN:
        return End.USER
    if seen.was_stopped:
        return End.ADMIN
    if not ended_in_order(seen):
        if failed_to_start(seen):
            return End.FAILED
        return End.ADMIN if _has_lost_its_xl(seen) else End.CRASH
    if not seen.has_run:
        return End.NEVER
    if seen.spec.is_xen():
        return End.ADMIN  # nobody else destroys domains
    return _ENDS.get(verdict or "", End.UNTOLD)
