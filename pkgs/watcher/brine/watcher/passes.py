"""One pass: every instance is looked at, decided about, and worked on.

What was seen may be another thing a moment later, when it is that instance's turn: so it is looked
at once more, while nobody else can change what is wanted of it, and only what is still right is
done. Source: "Implementation" in the design of the detection of user shutdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from threading import Lock, Semaphore, Thread, Timer
from typing import TYPE_CHECKING, Any, Protocol

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.instance import tries as record
from brine.instance.tries import NONE, DamagedError, Tries, TriesError
from brine.watcher.decisions import Action, Decision, Sight, Wish, decide
from brine.watcher.restarts import Policy, tried

if TYPE_CHECKING:
    from concurrent.futures import Future

_STUCK_S = 20.0

STARTS = frozenset({Action.START, Action.TRY})
_COUNTED = frozenset({Action.TRY, Action.GIVE_UP, Action.FORGET})
"""What needs the record of what was tried."""


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

    def start(self, case: Case) -> Callable[[], bool]:
        """Have it start; the result waits until it runs, or was stopped meanwhile, and says which.

        :raises BrineError: if it can't be, and so does the result if it does not run.
        """

    def leave(self) -> None:
        """Have nobody wait for a start any more; what was begun goes on."""


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


@dataclass(slots=True)
class _Work:
    """What is being done about an instance, and why, as it was looked at last."""

    case: Case
    decision: Decision
    done: list[Action] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """How to work.

    :param parallel: so many instances are cleaned up at the same time, and so many started.
    :param slot_s: so long a start counts among these; then another one begins beside it.
    :param only: do these things alone, and leave the rest to another pass.
    :param is_paused: asked before each instance: whether nothing more is to be done.
    """

    hands: Hands
    policy: Policy
    parallel: int = 4
    slot_s: float = 20.0
    clean_all: bool = False
    dry_run: bool = False
    only: frozenset[Action] = frozenset(Action)
    told: Callable[[Case, Action, Tries], None] = lambda *_: None
    clock: Callable[[], float] = time.time
    is_paused: Callable[[], bool] = lambda: False

    def run(self) -> Iterator[Outcome]:
        """Work on all instances; each is told of when it is done, in the order of their names."""
        cases: list[Case] = []
        for found in self.hands.look():
            if isinstance(found, BrineError):
                yield Outcome("", Decision(why=str(found), is_odd=True), fault=found)
            else:
                cases.append(found)
        cases.sort(key=lambda case: (case.name, case.key))
        try:
            known = record.load() if self._counts() else {}
        except DamagedError as error:
            # The next pass that does something begins anew.
            yield Outcome("", Decision(why=str(error), is_odd=True), fault=error)
            yield from self._done(cases, {})
        except TriesError as error:
            # What needs no record is done all the same.
            yield Outcome("", Decision(why=str(error), is_odd=True), fault=error)
            yield from replace(self, only=self.only - _COUNTED)._done(cases, {})
        else:
            yield from self._done(cases, known)

    def _done(self, cases: Sequence[Case], known: Mapping[str, Tries]) -> Iterator[Outcome]:
        decided = [(case, self._decide(case, known.get(case.name, NONE))) for case in cases]
        if self.dry_run or not any(decision.actions for _, decision in decided):
            for case, decision in decided:
                yield Outcome(case.name, decision, case.sight, decision.actions)
        else:
            yield from self._worked_on(decided, known)

    def _counts(self) -> bool:
        """Whether it matters what was tried."""
        return not self.only.isdisjoint(_COUNTED)

    def _worked_on(
        self, decided: Sequence[tuple[Case, Decision]], known: Mapping[str, Tries]
    ) -> Iterator[Outcome]:
        """First what frees memory, and then what needs it, of which what failed most comes last;
        and last what is not ours."""
        from concurrent.futures import ThreadPoolExecutor, wait  # takes long to load

        starting = _Starts(self.parallel, self.slot_s)
        with ThreadPoolExecutor(self.parallel) as cleaning:
            works: dict[str, Future[Outcome]] = {}
            starts: list[Future[Outcome]] = []

            def rows(kind: _Kind) -> list[tuple[Case, Decision]]:
                return [
                    (case, decision)
                    for case, decision in decided
                    if decision.actions and _kind_of(case, decision) is kind
                ]

            def begin(kind: _Kind) -> None:
                for case, decision in rows(kind):
                    works[case.key] = cleaning.submit(self._outcome, case, decision)

            def begin_starts() -> None:
                found = rows(_Kind.START)
                found.sort(key=lambda row: known.get(row[0].name, NONE).count)
                starts.extend(starting.begin([partial(self._outcome, *row) for row in found]))
                works.update(
                    {case.key: work for (case, _), work in zip(found, starts, strict=True)}
                )

            try:
                begin(_Kind.CLEAN_UP)
                _wait_while_any_ends(works.values())
                begin_starts()
                begin(_Kind.NOT_OURS)
                for case, decision in decided:
                    work = works.get(case.key)
                    yield work.result() if work else Outcome(case.name, decision, case.sight)
            except BaseException:
                # Somebody has had enough: nothing more is begun, and no start is waited for.
                cleaning.shutdown(wait=False, cancel_futures=True)
                begun = [work for work in starts if not work.cancel()]
                self.hands.leave()
                wait(begun)
                raise

    def _decide(self, case: Case, tries: Tries) -> Decision:
        if case.wish is None:
            tries = NONE  # one that has the name of one of ours
        now = self.clock()
        found = decide(case.wish, case.sight, tries, self.policy, now, clean_all=self.clean_all)
        left = tuple(action for action in found.actions if action in self.only)
        # Who does not give up an instance does not say so.
        is_left_out = Action.GIVE_UP in found.actions and Action.GIVE_UP not in left
        return replace(found, actions=left, is_odd=found.is_odd and not is_left_out)

    def _outcome(self, case: Case, decision: Decision) -> Outcome:
        work = _Work(case, decision)
        fault: BrineError | None = None
        try:
            runs = self._do(work)
            if not runs():
                why = f"{work.decision.why}; and it was stopped meanwhile"
                work.decision = replace(work.decision, why=why)
        except LockedError:
            work.decision = Decision(why="somebody is working on it")
        except BrineError as error:
            fault = error
        except OSError as error:
            fault = BrineError(f"{case.name}: {error.filename or 'the system'}: {error.strerror}")
        return Outcome(case.name, work.decision, work.case.sight, tuple(work.done), fault)

    def _do(self, work: _Work) -> Callable[[], bool]:
        """Do what is still right, one thing after another; returns what waits for a start."""
        runs: Callable[[], bool] = _not_started
        if self.is_paused():
            work.decision = Decision(why="the watcher was paused meanwhile")
            return runs
        with self.hands.alone(work.case):
            now = self.hands.look_again(work.case.key)
            if now is None:
                work.decision = Decision(why="it is gone")
                return runs
            tries = record.of(now.name) if self._counts() and not now.sight.is_reset else NONE
            work.case, work.decision = now, self._decide(now, tries)
            for action in work.decision.actions:
                match action:
                    case Action.SET_DOWN:
                        self.hands.set_down(now)
                    case Action.CLEAN_UP:
                        self.hands.clean_up(now)
                    case Action.START:
                        runs = self.hands.start(now)
                    case Action.TRY:
                        # On record first: a try that was killed is one, too.
                        record.note(now.name, tries := tried(tries, self.policy, self.clock()))
                        runs = self.hands.start(now)
                    case Action.GIVE_UP:
                        tries = replace(tries, given_up=True)
                        # Said first: who is killed in between says it again, rather than never.
                        self.told(now, action, tries)
                        record.note(now.name, tries)
                    case Action.FORGET:
                        record.forget(now.name)
                work.done.append(action)
                if action is not Action.GIVE_UP:
                    self.told(now, action, tries)
        return runs


class _Starts:
    """Starts that are made beside each other, begun in their order.

    :param parallel: so many at the same time.
    :param slot_s: after which one gives its place to the next, and goes on.
    """

    def __init__(self, parallel: int, slot_s: float) -> None:
        self._slots = Semaphore(parallel)
        self._slot_s = slot_s

    def begin(self, works: Sequence[Callable[[], Outcome]]) -> list[Future[Outcome]]:
        """Begin these, one after another; returns what comes of them."""
        from concurrent.futures import Future

        futures: list[Future[Outcome]] = [Future() for _ in works]
        rows = list(zip(works, futures, strict=True))
        Thread(target=self._begin, args=(rows,), daemon=True).start()
        return futures

    def _begin(self, rows: Sequence[tuple[Callable[[], Outcome], Future[Outcome]]]) -> None:
        for work, future in rows:
            self._slots.acquire()
            if future.set_running_or_notify_cancel():
                Thread(target=self._work, args=(work, future), daemon=True).start()
            else:
                self._slots.release()

    def _work(self, work: Callable[[], Outcome], future: Future[Outcome]) -> None:
        once = Lock()

        def give_back() -> None:
            if once.acquire(blocking=False):
                self._slots.release()

        timer = Timer(self._slot_s, give_back)
        timer.daemon = True
        timer.start()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            timer.cancel()
            give_back()


class _Kind(Enum):
    """What a piece of work is for, in the order in which they are begun."""

    CLEAN_UP = auto()
    START = auto()
    NOT_OURS = auto()


def _kind_of(case: Case, decision: Decision) -> _Kind:
    if case.wish is None:
        return _Kind.NOT_OURS
    return _Kind.CLEAN_UP if STARTS.isdisjoint(decision.actions) else _Kind.START


def _wait_while_any_ends(works: Iterable[Future[Any]]) -> None:
    """Wait for these. What is stuck keeps nobody waiting for long."""
    from concurrent.futures import FIRST_COMPLETED, wait

    left = set(works)
    while left:
        ended, left = wait(left, timeout=_STUCK_S, return_when=FIRST_COMPLETED)
        if not ended:
            return


def _not_started() -> bool:
    """There is nothing to wait for, and nothing that was stopped."""
    return True
