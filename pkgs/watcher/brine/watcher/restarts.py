"""How often an instance that crashed is started again, and when that becomes rare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from brine.instance.tries import Tries

_EARLY = 0.2
"""So much of the first wait a pass may come too early: passes are not quite as regular as that, and
one that was a second early would make it twice as long."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an administrator has set.

    :param tries: so often an instance is started again before it is given up.
    :param backoff_s: between the first try and the second; twice as long before each further one.
    :param slow_s: between two tries of an instance that is given up.
    :param forget_after_s: so long after the last try a running instance is as good as new.
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
    """What to do now about an instance that should run and does not.

    :param now: in seconds since 1970.
    """
    if tries.count >= policy.tries and not tries.given_up:
        return Next.GIVE_UP
    if now >= due_at(tries, policy, now):
        return Next.START
    return Next.REST if is_slow(tries, policy) else Next.WAIT


def is_slow(tries: Tries, policy: Policy) -> bool:
    """Whether an instance is given up: it is started once in a long while."""
    return tries.given_up and tries.count >= policy.tries


def due_at(tries: Tries, policy: Policy, now: float) -> float:
    """When the next try is due, in seconds since 1970."""
    if tries.count == 0:
        return now
    # A clock that was set back must not have an instance wait for years.
    if tries.last > now:
        return now
    if is_slow(tries, policy):
        return tries.last + policy.slow_s
    wait_s = policy.backoff_s * 2.0 ** (tries.count - 1)
    return tries.last + wait_s - _EARLY * policy.backoff_s


def is_forgotten(tries: Tries, policy: Policy, now: float) -> bool:
    """Whether an instance that runs has run long enough. One that was given up may just be tried
    again, and end as before."""
    return not tries.last <= now < tries.last + policy.forget_after_s


def tried(tries: Tries, policy: Policy, now: float) -> Tries:
    """The same after one more try."""
    return Tries(tries.count + 1, now, given_up=is_slow(tries, policy))
