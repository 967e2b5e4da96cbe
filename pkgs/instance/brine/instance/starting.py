"""Starting an instance. What only faults take is loaded for faults: no start has to wait for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from brine.common import instance_units, marks
from brine.common.background import spoken_wait
from brine.common.errors import BrineError
from brine.common.instance_units import unit_of
from brine.common.listening import is_listening
from brine.common.marks import Kind
from brine.instance import belongings, messages, spec_files, unit
from brine.instance.admin_states import forget_end, want
from brine.instance.control import BELIEVED_S, control_of
from brine.instance.other_specs import refuse_elsewhere
from brine.instance.runtime_asides import asides_of
from brine.instance.spec import AdminState, Spec
from brine.instance.spec_files import InstanceError, NoSpecError
from brine.instance.state import Oper, oper_of
from brine.instance.tries import forget
from brine.instance.unit import Unit, UnitError

if TYPE_CHECKING:
    from brine.instance.hot_changes import Aside

_ENDING_S = 60.0
_ANSWER_S = 2.0
_PAUSE_S = 0.05


def start_instance(name: str, *, warn: Callable[[Aside], object] | None = None) -> bool:
    """Have an instance run, and want it to; returns whether it did not.

    :param warn: told of a runtime file that could not be used, and is kept aside.
    :raises BrineError: why it does not; then nothing of it is left.
    """
    asides: frozenset[Path] = frozenset()
    deadline = time.monotonic() + _ENDING_S
    is_asked = is_wanted = False
    while True:
        with spec_files.alone(name):
            belongings.settle(name)
            spec = _load(name)
            refuse_elsewhere(spec)
            # The user's own shutdown may have been noted while it ended; this start came after it.
            if is_wanted and spec.admin_state != AdminState.UP and not spec.is_down_by_user():
                raise _stopped_meanwhile(name)
            ending, runs = _ending_or_runs(spec)
            want(spec, AdminState.UP)
            is_wanted = True
            forget_tries(name)
            if runs and not ending:
                _keep_up(spec)
                return is_asked
            if not ending:
                _forget_end(spec)
                asides = asides_of(name)
                messages.tell_start_asked(name, messages.who_asks())
                is_asked = True
                run = marks.last_run(name)
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
            return True
        time.sleep(_PAUSE_S)


def _is_still(name: str, run: str) -> bool:
    """Whether an instance that was started is still in the run before: systemd starts nothing whose
    process it has not seen end yet."""
    if run == marks.UNKNOWN_RUN or marks.last_run(name) != run:
        return False
    found = unit.units([name]).get(name)
    return found is not None and found.invocation == run and oper_of(found) is not Oper.DOWN


def _ending_or_runs(spec: Spec) -> tuple[Unit | None, bool]:
    """The unit of an instance that is just ending by itself, else None; and whether it runs."""
    if not _runs(spec):
        return None, False
    if spec.is_xen():
        return None, True
    found = unit.units([spec.name]).get(spec.name)
    return (found if found and _is_ending(spec.name, found) else None), True


def _is_ending(name: str, found: Unit) -> bool:
    """Whether a QEMU that systemd says is running has begun to end."""
    from brine.common.qmp_errors import QmpClosedError, QmpError
    from brine.instance.monitor import monitor_of, run_state
    from brine.instance.process import Process

    if oper_of(found) is Oper.STOPPING:
        return True
    if oper_of(found) is not Oper.RUNNING or not found.main_pid:
        return False
    if marks.read_mark(Kind.SHUTDOWN, name, run=found.invocation):
        return True
    with Process.of(found.main_pid, unit=unit_of(name)) as qemu:
        if qemu is None:
            return True
        try:
            limits = {"timeout_s": _ANSWER_S, "answer_timeout_s": _ANSWER_S}
            with monitor_of(name, of_unit=True, **limits) as qmp:
                run_state(qmp)
        except QmpClosedError:
            return True
        except QmpError:
            return qemu.ended()  # it is busy, or another program is connected
    return False


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
        marks.remove_unheld(Kind.STOP, name)
        run = marks.last_run(name)
        asked = marks.read_mark(Kind.ASKED, name, run=run)
        may_obey = asked is not None and time.time() - asked.made_at < BELIEVED_S
        if asked and may_obey and not marks.is_held(Kind.REBOOT, name):
            marks.write_mark(Kind.REBOOT, name, run=run, until=asked.made_at)
    except OSError as error:
        print(f"brine: warning: {name}: its stop before: {error}", file=sys.stderr)


def _load(name: str) -> Spec:
    try:
        return spec_files.load(name)
    except NoSpecError:
        from brine.instance.states import load_or_why

        return load_or_why(name)


def start_failure(
    name: str, error: UnitError, before: Unit | None = None, *, since_us: int = 0
) -> InstanceError:
    """What to tell of an instance that did not start: what its QEMU said, if that is known.

    :param before: its unit as it was before the attempt.
    :param since_us: when the attempt began, by the clock that begins with the boot.
    """
    from brine.instance.journal import why_not_started

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
    """What to tell of an instance whose guest is just shutting down for its admin."""
    hint = f"try again when it is down; brine instance stop --force {name} hastens that"
    return InstanceError(name, "is just being stopped", hint=hint)


def _stopped_meanwhile(name: str) -> InstanceError:
    hint = f"brine instance start {name}"
    text = "was not started: somebody has wanted otherwise while its QEMU was ending"
    return InstanceError(name, text, hint=hint)


def _forget_end(spec: Spec) -> None:
    """Have its last end count no more, also if the start fails."""
    try:
        forget_end(spec, starts=True)
    except OSError as error:
        print(f"brine: warning: {spec.name}: its last end: {error}", file=sys.stderr)


def forget_tries(name: str) -> None:
    """Have the watcher's own tries count no more: it is the admin who does something with it."""
    try:
        forget(name)
    except BrineError as error:
        print(f"brine: warning: {error}", file=sys.stderr)


def _runs(spec: Spec) -> bool:
    """Whether it runs, as systemd says. To ask takes long, and a QEMU that runs listens; one that
    is being stopped has its mark, too.

    :raises InstanceError: if somebody is just stopping it: both would have what neither wants.
    """
    name = spec.name
    control = control_of(name)
    is_silent = not spec.is_xen() and not is_listening(control.qmp) and not _has_process(name)
    if is_silent and marks.read_mark(Kind.STOP, name) is None:
        return False
    from brine.instance.states import look

    seen = look(name)
    oper = seen.state.oper
    if oper is Oper.STOPPING and (spec.is_xen() or seen.was_stopped):
        raise being_stopped(name)
    return oper in (Oper.RUNNING, Oper.STOPPING)


def _has_process(name: str) -> bool:
    """Whether the process that became its QEMU is still there: it may be about to end."""
    began = marks.read_mark(Kind.START, name)
    pid = began.facts.get("pid") if began else None
    return isinstance(pid, int) and instance_units.runs_in(pid, unit_of(name))


def _warn_of(spec: Spec, files: frozenset[Path], warn: Callable[[Aside], object]) -> None:
    """Tell who asked for the start, too, of what the runner has told the journal."""
    if not files:
        return
    from brine.instance.hot_changes import why_aside

    for file in sorted(files):
        warn(why_aside(spec, file))
