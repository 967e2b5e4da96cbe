"""A pass of the watcher: looking at all instances, deciding, and working on each.

An instance may change until its turn comes. So the pass looks at it once more, while no other
command can change its spec, and does only what is still right. Source: "Implementation" in the
design of the detection of user shutdown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Thread

from brine.common import paths
from brine.common.errors import BrineError, printable
from brine.common.files import read_regular
from brine.common.locks import LockedError
from brine.instance import store, unit
from brine.instance.history import needs_verdict, verdicts_on
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.intent import keep_users_will
from brine.instance.observe import Domains, Observed, look, look_at_all
from brine.instance.parallel import SlotPool
from brine.instance.start import start_failure
from brine.instance.store import InstanceError, KeptOutError
from brine.instance.unit import Active, UnitError
from brine.instance.xen import xl
from brine.instance.xen.domain import is_left, remove_domain
from brine.instance.xen.xl import Domain
from brine.vm.end import EndCause
from brine.vm.markers import MarkerKind, clear_way, remove_unheld
from brine.vm.run import RecordedVerdict
from brine.vm.spec import AdminState, Spec
from brine.vm.unit_name import unit_of
from brine.watcher import messages, restart_counter
from brine.watcher.decide import (
    STARTS,
    Action,
    Decision,
    counting_failure,
    decide,
    end_of,
    has_not_run,
    is_reset,
)
from brine.watcher.restart_counter import (
    NONE,
    DamagedCounterError,
    Tries,
    TriesError,
    with_one_more,
)
from brine.watcher.settings import WatcherSettings

_STUCK_S = 20.0
_COUNTED = frozenset({Action.TRY, Action.GIVE_UP, Action.FORGET})
"""The actions that need the tries."""


@dataclass
class PassOutcome:
    """The outcome of a pass for an instance or a domain, or what is wrong with the pass itself.

    :param seen: as it was looked at last.
    :param actions: what was done, or would be in a dry run.
    :param fault: what failed; then the rest was not done.
    """

    decision: Decision
    seen: Observed | Domain | None = None
    actions: tuple[Action, ...] = ()
    fault: BrineError | None = None

    @classmethod
    def of_fault(cls, fault: BrineError) -> PassOutcome:
        """The outcome of what concerns no instance that the pass can work on."""
        return cls(Decision(why=str(fault), is_odd=True), fault=fault)

    @property
    def name(self) -> str:
        """The name for people; empty if it concerns no instance."""
        return printable(self.seen.name) if self.seen else ""


@dataclass(frozen=True)
class Pass:
    """How to work.

    :param slot_s: so long a start counts among the parallel ones; then another one begins.
    :param only: do these actions alone, and leave the rest to another pass.
    :param is_paused: asked before each instance: whether nothing more is to be done.
    """

    instances: Instances
    settings: WatcherSettings
    slot_s: float = 20.0
    dry_run: bool = False
    only: frozenset[Action] = frozenset(Action)
    clock: Callable[[], float] = time.time
    is_paused: Callable[[], bool] = lambda: False

    def run(self) -> Iterator[PassOutcome]:
        """Work on all instances; yields each when it is done, in the order of their names."""
        found: list[Observed | Domain] = []
        for seen in self.instances.look():
            if isinstance(seen, BrineError):
                yield PassOutcome.of_fault(seen)
            else:
                found.append(seen)
        found.sort(key=lambda seen: printable(seen.name))
        known: Mapping[str, Tries] = {}
        doing = self
        try:
            known = restart_counter.load() if self._counts() else {}
        except TriesError as error:
            yield PassOutcome.of_fault(error)
            if not isinstance(error, DamagedCounterError):  # which the next change makes anew
                doing = replace(self, only=self.only - _COUNTED)
        decided = [(seen, doing._decide(seen, known.get(seen.name, NONE))) for seen in found]
        if self.dry_run or not any(decision.actions for _, decision in decided):
            for seen, decision in decided:
                yield PassOutcome(decision, seen, decision.actions)
        else:
            yield from doing._worked_on(decided, known)

    def _counts(self) -> bool:
        """Whether it matters what was tried."""
        return not self.only.isdisjoint(_COUNTED)

    def _worked_on(
        self, decided: Sequence[tuple[Observed | Domain, Decision]], known: Mapping[str, Tries]
    ) -> Iterator[PassOutcome]:
        """First what frees memory, then what needs it, the most failed last; then foreign
        domains."""
        works: dict[int, Future[PassOutcome]] = {}
        cleanups: list[int] = []
        starts: list[int] = []
        foreign: list[int] = []
        for index, (seen, decision) in enumerate(decided):
            if decision.actions and isinstance(seen, Domain):
                foreign.append(index)
            elif decision.actions:
                (cleanups if STARTS.isdisjoint(decision.actions) else starts).append(index)
        starts.sort(key=lambda index: known.get(decided[index][0].name, NONE).count)
        cleaning = ThreadPoolExecutor(self.settings.parallel)
        try:
            for index in cleanups:
                works[index] = cleaning.submit(self._outcome, *decided[index])
            _wait_while_any_ends(works.values())
            begun = self._begin_starts([partial(self._outcome, *decided[one]) for one in starts])
            works.update(zip(starts, begun, strict=True))
            for index in foreign:
                works[index] = cleaning.submit(self._outcome, *decided[index])
            for index, (seen, decision) in enumerate(decided):
                yield works[index].result() if index in works else PassOutcome(decision, seen)
        except BaseException:
            # The pass was interrupted: it begins nothing more, and waits for nothing.
            for work in works.values():
                work.cancel()
            raise
        finally:
            cleaning.shutdown(wait=False)

    def _begin_starts(
        self, works: Sequence[Callable[[], PassOutcome]]
    ) -> list[Future[PassOutcome]]:
        """Begin starts in their order, so many at a time; one that takes long gives its slot to the
        next, and goes on."""
        futures: list[Future[PassOutcome]] = [Future() for _ in works]

        def begin() -> None:
            pool = SlotPool[None](self.settings.parallel, self.slot_s)
            for number, (work, future) in enumerate(zip(works, futures, strict=True)):
                while pool.is_full():
                    pool.wait()
                if not future.set_running_or_notify_cancel():
                    return
                pool.begin(str(number), partial(_fulfil, future, work))

        Thread(target=begin, daemon=True).start()
        return futures

    def _decide(self, seen: Observed | Domain, tries: Tries) -> Decision:
        found = decide(seen, tries, self.settings, self.clock())
        left = tuple(action for action in found.actions if action in self.only)
        # A pass that does not give up an instance does not say so.
        is_left_out = Action.GIVE_UP in found.actions and Action.GIVE_UP not in left
        return replace(found, actions=left, is_odd=found.is_odd and not is_left_out)

    def _outcome(self, seen: Observed | Domain, decision: Decision) -> PassOutcome:
        outcome = PassOutcome(decision, seen)
        try:
            runs = self._do(outcome, seen)
            if not runs():
                why = f"{outcome.decision.why}; and it was stopped meanwhile"
                outcome.decision = replace(outcome.decision, why=why)
        except LockedError:
            outcome.decision = Decision(why="another process is working on it")
        except KeptOutError as error:
            outcome.decision = Decision(why=str(error).removeprefix(f"{error.name}: "))
        except BrineError as error:
            outcome.fault = error
        except OSError as error:
            text = f"{outcome.name}: {error.filename or 'the system'}: {error.strerror}"
            outcome.fault = BrineError(text)
        return outcome

    def _do(self, outcome: PassOutcome, seen: Observed | Domain) -> Callable[[], bool]:
        """Do what is still right, one thing after another; returns what waits for a start."""
        runs: Callable[[], bool] = lambda: True  # noqa: E731
        if self.is_paused():
            outcome.decision = Decision(why="the watcher was paused meanwhile")
            return runs
        with self.instances.alone(seen):
            now = self.instances.look_again(seen)
            if now is None:
                outcome.decision = Decision(why="it is gone")
                return runs
            tries = NONE
            if isinstance(now, Observed) and self._counts() and not is_reset(now):
                tries = restart_counter.load().get(now.name, NONE)
            outcome.seen, outcome.decision = now, self._decide(now, tries)
            for action in outcome.decision.actions:
                match action:
                    case Action.SET_DOWN:
                        self.instances.set_down(now)
                    case Action.CLEAN_UP:
                        self.instances.clean_up(now)
                    case Action.START:
                        runs = self.instances.start(now)
                    case Action.TRY:
                        # On record first: a try that was killed is one, too.
                        tries = with_one_more(tries, self.settings, self.clock())
                        with restart_counter.changed() as counters:
                            counters[now.name] = tries
                        runs = self.instances.start(now)
                    case Action.GIVE_UP:
                        # Said first: a pass that is killed in between says it again, not never.
                        messages.tell_action(now, action, tries)
                        with restart_counter.changed() as counters:
                            counters[now.name] = replace(tries, given_up=True)
                    case Action.FORGET:
                        restart_counter.forget_counter(now.name)
                    case Action.CONTINUE:
                        self.instances.resume(now)
                outcome.actions += (action,)
                if action is not Action.GIVE_UP:
                    messages.tell_action(now, action, tries)
        return runs


def _fulfil(future: Future[PassOutcome], work: Callable[[], PassOutcome]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _wait_while_any_ends(works: Iterable[Future[PassOutcome]]) -> None:
    """Wait for these works to end; give up when none of them ends for a while."""
    left = set(works)
    while left:
        ended, left = wait(left, timeout=_STUCK_S, return_when=FIRST_COMPLETED)
        if not ended:
            return


# The work on this node's instances, and on domains that are none.

_LOCK_S = 5.0
_STORAGE_S = 2.0
_ROOM_BYTES = 16 * 2**20
_VERDICT_S = 1.0
_SETTLED_S = 10.0
_CLEARED_S = 60.0
_ZOMBIE_S = 5.0
_XEN = Path("/proc/xen/capabilities")
"""Has ``control_d`` where domains are made."""


class Instances:
    """The instances of this node, and domains that are none.

    :param timeout_s: how long one may take to start; 0 waits for none.
    :param names: of those that are looked at; None are all, and domains that are none.
    """

    def __init__(self, *, timeout_s: float, names: Container[str] | None = None) -> None:
        self._timeout_s = timeout_s
        self._names = names
        self._looked_at = time.monotonic()

    def look(self) -> Iterator[Observed | Domain | BrineError]:
        """Observe all. systemd and Xen are asked once, and the journal only about instances that
        left no marker."""
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
        unsaid = [seen for seen in found if needs_verdict(seen)]
        verdicts = verdicts_on(unsaid)
        if late := [seen for seen in unsaid if seen.name not in verdicts]:
            time.sleep(_VERDICT_S)  # they may just be being written
            verdicts |= verdicts_on(late)
        is_node_starting = cache(unit.is_node_starting)
        for seen in found:
            yield _completed(seen, verdicts, is_node_starting)
        if self._names is None and _makes_domains():
            yield from _others(domains, found, faulty)
        self._looked_at = time.monotonic()

    def look_again(self, seen: Observed | Domain) -> Observed | Domain | None:
        """Observe one as it is now; None if it is gone, or no foreign domain any more."""
        if isinstance(seen, Domain):
            return _foreign(seen)
        if not store.spec_file_of(seen.name).exists():
            return None
        now = look(seen.name)
        verdicts = verdicts_on([now] if needs_verdict(now) else [])
        return _completed(now, verdicts, unit.is_node_starting)

    def alone(self, seen: Observed | Domain) -> AbstractContextManager[None]:
        """Keep other processes from changing its spec and from starting it."""
        if isinstance(seen, Domain):
            return nullcontext()
        return store.alone(seen.name, timeout_s=_LOCK_S)

    def set_down(self, seen: Observed | Domain) -> None:
        """Set an instance down by its user, in its spec and for the cluster."""
        keep_users_will(seen.name, is_told=end_of(seen) in (EndCause.USER, EndCause.UNKNOWN))

    def clean_up(self, seen: Observed | Domain) -> None:
        """Destroy an ended domain. With QEMU, systemd has cleaned up."""
        if isinstance(seen, Domain):
            # Its own xl may have been about to remove it, or make it anew.
            time.sleep(max(self._looked_at + _SETTLED_S - time.monotonic(), 0))
            if domain := _foreign(seen):
                xl.destroy(domain)
            return
        now = look(seen.name)
        if now.has_stale_stop:
            remove_unheld(MarkerKind.STOP, now.name)
        elif is_left(now):
            remove_domain(now)

    def resume(self, seen: Observed | Domain) -> None:
        """Continue an instance. An error if its storage is full at once again."""
        if isinstance(seen, Observed):
            hypervisor_of(seen.spec).set_paused(seen, seen.run.id, paused=False)

    def start(self, seen: Observed | Domain) -> Callable[[], bool]:
        """Start an instance; the result waits until it runs, and is False if it was stopped
        meanwhile.

        :raises BrineError: if it can't be started, and so does the result if it does not run.
        """
        name, slice_name = seen.name, "" if isinstance(seen, Domain) else seen.spec.slice
        if not self._timeout_s:
            unit.start_later(name, slice_name=slice_name)
            return lambda: True
        before = unit.units([name]).get(name)
        begun = unit.begin_start(name, slice_name=slice_name)

        def runs() -> bool:
            try:
                begun(timeout_s=self._timeout_s)
            except TimeoutError:
                text = f"has not started within {self._timeout_s:g} s"
                raise InstanceError(name, text, hint=f"systemctl status {unit_of(name)}") from None
            except UnitError as error:
                # First, as it marks the stop of a start that had not begun.
                failure = start_failure(name, error, before)
                if _is_stopped(name):
                    return False
                raise failure from error
            return True

        return runs


def take_ended() -> frozenset[str]:
    """The instances that have ended by themselves since the last call."""
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


def wait_cleared(names: Iterable[str]) -> None:
    """Wait until the units of instances have cleared up after them; not for long."""
    deadline = time.monotonic() + _CLEARED_S
    for found in unit.units(names).values():
        if found.active is Active.DEACTIVATING:
            unit.wait_ended(found.run, timeout_s=deadline - time.monotonic())


def _is_stopped(name: str) -> bool:
    """Whether the instance was stopped, undefined or set down since. Then its start may fail."""
    if not store.spec_file_of(name).exists():
        return True
    seen = look(name)
    return seen.run.was_stopped() or seen.spec.admin_state != AdminState.UP


def _completed(
    seen: Observed,
    verdicts: Mapping[str, RecordedVerdict],
    is_node_starting: Callable[[], bool],
) -> Observed:
    """An observed instance with all that the decision needs."""
    if verdict := verdicts.get(seen.name):
        seen = replace(seen, verdict=verdict.who)
    if has_not_run(seen) and is_node_starting():
        seen = replace(seen, awaits_node=True)
    if seen.halted and seen.halted.no_space:
        seen = replace(seen, has_room=_has_room(seen.spec))
    failed = counting_failure(seen)
    if failed and failed.lacks:
        seen = replace(seen, lacks=_missing(failed.lacks))
    return seen


def _missing(several: Sequence[str]) -> tuple[str, ...]:
    """The files that do not exist. Where storage does not answer, none of them does."""
    found: list[str] = []
    _look_at_storage(lambda: found.extend(one for one in several if os.path.exists(one)))
    return tuple(one for one in several if one not in found)


def _has_room(spec: Spec) -> bool:
    """Whether the file systems of all disks of an instance have room. A block device, which may be
    thin, can only be tried: QEMU stops again if it is still full."""
    found: list[bool] = []  # of all disks at once: storage that does not answer has no room

    def look() -> None:
        with suppress(OSError):
            files = [os.statvfs(disk.path) for disk in spec.disks if os.path.isfile(disk.path)]
            found.append(all(one.f_bavail * one.f_frsize >= _ROOM_BYTES for one in files))

    _look_at_storage(look)
    return found == [True]


def _look_at_storage(look: Callable[[], object]) -> None:
    """Look at storage, which may not answer: then go on without."""
    looking = Thread(target=look, daemon=True)
    looking.start()
    looking.join(_STORAGE_S)


def _makes_domains() -> bool:
    """Whether this node is the one that makes Xen's domains."""
    try:
        return "control_d" in _XEN.read_text()
    except OSError:
        return False


def _others(
    domains: Domains, ours: Iterable[Observed], faulty: Container[str]
) -> Iterator[Domain | BrineError]:
    """The domains that are not ours, or can't die, and rows of Xen's that are not understood.

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
                yield domain
        elif domain.uuid not in uuids and domain.name not in faulty:
            yield domain


def _stuck(zombies: Sequence[Domain]) -> Container[tuple[int, str, int]]:
    """The traces of those that Xen can't get rid of. One that it is just destroying looks the same
    for a while, and gets smaller."""
    if not zombies:
        return ()
    time.sleep(_ZOMBIE_S)
    later = {_trace(one) for one in xl.domains().domains if one.is_zombie()}
    return later.intersection(map(_trace, zombies))


def _trace(zombie: Domain) -> tuple[int, str, int]:
    return zombie.number, zombie.uuid, zombie.memory_mib


def _foreign(seen: Domain) -> Domain | None:
    """A foreign domain as it is now; None if it is gone, or is ours by now: an instance may have
    been defined meanwhile, or renamed just when all were looked at."""
    for domain in xl.domains().domains:
        if (domain.number, domain.uuid) == (seen.number, seen.uuid):
            return None if _is_instances(domain) else domain
    return None


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
