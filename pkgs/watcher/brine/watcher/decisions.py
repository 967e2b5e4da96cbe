"""What is to be done about an instance: one decision, from what is known of it.

Everything here is pure. Source: "Implementation" in the design of the detection of user shutdown;
the rows of the table are in :func:`decide`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from brine.instance.tries import NONE, Tries
from brine.watcher.restarts import Next, Policy, due_at, is_forgotten, is_slow, next_step


class Life(StrEnum):
    """What there is of an instance.

    ``PRESERVED`` is a domain of Xen's that has ended and still has its memory. ``SUSPENDED`` is one
    that is to go on later, or on another node. ``DOWN`` is nothing. ``ZOMBIE`` is a domain that Xen
    can't get rid of.
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


class End(StrEnum):
    """Who ended it, or what.

    ``REBOOT`` is one that was to start again, by its user or its admin, and did not. ``FAILED`` is
    a start that failed. ``NEVER`` is no end: it was not started since the node's own start.
    ``UNTOLD`` is an end in order of which nobody has said whose it was. ``UNKNOWN`` is one of which
    nobody can know that, as brine-kvmd was off.
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
class Wish:
    """What is wanted of an instance.

    :param up: whether it should run.
    :param restart: whether it starts again when its user has shut it down.
    :param by_user: whether it is down, and by its user's will.
    """

    up: bool
    restart: bool = False
    by_user: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """What there is of an instance, on whatever hypervisor.

    :param end: who ended it; None while it runs.
    :param said: for people: the state in the hypervisor's own words.
    :param is_busy: whether somebody is working on it right now.
    :param is_overdue: whether it is starting or stopping, and takes longer than it may.
    :param has_stale_stop: whether it runs, and a stop that was broken off says still that its
        admin is ending it.
    :param has_user_mark: whether a mark says still that its user has shut it down, which goes when
        that is noted for good.
    :param is_reset: whether somebody has had systemd forget that it failed.
    :param lacks: the files and network interfaces that its start lacked, where it lacked any; empty
        where all of them are there now.
    """

    life: Life
    end: End | None = None
    said: str = ""
    is_busy: bool = False
    is_overdue: bool = False
    has_stale_stop: bool = False
    has_user_mark: bool = False
    is_reset: bool = False
    lacks: tuple[str, ...] | None = None


class Action(StrEnum):
    """What can be done, in the order in which it is."""

    SET_DOWN = "set-down"
    CLEAN_UP = "clean-up"
    START = "start"
    TRY = "try"
    GIVE_UP = "give-up"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about an instance.

    :param actions: ``SET_DOWN`` says that its user wants it down; ``CLEAN_UP`` removes what is left
        of it; ``START`` starts it for its user, and ``TRY`` after a crash, which is counted;
        ``GIVE_UP`` says that further tries come rarely; ``FORGET`` forgets the earlier ones.
    :param why: for people, in a few words; empty where there is nothing to say.
    :param is_odd: whether an administrator should look at it.
    :param was_told: whether the journal has that already.
    :param is_usual: whether it is so most of the time, and need not be said.
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
    End.USER: "its user shut it down",
    End.UNKNOWN: "it ended in order, and kvmd is off: that counts as its user's will",
}


def decide(
    wish: Wish | None,
    sight: Sight,
    tries: Tries,
    policy: Policy,
    now: float,
    *,
    clean_all: bool = False,
) -> Decision:
    """What to do about an instance.

    :param wish: None of one that is not ours.
    :param tries: to start it again, so far.
    :param now: in seconds since 1970.
    :param clean_all: clean up after what is not ours, too.
    """
    if sight.life is Life.ZOMBIE:
        return Decision(why="Xen can't get rid of it: somebody has its memory", is_odd=True)
    if sight.life is Life.UNKNOWN:
        return Decision(why=f"its state is not known: {sight.said}", is_odd=True)
    if wish is None:
        return _not_ours(sight, clean_all=clean_all)
    if sight.is_overdue:
        return Decision(why=sight.said, is_odd=True)
    if sight.is_busy:
        return Decision(why="somebody is working on it")
    if sight.life in _MOVING:
        return Decision(why=_MOVING[sight.life])
    if sight.life in (Life.RUNNING, Life.PAUSED):
        return _running(wish, sight, tries, policy, now)
    if sight.is_reset:
        tries = NONE
    clean_up = (Action.CLEAN_UP,) if sight.life is Life.PRESERVED else ()
    if wish.by_user and sight.end is End.USER and sight.has_user_mark:
        return Decision((Action.SET_DOWN, *clean_up), "its user shut it down, and not all is done")
    if not wish.up:
        why = "it should be down, and what is left of it takes memory" if clean_up else ""
        return Decision(clean_up, why)
    return _ended(wish, sight, tries, policy, now, clean_up)


def _not_ours(sight: Sight, *, clean_all: bool) -> Decision:
    if sight.life is not Life.PRESERVED:
        return Decision(why="not ours", is_usual=True)
    if clean_all:
        return Decision((Action.CLEAN_UP,), "not ours, but it has ended and takes memory")
    return Decision(why='not ours: it has ended and takes memory; manage = "all" would clean up')


def _running(wish: Wish, sight: Sight, tries: Tries, policy: Policy, now: float) -> Decision:
    actions: tuple[Action, ...] = ()
    if tries != NONE and is_forgotten(tries, policy, now):
        actions = (Action.FORGET,)
    if sight.has_stale_stop:
        why = "it runs, and a stop that was broken off is forgotten"
        return Decision((Action.CLEAN_UP, *actions), why)
    if not wish.up:
        return Decision(actions, "it runs, but should be down", is_odd=True)
    return Decision(actions, "it is paused" if sight.life is Life.PAUSED else "")


def _ended(
    wish: Wish,
    sight: Sight,
    tries: Tries,
    policy: Policy,
    now: float,
    clean_up: tuple[Action, ...],
) -> Decision:
    match sight.end:
        case End.USER | End.UNKNOWN if wish.restart:
            why = f"{_BY_USER[sight.end]}, and it is to start again"
            return Decision((*clean_up, Action.START), why)
        case End.USER | End.UNKNOWN:
            return Decision((Action.SET_DOWN, *clean_up), _BY_USER[sight.end])
        case End.REBOOT:
            # By its user with reboot_behavior = exit alone, which makes a crash of it.
            return _crashed(sight, tries, policy, now, clean_up, "it was to reboot")
        case End.ADMIN:
            return Decision(clean_up, "it was stopped by an administrator")
        case End.CRASH:
            return _crashed(sight, tries, policy, now, clean_up, "it crashed")
        case End.FAILED:
            return _crashed(sight, tries, policy, now, clean_up, "it did not start")
        case End.NEVER:
            return _crashed(sight, tries, policy, now, clean_up, "it does not run")
    text = f"it ended, and nobody knows who did it: {sight.said}"
    return Decision(why=text, is_odd=True)


def _crashed(
    sight: Sight, tries: Tries, policy: Policy, now: float, clean_up: tuple[Action, ...], why: str
) -> Decision:
    if not policy.tries:
        return Decision(clean_up, f"{why}, and is not to be started again: tries = 0")
    if sight.is_reset:
        why = f"{why}, and somebody had systemd forget that"
    step = next_step(tries, policy, now)
    if sight.lacks == () and step in (Next.WAIT, Next.REST):
        step, why = Next.START, f"{why}, and what it lacked is there now"
    elif sight.lacks:
        why = f"{why}, and lacks {', '.join(sight.lacks)}"
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
