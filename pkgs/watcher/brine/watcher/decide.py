"""The watcher's decision about an observed instance, or about a domain without an instance.

Everything here is pure. Source: "Implementation" in the design of the detection of user shutdown;
the rows of the table are in :func:`decide`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from brine.instance.observe import Observed, Oper
from brine.instance.xen.xl import Domain
from brine.vm.end import EndCause
from brine.vm.run import Run
from brine.vm.spec import AdminState
from brine.watcher.restart_counter import NONE, Tries, due_at, is_slow
from brine.watcher.settings import WatcherSettings


class Life(StrEnum):
    """The life of an instance or a domain.

    ``PRESERVED`` is a domain that has ended, or was half-made, and has its memory. ``SUSPENDED``
    is a domain that goes on later, or on another node. ``DOWN`` is no domain or QEMU. ``ZOMBIE``
    is a domain that Xen can't free. ``HALTED`` is a QEMU that has stopped its VM by itself.
    """

    RUNNING = "running"
    PAUSED = "paused"
    HALTED = "halted"
    STARTING = "starting"
    STOPPING = "stopping"
    PRESERVED = "preserved"
    SUSPENDED = "suspended"
    DOWN = "down"
    ZOMBIE = "zombie"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """The actions, in the order in which they are done.

    ``SET_DOWN`` notes that its user wants an instance down; ``CLEAN_UP`` removes its leftovers;
    ``START`` starts it for its user; ``TRY`` starts it after a crash, which is counted; ``GIVE_UP``
    reports that further tries come rarely; ``FORGET`` resets the counter; ``CONTINUE`` continues a
    VM whose storage was full.
    """

    SET_DOWN = "set-down"
    CLEAN_UP = "clean-up"
    START = "start"
    TRY = "try"
    GIVE_UP = "give-up"
    FORGET = "forget"
    CONTINUE = "continue"


STARTS = frozenset({Action.START, Action.TRY})


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about an instance.

    :param why: for people, in a few words; empty if there is nothing to explain.
    :param is_odd: whether it needs an administrator's attention.
    :param was_told: whether the journal has that already.
    :param is_usual: whether this is the usual state, which is not printed.
    """

    actions: tuple[Action, ...] = ()
    why: str = ""
    is_odd: bool = False
    was_told: bool = False
    is_usual: bool = False


# What an instance or a domain does, and what ended it.

_LIVES = {
    Oper.RUNNING: Life.RUNNING,
    Oper.STARTING: Life.STARTING,
    Oper.STOPPING: Life.STOPPING,
}


def life_of(seen: Observed | Domain) -> Life:
    """The life of an instance or a domain."""
    if isinstance(seen, Domain):
        return _life_of_domain(seen)
    domain, oper = seen.domain, seen.state.oper
    # A zombie is a case of its own, and blocks no start.
    if seen.is_half_made:
        return Life.PRESERVED
    if domain and not domain.is_zombie() and oper not in (Oper.STARTING, Oper.STOPPING):
        return _life_of_domain(domain)
    if oper is Oper.RUNNING and seen.halted and seen.halted.is_fault:
        return Life.HALTED
    return _LIVES.get(oper, Life.DOWN)


def _life_of_domain(domain: Domain) -> Life:
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


def end_of(seen: Observed | Domain) -> EndCause | None:
    """The cause of an instance's end; None while it runs."""
    if isinstance(seen, Domain) or life_of(seen) not in (Life.DOWN, Life.PRESERVED):
        return None
    return seen.last_end().ended_by()


def is_reset(seen: Observed) -> bool:
    """Whether an instance failed last, and systemd was told to forget that."""
    return life_of(seen) is Life.DOWN and seen.last_end().is_reset()


def counting_failure(seen: Observed) -> Run | None:
    """The failed run that an instance is down for, unless its user or admin ended it."""
    return seen.last_end().counting_failure() if life_of(seen) is Life.DOWN else None


def has_not_run(seen: Observed) -> bool:
    """Whether an instance was not started since the node's own start."""
    return life_of(seen) is Life.DOWN and seen.last_end().is_first()


# What is done about it.

_MOVING = {
    Life.STARTING: "it is just starting",
    Life.STOPPING: "it is just stopping",
    Life.SUSPENDED: "it is suspended, to be saved or moved",
}
# Source: the design of the detection of user shutdown, of a domain that ended in order.
_BY_USER = {
    EndCause.USER: "its user shut it down",
    EndCause.UNKNOWN: "it ended in order, and kvmd is off: that counts as its user's will",
}
_CRASHED = {
    # Only its user can have done that, with reboot_behavior = exit.
    EndCause.REBOOT: "it was to reboot",
    EndCause.CRASH: "it crashed",
    EndCause.FAILED: "it did not start",
    EndCause.NEVER: "it does not run",
}


def decide(
    seen: Observed | Domain, tries: Tries, settings: WatcherSettings, now: float
) -> Decision:
    """Decide about an instance, or a domain that is none.

    :param tries: to start it again, so far.
    :param now: in seconds since 1970.
    """
    life = life_of(seen)
    domain = seen if isinstance(seen, Domain) else seen.domain
    if life is Life.UNKNOWN and domain:
        return Decision(why=f"its state is not known: {domain.state}", is_odd=True)
    if isinstance(seen, Domain):
        return _not_ours(life, clean_all=settings.manage == "all")
    if reason := _reason_to_wait(seen, life):
        return reason
    if life in (Life.RUNNING, Life.PAUSED, Life.HALTED):
        return _running(seen, life, tries, settings, now)
    clean_up = (Action.CLEAN_UP,) if life is Life.PRESERVED else ()
    if seen.spec.admin_state != AdminState.UP:
        return _should_be_down(seen, clean_up)
    end, restarts_for_user = end_of(seen), seen.spec.user_shutdown == "restart"
    restarts = restarts_for_user if end in _BY_USER else end in _CRASHED
    if seen.lacks_owner and restarts:
        return Decision(clean_up, f"its owner is not there: {seen.lacks_owner}")
    if end in _CRASHED:
        found = _crashed(seen, end, tries, settings, now)
        return replace(found, actions=(*clean_up, *found.actions))
    if end in _BY_USER and restarts:
        return Decision((*clean_up, Action.START), f"{_BY_USER[end]}, and it is to start again")
    if end in _BY_USER:
        return Decision((Action.SET_DOWN, *clean_up), _BY_USER[end])
    if end is EndCause.ADMIN:
        return Decision(clean_up, "it was stopped by an administrator")
    return Decision(why=f"it ended, and the cause is not known: {seen.state.why}", is_odd=True)


def _reason_to_wait(seen: Observed, life: Life) -> Decision | None:
    """The decision about an instance that another process or systemd is just changing."""
    if seen.overdue:
        return Decision(why=seen.overdue, is_odd=True)
    if seen.run.is_being_stopped() or seen.awaits_node:
        return Decision(why="another process is working on it")
    if life in _MOVING:
        return Decision(why=_MOVING[life])
    runs = life in (Life.RUNNING, Life.PAUSED, Life.HALTED)
    if seen.bar and (seen.bar.node or not runs):
        return Decision(why=f"it {'runs, but ' * runs}{seen.bar.why}", is_odd=runs)
    return None


def _should_be_down(seen: Observed, clean_up: tuple[Action, ...]) -> Decision:
    """The decision about an instance that is down, as it should be."""
    spec = seen.spec
    if spec.is_down_by_user() and end_of(seen) is EndCause.USER and seen.run.was_shut_down():
        return Decision((Action.SET_DOWN, *clean_up), "its user shut it down, and not all is done")
    why = "it should be down, and its leftovers take memory" if clean_up else ""
    return Decision(clean_up, why)


def _not_ours(life: Life, *, clean_all: bool) -> Decision:
    if life is Life.ZOMBIE:
        return Decision(why="Xen can't get rid of it: another domain has its memory", is_odd=True)
    if life is not Life.PRESERVED:
        return Decision(why="not ours", is_usual=True)
    if clean_all:
        return Decision((Action.CLEAN_UP,), "not ours, but it has ended and takes memory")
    return Decision(why='not ours: it has ended and takes memory; manage = "all" would clean up')


def _running(
    seen: Observed, life: Life, tries: Tries, settings: WatcherSettings, now: float
) -> Decision:
    actions: tuple[Action, ...] = ()
    # One that is given up may just have been tried again, and end as before.
    if tries != NONE and not tries.last <= now < tries.last + settings.forget_after:
        actions = (Action.FORGET,)
    if seen.has_stale_stop:
        why = "it runs, and a stop that was broken off is forgotten"
        return Decision((Action.CLEAN_UP, *actions), why)
    if seen.spec.admin_state != AdminState.UP:
        return Decision(actions, "it runs, but should be down", is_odd=True)
    if seen.halted and seen.halted.no_space and seen.has_room:
        why = f"{seen.state.why}, and there is room again"
        return Decision((*actions, Action.CONTINUE), why)
    if seen.halted:
        return Decision(actions, seen.state.why, is_odd=life is Life.HALTED)
    return Decision(actions, "it is paused" if life is Life.PAUSED else "")


def _crashed(
    seen: Observed, end: EndCause, tries: Tries, settings: WatcherSettings, now: float
) -> Decision:
    why = _CRASHED[end]
    if not settings.tries:
        return Decision(why=f"{why}, and is not to be started again: tries = 0")
    if is_reset(seen):
        tries, why = NONE, f"{why}, and systemd was told to forget that"
    if tries.count >= settings.tries and not tries.given_up:
        text = f"{_lacking(why, seen)}, and is given up after {tries.count} tries"
        return Decision((Action.GIVE_UP,), text, is_odd=True)
    is_rare = is_slow(tries, settings)
    number = f"try {tries.count + 1}" + ("" if is_rare else f" of {settings.tries}")
    left_s = math.ceil(due_at(tries, settings, now) - now)
    if left_s > 0 and seen.lacks == ():
        return Decision((Action.TRY,), f"{why}, and its missing parts are there now: {number}")
    why = _lacking(why, seen)
    if left_s <= 0:
        return Decision((Action.TRY,), f"{why}: {number}")
    if not is_rare:
        return Decision(why=f"{why}: {number} is due in {left_s} s")
    text = f"{why}, and was given up after {tries.count} tries: the next is due in {left_s} s"
    return Decision(why=text, is_odd=True, was_told=True)


def _lacking(why: str, seen: Observed) -> str:
    return f"{why}, and lacks {', '.join(seen.lacks)}" if seen.lacks else why
