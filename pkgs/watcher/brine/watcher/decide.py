"""The watcher's decision about an observed instance.

Everything here is pure. Source: "Implementation" in the design of the detection of user shutdown;
the rows of the table are in :func:`decide`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from brine.common.markers import WHO_UNKNOWN
from brine.instance.history import ended_in_order, failed_to_start
from brine.instance.restart_counter import NONE, Tries
from brine.instance.spec import AdminState, Spec
from brine.instance.status import Observed, Oper
from brine.instance.xen.xl import Domain

# How often an instance that crashed is started again, and when that becomes rare.

_EARLY = 0.2
"""The part of the first wait by which a pass may come too early. Passes are not quite regular;
without this, a pass that comes a second early would double the wait."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of restarts.

    :param tries: how often an instance is started again before it is given up.
    :param backoff_s: between the first try and the second; it doubles with each further try.
    :param slow_s: between two tries of an instance that is given up.
    :param forget_after_s: how long an instance must run until its tries are forgotten.
    """

    tries: int = 5
    backoff_s: float = 300.0
    forget_after_s: float = 8 * 3600.0
    slow_s: float = 8 * 3600.0


class Next(Enum):
    """What to do about an instance that crashed."""

    START = auto()
    WAIT = auto()
    GIVE_UP = auto()
    REST = auto()


def next_step(tries: Tries, policy: Policy, now: float) -> Next:
    """The next step for an instance that should run and does not.

    :param now: in seconds since 1970.
    """
    if tries.count >= policy.tries and not tries.given_up:
        return Next.GIVE_UP
    if now >= due_at(tries, policy, now):
        return Next.START
    return Next.REST if is_slow(tries, policy) else Next.WAIT


def is_slow(tries: Tries, policy: Policy) -> bool:
    """Whether an instance is given up: it is started rarely."""
    return tries.given_up and tries.count >= policy.tries


def due_at(tries: Tries, policy: Policy, now: float) -> float:
    """When the next try is due, in seconds since 1970."""
    if tries.count == 0:
        return now
    # After a clock was set back, an instance must not wait for years.
    if tries.last > now:
        return now
    if is_slow(tries, policy):
        return tries.last + policy.slow_s
    wait_s = policy.backoff_s * 2.0 ** (tries.count - 1)
    return tries.last + wait_s - _EARLY * policy.backoff_s


def is_forgotten(tries: Tries, policy: Policy, now: float) -> bool:
    """Whether a running instance has run long enough. One that is given up may just have been tried
    again, and end as before."""
    return not tries.last <= now < tries.last + policy.forget_after_s


def tried(tries: Tries, policy: Policy, now: float) -> Tries:
    """The counter after one more try."""
    return Tries(tries.count + 1, now, given_up=is_slow(tries, policy))


class Life(StrEnum):
    """The life of an instance or a domain.

    ``PRESERVED`` is a domain that has ended and still has its memory. ``SUSPENDED`` is a domain
    that goes on later, or on another node. ``DOWN`` is no domain or QEMU. ``ZOMBIE`` is a domain
    that Xen can't free.
    """

    RUNNING = "running"
    PAUSED = "paused"
    STARTING = "starting"
    STOPPING = "stopping"
    PRESERVED = "preserved"
    SUSPENDED = "suspended"
    DOWN = "down"
    ZOMBIE = "zombie"
    UNKNOWN = "unknown"


class EndCause(StrEnum):
    """What ended an instance.

    ``REBOOT`` is the first half of a reboot, by user or admin, without the second. ``FAILED`` is a
    failed start. ``NEVER``: it was not started since the node's own start. ``UNTOLD`` is a clean
    end without a verdict yet. ``UNKNOWN`` is a clean end without a verdict because brine-kvmd was
    off.
    """

    USER = "user"
    ADMIN = "admin"
    CRASH = "crash"
    REBOOT = "reboot"
    FAILED = "failed"
    NEVER = "never"
    UNTOLD = "untold"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Case:
    """The facts for a decision about an instance, or about a domain without an instance.

    :param key: an instance's name, or a domain's number and UUID.
    :param name: for people.
    :param seen: the instance; None for a domain without one.
    :param end: what ended it; None while it runs.
    :param said: for people: its state in the hypervisor's own words.
    :param is_busy: whether another command works on it.
    :param is_reset: whether its failure was reset in systemd.
    :param lacks: the files and network interfaces that its start lacked; empty if they all exist
        now, None if it lacked none.
    """

    key: str
    name: str
    seen: Observed | None
    life: Life
    end: EndCause | None = None
    said: str = ""
    is_busy: bool = False
    is_reset: bool = False
    lacks: tuple[str, ...] | None = None


class Action(StrEnum):
    """The actions, in the order in which they are done."""

    SET_DOWN = "set-down"
    CLEAN_UP = "clean-up"
    START = "start"
    TRY = "try"
    GIVE_UP = "give-up"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about an instance.

    :param actions: ``SET_DOWN`` notes that its user wants it down; ``CLEAN_UP`` removes its
        leftovers; ``START`` starts it for its user; ``TRY`` starts it after a crash, which is
        counted; ``GIVE_UP`` reports that further tries come rarely; ``FORGET`` resets the counter.
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


def decide(
    case: Case, tries: Tries, policy: Policy, now: float, *, clean_all: bool = False
) -> Decision:
    """Decide about an instance, or a domain.

    :param tries: to start it again, so far.
    :param now: in seconds since 1970.
    :param clean_all: also clean up domains without an instance.
    """
    seen = case.seen
    if case.life is Life.ZOMBIE:
        return Decision(why="Xen can't get rid of it: somebody has its memory", is_odd=True)
    if case.life is Life.UNKNOWN:
        return Decision(why=f"its state is not known: {case.said}", is_odd=True)
    if seen is None:
        return _not_ours(case, clean_all=clean_all)
    if seen.overdue:
        return Decision(why=case.said, is_odd=True)
    if case.is_busy:
        return Decision(why="somebody is working on it")
    if case.life in _MOVING:
        return Decision(why=_MOVING[case.life])
    if case.life in (Life.RUNNING, Life.PAUSED):
        return _running(case, seen, tries, policy, now)
    if case.is_reset:
        tries = NONE
    clean_up = (Action.CLEAN_UP,) if case.life is Life.PRESERVED else ()
    if seen.spec.is_down_by_user() and case.end is EndCause.USER and seen.has_user_marker:
        return Decision((Action.SET_DOWN, *clean_up), "its user shut it down, and not all is done")
    if seen.spec.admin_state != AdminState.UP:
        why = "it should be down, and what is left of it takes memory" if clean_up else ""
        return Decision(clean_up, why)
    return _ended(case, seen.spec, tries, policy, now, clean_up)


def _not_ours(case: Case, *, clean_all: bool) -> Decision:
    if case.life is not Life.PRESERVED:
        return Decision(why="not ours", is_usual=True)
    if clean_all:
        return Decision((Action.CLEAN_UP,), "not ours, but it has ended and takes memory")
    return Decision(why='not ours: it has ended and takes memory; manage = "all" would clean up')


def _running(case: Case, seen: Observed, tries: Tries, policy: Policy, now: float) -> Decision:
    actions: tuple[Action, ...] = ()
    if tries != NONE and is_forgotten(tries, policy, now):
        actions = (Action.FORGET,)
    if seen.has_stale_stop:
        why = "it runs, and a stop that was broken off is forgotten"
        return Decision((Action.CLEAN_UP, *actions), why)
    if seen.spec.admin_state != AdminState.UP:
        return Decision(actions, "it runs, but should be down", is_odd=True)
    return Decision(actions, "it is paused" if case.life is Life.PAUSED else "")


def _ended(
    case: Case,
    spec: Spec,
    tries: Tries,
    policy: Policy,
    now: float,
    clean_up: tuple[Action, ...],
) -> Decision:
    match case.end:
        case EndCause.USER | EndCause.UNKNOWN if spec.user_shutdown == "restart":
            why = f"{_BY_USER[case.end]}, and it is to start again"
            return Decision((*clean_up, Action.START), why)
        case EndCause.USER | EndCause.UNKNOWN:
            return Decision((Action.SET_DOWN, *clean_up), _BY_USER[case.end])
        case EndCause.REBOOT:
            # Only its user can have done that, with reboot_behavior = exit; it counts as a crash.
            return _crashed(case, tries, policy, now, clean_up, "it was to reboot")
        case EndCause.ADMIN:
            return Decision(clean_up, "it was stopped by an administrator")
        case EndCause.CRASH:
            return _crashed(case, tries, policy, now, clean_up, "it crashed")
        case EndCause.FAILED:
            return _crashed(case, tries, policy, now, clean_up, "it did not start")
        case EndCause.NEVER:
            return _crashed(case, tries, policy, now, clean_up, "it does not run")
    text = f"it ended, and nobody knows who did it: {case.said}"
    return Decision(why=text, is_odd=True)


def _crashed(
    case: Case, tries: Tries, policy: Policy, now: float, clean_up: tuple[Action, ...], why: str
) -> Decision:
    if not policy.tries:
        return Decision(clean_up, f"{why}, and is not to be started again: tries = 0")
    if case.is_reset:
        why = f"{why}, and somebody had systemd forget that"
    step = next_step(tries, policy, now)
    if case.lacks == () and step in (Next.WAIT, Next.REST):
        step, why = Next.START, f"{why}, and what it lacked is there now"
    elif case.lacks:
        why = f"{why}, and lacks {', '.join(case.lacks)}"
    given_up = is_slow(tries, policy)
    number = f"try {tries.count + 1}" + ("" if given_up else f" of {policy.tries}")
    match step:
        case Next.START:
            return Decision((*clean_up, Action.TRY), f"{why}: {number}")
        case Next.WAIT:
            left_s = math.ceil(due_at(tries, policy, now) - now)
            return Decision(clean_up, f"{why}: {number} is due in {left_s} s")
        case Next.GIVE_UP:
            text = f"{why}, and is given up after {tries.count} tries"
            return Decision((*clean_up, Action.GIVE_UP), text, is_odd=True)
        case Next.REST:
            left_s = math.ceil(due_at(tries, policy, now) - now)
            why = f"{why}, and was given up after {tries.count} tries"
            text = f"{why}: the next is due in {left_s} s"
            return Decision(clean_up, text, is_odd=True, was_told=True)


# The facts of a decision, from the observed instance.

_LIVES = {
    Oper.RUNNING: Life.RUNNING,
    Oper.STARTING: Life.STARTING,
    Oper.STOPPING: Life.STOPPING,
}
_KILLED = ("signal", "oom-kill")
_ENDS = {
    "user": EndCause.USER,
    "admin": EndCause.ADMIN,
    "crash": EndCause.CRASH,
    WHO_UNKNOWN: EndCause.UNKNOWN,
}


def case_of(seen: Observed, verdict: str | None) -> Case:
    """The case of an instance.

    :param verdict: on its last run; None if there is none, or it was not read.
    """
    name, domain, oper = seen.name, seen.domain, seen.state.oper
    end: EndCause | None = None
    if oper in (Oper.STARTING, Oper.STOPPING):
        life, said = _LIVES[oper], seen.overdue or oper
    elif domain and not domain.is_zombie():  # a zombie is a case of its own, and is in nobody's way
        life, said = life_of(domain), domain.state
        if life is Life.PRESERVED:
            end = _ended_by(seen, EndCause.ADMIN if seen.was_stopped else _end_of_domain(domain))
    elif oper in _LIVES:
        life, said = _LIVES[oper], oper
    else:
        life, said = Life.DOWN, seen.state.why
        end = _ended_by(seen, _end_of(seen, verdict))
    return Case(name, name, seen, life, end, said, is_busy=seen.is_being_stopped)


def life_of(domain: Domain) -> Life:
    """The life of a domain."""
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


def _ended_by(seen: Observed, end: EndCause) -> EndCause:
    """The end of an instance; an admin's stop may be the first half of a reboot."""
    return EndCause.REBOOT if end is EndCause.ADMIN and seen.is_to_reboot else end


def _end_of_domain(domain: Domain) -> EndCause:
    if domain.has_crashed():
        return EndCause.CRASH
    return EndCause.USER if domain.was_powered_off() else EndCause.REBOOT


def _has_lost_its_xl(seen: Observed) -> bool:
    """Whether only the xl of a domain was killed. If the domain is gone, it was moved or destroyed
    since: a domain that ends by itself stays."""
    is_killed = seen.unit is not None and seen.unit.result in _KILLED
    return is_killed and seen.spec.is_xen() and seen.has_run


def _end_of(seen: Observed, verdict: str | None) -> EndCause:
    if seen.state.oper is Oper.USER_SHUTDOWN:
        return EndCause.USER
    if seen.was_stopped:
        return EndCause.ADMIN
    if not ended_in_order(seen):
        if failed_to_start(seen):
            return EndCause.FAILED
        return EndCause.ADMIN if _has_lost_its_xl(seen) else EndCause.CRASH
    if not seen.has_run:
        return EndCause.NEVER
    if seen.spec.is_xen():
        return EndCause.ADMIN  # nobody else destroys domains
    return _ENDS.get(verdict or "", EndCause.UNTOLD)
