"""What can be done with an instance: each is done whole, and says what it changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import UsageError
from brine.common.qmp_blocking import BlockingQmpClient, without_loop
from brine.common.wholefile import sync_folder
from brine.instance import spec_files, unit
from brine.instance.control import control_of
from brine.instance.definition import define
from brine.instance.journal import why_not_started
from brine.instance.process import Process
from brine.instance.spec import AdminState, Source, Spec
from brine.instance.spec_files import InstanceError
from brine.instance.state import Oper
from brine.instance.states import Seen, look
from brine.instance.stopping import end, shut_down
from brine.instance.unit import Unit, UnitError

_GONE_S = 30.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Defined:
    """What came of a definition.

    :param changed: whether the spec is another one than before.
    :param aside: where a damaged spec is kept, whose place it has.
    """

    spec: Spec
    changed: bool
    aside: Path | None = None


def define_instance(data: Any, *, dry_run: bool = False) -> Defined:
    """Write the spec of an instance. If it runs, it has that from its next start on.

    :raises BrineError: what is wrong with it, or what failed.
    """
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return Defined(define(data), changed=True)  # which says what is wrong
    with spec_files.alone(name):
        before = spec_files.load_sound(name)
        spec = define(data, before=before)
        if spec == before:
            return Defined(spec, changed=False)
        aside = None
        if not dry_run:
            if before is None and spec_files.file_of(name).exists():
                aside = spec_files.keep_aside(name)
            spec_files.save(spec)
    return Defined(spec, changed=True, aside=aside)


def undefine_instance(name: str) -> None:
    """Forget an instance that does not run.

    :raises BrineError: if it runs, or there is none.
    """
    with spec_files.alone(name):
        if spec_files.load_sound(name) or not spec_files.file_of(name).exists():
            _refuse_running(look(name), "undefine")
        elif (found := unit.units([name]).get(name)) and found.main_pid:
            raise InstanceError(name, "is running", hint=f"systemctl stop {unit.unit_of(name)}")
        _forget(name)
        spec_files.remove(name)
    unit.forget_failure(name)


def rename_instance(name: str, new_name: str) -> Spec:
    """Give an instance that does not run another name; its UUID stays.

    :raises BrineError: if it runs, there is none, or one of the new name.
    """
    first, second = sorted((name, new_name))
    if first == second:
        raise UsageError(f"that is its name: {name}", hint="give it another one")
    with spec_files.alone(first), spec_files.alone(second):
        seen = look(name)
        _refuse_running(seen, "rename")
        if spec_files.file_of(new_name).exists():
            raise InstanceError(new_name, "there is an instance of that name already")
        spec = replace(seen.spec, name=new_name)
        spec_files.save(spec)
        runtime = paths.RUNTIME_DIR / f"{name}.json"
        if runtime.exists():
            os.rename(runtime, paths.RUNTIME_DIR / f"{new_name}.json")
            sync_folder(paths.RUNTIME_DIR)
        _rename_marks(name, new_name)
        _forget(name)
        spec_files.remove(name)
    unit.forget_failure(name)
    return spec


def _rename_marks(name: str, new_name: str) -> None:
    """Have what is known of an instance's end known of it by its new name."""
    before, after = control_of(name), control_of(new_name)
    for mark, renamed in ((before.shutdown, after.shutdown), (before.stopping, after.stopping)):
        renamed.unlink(missing_ok=True)
        if mark.exists():
            mark.rename(renamed)


def _forget(name: str) -> None:
    """Remove what there is of an instance that does not run, but its spec."""
    control = control_of(name)
    for file in (control.shutdown, control.stopping, paths.RUNTIME_DIR / f"{name}.json"):
        file.unlink(missing_ok=True)


def start_instance(name: str) -> bool:
    """Have an instance run, and want it to; returns whether it did not.

    :raises BrineError: why it does not; then nothing of it is left.
    """
    with spec_files.alone(name):
        seen = look(name)
        _want(seen.spec, AdminState.UP)
        if seen.state.oper is Oper.RUNNING:
            return False
    try:
        unit.start(name)
    except UnitError as error:
        raise start_failure(name, error, seen.unit) from error
    return True


def stop_instance(name: str, *, force: bool = False, timeout_s: float | None = None) -> bool:
    """Have an instance not run, and want it not to; returns whether it did.

    :param force: end it when its guest does not shut down in time.
    :param timeout_s: how long that may take; None is what its spec says.
    :raises InstanceError: if it does not shut down, and was not to be forced: then it runs on.
    """
    with spec_files.alone(name):
        seen = look(name)
        _want(seen.spec, AdminState.DOWN)
    if seen.state.oper not in (Oper.RUNNING, Oper.STARTING, Oper.STOPPING):
        return False
    if seen.state.oper is Oper.RUNNING:
        _end(seen, force=force, timeout_s=timeout_s)
        _wait_stopped(name)
    else:
        unit.stop(name)
    return True


def reboot_instance(name: str, *, force: bool = False, timeout_s: float | None = None) -> None:
    """Have an instance's guest shut down, and start it anew with its spec as it is now.

    :raises InstanceError: if it does not run, or does not shut down, and was not to be forced.
    """
    seen = look(name)
    if seen.state.oper is not Oper.RUNNING:
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")
    _end(seen, force=force, timeout_s=timeout_s)
    _wait_stopped(name)
    start_instance(name)


def reset_instance(name: str) -> None:
    """Press the reset button: the guest is not asked, and QEMU stays the same.

    :raises BrineError: if it does not run.
    """
    seen = look(name)
    if seen.state.oper is not Oper.RUNNING:
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")
    with BlockingQmpClient.connect(control_of(name).qmp) as qmp:
        without_loop(qmp.execute("system_reset"))


def _want(spec: Spec, admin_state: AdminState) -> None:
    wanted = replace(spec, admin_state=admin_state.value, admin_state_source=Source.ADMIN.value)
    if spec.admin_state == AdminState.OFFLINE:
        if admin_state is AdminState.DOWN:
            return  # it is more than that
        hint = 'define it with "admin_state": "down", if it may run again'
        raise InstanceError(spec.name, "is offline", hint=hint)
    if wanted != spec:
        spec_files.save(wanted)


def _end(seen: Seen, *, force: bool, timeout_s: float | None) -> None:
    spec = seen.spec
    timeout_s = spec.shutdown_timeout if timeout_s is None else timeout_s
    how: Callable[..., object] = end if force else shut_down
    main_pid = seen.unit.main_pid if seen.unit else 0
    with Process.of(main_pid, unit=unit.unit_of(spec.name)) as qemu:
        if qemu is None:
            return
        try:
            has_ended = how(spec.name, qemu, timeout_s=timeout_s)
        finally:
            # Nobody stops it any more: what its user does next is its user's will again.
            if not qemu.ended():
                control_of(spec.name).stopping.unlink(missing_ok=True)
        if not has_ended:
            raise InstanceError(
                spec.name,
                f"did not shut down within {timeout_s:g} s, and runs on",
                hint=f"brine instance stop --force {spec.name} ends it",
            )


def _wait_stopped(name: str) -> None:
    """Wait until the unit has cleared up after QEMU."""
    deadline = time.monotonic() + _GONE_S
    while look(name).state.oper in (Oper.RUNNING, Oper.STOPPING):
        if time.monotonic() >= deadline:
            raise InstanceError(name, f"its unit has not stopped within {_GONE_S:g} s")
        time.sleep(_PAUSE_S)


def _refuse_running(seen: Seen, what: str) -> None:
    if seen.state.oper in (Oper.RUNNING, Oper.STARTING, Oper.STOPPING):
        name = seen.spec.name
        hint = f"brine instance stop {name}, then {what} it"
        raise InstanceError(name, f"is {seen.state.oper}", hint=hint)


def start_failure(name: str, error: UnitError, before: Unit | None) -> InstanceError:
    """What to tell of an instance that did not start: what its QEMU said, if that is known.

    :param before: its unit as it was before the attempt.
    """
    try:
        found = unit.units([name]).get(name)
    except UnitError:
        found = None  # what went wrong before is what is told
    invocation = found.invocation if found else ""
    is_new = invocation and (before is None or before.invocation != invocation)
    reason = why_not_started(name, invocation) if is_new else None
    hint = f"journalctl --unit {unit.unit_of(name)} has all of it"
    if reason is None:
        return InstanceError(name, f"did not start: {error}", hint=hint)
    return InstanceError(name, f"did not start: {reason.text}", hint=reason.hint or hint)
