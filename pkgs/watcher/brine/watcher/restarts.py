"""How often an instance that crashed is started again, and when that is given up."""

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

    :param tries: so often an instance is started again.
    :param backoff_s: between the first try and the second; twice as long before each further one.
    :param forget_after_s: so long after the last try a running instance is as good as new.
    """

    tries: int = 5
    backoff_s: float = 300.0
    forget_after_s: float = 8 * 3600.0


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
    if tries.given_up and tries.count >= policy.tries:
        return Next.REST
    if tries.count >= policy.tries:
        return Next.GIVE_UP
    return Next.WAIT if now < due_at(tries, policy, now) else Next.START


def due_at(tries: Tries, policy: Policy, now: float) -> float:
    """When the next try is due, in seconds since 1970."""
    if tries.count == 0:
        return now
    # A clock that was set back must not have an instance wait for years.
    if tries.last > now:
        return now
    wait_s = policy.backoff_s * 2.0 ** (tries.count - 1)
    return tries.last + wait_s - _EARLY * policy.backoff_s


def is_forgotten(tries: Tries, policy: Policy, now: float) -> bool:
    """Whether an instance that runs has run long enough, or was started by somebody else."""
    is_told_by_clock = tries.last <= now < tries.last + policy.forget_after_s
    return tries.given_up or not is_told_by_clock


def tried(tries: Tries, now: float) -> Tries:
    """The same after one more try."""
    return Tries(tries.count + 1, now)
