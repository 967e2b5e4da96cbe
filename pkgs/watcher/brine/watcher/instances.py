"""What the watcher has its hands on: this node's instances."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.instance_units import unit_of
from brine.common.marks import Kind, Mark, clear_way, read_mark, remove_unheld
from brine.common.printable import printable
from brine.common.regular_file import read_regular
from brine.instance import spec_files, unit
from brine.instance.journal import Verdict
from brine.instance.spec import AdminState
from brine.instance.spec_files import InstanceError
from brine.instance.states import Seen, Xen, look, look_at_all
from brine.instance.unit import Active, Unit
from brine.instance.verdicts import needed_verdicts, needs_verdict
from brine.watcher.decisions import End, Life, Sight
from brine.watcher.passes import Case
from brine.watcher.sights import life_of, sight_of, wish_of

if TYPE_CHECKING:
    from brine.instance.xen.domains import Domain

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
        """All of them, and domains that are none. systemd and Xen are asked once, and kvmd only
        about those that left no mark."""
        found: list[Seen] = []
        faulty: set[str] = set()
        xen = Xen()
        for seen in look_at_all(xen):
            name = seen.name if isinstance(seen, InstanceError) else seen.spec.name
            if self._names is not None and name not in self._names:
                continue
            if isinstance(seen, InstanceError):
                faulty.add(seen.name)
                yield seen
            else:
                found.append(seen)
        verdicts: Mapping[str, Verdict] = {}
        try:
            verdicts = _verdicts_on(found)
        except OSError as error:
            yield BrineError(f"the journal can't be read: {error.strerror}")
        is_node_starting = cache(unit.is_node_starting)
        for seen in found:
            yield _case_of(seen, verdicts, is_node_starting)
        if self._names is None and _makes_domains():
            yield from _others(xen, found, faulty)
        self._looked_at = time.monotonic()

    def look_again(self, key: str) -> Case | None:
        """One of them, by its name, or by the number and UUID of a domain."""
        if key.startswith(_DOMAIN):
            domain = _foreign(key)
            return _case_of_other(domain) if domain else None
        if not spec_files.file_of(key).exists():
            return None
        seen = look(key)
        return _case_of(seen, needed_verdicts([seen]))

    def alone(self, case: Case) -> AbstractContextManager[None]:
        """Nobody else changes its spec, or starts it."""
        if case.wish is None:
            return nullcontext()
        return spec_files.alone(case.key, timeout_s=_LOCK_S)

    def set_down(self, case: Case) -> None:
        """For good, in its spec and for the cluster."""
        from brine.instance.user_shutdown import keep_users_will

        keep_users_will(case.key, is_told=case.sight.end in (End.USER, End.UNKNOWN))

    def clean_up(self, case: Case) -> None:
        """Have Xen take back what a domain had. With QEMU, systemd has done so."""
        from brine.instance.xen import leftovers, xl

        if case.wish is None:
            if domain := self._settled(case.key):
                xl.destroy(domain)
            return
        seen = look(case.key)
        if seen.has_stale_stop:
            remove_unheld(Kind.STOP, case.key)
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
        """Have nobody wait for a start any more. systemd goes on with it."""
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
                from brine.instance.starting import start_failure

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
    if not spec_files.file_of(name).exists():
        return True
    seen = look(name)
    return seen.was_stopped or seen.spec.admin_state != AdminState.UP


def _makes_domains() -> bool:
    """Whether this node is the one that makes Xen's domains."""
    try:
        return "control_d" in _XEN.read_text()
    except OSError:
        return False


def _others(xen: Xen, ours: Iterable[Seen], faulty: Container[str]) -> Iterator[Case | BrineError]:
    """The domains that are not ours, or can't die, and what nobody understands.

    :param faulty: the names of instances of which more is not known.
    """
    from brine.instance.xen import xl

    try:
        listing = xen.listing()
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
    from brine.instance.xen import xl

    if not zombies:
        return ()
    time.sleep(_ZOMBIE_S)
    later = {_trace(one) for one in xl.domains().domains if one.is_zombie()}
    return later.intersection(map(_trace, zombies))


def _trace(zombie: Domain) -> tuple[int, str, int]:
    return zombie.number, zombie.uuid, zombie.memory_mib


def _case_of_other(domain: Domain) -> Case:
    name, key = printable(domain.name), f"{_DOMAIN}{domain.number}:{domain.uuid}"
    return Case(key, name, None, Sight(life_of(domain), said=domain.state))


def _foreign(key: str) -> Domain | None:
    """A domain that is not ours; None if it is gone, or is ours by now: an instance may have been
    defined meanwhile, or renamed just when all were looked at."""
    from brine.instance.xen import xl

    there = xl.domains().domains
    found = next((one for one in there if f"{_DOMAIN}{one.number}:{one.uuid}" == key), None)
    return None if found is None or _is_instances(found) else found


def _is_instances(domain: Domain) -> bool:
    """Whether any spec is that of a domain, as far as it can be read."""
    uuid = domain.uuid.encode()
    for name in spec_files.names():
        try:
            # Not taken apart, as a damaged one may be its, too.
            if uuid in read_regular(spec_files.file_of(name)).lower():
                return True
        except FileNotFoundError:
            continue  # it was undefined just now
        except OSError:
            if name == domain.name:
                return True
    return False


def _case_of(
    seen: Seen,
    verdicts: Mapping[str, Verdict],
    is_node_starting: Callable[[], bool] = unit.is_node_starting,
) -> Case:
    name = seen.spec.name
    verdict = verdicts.get(name)
    sight = sight_of(seen, verdict.who if verdict else None)
    if sight.end is End.NEVER and is_node_starting():
        sight = replace(sight, is_busy=True)  # its turn comes
    if sight.life is Life.DOWN and (failure := read_mark(Kind.FAILURE, name)):
        sight = _with_failure(sight, seen, failure)
    return Case(name, name, wish_of(seen.spec), sight)


def _with_failure(sight: Sight, seen: Seen, failure: Mark) -> Sight:
    """The same of an instance that is down and failed last, as systemd saw it."""
    if failure.run == seen.run and sight.end in (End.USER, End.ADMIN):
        return sight
    lacks = failure.facts.get("lacks")
    if isinstance(lacks, list) and lacks:
        sight = replace(sight, lacks=tuple(_missing([str(one) for one in lacks])))
    if seen.unit and seen.unit.active is Active.FAILED:
        return sight
    started = read_mark(Kind.STARTED, seen.spec.name, run=failure.run)
    return replace(sight, end=End.CRASH if started else End.FAILED, is_reset=True)


def _missing(several: Sequence[str]) -> list[str]:
    """Which of these files are not there. Where storage does not answer, none of them is."""
    found: list[str] = []

    def look() -> None:
        found.extend(one for one in several if os.path.exists(one))

    looking = Thread(target=look, daemon=True)
    looking.start()
    looking.join(_STORAGE_S)
    return [one for one in several if one not in found]


def _verdicts_on(several: list[Seen]) -> dict[str, Verdict]:
    """kvmd's verdicts. One that is just being written is waited for."""
    found = needed_verdicts(several)
    if late := [seen for seen in several if needs_verdict(seen) and seen.spec.name not in found]:
        time.sleep(_VERDICT_S)
        found |= needed_verdicts(late)
    return found
