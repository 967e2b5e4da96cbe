"""Many locks by their names, and owners that wait for several of them: no threads, no clock.

An owner claims several locks together. A claim that is not whole within ``2**tries`` seconds gives
back what it has and tries again, and after five attempts it keeps what it gets. Locks have levels,
which an owner takes in their order, so that two owners can't wait for each other. Source: Ganeti's
design for 2.1, "Locking improvements".
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

from brine.cluster.lock_queue import LockQueue, LockRequest
from brine.common.locks import LockError

MOST_LOCKS = 10_000
"""Of one claim."""

_ATTEMPTS = 5
_LONGEST_NAME = 255


def attempt_s(tries: int, locks: int) -> float:
    """How long the next attempt to take several locks may last, after so many that failed. What
    waits for one lock alone keeps nothing from others, and may wait."""
    return 2.0**tries if tries < _ATTEMPTS and locks > 1 else math.inf


class Level(IntEnum):
    """The levels of locks, in the order in which an owner takes them."""

    CLUSTER = 0
    INSTANCE = 1
    GROUP = 2
    NODE = 3
    STORAGE = 4


_LEVELS = {level.name.lower(): level for level in Level}
_ORDER = ", ".join(_LEVELS)


class LockName(NamedTuple):
    """A lock: ``instance/web1``, or ``cluster``. The order of names is that of taking them."""

    level: Level
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> LockName:
        """:raises LockError: if it is no name of a lock."""
        word, slash, name = text.partition("/")
        level = _LEVELS.get(word)
        if level is None:
            raise LockError(f"{text!r:.80}: a lock's level is one of {_ORDER}")
        is_whole = not slash if level is Level.CLUSTER else bool(name)
        if not (is_whole and name.isprintable() and len(name) <= _LONGEST_NAME):
            raise LockError(f"{text!r:.80}: no name of a lock, such as instance/web1 or cluster")
        return cls(level, name)

    def __str__(self) -> str:
        level = self.level.name.lower()
        return f"{level}/{self.name}" if self.name else level


class ClaimState(Enum):
    """The state of a claim. It leaves *waiting* once."""

    WAITING = auto()
    GRANTED = auto()
    TIMED_OUT = auto()
    RELEASED = auto()


@dataclass(eq=False, slots=True)
class LockClaim:
    """Several locks that an owner holds or wants together.

    :param owner: whatever stands for it.
    :param names: in the order of taking them.
    :param since: when it was made, and when it was granted, in the table's time.
    :param until: when it gives up; None is never.
    :param settled: is called when it is granted or has timed out.
    """

    owner: object
    names: Sequence[LockName]
    is_shared: bool
    priority: int
    since: float
    until: float | None
    settled: Callable[[], object]
    state: ClaimState = ClaimState.WAITING
    attempt: int = 0
    held: list[LockName] = field(default_factory=list)
    waits_for: LockRequest | None = None

    def lock_waited_for(self) -> LockName | None:
        """The lock that it waits for now."""
        return self.names[len(self.held)] if self.state is ClaimState.WAITING else None


class LockTable:
    """All locks. A lock is there while it is held or waited for. Time is in seconds, from any
    clock that does not go back."""

    def __init__(self) -> None:
        self._queues: dict[LockName, LockQueue] = {}
        self._claims: dict[object, list[LockClaim]] = {}  # by owner
        self._ends: list[tuple[float, int, LockClaim]] = []  # of attempts: a heap
        self._number = 0
        self._now = 0.0

    def claim(
        self,
        owner: object,
        names: Iterable[LockName],
        *,
        now: float,
        settled: Callable[[], object],
        shared: bool = False,
        timeout: float | None = None,
        priority: int = 0,
    ) -> LockClaim:
        """LockClaim locks together; the claim may be granted at once.

        :param timeout: give up after so many seconds; 0 does not wait.
        :raises LockError: if an owner has, or wants, locks that come after these, or the same ones.
        """
        self.advance(now)
        wanted = sorted({*names})
        if not 0 < len(wanted) <= MOST_LOCKS:
            raise LockError(f"a claim has 1 to {MOST_LOCKS} locks, not {len(wanted)}")
        for other in self._claims.get(owner, ()):
            if other.names[-1].level >= wanted[0].level:
                text = f"{wanted[0]} is to be taken before {other.names[-1]}, which is taken"
                raise LockError(text, hint=f"the order is {_ORDER}; release all first")
        until = None if timeout is None else now + timeout
        claim = LockClaim(owner, wanted, shared, priority, now, until, settled)
        self._claims.setdefault(owner, []).append(claim)
        self._begin(claim)
        return claim

    def release(self, owner: object, *, now: float) -> None:
        """End all claims of an owner, also those that wait."""
        self.advance(now)
        for claim in self._claims.pop(owner, ()):
            claim.state = ClaimState.RELEASED
            self._give_back(claim)

    def advance(self, now: float) -> None:
        """Let time pass: attempts end, and claims time out."""
        self._now = max(self._now, now)
        while self._ends and self._ends[0][0] <= self._now:
            _, _, claim = heapq.heappop(self._ends)
            if claim.state is not ClaimState.WAITING:
                continue
            self._give_back(claim)
            if claim.until is not None and claim.until <= self._now:
                self._claims[claim.owner].remove(claim)
                claim.state = ClaimState.TIMED_OUT
                claim.settled()
            else:
                claim.attempt += 1
                self._begin(claim)

    def next_end(self) -> float | None:
        """When :meth:`advance` has something to do; None if it never has."""
        while self._ends and self._ends[0][2].state is not ClaimState.WAITING:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def claims(self) -> Iterator[LockClaim]:
        """All claims that are granted or wait."""
        for claims in self._claims.values():
            yield from claims

    def holders(self, name: LockName) -> list[LockClaim]:
        """The claims that hold a lock, also while they wait for others."""
        queue = self._queues.get(name)
        holders: Iterable[Any] = queue.holders() if queue else ()
        return [*holders]

    def _begin(self, claim: LockClaim) -> None:
        """Begin an attempt."""
        self._take(claim)
        if claim.state is not ClaimState.WAITING:
            return
        end = self._now + attempt_s(claim.attempt, len(claim.names))
        end = min(end, math.inf if claim.until is None else claim.until)
        if end < math.inf:
            self._number += 1
            heapq.heappush(self._ends, (end, self._number, claim))

    def _take(self, claim: LockClaim) -> None:
        """Take the next locks until one has to be waited for."""
        while len(claim.held) < len(claim.names):
            name = claim.names[len(claim.held)]
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = LockQueue(name)
            if not queue.take(claim, shared=claim.is_shared):
                claim.waits_for = queue.request(
                    claim,
                    shared=claim.is_shared,
                    settled=lambda: self._granted(claim),
                    priority=claim.priority,
                )
                if claim.waits_for:
                    return
            claim.held.append(name)
        claim.state = ClaimState.GRANTED
        claim.since = self._now
        claim.settled()

    def _granted(self, claim: LockClaim) -> None:
        claim.waits_for = None
        claim.held.append(claim.names[len(claim.held)])
        self._take(claim)

    def _give_back(self, claim: LockClaim) -> None:
        """Hold and want nothing."""
        request, claim.waits_for = claim.waits_for, None
        held, claim.held = claim.held, []
        if request:
            self._queues[claim.names[len(held)]].withdraw(request)
        for name in held:
            self._queues[name].release(claim)
        for name in claim.names[: len(held) + 1]:
            queue = self._queues.get(name)
            if queue and queue.is_idle:
                del self._queues[name]
