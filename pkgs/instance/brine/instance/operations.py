"""The operations on an instance: define, stop, reboot, pause, rename, undefine."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from brine.common import operation
from brine.common.errors import BrineError, UsageError, warn
from brine.common.operation import OperationKind
from brine.common.process import TERM_TIMEOUT_S, Process
from brine.common.qmp.wire import QmpClosedError
from brine.common.unix_socket import is_listening
from brine.hotplug.transaction import being_released
from brine.instance import messages, store, unit
from brine.instance.action import act_on, act_on_each
from brine.instance.conflicts import refuse_conflicts
from brine.instance.devices import refuse_other_formats
from brine.instance.history import verdicts_on
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.intent import offline, tell_cluster
from brine.instance.kvm.guest import monitor_of, press_reset
from brine.instance.kvm.programs import refuse_writers
from brine.instance.observe import (
    GOING,
    Observed,
    Oper,
    look,
    oper_of,
    refuse_running_without_spec,
)
from brine.instance.owner import make_folder, remove_folder
from brine.instance.start import being_stopped, forget_end, forget_tries, start_instance
from brine.instance.stop import (
    StopLimits,
    Stopped,
    end_guest,
    remove_domain,
    run_of,
    stop_instance,
    told_to_stop,
    wait_stopped,
)
from brine.instance.store import ELSEWHERE, InstanceError, cluster_name, is_here
from brine.instance.unit import UnitError
from brine.instance.validate import completed
from brine.instance.xen import last_start, xl
from brine.vm import markers
from brine.vm.conflicts import NONE_PLANNED, OtherIdentities, Planned, claiming
from brine.vm.files import InstanceFiles
from brine.vm.instances import started_with
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.spec import AdminState, Source, Spec, SpecError, parse, to_json
from brine.vm.unit_name import unit_of
from brine.vm.values import new_name_fault

_GONE_S = 180.0


@dataclass(frozen=True, slots=True)
class Defined:
    """The result of a definition.

    :param changed: whether the spec differs from the former one.
    :param before: the former one, if there was one that can be used.
    :param aside: the copy of a damaged spec that it replaces.
    """

    spec: Spec
    changed: bool
    before: Spec | None = None
    aside: Path | None = None


def define_instance(
    data: Any,
    *,
    dry_run: bool = False,
    is_new: bool = False,
    over: Spec | None = None,
    keeps_user_state: bool = False,
    planned: Planned = NONE_PLANNED,
) -> Defined:
    """Write the spec of an instance. A running instance uses it from its next start on.

    :param is_new: refuse it if an instance of that name exists.
    :param over: the spec that it was made from: refuse it if that has changed meanwhile.
    :param keeps_user_state: one that its user has shut down stays so, unless it is to be offline.
    :param planned: the specs that other instances would have.
    :raises BrineError: what is wrong with the spec, or what failed.
    """
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return Defined(completed(data), changed=True)  # which tells the fault
    with ExitStack() as locks:
        if not dry_run:
            locks.enter_context(store.alone(name))
        if is_new:
            refuse_name(name)
        before = store.load_sound(name)
        if before is None and not store.spec_file_of(name).exists():
            _refuse_odd_name(name)
        if over and before != over:
            done = "its spec changed" if before else "it was undefined, or its spec was damaged,"
            hint = f"brine instance edit {name}, again" if before else None
            raise InstanceError(name, f"{done} during this edit", hint=hint)
        known = before or _known(name, data)
        taken = OtherIdentities(name, planned)
        if keeps_user_state and before and before.is_down_by_user():
            data = without_state(data)
        spec = completed(data, before=known, cluster=cluster_name(), taken=taken)
        if not is_here(spec):
            raise SpecError(
                f"is {spec.node}, and this is {os.uname().nodename}", where="/node", hint=ELSEWHERE
            )
        if spec == before:
            return Defined(spec, changed=False, before=before)
        is_other_machine = before is not None and (
            before.hypervisor != spec.hypervisor or (spec.is_xen() and before.uuid != spec.uuid)
        )
        if before is None:
            _refuse_to_lose_domain(spec)
        elif is_other_machine:
            what = "hypervisor" if before.hypervisor != spec.hypervisor else "UUID"
            _refuse_running(look(name), f"give another {what} to")
        refuse_other_formats(spec)
        refuse_writers(spec)
        check = partial(refuse_conflicts, spec, before, planned)
        if dry_run:
            check()
        else:
            locks.enter_context(claiming(check))
        aside = None
        if not dry_run:
            if before and before.is_xen() and is_other_machine:
                _let_go(name, "define")
            if spec.owner:
                make_folder(name, spec.owner)
            aside = _put(spec, before, is_new=known is None)
            if before and before.owner and not spec.owner:
                remove_folder(name)  # owners that wait there for its end see that
    return Defined(spec, changed=True, before=before, aside=aside)


def without_state(data: dict[str, Any]) -> dict[str, Any]:
    """A spec as people write it that leaves the admin_state as it is, unless it is offline."""
    if data.get("admin_state") == AdminState.OFFLINE:
        return data
    keys = ("admin_state", "admin_state_source")
    return {key: value for key, value in data.items() if key not in keys}


def _known(name: str, data: dict[str, Any]) -> Spec | None:
    """The spec of the last start of an instance without a sound spec, unless the UUID differs, or
    is another instance's by now: 0.2.0 left files of the old name when its rename was killed.

    With it, the guest sees the same machine at the next start.
    """
    spec = _started_as(name)
    if spec is None or str(data.get("uuid") or spec.uuid).lower() != spec.uuid:
        return None
    others = (one for one in store.load_all() if isinstance(one, Spec) and one.name != name)
    return None if any(one.uuid == spec.uuid for one in others) else spec


def _put(spec: Spec, before: Spec | None, *, is_new: bool) -> Path | None:
    """Write a spec, of an instance that may be new; returns the copy of a damaged one before it."""
    aside, name = None, spec.name
    control = InstanceFiles(name)
    if before is None and store.spec_file_of(name).exists():
        aside = store.keep_aside(name)
    elif is_new and not (is_listening(control.qmp) or control.domain.exists()):
        store.forget(name)  # of one that had this name before, and does not run
    if before:
        tell_cluster(before, spec)
        if before.admin_state != AdminState.UP == spec.admin_state:
            _forget_end(before)
    store.save(spec)
    if before is None:
        messages.tell(messages.DEFINED, name)
    else:
        shapes = to_json(before), to_json(spec)
        changed = [key for key, value in shapes[1].items() if value != shapes[0][key]]
        messages.tell(messages.CHANGED, name, keys=" ".join(changed))
    return aside


def _forget_end(spec: Spec) -> None:
    """Forget the last end of an instance that should be up and does not run."""
    try:
        if look(spec.name).is_going:
            return
    except BrineError:
        return  # of what can't be known nothing is forgotten
    try:
        forget_end(spec, starts=False)
    except OSError as error:
        raise InstanceError(spec.name, f"its last end: {error}") from error


def _refuse_to_lose_domain(spec: Spec) -> None:
    """Refuse a definition that would orphan a running Xen domain."""
    if not InstanceFiles(spec.name).has_domain():
        return
    uuid = last_start.uuid_of(spec.name)
    is_its_own = spec.is_xen() and spec.uuid == uuid
    if uuid and not is_its_own and xl.domain_of(uuid):
        hint = f'give it "uuid": "{uuid}", or xl destroy what runs'
        raise InstanceError(spec.name, "its domain, of another UUID, is still there", hint=hint)


def _started_as(name: str) -> Spec | None:
    """The spec of an instance's last start, down if it was stopped since; None if not known."""
    try:
        spec = parse(Spec, started_with(name))
    except (SpecError, ValueError, RecursionError):
        return None
    if not Run.last(name).was_stopped():
        return spec
    down, admin = AdminState.DOWN.value, Source.ADMIN.value
    return replace(spec, admin_state=down, admin_state_source=admin)


def undefine_instance(name: str) -> None:
    """Remove the spec and all files of an instance that does not run."""
    with store.alone(name):
        if store.load_sound(name) or not store.spec_file_of(name).exists():
            _let_go(name, "undefine")
        elif (oper := oper_of(unit.find(name))) in GOING:
            raise _is_going(name, oper, "undefine")
        store.remove(name)
        store.forget(name)
        forget_tries(name)
        messages.tell(messages.UNDEFINED, name)
        remove_folder(name)
        _forget_unit(name)  # before another instance of that name starts


def _forget_unit(name: str) -> None:
    """Have systemd keep nothing of the unit of an instance that is no more."""
    unit.forget_failure(name)
    with suppress(UnitError):  # the next start of that name does it
        unit.forget_slice(name)


def _let_go(name: str, what: str) -> None:
    """Refuse to change a running instance, and remove the leftovers of its domain."""
    seen = look(name)
    _refuse_running(seen, what)
    if seen.domain:
        remove_domain(seen.spec)


def refuse_name(name: str) -> None:
    """Refuse a name for another instance, if one has it or runs by it, with or without a spec."""
    store.refuse_existing(name)
    _refuse_odd_name(name)
    refuse_running_without_spec(name)
    if is_listening(InstanceFiles(name).qmp):
        hint = f"give another name; {InstanceFiles(name).qmp} is its monitor"
        raise InstanceError(name, "a QEMU of that name runs, which Brine did not start", hint=hint)


def _refuse_odd_name(name: str) -> None:
    if fault := new_name_fault(name):
        raise InstanceError(name, fault, hint="give another name")


def _refuse_running(seen: Observed, what: str) -> None:
    if seen.is_going:
        raise _is_going(seen.name, seen.state.oper, what)


def _is_going(name: str, oper: Oper, what: str) -> InstanceError:
    return InstanceError(name, f"is {oper}", hint=f"brine instance stop {name}, then {what} it")


def rename_instance(name: str, new_name: str) -> Spec:
    """Give an instance that does not run another name; its UUID stays.

    At any time the instance has exactly one name, with all its files, even if this is killed.

    :raises BrineError: if it runs, it does not exist, or the new name is taken.
    """
    first, second = sorted((name, new_name))
    if first == second:
        raise UsageError(f"that is its name: {name}", hint="give it another one")
    with store.alone(first), store.alone(second):
        seen = look(name)
        _refuse_running(seen, "rename")
        refuse_name(new_name)
        has_crashed = _has_crashed(seen)
        store.try_to_save(seen.spec, new_name)
        there = {"name": name, "new_name": new_name}
        with operation.begin(RENAME, store.key_of(name), store.key_of(new_name)) as work:
            work.step("link the files", undo=("forget", {"name": new_name}))
            if seen.spec.owner:
                make_folder(new_name, seen.spec.owner)
            store.share(name, new_name)
            finish = ("finish", {**there, "has_crashed": has_crashed})
            rest = (finish, ("forget", {"name": name}), ("save", there))
            # At no moment do other commands miss its claims.
            with work.committing(("is renamed", there), *rest), claiming():
                store.switch(name, new_name)
    return replace(seen.spec, name=new_name)


def _is_renamed(facts: operation.Facts) -> bool:
    specs = (store.spec_file_of(facts[key]) for key in ("name", "new_name"))
    return [one.exists() for one in specs] == [False, True]


def _finish_rename(facts: operation.Facts) -> None:
    if facts["has_crashed"]:
        # The records of the crash have its old name. So it counts as never started, and starts
        # again.
        with suppress(OSError):
            markers.remove_marker(MarkerKind.STARTED, facts["new_name"])
    messages.tell(messages.RENAMED, facts["new_name"], name=facts["name"])


def _forget_name(facts: operation.Facts) -> None:
    """Remove all that belongs to a name, unless an instance has it."""
    name = facts["name"]
    if store.spec_file_of(name).exists():
        return
    store.forget(name)
    forget_tries(name)
    remove_folder(name)
    _forget_unit(name)  # before another instance of that name starts


def _save_renamed(facts: operation.Facts) -> None:
    """Save the spec under its new name, which its content lacks."""
    if spec := store.load_sound(facts["new_name"]):
        store.save(spec)


RENAME = OperationKind(
    "rename",
    {
        "forget": _forget_name,
        "is renamed": _is_renamed,
        "finish": _finish_rename,
        "save": _save_renamed,
    },
    alone=store.all_held,
)


def _has_crashed(seen: Observed) -> bool:
    """Whether an instance should be up and is down, and neither user nor admin ended it."""
    if seen.spec.admin_state != AdminState.UP or seen.state.oper is not Oper.DOWN:
        return False
    if seen.run.was_stopped():
        return False
    if not seen.ended_in_order():
        return True
    with suppress(OSError):
        verdict = verdicts_on([seen]).get(seen.name)
        return verdict is not None and verdict.who == "crash"
    return False


def reboot_instance(name: str, *, force: bool = False, timeout_s: float | None = None) -> None:
    """Ask an instance's guest to shut down, and start the instance with its present spec."""
    seen = _look_to_change(name)
    if seen.spec.admin_state == AdminState.OFFLINE:
        raise offline(name)  # it could not be started again
    if timeout_s is None:
        timeout_s = seen.spec.shutdown_timeout
    limits = StopLimits(timeout_s, force)
    store.try_files_of_start(seen.spec)
    with ExitStack() as stack:
        # Without its xl, the end of a domain could not be explained.
        if seen.unit and seen.unit.main_pid:
            stack.enter_context(_noted_reboot(seen, timeout_s))
        kept = being_released(InstanceFiles(name).qmp)
        with told_to_stop(name, seen.unit, seen.spec if seen.domain else None) as guest:
            end_guest(guest, "reboot", limits)
        _start_again(seen)
    messages.tell(messages.REBOOTED, name)
    for one in kept:
        text = f"{name}: its guest had not released {one.device_id}, which is as its spec has it"
        warn(text, hint=f"brine {one.kind} list {name} shows whether it is there")


@contextmanager
def _noted_reboot(seen: Observed, timeout_s: float) -> Iterator[None]:
    """Mark an instance to be started again, even if the command that waits for its end is killed.

    Its next start removes the marker.
    """
    name, run = seen.name, run_of(seen.unit, seen.name)
    with ExitStack() as stack:
        # Without the marker, only this command starts it again.
        with suppress(OSError):
            markers.remove_unheld(MarkerKind.REBOOT, name)
            until = time.time() + timeout_s
            stack.enter_context(
                markers.held_marker(MarkerKind.REBOOT, name, run=run.id, until=until)
            )
        yield


def reset_instance(name: str) -> None:
    """Press the reset button: the guest is not asked, and QEMU stays the same.

    An instance whose QEMU ends at a reboot is started anew.

    :raises BrineError: if it does not run, or does not come back.
    """
    seen = _look_to_change(name)
    if seen.spec.is_xen():
        hint = f"brine instance reboot --force {name}"
        raise InstanceError(name, "has no reset button: it is a domain of Xen's", hint=hint)
    # At the reset button, QEMU does the same as at a reboot of the guest.
    if (_started_as(name) or seen.spec).reboot_behavior == "exit":
        if seen.spec.admin_state == AdminState.OFFLINE:
            raise offline(name)  # it could not be started again
        store.try_files_of_start(seen.spec)
        _reset_by_start(seen)
    else:
        with monitor_of(name) as qmp:
            press_reset(qmp)
    messages.tell(messages.RESET, name)


def _reset_by_start(seen: Observed) -> None:
    name, main_pid = seen.name, seen.unit.main_pid if seen.unit else 0
    with (
        _noted_reboot(seen, TERM_TIMEOUT_S),
        Process.of(main_pid, unit=unit_of(name)) as qemu,
    ):
        with suppress(QmpClosedError), monitor_of(name) as qmp:  # it may not come to answer
            qmp.execute("system_reset")
        if qemu and not qemu.ended(TERM_TIMEOUT_S):
            hint = f"brine instance reboot --force {name}"
            raise InstanceError(name, "its QEMU does not follow the reset button", hint=hint)
        _start_again(seen)


def _start_again(before: Observed) -> None:
    """Start an instance that has ended for a reboot, unless its admin_state has changed since."""
    name = before.name
    if before.unit:
        wait_stopped(before.unit.run)
    if store.load(name).admin_state != before.spec.admin_state:
        text = "was stopped, and not started again: somebody has wanted otherwise meanwhile"
        raise InstanceError(name, text, hint=f"brine instance start {name}")
    start_instance(name)


def set_paused(name: str, *, paused: bool) -> bool:
    """Pause or resume an instance's processors. False if nothing changes."""
    seen = _look_to_change(name)
    if not hypervisor_of(seen.spec).set_paused(seen, run_of(seen.unit, name).id, paused=paused):
        return False
    messages.tell(messages.PAUSED if paused else messages.RESUMED, name)
    return True


def _look_to_change(name: str) -> Observed:
    """A running instance, for a change. Only root gets it; users of the group reach QEMU
    directly."""
    with store.alone(name):
        seen = look(name)
    if seen.state.oper is Oper.STOPPING:
        raise being_stopped(name)
    if seen.state.oper is not Oper.RUNNING:
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")
    return seen


# The verbs of ``brine instance`` for a running instance.

_STOPPED = {
    Stopped.STOPPED: "",
    Stopped.NOTED: " is down already, and should be from now on",
    Stopped.CLEANED_UP: " was down already, and what was left of it is gone",
    Stopped.UNCHANGED: " does not run",
}


def stop(arguments: argparse.Namespace) -> int:

    def act(name: str) -> tuple[str, bool]:
        done = stop_instance(name, force=arguments.force, timeout_s=arguments.timeout)
        return f"{done}: {name}{_STOPPED[done]}", done is not Stopped.UNCHANGED

    return act_on_each(arguments, act, runs="runs on, and may still do what it was asked")


def reboot(arguments: argparse.Namespace) -> int:
    if arguments.reset and (arguments.force or arguments.timeout is not None):
        hint = "leave out --force and --timeout, or --reset"
        raise UsageError("--reset asks nobody, and waits for nobody", hint=hint)

    def act(name: str) -> tuple[str, bool]:
        if arguments.reset:
            reset_instance(name)
            return f"reset: {name}", True
        reboot_instance(name, force=arguments.force, timeout_s=arguments.timeout)
        return f"rebooted: {name}", True

    return act_on(arguments, act, runs="runs, and may still reboot")


def pause(arguments: argparse.Namespace) -> int:
    return _set_paused(arguments, f"paused: {arguments.name}", "is paused", paused=True)


def resume(arguments: argparse.Namespace) -> int:
    return _set_paused(arguments, f"resumed: {arguments.name}", "is not paused", paused=False)


def _set_paused(arguments: argparse.Namespace, done: str, already: str, *, paused: bool) -> int:
    def act(name: str) -> tuple[str, bool]:
        changed = set_paused(name, paused=paused)
        return done if changed else f"unchanged: {name} {already}", changed

    return act_on(arguments, act)
