"""Starting an instance, or all of this node's: ``brine instance start``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePosixPath

from brine.common.errors import BrineError, UsageError, tell_error, warn
from brine.common.progress import spoken_wait
from brine.instance import messages, store, unit
from brine.instance.action import Done, act_on_each
from brine.instance.claims import refuse_barred
from brine.instance.failed_starts import why_not_started
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.intent import forget_user_shutdown, want
from brine.instance.observe import Observed, Oper, load_or_why, look, look_at_all, oper_of
from brine.instance.owner import refuse_without_owner, warn_without_handler
from brine.instance.parallel import SlotPool
from brine.instance.store import InstanceError, asides_of, system_error
from brine.instance.supervisor import supervisor
from brine.instance.unit import CalledOffError, Unit, UnitError
from brine.vm import markers
from brine.vm.end import has_obeyed
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.spec import AdminState, Spec
from brine.vm.unit_name import unit_of

_ENDING_S = 60.0
_PAUSE_S = 0.05


class Started(StrEnum):
    """The result of a start. An instance that runs already may be *noted* to be up from now on."""

    STARTED = "started"
    NOTED = "noted"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class _Queued:
    """A start that systemd has queued.

    :param before: the run before it.
    :param since_us: when it was queued, by the clock that begins with the boot.
    :param asides: the unusable runtime files that there were.
    :param wait: waits for its end.
    """

    spec: Spec
    before: Run
    since_us: int
    asides: frozenset[Path]
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What was found, and done, while the lock of an instance was held. It runs, its unit is just
    *ending*, or its start is *queued*.

    :param is_noted: whether its admin_state changed, at this turn or before.
    :param is_asked: whether its start was queued, at this turn or before.
    """

    is_noted: bool
    is_asked: bool
    ending: Unit | None = None
    queued: _Queued | None = None


def start_instance(name: str, *, keeps_tries: bool = False) -> Started:
    """Start an instance, and set its admin_state to up. A failed start leaves nothing behind.

    :param keeps_tries: whether the watcher goes on counting where it is.
    """
    deadline = time.monotonic() + _ENDING_S
    turn = None
    while True:
        turn = _take_turn(name, turn, keeps_tries=keeps_tries)
        if turn.ending:
            _wait_ended(name, turn.ending, deadline)
        elif turn.queued:
            _wait_started(turn.queued)
            if not _is_still(turn.queued.before) or time.monotonic() > deadline:
                return Started.STARTED
            time.sleep(_PAUSE_S)
        elif turn.is_asked:
            return Started.STARTED
        else:
            return Started.NOTED if turn.is_noted else Started.UNCHANGED


def _take_turn(name: str, before: _Turn | None, *, keeps_tries: bool) -> _Turn:
    """Look at an instance, note that it should be up, and queue its start if it does not run.

    :param before: the turn before, of the same command.
    """
    with store.alone(name):
        spec = load_or_why(name)
        refuse_barred(spec)
        # The user's shutdown may have been noted while it ended. This start came after that.
        if before and spec.admin_state != AdminState.UP and not spec.is_down_by_user():
            text = "was not started: its admin_state changed while its QEMU was ending"
            raise InstanceError(name, text, hint=f"brine instance start {name}")
        runs, ending = _runs(spec)
        if not runs:
            refuse_without_owner(spec)
            if spec.owner:
                warn_without_handler()
        is_noted = want(spec, AdminState.UP) or (before is not None and before.is_noted)
        if not keeps_tries:
            forget_tries(name)
        if runs and not ending:
            _keep_up(name)
        queued = None if runs else _queue(spec)
        is_asked = queued is not None or (before is not None and before.is_asked)
        return _Turn(is_noted, is_asked, ending, queued)


def _queue(spec: Spec) -> _Queued:
    """Queue the start of an instance whose lock the caller holds, so that a later stop finds it."""
    name = spec.name
    try:
        forget_end(spec)
    except OSError as error:
        warn(f"{name}: its last end: {error}")
    asides = asides_of(name)
    messages.tell(messages.START_ASKED, name)
    run = Run.last(name)
    since_us = time.monotonic_ns() // 1000
    try:
        wait = unit.begin_start(name, slice_name=spec.slice)
    except UnitError as error:
        raise start_failure(name, error, since_us=since_us) from error
    return _Queued(spec, run, since_us, asides, wait)


def _wait_started(queued: _Queued) -> None:
    spec = queued.spec
    name = spec.name
    try:
        with spoken_wait(f"{name}: waiting for its start, at most {spec.start_limit_s()} s"):
            queued.wait()
    except UnitError as error:
        raise start_failure(name, error, since_us=queued.since_us) from error
    finally:
        _warn_of(spec, asides_of(name) - queued.asides)


def forget_end(spec: Spec) -> None:
    """Forget an instance's last end, because its admin wants it up now: it counts as never started
    until it has come up, also if its start does not even begin.

    The caller holds the instance's lock. The marker of a stop in progress stays.
    """
    name = spec.name
    forget_user_shutdown(name)
    markers.remove_unheld(MarkerKind.STOP, name)
    if not Run.last(name).has_process():  # another command may just have started it
        markers.remove_marker(MarkerKind.STARTED, name)  # no verdict from before counts
    hypervisor_of(spec).remove_rest(name)


def _is_still(run: Run) -> bool:
    """Whether the unit is still in its former run: systemd starts nothing before it has seen the
    former process end."""
    if run.id == markers.UNKNOWN_RUN or not run.is_last():
        return False
    found = unit.find_unit(run.name)
    return found is not None and found.invocation == run.id and oper_of(found) is not Oper.DOWN


def _runs(spec: Spec) -> tuple[bool, Unit | None]:
    """Whether an instance runs, as systemd says; and its unit, if it is just ending.

    systemd is asked only if QEMU listens or a stop marker exists, because that takes long.

    :raises InstanceError: if it is being stopped: a start and a stop must not mix.
    """
    name, hypervisor = spec.name, hypervisor_of(spec)
    has_stop = Run.marked(MarkerKind.STOP, name) is not None
    if not hypervisor.may_run(name) and not has_stop:
        return False, None
    seen = look(name)
    oper = seen.state.oper
    if oper is Oper.STOPPING and (spec.is_xen() or seen.run.was_stopped()):
        raise being_stopped(name)
    if oper not in (Oper.RUNNING, Oper.STOPPING):
        return False, None
    if seen.halted and seen.halted.is_fault:
        warn(f"{name}: {seen.state.why}", hint=f"brine instance resume {name}, if it is to go on")
    is_ending = seen.unit is not None and hypervisor.is_ending(name, seen.unit)
    return True, seen.unit if is_ending else None


def _wait_ended(name: str, found: Unit, deadline: float) -> None:
    """Wait until a run of a unit has ended, with its cleanup."""
    with spoken_wait(f"{name}: waiting for its QEMU to end, at most {_ENDING_S:g} s"):
        if not unit.wait_ended(found.run, timeout_s=deadline - time.monotonic()):
            text = f"its QEMU has begun to end, and has not within {_ENDING_S:g} s"
            hint = f"brine instance stop --force {name}, then start it"
            raise InstanceError(name, text, hint=hint)


def _keep_up(name: str) -> None:
    """Withdraw an earlier stop of a running instance. Its guest may still shut down because of that
    stop; then the instance is to start again."""
    try:
        markers.remove_unheld(MarkerKind.STOP, name)
        run = Run.last(name)
        if has_obeyed(run, time.time()) and not markers.is_held(MarkerKind.REBOOT, name):
            markers.write_marker(MarkerKind.REBOOT, name, run=run.id, until=run.asked_at)
    except OSError as error:
        warn(f"{name}: its stop before: {error}")


def start_failure(
    name: str, error: UnitError, before: Unit | None = None, *, since_us: int = 0
) -> InstanceError:
    """The error of an instance that did not start, with QEMU's message if there is one. A start
    that was called off before systemd had begun it counts as stopped from then on.

    :param before: the state of its unit before the attempt.
    :param since_us: when the attempt began, by the clock that begins with the boot.
    """
    reason = None
    # If systemd or the journal gives no answer, the error still tells the first fault.
    with suppress(UnitError, OSError):
        found = unit.find_unit(name)
        is_other = found and (before is None or before.invocation != found.invocation)
        if found and found.invocation and is_other and found.begun_us >= since_us:
            reason = why_not_started(name, found.invocation)
        elif isinstance(error, CalledOffError):
            _note_called_off(name)
    text, hint = (reason.text, reason.hint) if reason else (str(error), error.hint)
    hint = hint or f"journalctl --unit {unit_of(name)} has all of it"
    return InstanceError(name, f"did not start: {text}", hint=hint)


def _note_called_off(name: str) -> None:
    """Mark the stop of a start that was queued: systemd runs none of its unit's programs.

    Nothing is marked if a command has stopped it, which notes that itself, or it starts again.
    """
    # Not a fault of the start: the error that follows says that it was called off.
    with suppress(BrineError), store.alone(name):
        is_wanted = store.load(name).admin_state == AdminState.UP
        if not is_wanted or oper_of(unit.find_unit(name)) is not Oper.DOWN:
            return
        # A failure of the run before would say more than the markers.
        unit.forget_failure(name)
        run = os.urandom(16).hex()  # as systemd names runs
        store.note_unbegun_run(name, run)
        markers.write_marker(MarkerKind.STOP, name, run=run)
        messages.tell(messages.CALLED_OFF, name)


def being_stopped(name: str) -> InstanceError:
    """The error of an instance that is just being stopped."""
    hint = f"try again when it is down; brine instance stop --force {name} hastens that"
    return InstanceError(name, "is just being stopped", hint=hint)


def forget_tries(name: str) -> None:
    """Forget the watcher's tries, because an administrator acts on the instance."""
    try:
        supervisor().forget(name)
    except BrineError as error:
        warn(str(error))


def _warn_of(spec: Spec, asides: frozenset[Path]) -> None:
    """Warn of what the unit has reported in the journal: a runtime file that it can't use."""
    if not asides:
        return
    from brine.instance.kvm.runtime_devices import why_aside  # only a start that drops devices

    for file in sorted(asides):
        warn(f"{spec.name}: {why_aside(spec, file)}")


# Starting all instances of a node that should be up, as when the node starts.

SLOT_S = 20.0
"""How long a start occupies its slot; then another start begins."""

_MOUNTS = Path("/proc/self/mounts")

_Result = tuple[str, BrineError | None]


class StillStartingError(InstanceError):
    """An instance whose start takes long. systemd goes on with it; Brine does not wait."""


class BarredError(InstanceError):
    """An instance that this node may not run now, which is no failure."""


def start_all(*, parallel: int, slot_s: float = SLOT_S) -> Iterator[_Result]:
    """Start all instances that should be up and are down, but those that their users shut down, and
    those whose owners are not there, and those that this node may not run.

    All instances with a lower ``start_order`` have started or failed before the next ones begin. A
    start that takes longer than *slot_s* holds up no other. Last come the instances that the
    watcher has tried to start, and those with disks on the same storage as a start that takes so
    long.

    :returns: the name of each when it has started, with its error if it failed; also of specs that
        can't be used, and a :class:`BarredError` for each that this node may not run. Last comes a
        :class:`StillStartingError` for each that is still starting.
    """
    due = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            yield seen.name, seen
        elif seen.spec.admin_state == AdminState.UP and seen.state.oper is Oper.DOWN:
            if bar := seen.bar:
                yield seen.name, BarredError(seen.name, bar.why, hint=bar.hint)
            # The owner of an instance starts it, or the watcher when the owner is there.
            elif not seen.lacks_owner:
                due.append(seen)
    failed = frozenset(supervisor().attempts())
    due.sort(key=lambda seen: (seen.spec.start_order, seen.name))
    last = [seen for seen in due if seen.name in failed]
    starts = _Starts(parallel, slot_s)
    yield from starts.begin([seen for seen in due if seen.name not in failed], put_off=last)
    last.sort(key=lambda seen: (seen.name in failed, seen.spec.start_order))
    yield from starts.begin(last)
    for name in starts.late():
        text = f"is still starting after {slot_s:g} s; systemd goes on with the start"
        hint = f"brine instance info {name} shows how far it is"
        yield name, StillStartingError(name, text, hint=hint)


class _Starts:
    """Starts of many, in the order of their *start_order*, some of which hang."""

    def __init__(self, parallel: int, slot_s: float) -> None:
        self._pool = SlotPool[BrineError | None](parallel, slot_s, self._note_late)
        self._specs: dict[str, Spec] = {}
        self._silent: set[str] = set()  # storage of late ones

    def late(self) -> list[str]:
        """Those that have had their time, and have not ended."""
        return sorted(self._pool.late)

    def begin(
        self, several: Sequence[Observed], put_off: list[Observed] | None = None
    ) -> Iterator[_Result]:
        """Start these in their order; returns when all slots are free again.

        :param put_off: collects those with disks on the storage of late ones; None starts them.
        """
        for seen in several:
            while not self._has_room(seen.spec):
                yield from self._next()
            if put_off is not None and not self._silent.isdisjoint(storage_of(seen.spec)):
                put_off.append(seen)
                continue
            self._specs[seen.name] = seen.spec
            self._pool.begin(seen.name, partial(_start, seen))
        while self._pool.holders():
            yield from self._next()

    def _has_room(self, spec: Spec) -> bool:
        orders = {self._specs[name].start_order for name in self._pool.holders()}
        return not orders or (orders == {spec.start_order} and not self._pool.is_full())

    def _next(self) -> Iterator[_Result]:
        if ended := self._pool.wait():
            yield ended

    def _note_late(self, name: str) -> None:
        self._silent |= storage_of(self._specs[name])


def _start(seen: Observed) -> BrineError | None:
    """Start an instance that should be up still; returns why it did not start."""
    name = seen.name
    try:
        with store.alone(name):  # until it is queued, or who stops it now would miss it
            # Other instances were started first, so its admin_state may have changed.
            spec = store.load(name)
            if spec.admin_state != AdminState.UP:
                return None
            messages.tell(messages.START_ASKED, name)
            wait = unit.begin_start(name, slice_name=spec.slice)
        wait()
    except UnitError as error:
        return start_failure(name, error, seen.unit)
    except BrineError as error:
        return error
    except OSError as error:
        return system_error(name, error)
    return None


def storage_of(spec: Spec) -> frozenset[str]:
    """The storage of an instance's disks: mount points, and folders of devices. This function
    touches none of it, because it may not answer."""
    points = {line.split()[1] for line in _MOUNTS.read_text(errors="replace").splitlines()}
    found = set()
    for disk in spec.disks:
        path = PurePosixPath(disk.path)
        if path.is_relative_to("/dev"):
            # The folder of a volume group; other folders of /dev mix all kinds of disks.
            is_mixed = len(path.parts) != 4 or path.parts[2] in ("mapper", "disk", "zvol")
            found.add(str(path if is_mixed else path.parent))
        else:
            found.add(next((str(one) for one in path.parents if str(one) in points), "/"))
    return frozenset(found)


# ``brine instance start``, which loads less than the other verbs.

_STARTED = {
    Started.NOTED: "already runs; it will start with the node",
    Started.UNCHANGED: "runs",
}


def start(arguments: argparse.Namespace) -> int:
    if not (arguments.name or arguments.all):
        raise UsageError("which instance?", hint="give its name, or --all")
    if arguments.name and arguments.all:
        raise UsageError("--all, or that one?", hint="give a name, or --all")
    if arguments.all and (arguments.keep_tries or arguments.json):
        option = "--keep-tries" if arguments.keep_tries else "--json"
        raise UsageError(f"{option} goes with names of instances", hint=f"leave {option} out")
    if arguments.all:
        messages.log_to_journal("brine")
        return _start_all()

    def act(name: str) -> Done:
        done = start_instance(name, keeps_tries=arguments.keep_tries)
        return Done(done.value, done is not Started.UNCHANGED, _STARTED.get(done, ""))

    at_most = _parallel_starts() if len(arguments.name) > 1 else 1
    return act_on_each(arguments, act, at_most=at_most)


def _parallel_starts() -> int:
    from brine.instance.settings import load_settings  # with it a reader of TOML

    return load_settings().parallel_starts


def _start_all() -> int:
    status = 0
    for name, error in start_all(parallel=_parallel_starts()):
        if error is None:
            print(f"started: {name}", flush=True)
        elif isinstance(error, StillStartingError):
            warn(str(error))
        elif isinstance(error, BarredError):
            print(f"not started: {error}", flush=True)
        else:
            status = 1
            tell_error(error)
    return status
