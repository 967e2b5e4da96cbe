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

    :param warn: called for a runtime file that could not be used, and is kept aside.
    :raises BrineError: why it does not start; then nothing of the attempt is left.
    """
    asides: frozenset[Path] = frozenset()
    deadline = time.monotonic() + _ENDING_S
    is_asked = is_wanted = is_noted = False
    while True:
        with store.alone(name):
            files.settle(name)
            spec = _load(name)
            refuse_elsewhere(spec)
            # The user's shutdown may have been noted while it ended. This start came after that.
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
                    # Queued while the lock is held, so that a later stop finds the job.
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
    """Whether the unit is still in its former run: systemd starts nothing before it has seen the
    former process end."""
    if run == markers.UNKNOWN_RUN or markers.last_run(name) != run:
        return False
    found = unit.units([name]).get(name)
    return found is not None and found.invocation == run and oper_of(found) is not Oper.DOWN


def _ending_or_runs(spec: Spec) -> tuple[Unit | None, bool]:
    """The unit of an instance that is just ending, else None; and whether the instance runs."""
    if not _runs(spec):
        return None, False
    found = unit.units([spec.name]).get(spec.name)
    is_ending = found is not None and hypervisor_of(spec).is_ending(spec.name, found)
    return (found if is_ending else None), True


def _wait_ended(spec: Spec, found: Unit, deadline: float) -> None:
    """Wait until a run of a unit has ended, with its cleanup.

    :raises InstanceError: if it has not ended in time.
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
    """Withdraw an earlier stop of a running instance. Its guest may still shut down because of that
    stop; then the instance is to start again."""
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
    """The error of an instance that did not start, with QEMU's message if there is one.

    :param before: the state of its unit before the attempt.
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
    """Whether it runs, as systemd says. Systemd is asked only if QEMU listens or a stop marker
    exists, because that takes long.

    :raises InstanceError: if it is being stopped: a start and a stop must not mix.
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
    """Warn the caller of what the unit has reported in the journal."""
    if not files:
        return
    from brine.instance.kvm.live_changes import why_aside

    for file in sorted(files):
        warn(why_aside(spec, file))


# Starting all instances of a node that should be up, as when the node starts.

SLOT_S = 20.0
"""How long a start occupies its slot; then another start begins."""

_MOUNTS = Path("/proc/self/mounts")


class StillStartingError(InstanceError):
    """An instance whose start takes long. systemd goes on with it; Brine does not wait."""


def start_all(*, parallel: int, slot_s: float = SLOT_S) -> Iterator[tuple[str, BrineError | None]]:
    """Start all instances that should be up and are down, but those that their users shut down.

    All instances with a lower ``start_order`` have started or failed before the next ones begin. A
    start that takes longer than *slot_s* holds up no other. Last come the instances that the
    watcher has tried to start, and those with disks on the same storage as a start that takes so
    long.

    :param parallel: how many start at the same time.
    :returns: the name of each when it has started, with its error if it failed; also of specs that
        can't be used. Last comes a :class:`StillStartingError` for each that is still starting.
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
        """Start these in their order; returns when all slots are free again.

        :param last: collects those that are put off.
        """
        for seen in several:
            while self._slots and not self._has_room(seen):
                yield from self._next()
            if last is not None and not self._silent.isdisjoint(storage_of(seen.spec)):
                last.append(seen)
                continue
            name = seen.name
            self._slots[name] = (seen.spec, time.monotonic() + self._slot_s)
            # A daemon thread: one that hangs must not keep the program from ending.
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
    """The instances with a restart counter: the watcher has tried to start them."""
    try:
        return frozenset(restart_counter.load())
    except TriesError:
        return frozenset()


def storage_of(spec: Spec) -> frozenset[str]:
    """The storage of an instance's disks: mount points, and folders of devices. This function
    touches none of it, because it may not answer."""
    points = {line.split()[1] for line in _MOUNTS.read_text(errors="replace").splitlines()}
    found = set()
    for disk in spec.disks:
        path = PurePosixPath(disk.path)
        if path.is_relative_to("/dev"):
            # The folder of a volume group; other folders of /dev mix all kinds of disks.
            found.add(str(path.parent if len(path.parts) == 4 and _is_group(path) else path))
        else:
            found.add(next((str(one) for one in path.parents if str(one) in points), "/"))
    return frozenset(found)


def _is_group(path: PurePosixPath) -> bool:
    return path.parts[2] not in ("mapper", "disk", "zvol")


def is_due(seen: Observed) -> bool:
    """Whether an instance should be up and is down."""
    return seen.spec.admin_state == AdminState.UP and seen.state.oper is Oper.DOWN


def _start(seen: Observed) -> BrineError | None:
    name = seen.name
    try:
        with store.alone(name):  # until it is queued, or who stops it now would miss it
            # Other instances were started first, so its admin_state may have changed.
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
    """Report the state of an instance after the user has interrupted a wait.

    :param runs: the words for a running instance.
    """
    try:
        seen = look(name)
    except BrineError:
        return 128 + signal.SIGINT  # it has no spec, say
    words = runs if seen.state.oper is Oper.RUNNING else f"is {seen.state.oper}"
    text = f"interrupted: {name} {words}; its admin_state is {seen.spec.admin_state}"
    print(text, file=sys.stderr)
    return 128 + signal.SIGINT
