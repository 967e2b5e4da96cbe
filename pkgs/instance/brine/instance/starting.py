"""Starting an instance. What only faults take is loaded for faults: no start has to wait for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from brine.common import marks
from brine.common.errors import BrineError
from brine.common.instance_units import unit_of
from brine.common.listening import is_listening
from brine.common.marks import Kind
from brine.instance import belongings, messages, spec_files, unit
from brine.instance.admin_states import forget_end, want
from brine.instance.control import control_of
from brine.instance.other_specs import refuse_elsewhere
from brine.instance.runtime_asides import asides_of
from brine.instance.spec import AdminState, Spec
from brine.instance.spec_files import InstanceError, NoSpecError
from brine.instance.tries import forget
from brine.instance.unit import Unit, UnitError

if TYPE_CHECKING:
    from brine.instance.hot_changes import Aside


def start_instance(name: str, *, warn: Callable[[Aside], object] | None = None) -> bool:
    """Have an instance run, and want it to; returns whether it did not.

    :param warn: told of a runtime file that could not be used, and is kept aside.
    :raises BrineError: why it does not; then nothing of it is left.
    """
    with spec_files.alone(name):
        belongings.settle(name)
        spec = _load(name)
        refuse_elsewhere(spec)
        runs = _runs(spec)
        want(spec, AdminState.UP)
        _forget_end(spec)
        forget_tries(name)
    if runs:
        return False
    if spec.is_xen():
        make_room(but=name)
    before = asides_of(name)
    messages.tell_start_asked(name, messages.who_asks())
    since_us = time.monotonic_ns() // 1000
    try:
        unit.start(name)
    except UnitError as error:
        raise start_failure(name, error, since_us=since_us) from error
    finally:
        if warn:
            _warn_of(spec, asides_of(name) - before, warn)
    return True


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


def make_room(*, but: str | None = None) -> None:
    """Have Xen take back the memory of what has ended. If it does not, a start may fail.

    :param but: the instance that the caller is alone with.
    """
    from brine.instance.xen.leftovers import clean_up_ended

    try:
        failed = clean_up_ended(but=but)
    except BrineError as error:
        failed = [error]
    for one in failed:
        print(f"brine: warning: {one}", file=sys.stderr)


def _runs(spec: Spec) -> bool:
    """Whether it runs, as systemd says. To ask takes long, and a QEMU that runs listens; one that
    is being stopped has its mark, too.

    :raises InstanceError: if somebody is just stopping it: both would have what neither wants.
    """
    name = spec.name
    control = control_of(name)
    is_silent = not spec.is_xen() and not is_listening(control.qmp)
    if is_silent and marks.read_mark(Kind.STOP, name) is None:
        return False
    from brine.instance.state import Oper
    from brine.instance.states import look

    oper = look(name).state.oper
    if oper is Oper.STOPPING:
        raise being_stopped(name)
    return oper is Oper.RUNNING


def _warn_of(spec: Spec, files: frozenset[Path], warn: Callable[[Aside], object]) -> None:
    """Tell who asked for the start, too, of what the runner has told the journal."""
    if not files:
        return
    from brine.instance.hot_changes import why_aside

    for file in sorted(files):
        warn(why_aside(spec, file))
