"""A pass of the watcher: looking at all instances, deciding, and working on each.

What was seen may be another thing a moment later, when it is that instance's turn: so it is looked
at once more, while nobody else can change what is wanted of it, and only what is still right is
done. Source: "Implementation" in the design of the detection of user shutdown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from threading import Event, Lock, Semaphore, Thread, Timer
from typing import TYPE_CHECKING, Any, Protocol

from brine.common import paths
from brine.common.errors import BrineError, printable
from brine.common.files import read_regular
from brine.common.locks import LockedError
from brine.common.markers import Marker, MarkerKind, clear_way, read_marker, remove_unheld
from brine.common.peer import unit_of
from brine.instance import restart_counter as record
from brine.instance import store, unit
from brine.instance.history import RecordedVerdict, needed_verdicts, needs_verdict
from brine.instance.intent import keep_users_will
from brine.instance.observe import Domains, look, look_at_all
from brine.instance.restart_counter import NONE, DamagedCounterError, Tries, TriesError
from brine.instance.spec import AdminState
from brine.instance.start import start_failure
from brine.instance.status import Observed
from brine.instance.store import InstanceError
from brine.instance.unit import Active, Unit
from brine.instance.xen import leftovers, xl
from brine.watcher.decide import (
    Action,
    Case,
    Decision,
    EndCause,
    Life,
    Policy,
    case_of,
    decide,
    life_of,
    tried,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from brine.instance.xen.xl import Domain


_STUCK_S = 20.0

STARTS = frozenset({Action.START, Action.TRY})
_COUNTED = frozenset({Action.TRY, Action.GIVE_UP, Action.FORGET})
"""The actions that need the tries."""


class Hands(Protocol):
    """The work on instances."""

    def look(self) -> Iterable[Case | BrineError]:
        """All there is; what is wrong with one of them does not stop the others."""

    def look_again(self, key: str) -> Case | None:
        """One of them as it is now; None if there is no such thing any more."""

    def alone(self, case: Case) -> AbstractContextManager[None]:
        """Be the only one who changes what is wanted of it.

        :raises brine.common.locks.LockedError: if somebody else does.
        """

    def set_down(self, case: Case) -> None:
        """Set it down for good, by its user."""

    def clean_up(self, case: Case) -> None:
        """Remove what is left of it."""

    def start(self, case: Case) -> Callable[[], bool]:
        """Start it; the result waits until it runs or was stopped meanwhile, and says which.

        :raises BrineError: if it can't be, and so does the result if it does not run.
        """

    def leave(self) -> None:
        """Stop waiting for starts; they go on."""


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """The outcome of a pass for an instance.

    :param actions: what was done, or would be in a dry run.
    :param fault: what failed; then the rest was not done.
    """

    name: str
    decision: Decision
    case: Case | None = None
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

    def run(self) -> Iterator[PassOutcome]:
        """Work on all instances; each is told of when it is done, in the order of their names."""
        cases: list[Case] = []
        for found in self.hands.look():
            if isinstance(found, BrineError):
                yield PassOutcome("", Decision(why=str(found), is_odd=True), fault=found)
            else:
                cases.append(found)
        cases.sort(key=lambda case: (case.name, case.key))
        try:
            known = record.load() if self._counts() else {}
        except DamagedCounterError as error:
            # The next pass that does something begins anew.
            yield PassOutcome("", Decision(why=str(error), is_odd=True), fault=error)
            yield from self._done(cases, {})
        except TriesError as error:
            # What needs no record is done all the same.
            yield PassOutcome("", Decision(why=str(error), is_odd=True), fault=error)
            yield from replace(self, only=self.only - _COUNTED)._done(cases, {})
        else:
            yield from self._done(cases, known)

    def _done(self, cases: Sequence[Case], known: Mapping[str, Tries]) -> Iterator[PassOutcome]:
        decided = [(case, self._decide(case, known.get(case.name, NONE))) for case in cases]
        if self.dry_run or not any(decision.actions for _, decision in decided):
            for case, decision in decided:
                yield PassOutcome(case.name, decision, case, decision.actions)
        else:
            yield from self._worked_on(decided, known)

    def _counts(self) -> bool:
        """Whether it matters what was tried."""
        return not self.only.isdisjoint(_COUNTED)

    def _worked_on(
        self, decided: Sequence[tuple[Case, Decision]], known: Mapping[str, Tries]
    ) -> Iterator[PassOutcome]:
        """First what frees memory, and then what needs it, of which what failed most comes last;
        and last what is not ours."""
        starting = _StartQueue(self.parallel, self.slot_s)
        with ThreadPoolExecutor(self.parallel) as cleaning:
            works: dict[str, Future[PassOutcome]] = {}
            starts: list[Future[PassOutcome]] = []

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
                    yield work.result() if work else PassOutcome(case.name, decision, case)
            except BaseException:
                # Somebody has had enough: nothing more is begun, and no start is waited for.
                cleaning.shutdown(wait=False, cancel_futures=True)
                begun = [work for work in starts if not work.cancel()]
                self.hands.leave()
                wait(begun)
                raise

    def _decide(self, case: Case, tries: Tries) -> Decision:
        if case.seen is None:
            tries = NONE  # one that has the name of one of ours
        now = self.clock()
        found = decide(case, tries, self.policy, now, clean_all=self.clean_all)
        left = tuple(action for action in found.actions if action in self.only)
        # Who does not give up an instance does not say so.
        is_left_out = Action.GIVE_UP in found.actions and Action.GIVE_UP not in left
        return replace(found, actions=left, is_odd=found.is_odd and not is_left_out)

    def _outcome(self, case: Case, decision: Decision) -> PassOutcome:
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
        return PassOutcome(case.name, work.decision, work.case, tuple(work.done), fault)

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
            tries = record.of(now.name) if self._counts() and not now.is_reset else NONE
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


class _StartQueue:
    """Starts that are made beside each other, begun in their order.

    :param parallel: so many at the same time.
    :param slot_s: after which one gives its place to the next, and goes on.
    """

    def __init__(self, parallel: int, slot_s: float) -> None:
        self._slots = Semaphore(parallel)
        self._slot_s = slot_s

    def begin(self, works: Sequence[Callable[[], PassOutcome]]) -> list[Future[PassOutcome]]:
        """Begin these, one after another; returns what comes of them."""
        futures: list[Future[PassOutcome]] = [Future() for _ in works]
        rows = list(zip(works, futures, strict=True))
        Thread(target=self._begin, args=(rows,), daemon=True).start()
        return futures

    def _begin(self, rows: Sequence[tuple[Callable[[], PassOutcome], Future[PassOutcome]]]) -> None:
        for work, future in rows:
            self._slots.acquire()
            if future.set_running_or_notify_cancel():
                Thread(target=self._work, args=(work, future), daemon=True).start()
            else:
                self._slots.release()

    def _work(self, work: Callable[[], PassOutcome], future: Future[PassOutcome]) -> None:
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
    """The kinds of work, in the order in which they begin."""

    CLEAN_UP = auto()
    START = auto()
    NOT_OURS = auto()


def _kind_of(case: Case, decision: Decision) -> _Kind:
    if case.seen is None:
        return _Kind.NOT_OURS
    return _Kind.CLEAN_UP if STARTS.isdisjoint(decision.actions) else _Kind.START


def _wait_while_any_ends(works: Iterable[Future[Any]]) -> None:
    """Wait for these. What is stuck keeps nobody waiting for long."""
    left = set(works)
    while left:
        ended, left = wait(left, timeout=_STUCK_S, return_when=FIRST_COMPLETED)
        if not ended:
            return


def _not_started() -> bool:
    """There is nothing to wait for, and nothing that was stopped."""
    return True


# What the watcher has its hands on: this node's instances.

# Most passes have nothing to do: what takes long to load is loaded where something is done.

_LOCK_S = 5.0
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_STORAGE_S = 2.0
_VERDICT_S = 1.0
_SETTLED_S = 10.0
_CLEARED_S = 60.0
_ZOMBIE_S = 5.0
_DOMAIN = "domain:"
_XEN = Path("/proc/xen/capabilities")
"""Has ``control_d`` where domains are made."""


class Instances:
    """The instances of this node; see :class:`brine.watcher.passes.Hands`.

    :param timeout_s: how long one may take to start; 0 waits for none.
    :param names: of those that are looked at; None are all, and domains that are none.
    """

    def __init__(self, *, timeout_s: float, names: Container[str] | None = None) -> None:
        self._timeout_s = timeout_s
        self._names = names
        self._looked_at = time.monotonic()
        self._is_left = Event()

    def look(self) -> Iterator[Case | BrineError]:
        """All of them, and domains that are no instance's. systemd and Xen are asked once, and
        kvmd only about instances that left no marker."""
        found: list[Observed] = []
        faulty: set[str] = set()
        domains = Domains()
        for seen in look_at_all(domains):
            if self._names is not None and seen.name not in self._names:
                continue
            if isinstance(seen, InstanceError):
                faulty.add(seen.name)
                yield seen
            else:
                found.append(seen)
        verdicts: Mapping[str, RecordedVerdict] = {}
        try:
            verdicts = _verdicts_on(found)
        except OSError as error:
            yield BrineError(f"the journal can't be read: {error.strerror}")
        is_node_starting = cache(unit.is_node_starting)
        for seen in found:
            yield _case_of(seen, verdicts, is_node_starting)
        if self._names is None and _makes_domains():
            yield from _others(domains, found, faulty)
        self._looked_at = time.monotonic()

    def look_again(self, key: str) -> Case | None:
        """One of them, by its name, or by the number and UUID of a domain."""
        if key.startswith(_DOMAIN):
            domain = _foreign(key)
            return _case_of_other(domain) if domain else None
        if not store.spec_file_of(key).exists():
            return None
        seen = look(key)
        return _case_of(seen, needed_verdicts([seen]))

    def alone(self, case: Case) -> AbstractContextManager[None]:
        """Nobody else changes its spec, or starts it."""
        if case.seen is None:
            return nullcontext()
        return store.alone(case.key, timeout_s=_LOCK_S)

    def set_down(self, case: Case) -> None:
        """For good, in its spec and for the cluster."""
        keep_users_will(case.key, is_told=case.end in (EndCause.USER, EndCause.UNKNOWN))

    def clean_up(self, case: Case) -> None:
        """Destroy an ended domain. With QEMU, systemd has cleaned up."""
        if case.seen is None:
            if domain := self._settled(case.key):
                xl.destroy(domain)
            return
        seen = look(case.key)
        if seen.has_stale_stop:
            remove_unheld(MarkerKind.STOP, case.key)
        elif leftovers.is_left(seen):
            leftovers.remove(seen)

    def start(self, case: Case) -> Callable[[], bool]:
        """As ``systemctl start`` does, without waiting."""
        before = unit.units([case.key]).get(case.key)
        unit.start_later(case.key)
        if not self._timeout_s:
            return lambda: True
        return lambda: self._wait_started(case.key, before)

    def _settled(self, key: str) -> Domain | None:
        """A domain that is not ours and has ended; None if its own xl has taken it away, or made it
        anew, as it may have been about to when it was looked at."""
        time.sleep(max(self._looked_at + _SETTLED_S - time.monotonic(), 0))
        return _foreign(key)

    def leave(self) -> None:
        """Stop waiting for starts. systemd goes on with them."""
        self._is_left.set()

    def _wait_started(self, name: str, before: Unit | None) -> bool:
        deadline = time.monotonic() + self._timeout_s
        earlier = before.invocation if before else ""
        was_idle = False
        pause_s = _PAUSE_S
        while True:
            try:
                now = unit.units([name]).get(name)
            except unit.UnitError:
                # Where many start at once, systemd may be slow to answer.
                if self._is_left.wait(_LONGEST_PAUSE_S) or time.monotonic() >= deadline:
                    raise
                continue
            if now and now.active in (Active.ACTIVE, Active.RELOADING):
                return True
            is_idle = _is_idle(now)
            # One that is about to begin may look so for a moment.
            if is_idle and (was_idle or (now and now.invocation != earlier)):
                if _is_stopped(name):
                    return False

                state = now.active if now else Active.INACTIVE
                raise start_failure(name, unit.UnitError(f"its unit is {state}"), before)
            was_idle = is_idle
            if time.monotonic() >= deadline:
                text = f"has not started within {self._timeout_s:g} s"
                raise InstanceError(name, text, hint=f"systemctl status {unit_of(name)}")
            if self._is_left.wait(pause_s):
                raise InstanceError(name, "is starting, and nobody waits for it any more")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def take_ended() -> frozenset[str]:
    """The instances that have ended by themselves since somebody took them last.

    :raises BrineError: if that can't be known.
    """
    try:
        names = frozenset(os.listdir(paths.ENDED_DIR))
        for name in names:
            # Before they are looked at: one that ends again meanwhile is there again.
            clear_way(paths.ENDED_DIR / name)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        raise BrineError(f"{paths.ENDED_DIR}: {error.strerror}", hint=hint) from error
    return names


def wait_cleared(names: Collection[str]) -> None:
    """Wait until the units of instances have cleared up after them; not for long.

    :raises brine.instance.unit.UnitError: if systemd can't be asked.
    """
    deadline, pause_s = time.monotonic() + _CLEARED_S, _PAUSE_S
    while time.monotonic() < deadline:
        found = unit.units(names).values()
        if not any(one.active is Active.DEACTIVATING for one in found):
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_idle(now: Unit | None) -> bool:
    """Whether nothing of it runs, and nothing is about to."""
    return now is None or (now.active in (Active.FAILED, Active.INACTIVE) and not now.is_queued)


def _is_stopped(name: str) -> bool:
    """Whether somebody has decided otherwise meanwhile, so that it is no fault that it is down."""
    if not store.spec_file_of(name).exists():
        return True
    seen = look(name)
    return seen.was_stopped or seen.spec.admin_state != AdminState.UP


def _makes_domains() -> bool:
    """Whether this node is the one that makes Xen's domains."""
    try:
        return "control_d" in _XEN.read_text()
    except OSError:
        return False


def _others(
    domains: Domains, ours: Iterable[Observed], faulty: Container[str]
) -> Iterator[Case | BrineError]:
    """The domains that are not ours, or can't die, and what nobody understands.

    :param faulty: the names of instances of which more is not known.
    """
    try:
        listing = domains.listing()
        stuck = _stuck([one for one in listing.domains if one.is_zombie()])
    except xl.XlError as error:
        yield error
        return
    for row in listing.unknown:
        yield xl.XlError(f"xl list: a row that is not known here: {printable(row)}")
    uuids = {seen.spec.uuid for seen in ours}
    for domain in listing.domains:
        if domain.is_zombie():
            if _trace(domain) in stuck:
                yield _case_of_other(domain)
        elif domain.uuid not in uuids and domain.name not in faulty:
            yield _case_of_other(domain)


def _stuck(zombies: Sequence[Domain]) -> Container[tuple[int, str, int]]:
    """The traces of those that Xen can't get rid of. One that it is just destroying looks the same
    for a while, and gets smaller.

    :raises brine.instance.xen.xl.XlError: if that can't be known.
    """
    if not zombies:
        return ()
    time.sleep(_ZOMBIE_S)
    later = {_trace(one) for one in xl.domains().domains if one.is_zombie()}
    return later.intersection(map(_trace, zombies))


def _trace(zombie: Domain) -> tuple[int, str, int]:
    return zombie.number, zombie.uuid, zombie.memory_mib


def _case_of_other(domain: Domain) -> Case:
    name, key = printable(domain.name), f"{_DOMAIN}{domain.number}:{domain.uuid}"
    return Case(key, name, None, life_of(domain), said=domain.state)


def _foreign(key: str) -> Domain | None:
    """A domain that is not ours; None if it is gone, or is ours by now: an instance may have been
    defined meanwhile, or renamed just when all were looked at."""
    there = xl.domains().domains
    found = next((one for one in there if f"{_DOMAIN}{one.number}:{one.uuid}" == key), None)
    return None if found is None or _is_instances(found) else found


def _is_instances(domain: Domain) -> bool:
    """Whether any spec is that of a domain, as far as it can be read."""
    uuid = domain.uuid.encode()
    for name in store.names():
        try:
            # Not taken apart, as a damaged one may be its, too.
            if uuid in read_regular(store.spec_file_of(name)).lower():
                return True
        except FileNotFoundError:
            continue  # it was undefined just now
        except OSError:
            if name == domain.name:
                return True
    return False


def _case_of(
    seen: Observed,
    verdicts: Mapping[str, RecordedVerdict],
    is_node_starting: Callable[[], bool] = unit.is_node_starting,
) -> Case:
    verdict = verdicts.get(seen.name)
    case = case_of(seen, verdict.who if verdict else None)
    if case.end is EndCause.NEVER and is_node_starting():
        case = replace(case, is_busy=True)  # its turn comes
    if case.life is Life.DOWN and (failure := read_marker(MarkerKind.FAILURE, seen.name)):
        return _with_failure(case, seen, failure)
    return case


def _with_failure(case: Case, seen: Observed, failure: Marker) -> Case:
    """The same of an instance that is down and failed last, as systemd saw it."""
    if failure.run == seen.run and case.end in (EndCause.USER, EndCause.ADMIN):
        return case
    lacks = failure.facts.get("lacks")
    if isinstance(lacks, list) and lacks:
        case = replace(case, lacks=tuple(_missing([str(one) for one in lacks])))
    if seen.unit and seen.unit.active is Active.FAILED:
        return case
    started = read_marker(MarkerKind.STARTED, seen.name, run=failure.run)
    return replace(case, end=EndCause.CRASH if started else EndCause.FAILED, is_reset=True)


def _missing(several: Sequence[str]) -> list[str]:
    """Which of these files are not there. Where storage does not answer, none of them is."""
    found: list[str] = []

    def look() -> None:
        found.extend(one for one in several if os.path.exists(one))

    looking = Thread(target=look, daemon=True)
    looking.start()
    looking.join(_STORAGE_S)
    return [one for one in several if one not in found]


def _verdicts_on(several: list[Observed]) -> dict[str, RecordedVerdict]:
    """kvmd's verdicts. One that is just being written is waited for."""
    found = needed_verdicts(several)
    if late := [seen for seen in several if needs_verdict(seen) and seen.name not in found]:
        time.sleep(_VERDICT_S)
        found |= needed_verdicts(late)
    return found
