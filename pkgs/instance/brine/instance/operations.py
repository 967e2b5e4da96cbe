"""What can be done with an instance: each is done whole, and says what it changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brine.common.errors import UsageError
from brine.common.qmp_blocking import BlockingQmpClient, without_loop
from brine.instance import belongings, messages, spec_files, unit
from brine.instance.admin_states import offline, want
from brine.instance.control import control_of
from brine.instance.definition import define
from brine.instance.process import Process
from brine.instance.schema import to_json
from brine.instance.shared_disks import refuse_shared
from brine.instance.spec import AdminState, Spec
from brine.instance.spec_files import InstanceError
from brine.instance.starting import start_instance
from brine.instance.state import Oper
from brine.instance.states import Seen, look
from brine.instance.stopping import end, shut_down
from brine.instance.twins import refuse_twin

_GOING = (Oper.RUNNING, Oper.STARTING, Oper.STOPPING)
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
    _settle_namesake(name)
    with spec_files.alone(name):
        if not dry_run:
            belongings.settle(name)
        before = spec_files.load_sound(name)
        spec = define(data, before=before)
        if spec == before:
            return Defined(spec, changed=False)
        if before is None or before.disks != spec.disks:
            refuse_shared(spec)
        if before is None or (before.uuid, before.nics) != (spec.uuid, spec.nics):
            refuse_twin(spec)
        aside = None
        if not dry_run:
            aside = _put(spec, before)
    return Defined(spec, changed=True, aside=aside)


def _put(spec: Spec, before: Spec | None) -> Path | None:
    """Write a spec; returns where a damaged one is kept, whose place it has."""
    aside, name = None, spec.name
    if before is None and spec_files.file_of(name).exists():
        aside = spec_files.keep_aside(name)
    elif before is None:
        belongings.forget(name)  # of one that had this name before
    spec_files.save(spec)
    if before is None:
        messages.tell_defined(name, messages.who_asks())
    else:
        shapes = to_json(before), to_json(spec)
        changed = [key for key, value in shapes[1].items() if value != shapes[0][key]]
        messages.tell_changed(name, messages.who_asks(), changed)
    return aside


def undefine_instance(name: str) -> None:
    """Forget an instance that does not run.

    :raises BrineError: if it runs, or there is none.
    """
    with spec_files.alone(name):
        if spec_files.load_sound(name) or not spec_files.file_of(name).exists():
            _refuse_running(look(name), "undefine")
        elif (found := unit.units([name]).get(name)) and found.main_pid:
            raise InstanceError(name, "is running", hint=f"systemctl stop {unit.unit_of(name)}")
        spec_files.remove(name)
        belongings.forget(name)
    messages.tell_undefined(name, messages.who_asks())
    unit.forget_failure(name)


def rename_instance(name: str, new_name: str) -> Spec:
    """Give an instance that does not run another name; its UUID stays.

    It has one name at any time, with all that belongs to it. What is killed leaves links to that by
    the other name, which the next who changes it removes.

    :raises BrineError: if it runs, there is none, or one of the new name.
    """
    first, second = sorted((name, new_name))
    if first == second:
        raise UsageError(f"that is its name: {name}", hint="give it another one")
    _settle_namesake(new_name)
    with spec_files.alone(first), spec_files.alone(second):
        belongings.settle(name)
        seen = look(name)
        _refuse_running(seen, "rename")
        if spec_files.file_of(new_name).exists():
            raise InstanceError(new_name, "there is an instance of that name already")
        belongings.share(name, new_name)
        spec_files.switch(name, new_name)
        belongings.settle(new_name)
    messages.tell_renamed(new_name, messages.who_asks(), name)
    unit.forget_failure(name)
    return replace(seen.spec, name=new_name)


def _settle_namesake(name: str) -> None:
    """Finish the interrupted rename of an instance that had a name which is to be another's."""
    if not spec_files.file_of(name).exists() and (renamed := spec_files.renamed_from(name)):
        with spec_files.alone(renamed):
            belongings.settle(renamed)


def stop_instance(name: str, *, force: bool = False, timeout_s: float | None = None) -> bool:
    """Have an instance not run, and want it not to; returns whether it did.

    :param force: end it when its guest does not shut down in time.
    :param timeout_s: how long that may take; None is what its spec says.
    :raises InstanceError: if it does not shut down, and was not to be forced: then it runs on. Or
        if it can't be noted that it is to be down: then it has been stopped nevertheless.
    """
    unnoted = None
    with spec_files.alone(name):
        belongings.settle(name)
        seen = look(name)
        try:
            want(seen.spec, AdminState.DOWN)
        except InstanceError as error:
            if seen.state.oper not in _GOING:
                raise
            unnoted = error
    if seen.state.oper not in _GOING:
        if seen.unit and seen.unit.active is unit.Active.FAILED:
            unit.forget_failure(name)
        return False
    # Somebody may be stopping it, and have much patience.
    is_forced = force and seen.state.oper is Oper.STOPPING
    if seen.state.oper is Oper.RUNNING or is_forced:
        _end(seen, force=force, timeout_s=timeout_s)
        _wait_stopped(name)
    else:
        unit.stop(name)
    if unnoted:
        text = f"is stopped, but not noted to be down: {unnoted}"
        raise InstanceError(name, text, hint="else it starts again with the node")
    return True


def reboot_instance(name: str, *, force: bool = False, timeout_s: float | None = None) -> None:
    """Have an instance's guest shut down, and start it anew with its spec as it is now.

    :raises InstanceError: if it does not run, or does not shut down, and was not to be forced.
    """
    seen = _look_to_change(name)
    if seen.spec.admin_state == AdminState.OFFLINE:
        raise offline(name)  # it could not be started again
    _end(seen, force=force, timeout_s=timeout_s)
    _wait_stopped(name)
    start_instance(name)
    messages.tell_rebooted(name, messages.who_asks())


def reset_instance(name: str) -> None:
    """Press the reset button: the guest is not asked, and QEMU stays the same.

    :raises BrineError: if it does not run.
    """
    _look_to_change(name)
    with BlockingQmpClient.connect(control_of(name).qmp) as qmp:
        without_loop(qmp.execute("system_reset"))
    messages.tell_reset(name, messages.who_asks())


def _look_to_change(name: str) -> Seen:
    """An instance that runs, for who may change it: others could talk to its QEMU, too."""
    with spec_files.alone(name):
        seen = look(name)
    if seen.state.oper is not Oper.RUNNING:
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")
    return seen


def _end(seen: Seen, *, force: bool, timeout_s: float | None) -> None:
    spec = seen.spec
    timeout_s = spec.shutdown_timeout if timeout_s is None else timeout_s
    how: Callable[..., object] = end if force else shut_down
    main_pid = seen.unit.main_pid if seen.unit else 0
    with Process.of(main_pid, unit=unit.unit_of(spec.name)) as qemu:
        if qemu is None:
            return
        ways = "its guest is asked, and ended if need be" if force else "its guest is asked"
        messages.tell_stop_asked(spec.name, messages.who_asks(), ways, timeout_s)
        if not how(spec.name, qemu, timeout_s=timeout_s):
            messages.tell_not_in_time(spec.name, timeout_s)
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
    if seen.state.oper in _GOING:
        name = seen.spec.name
        hint = f"brine instance stop {name}, then {what} it"
        raise InstanceError(name, f"is {seen.state.oper}", hint=hint)
