"""Starting an instance, or all of this node's: ``brine instance start``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from brine.common import markers
from brine.common.errors import BrineError, UsageError, tell_error, warn
from brine.common.markers import BELIEVED_S, MarkerKind
from brine.common.peer import unit_of
from brine.common.process import spoken_wait
from brine.instance import files, messages, restart_counter, store, unit
from brine.instance.hypervisor import hypervisor_of
from brine.instance.intent import forget_end, want
from brine.instance.messages import log_to_journal
from brine.instance.observe import load_or_why, look, look_at_all
from brine.instance.restart_counter import TriesError, forget
from brine.instance.spec import AdminState, Spec
from brine.instance.status import Observed, Oper, oper_of
from brine.instance.store import InstanceError, NoSpecError, asides_of, refuse_elsewhere
from brine.instance.unit import Unit, UnitError

if TYPE_CHECKING:
    from brine.instance.kvm.live_changes import SetAside

_ENDING_S = 60.0
_ANSWER_S = 2.0
_PAUSE_S = 0.05


class Started(Enum):
    """The result of a start."""

    STARTED = auto()
    NOTED = auto()
    """It ran already; its admin_state is up now."""
    UNCHANGED = auto()


def start_instance(name: str, *, warn: Callable[[SetAside], object] | None = None) -> Started:
    """Start an instance, and set its admin_state to up.

    :param warn: told of a runtime file that could not be used, and is kept aside.
    :raises BrineError: why it does not; then nothing of it is left.
    """
    asides: frozenset[Path] = frozenset()
    deadline = time.monotonic() + _ENDING_S
    is_asked = is_wanted = is_noted = False
    while True:
        with store.alone(name):
            files.settle(name)
            spec = _load(name)
            refuse_elsewhere(spec)
            # The user's own shutdown may have been noted while it ended; this start came after it.
            if is_wanted and spec.admin_state != AdminState.UP and not spec.is_down_by_user():
                raise _stopped_meanwhile(name)
            ending, runs = _ending_or_runs(spec)
            is_noted = want(spec, AdminState.UP) or is_noted
            is_wanted = True
            forget_tries(name)
            if runs and not ending:
                _keep_up(spec)
                if is_asked:
                    return Started.STARTED
                return Started.NOTED if is_noted else Started.UNCHANGED
            if not ending:
                _forget_end(spec)
                asides = asides_of(name)
                messages.tell(messages.START_ASKED, name)
                is_asked = True
                run = markers.last_run(name)
                since_us = time.monotonic_ns() // 1000
                try:
                    # Queued before anybody else is alone with it: who stops it now, does so.
                    wait = unit.begin_start(name)
                except UnitError as error:
                    raise start_failure(name, error, since_us=since_us) from error
        if ending:
            _wait_ended(spec, ending, deadline)
            continue
        try:
            with spoken_wait(f"{name}: waiting for its start, at most {spec.start_limit_s()} s"):
                wait()
        except UnitError as error:
            raise start_failure(name, error, since_us=since_us) from error
        finally:
            if warn:
                _warn_of(spec, asides_of(name) - asides, warn)
        if not _is_still(name, run) or _is_late(deadline):
            return Started.STARTED
        time.sleep(_PAUSE_S)


def _is_still(name: str, run: str) -> bool:
    """Whether an instance that was started is still in the run before: systemd starts nothing whose
    process it has not seen end yet."""
    if run == markers.UNKNOWN_RUN or markers.last_run(name) != run:
        return False
    found = unit.units([name]).get(name)
    return found is not None and found.invocation == run and oper_of(found) is not Oper.DOWN


def _ending_or_runs(spec: Spec) -> tuple[Unit | None, bool]:
    """The unit of an instance that is just ending by itself, else None; and whether it runs."""
    if not _runs(spec):
        return None, False
    found = unit.units([spec.name]).get(spec.name)
    is_ending = found is not None and hypervisor_of(spec).is_ending(spec.name, found)
    return (found if is_ending else None), True


def _wait_ended(spec: Spec, found: Unit, deadline: float) -> None:
    """Wait until a run of a unit has ended, and been cleared up after.

    :raises InstanceError: if it has not in time.
    """
    name = spec.name
    with spoken_wait(f"{name}: waiting for its QEMU to end, at most {_ENDING_S:g} s"):
        while True:
            now = unit.units([name]).get(name)
            if now is None or now.invocation != found.invocation or oper_of(now) is Oper.DOWN:
                return
            if _is_late(deadline):
                text = f"its QEMU has begun to end, and has not within {_ENDING_S:g} s"
                hint = f"brine instance stop --force {name}, then start it"
                raise InstanceError(name, text, hint=hint)
            time.sleep(_PAUSE_S)


def _is_late(deadline: float) -> bool:
    return time.monotonic() > deadline


def _keep_up(spec: Spec) -> None:
    """Have an instance that runs go on to do so, whatever others wanted before: its guest may still
    follow a stop that it has not followed in time. Then it is to start again."""
    name = spec.name
    try:
        markers.remove_unheld(MarkerKind.STOP, name)
        run = markers.last_run(name)
        asked = markers.read_marker(MarkerKind.ASKED, name, run=run)
        may_obey = asked is not None and time.time() - asked.made_at < BELIEVED_S
        if asked and may_obey and not markers.is_held(MarkerKind.REBOOT, name):
            markers.write_marker(MarkerKind.REBOOT, name, run=run, until=asked.made_at)
    except OSError as error:
        warn(f"{name}: its stop before: {error}")


def _load(name: str) -> Spec:
    try:
        return store.load(name)
    except NoSpecError:
        return load_or_why(name)


def start_failure(
    name: str, error: UnitError, before: Unit | None = None, *, since_us: int = 0
) -> InstanceError:
    """What to tell of an instance that did not start: what its QEMU said, if that is known.

    :param before: its unit as it was before the attempt.
    :param since_us: when the attempt began, by the clock that begins with the boot.
    """
    from brine.instance.history import why_not_started

    try:
        found = unit.units([name]).get(name)
    except UnitError:
        found = None  # what went wrong before is what is told
    invocation = found.invocation if found else ""
    is_other = before is None or before.invocation != invocation
    is_new = found and invocation and is_other and found.begun_us >= since_us
    reason = None
    with suppress(OSError):  # a journal that is damaged keeps nobody from going on
        reason = why_not_started(name, invocation) if is_new else None
    hint = f"journalctl --unit {unit_of(name)} has all of it"
    if reason is None:
        return InstanceError(name, f"did not start: {error}", hint=error.hint or hint)
    return InstanceError(name, f"did not start: {reason.text}", hint=reason.hint or hint)


def being_stopped(name: str) -> InstanceError:
    """The error of an instance that is just being stopped."""
    hint = f"try again when it is down; brine instance stop --force {name} hastens that"
    return InstanceError(name, "is just being stopped", hint=hint)


def _stopped_meanwhile(name: str) -> InstanceError:
    hint = f"brine instance start {name}"
    text = "was not started: somebody has wanted otherwise while its QEMU was ending"
    return InstanceError(name, text, hint=hint)


def _forget_end(spec: Spec) -> None:
    """Forget the last end of an instance, even if the start fails."""
    try:
        forget_end(spec, starts=True)
    except OSError as error:
        warn(f"{spec.name}: its last end: {error}")


def forget_tries(name: str) -> None:
    """Forget the watcher's tries, because an administrator acts on the instance."""
    try:
        forget(name)
    except BrineError as error:
        warn(str(error))


def _runs(spec: Spec) -> bool:
    """Whether it runs, as systemd says. To ask takes long, and a QEMU that runs listens; one that
    is being stopped has its marker, too.

    :raises InstanceError: if somebody is just stopping it: both would have what neither wants.
    """
    name = spec.name
    has_stop = markers.read_marker(MarkerKind.STOP, name) is not None
    if not hypervisor_of(spec).may_run(name) and not has_stop:
        return False

    seen = look(name)
    oper = seen.state.oper
    if oper is Oper.STOPPING and (spec.is_xen() or seen.was_stopped):
        raise being_stopped(name)
    return oper in (Oper.RUNNING, Oper.STOPPING)


def _warn_of(spec: Spec, files: frozenset[Path], warn: Callable[[SetAside], object]) -> None:
    """Tell who asked for the start, too, of what the runner has told the journal."""
    if not files:
        return
    from brine.instance.kvm.live_changes import why_aside

    for file in sorted(files):
        warn(why_aside(spec, file))


# Starting all instances of a node that should be up, as after its own start.

SLOT_S = 20.0
"""So long a start counts among those that are made at the same time; then another one begins."""

_MOUNTS = Path("/proc/self/mounts")


class StillStartingError(InstanceError):
    """An instance whose start takes long. systemd goes on with it, and nobody waits."""


def start_all(*, parallel: int, slot_s: float = SLOT_S) -> Iterator[tuple[str, BrineError | None]]:
    """Start all instances that should be up and are down, but those that their users shut down.

    Those with a lower ``start_order`` have started, or failed to, before the next ones begin. What
    takes longer than *slot_s* holds up no other one. Last come those that the watcher has tried to
    start, and those whose disks are where those of a start are that takes so long.

    :param parallel: how many start at the same time.
    :returns: the name of each, as it has started, with why it did not; also of specs that can't be
        used. In the end :class:`StillStartingError` of those that are starting still.
    :raises UnitError: if systemd can't be asked.
    """
    due = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            yield seen.name, seen
        elif is_due(seen):
            due.append(seen)
    yield from _Starts(parallel, slot_s).of(due)


class _Starts:
    """Starts of many, some of which hang."""

    def __init__(self, parallel: int, slot_s: float) -> None:
        self._parallel = parallel
        self._slot_s = slot_s
        self._ended: SimpleQueue[tuple[str, BrineError | None]] = SimpleQueue()
        self._slots: dict[str, tuple[Spec, float]] = {}  # with when each is given back
        self._late: dict[str, Spec] = {}
        self._silent: set[str] = set()  # storage of late ones

    def of(self, due: Sequence[Observed]) -> Iterator[tuple[str, BrineError | None]]:
        failed = _failed_before()
        due = sorted(due, key=lambda seen: (seen.spec.start_order, seen.name))
        last = [seen for seen in due if seen.name in failed]
        yield from self._begin([seen for seen in due if seen.name not in failed], last)
        last.sort(key=lambda seen: (seen.name in failed, seen.spec.start_order))
        yield from self._begin(last, None)
        for name in sorted(self._late):
            text = f"is starting still, after {self._slot_s:g} s, and nobody waits for it"
            hint = f"brine instance info {name} tells how that goes on"
            yield name, StillStartingError(name, text, hint=hint)

    def _begin(
        self, several: Sequence[Observed], last: list[Observed] | None
    ) -> Iterator[tuple[str, BrineError | None]]:
        """Start these in their order; returns when none has a slot any more.

        :param last: takes those that are put off.
        """
        for seen in several:
            while self._slots and not self._has_room(seen):
                yield from self._next()
            if last is not None and not self._silent.isdisjoint(storage_of(seen.spec)):
                last.append(seen)
                continue
            name = seen.name
            self._slots[name] = (seen.spec, time.monotonic() + self._slot_s)
            # One that hangs must not keep the whole program from ending.
            Thread(target=self._start, args=(seen,), daemon=True).start()
        while self._slots:
            yield from self._next()

    def _has_room(self, seen: Observed) -> bool:
        orders = {spec.start_order for spec, _ in self._slots.values()}
        return len(self._slots) < self._parallel and orders == {seen.spec.start_order}

    def _start(self, seen: Observed) -> None:
        error: BrineError | None
        try:
            error = _start(seen)
        except OSError as fault:
            error = InstanceError(seen.name, f"{fault.filename or fault}: {fault.strerror}")
        self._ended.put((seen.name, error))

    def _next(self) -> Iterator[tuple[str, BrineError | None]]:
        """Wait for the end of any start, or until one has had its time."""
        left_s = min(until for _, until in self._slots.values()) - time.monotonic()
        try:
            name, error = self._ended.get(timeout=max(left_s, 0))
        except Empty:
            now = time.monotonic()
            for name in [one for one, (_, until) in self._slots.items() if until <= now]:
                self._late[name] = self._slots.pop(name)[0]
                self._silent |= storage_of(self._late[name])
            return
        self._slots.pop(name, None)
        self._late.pop(name, None)
        yield name, error


def _failed_before() -> frozenset[str]:
    """Those that the watcher has tried to start since they were well."""
    try:
        return frozenset(restart_counter.load())
    except TriesError:
        return frozenset()


def storage_of(spec: Spec) -> frozenset[str]:
    """What the disks of an instance are kept in: mount points, and folders of devices. Nothing of
    that is touched, as it may not answer."""
    points = {line.split()[1] for line in _MOUNTS.read_text(errors="replace").splitlines()}
    found = set()
    for disk in spec.disks:
        path = PurePosixPath(disk.path)
        if path.is_relative_to("/dev"):
            # A volume group's folder; others have disks of all kinds.
            found.add(str(path.parent if len(path.parts) == 4 and _is_group(path) else path))
        else:
            found.add(next((str(one) for one in path.parents if str(one) in points), "/"))
    return frozenset(found)


def _is_group(path: PurePosixPath) -> bool:
    return path.parts[2] not in ("mapper", "disk", "zvol")


def is_due(seen: Observed) -> bool:
    """Whether an instance should run and nothing of it does."""
    return seen.spec.admin_state == AdminState.UP and seen.state.oper is Oper.DOWN


def _start(seen: Observed) -> BrineError | None:
    name = seen.name
    try:
        with store.alone(name):  # until it is queued, or who stops it now would miss it
            # Others were started first: somebody may have decided otherwise since.
            if store.load(name).admin_state != AdminState.UP:
                return None
            messages.tell(messages.START_ASKED, name)
            wait = unit.begin_start(name)
        wait()
    except UnitError as error:
        return start_failure(name, error, seen.unit)
    except BrineError as error:
        return error
    return None


# ``brine instance start``, which loads less than the other verbs.


def start(arguments: argparse.Namespace) -> int:
    """``brine instance start``"""
    name = arguments.name
    if name is None and not arguments.all:
        raise UsageError("which instance?", hint="give its name, or --all")
    if name is not None and arguments.all:
        raise UsageError("--all, or that one?", hint="give a name, or --all")
    log_to_journal("brine")
    if arguments.all:
        return _start_all()
    try:
        done = start_instance(name, warn=lambda aside: warn(f"{name}: {aside}"))
    except KeyboardInterrupt:
        return interrupted(name, runs="runs")
    words = {
        Started.STARTED: f"started: {name}",
        Started.NOTED: f"noted: {name} runs already, and should from now on",
        Started.UNCHANGED: f"unchanged: {name} runs",
    }
    print(words[done])
    return 0


def _start_all() -> int:
    from brine.instance.settings import load_settings  # with it a reader of TOML

    failed = False
    for name, error in start_all(parallel=load_settings().parallel_starts):
        if error is None:
            print(f"started: {name}", flush=True)
        elif isinstance(error, StillStartingError):
            warn(str(error))
        else:
            failed = True
            tell_error(error)
    return 1 if failed else 0


def interrupted(name: str, *, runs: str) -> int:
    """Say what holds of an instance that somebody does not wait for any more.

    :param runs: what to say of it if it runs.
    """
    try:
        seen = look(name)
    except BrineError:
        return 128 + signal.SIGINT  # it has no spec, say
    words = runs if seen.state.oper is Oper.RUNNING else f"is {seen.state.oper}"
    text = f"interrupted: {name} {words}; its admin_state is {seen.spec.admin_state}"
    print(text, file=sys.stderr)
    return 128 + signal.SIGINT
