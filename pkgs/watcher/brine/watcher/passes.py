"""One pass: every instance is looked at, decided about, and worked on.

What was seen may be another thing a moment later, when it is that instance's turn: so it is looked
at once more, while nobody else can change what is wanted of it, and only what is still right is
done. Source: "Implementation" in the design of the detection of user shutdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from brine.common.errors import BrineError
from brine.watcher.counters import Counters
from brine.watcher.decisions import Action, Decision, Sight, Wish, decide
from brine.watcher.restarts import NONE, Policy, Tries, tried


@dataclass(frozen=True, slots=True)
class Case:
    """An instance, or what else was found, as it is.

    :param key: by which it is found again: an instance's name, or a domain's number.
    :param name: for people.
    :param wish: None of what is not ours.
    """

    key: str
    name: str
    wish: Wish | None
    sight: Sight


class Hands(Protocol):
    """What works on instances, on whatever hypervisor."""

    def look(self) -> Iterable[Case | BrineError]:
        """All there is; what is wrong with one of them does not stop the others."""

    def look_again(self, key: str) -> Case | None:
        """One of them as it is now; None if there is no such thing any more."""

    def alone(self, case: Case) -> AbstractContextManager[None]:
        """Be the only one who changes what is wanted of it.

        :raises brine.common.locks.LockedError: if somebody else does.
        """

    def set_down(self, case: Case) -> None:
        """Have it be down for good, by its user."""

    def clean_up(self, case: Case) -> None:
        """Remove what is left of it."""

    def start(self, case: Case) -> Callable[[], None]:
        """Have it start; the result waits until it runs.

        :raises BrineError: if it can't be, and so does the result if it does not run.
        """


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an instance in a pass.

    :param actions: what was done, or would be in a dry run.
    :param fault: what failed; then the rest was not done.
    """

    name: str
    decision: Decision
    sight: Sight | None = None
    actions: tuple[Action, ...] = ()
    fault: BrineError | None = None


@dataclass(frozen=True)
class Pass:
    """How to work.

    :param counters: of tries; loaded.
    :param only: do these things alone, and leave the rest to another pass.
    """

    hands: Hands
    counters: Counters
    policy: Policy
    parallel: int = 4
    clean_all: bool = False
    dry_run: bool = False
    only: frozenset[Action] = frozenset(Action)
    told: Callable[[Case, Action, Tries], None] = lambda *_: None
    clock: Callable[[], float] = time.time

    def run(self) -> Iterator[Outcome]:
        """Work on all instances; each is told of when it is done, in the order of their names."""
        cases: list[Case] = []
        for found in self.hands.look():
            if isinstance(found, BrineError):
                yield Outcome("", Decision(why=str(found), is_odd=True), fault=found)
            else:
                cases.append(found)
        cases.sort(key=lambda case: (case.name, case.key))
        lock = Lock()
        with ThreadPoolExecutor(self.parallel) as pool:
            yield from pool.map(lambda case: self._outcome(case, lock), cases)

    def _decide(self, case: Case) -> Decision:
        tries = self.counters.of(case.name) if case.wish else NONE
        now = self.clock()
        found = decide(case.wish, case.sight, tries, self.policy, now, clean_all=self.clean_all)
        left = tuple(action for action in found.actions if action in self.only)
        return Decision(left, found.why, found.is_odd)

    def _outcome(self, case: Case, lock: Lock) -> Outcome:
        decision = self._decide(case)
        if self.dry_run or not decision.actions:
            return Outcome(case.name, decision, case.sight, decision.actions)
        done: list[Action] = []
        try:
            wait = self._work(case, done, lock)
            wait()
        except BrineError as error:
            return Outcome(case.name, decision, case.sight, tuple(done), error)
        return Outcome(case.name, decision, case.sight, tuple(done))

    def _work(self, case: Case, done: list[Action], lock: Lock) -> Callable[[], None]:
        """Do what is still right, one thing after another; returns what waits for a start."""
        wait: Callable[[], None] = _nothing
        with self.hands.alone(case):
            now = self.hands.look_again(case.key)
            if now is None:
                return wait
            for action in self._decide(now).actions:
                tries = self.counters.of(now.name)
                match action:
                    case Action.SET_DOWN:
                        self.hands.set_down(now)
                    case Action.CLEAN_UP:
                        self.hands.clean_up(now)
                    case Action.START:
                        wait = self.hands.start(now)
                    case Action.TRY:
                        # On record first: a try that was killed is one, too.
                        with lock:
                            self.counters.set(now.name, tries := tried(tries, self.clock()))
                        wait = self.hands.start(now)
                    case Action.GIVE_UP:
                        tries = Tries(tries.count, tries.last, given_up=True)
                        self.told(now, action, tries)
                        with lock:
                            self.counters.set(now.name, tries)
                    case Action.FORGET:
                        with lock:
                            self.counters.forget(now.name)
                done.append(action)
                if action is not Action.GIVE_UP:
                    self.told(now, action, tries)
        return wait


def _nothing() -> None:
    """There is nothing to wait for."""
