"""The operations on a running instance: stop, reboot, reset, pause, resume."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from brine.common.errors import UsageError, warn
from brine.common.process import TERM_TIMEOUT_S, Process
from brine.common.qmp.wire import QmpClosedError
from brine.hotplug.transaction import being_released
from brine.instance import messages, store, unit
from brine.instance.action import MOST_AT_ONCE, Done, act_on, act_on_each
from brine.instance.claims import refuse_barred, refuse_elsewhere
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.intent import offline
from brine.instance.kvm.guest import monitor_of, press_reset
from brine.instance.observe import GOING, Observed, Oper, look, look_at_all, oper_of
from brine.instance.start import being_stopped, start_instance
from brine.instance.stop import (
    StopLimits,
    Stopped,
    end_guest,
    run_of,
    stop_instance,
    told_to_stop,
    wait_stopped,
)
from brine.instance.store import InstanceError
from brine.vm import markers
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind
from brine.vm.spec import AdminState
from brine.vm.unit_name import unit_of


def reboot_instance(name: str, *, force: bool = False, timeout_s: float | None = None) -> None:
    """Ask an instance's guest to shut down, and start the instance with its present spec."""
    seen = _look_to_change(name)
    if seen.spec.admin_state == AdminState.OFFLINE:
        raise offline(name)  # it could not be started again
    refuse_barred(seen.spec)  # as that
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
        text = f"{name}: its guest had not released {one.device_id} before the reboot; now the "
        text += "spec decides about that device"
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
    refuse_elsewhere(seen.spec)
    # At the reset button, QEMU does the same as at a reboot of the guest.
    if (store.started_as(name) or seen.spec).reboot_behavior == "exit":
        if seen.spec.admin_state == AdminState.OFFLINE:
            raise offline(name)  # it could not be started again
        refuse_barred(seen.spec)  # as that
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
        text = "was stopped, and not started again: its admin_state changed meanwhile"
        raise InstanceError(name, text, hint=f"brine instance start {name}")
    start_instance(name)


def pause_instance(name: str) -> bool:
    """Stop an instance's processors. False if nothing changes."""
    return _set_paused(name, paused=True)


def resume_instance(name: str) -> bool:
    """Have a paused instance go on. False if nothing changes."""
    return _set_paused(name, paused=False)


def _set_paused(name: str, *, paused: bool) -> bool:
    seen = _look_to_change(name)
    if not paused:
        refuse_barred(seen.spec)
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
    Stopped.NOTED: "is already down; it will not start with the node",
    Stopped.CLEANED_UP: "was down already, and what was left of it is gone",
    Stopped.UNCHANGED: "does not run",
}


def stop(arguments: argparse.Namespace) -> int:
    if bool(arguments.name) == arguments.all:
        text = "--all, or that one?" if arguments.all else "which instance?"
        raise UsageError(text, hint="give names of instances, or --all")

    def act(name: str) -> Done:
        done = stop_instance(name, force=arguments.force, timeout_s=arguments.timeout)
        return Done(done.value, done is not Stopped.UNCHANGED, _STOPPED.get(done, ""))

    groups = running_groups() if arguments.all else []
    if arguments.all and not groups:
        print(json.dumps({"instances": []}, indent=2) if arguments.json else "no instance runs")
        return 0
    text, at_most = "runs on, and may still do what it was asked", arguments.parallel
    return act_on_each(arguments, act, runs=text, at_most=at_most or MOST_AT_ONCE, groups=groups)


def running_groups() -> list[list[str]]:
    """The instances that run, or are starting, in groups of one ``start_order``, the highest first;
    one without a usable spec comes last."""
    orders: dict[int, list[str]] = {}
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            if (found := unit.find_unit(seen.name)) and oper_of(found) in GOING:
                orders.setdefault(-1, []).append(seen.name)
        elif seen.is_going:
            orders.setdefault(seen.spec.start_order, []).append(seen.name)
    return [sorted(orders[order]) for order in sorted(orders, reverse=True)]


def reboot(arguments: argparse.Namespace) -> int:
    if arguments.reset and (arguments.force or arguments.timeout is not None):
        hint = "leave out --force and --timeout, or --reset"
        raise UsageError("--reset does not ask the guest, and waits for no shutdown", hint=hint)

    def act(name: str) -> Done:
        if arguments.reset:
            reset_instance(name)
            return Done("reset")
        reboot_instance(name, force=arguments.force, timeout_s=arguments.timeout)
        return Done("rebooted")

    return act_on(arguments, act, runs="runs, and may still reboot")


def pause(arguments: argparse.Namespace) -> int:

    def act(name: str) -> Done:
        return Done("paused") if pause_instance(name) else _unchanged("is paused")

    return act_on(arguments, act)


def resume(arguments: argparse.Namespace) -> int:

    def act(name: str) -> Done:
        return Done("resumed") if resume_instance(name) else _unchanged("is not paused")

    return act_on(arguments, act)


def _unchanged(more: str) -> Done:
    return Done("unchanged", changed=False, more=more)
