"""Locking a VM and connecting to its QMP socket; completing interrupted work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from brine.common.errors import BrineError
from brine.common.locks import node_lock
from brine.common.operation import (
    AwaitedError,
    Facts,
    OperationError,
    OperationKind,
    OperationState,
    Work,
    forget,
)
from brine.common.operation import pending as recorded
from brine.common.privileges import Capability, may
from brine.common.qmp.wire import QmpClosedError, QmpTimeoutError
from brine.hotplug import messages, plug_disk
from brine.hotplug.block_jobs import refuse_busy
from brine.hotplug.errors import HotplugError
from brine.hotplug.image_records import IMAGES, settle_images
from brine.hotplug.known_devices import Device, DeviceChange
from brine.hotplug.locked_vm import Vm
from brine.hotplug.qemu import Machine, monitor
from brine.hotplug.relay import Relay
from brine.hotplug.timeouts import LOCK_TIMEOUT_S, QMP_TIMEOUT_S, UNPLUG_TIMEOUT_S
from brine.hotplug.transaction import (
    LOCK_PREFIX,
    PLUGGING,
    Pending,
    PendingAction,
    adopt,
    forget_ended,
    identity_in,
    identity_of,
    key_of,
    sockets,
    work_on,
)
from brine.vm.address import DeviceKind
from brine.vm.runtime_file import RuntimeFileError, lock_name
from brine.vm.slots import Slot
from brine.vm.vif import Vif

log = logging.getLogger(__name__)

LIMIT_S = 1800.0
"""How long work on a VM may take at most, whatever QEMU and its guest do."""

_SETTLE_LIMIT_S = 60.0
_SETTLE_TIMEOUT_S = 5.0
_GUEST_TAKES_S = 5.0
_LOOK_S = 0.05


def remove_device(vm: Vm, device: Device) -> DeviceChange:
    """Remove a device from the guest, then its backend, then its entry in the runtime file."""
    change = device.change(changed=True)
    if change.kind is DeviceKind.DISK:
        refuse_busy(vm.machine, device.device_id)
    if not vm.dry_run:
        take_out = plug_disk.take_out
        if change.kind is DeviceKind.NIC:
            from brine.hotplug.plug_nic import take_out  # with netlink, of which disks need none

        with vm.doing(PendingAction.REMOVE, change):
            take_out(vm, device)
    return change


# Completing or undoing the work of commands that were killed.


def _settle(vm: Vm) -> None:
    """Complete or undo interrupted work, as far as possible; ``vm.finished`` gets the former."""
    forget_ended()
    adopt(vm.identity)
    _settle_images_of(vm)
    for record, pending in work_on(vm.identity):
        try:
            Work(_plugging(vm), record).end()
        except OperationError as error:
            # This error must not block all further work on the VM.
            if isinstance(error.__cause__, QmpTimeoutError | QmpClosedError):
                raise error.__cause__ from error
            if not isinstance(error.__cause__, AwaitedError):
                what = f"{pending.action} of {pending.device_id}"
                log.error("%s: %s was interrupted, and is half-done: %s", vm.name, what, error)
            continue
        forget(record)
        is_done = record.state is OperationState.COMMITTED
        if is_done:
            vm.finished.append(pending)
        message = messages.FINISHED if is_done else messages.UNDONE
        action = pending.action.value
        messages.tell(message, vm.name, pending.kind, pending.device_id, action=action)


def _settle_images_of(vm: Vm) -> None:
    """The same for work on the images of disks."""
    for record in recorded(key_of(vm.identity)):
        if record.kind == IMAGES.name and record.is_interrupted():
            try:
                Work(_imaging(vm), record).end()
            except OperationError as error:
                if isinstance(error.__cause__, QmpTimeoutError | QmpClosedError):
                    raise error.__cause__ from error
                log.error("%s: %s", vm.name, error)
                continue
            forget(record)


def _imaging(vm: Vm) -> OperationKind:
    return replace(IMAGES, functions={"settle": partial(settle_images, vm)})


def _plugging(vm: Vm) -> OperationKind:
    """The kind of work on a locked VM. What is done with a device shows how its work ends."""
    functions = {"is_done": _is_done, "undo": _undo, "finish": _finish}
    return replace(
        PLUGGING, functions={name: partial(_on, vm, how) for name, how in functions.items()}
    )


def _on(vm: Vm, how: Callable[[Vm, Pending], object], facts: Facts) -> object:
    pending = Pending.of(facts)
    if pending.kind is DeviceKind.NIC and not may(Capability.NET_ADMIN):
        raise AwaitedError("what a command for NICs does, as root")
    return how(vm, pending)


def _is_done(vm: Vm, pending: Pending) -> bool:
    is_there = vm.machine.has_device(pending.device_id)
    if is_there and pending.awaits_guest():
        if _is_kept(vm, pending):
            raise AwaitedError(pending.awaited())
        is_there = False
    return is_there or pending.action is PendingAction.REMOVE


def _finish(vm: Vm, pending: Pending) -> None:
    is_plugged = pending.action is not PendingAction.REMOVE
    if not is_plugged:
        _remove_rest(vm, pending)
    _record(pending, plugged=is_plugged)


def _undo(vm: Vm, pending: Pending) -> None:
    if vm.machine.has_device(pending.device_id):
        _record(pending, plugged=True)  # a process that undid it was killed, too
        return
    _remove_rest(vm, pending)
    if pending.action is PendingAction.MODIFY:
        _go_back(vm, pending)
    else:
        _record(pending, plugged=False)


def _remove_rest(vm: Vm, pending: Pending) -> None:
    remove_rest = plug_disk.remove_rest
    if pending.kind is DeviceKind.NIC:
        from brine.hotplug.plug_nic import remove_rest  # as above

    remove_rest(vm, pending)


def _is_kept(vm: Vm, pending: Pending) -> bool:
    """Whether the guest still has a device after a moment.

    The guest was asked to release it just now, and should not do so in the middle of the next work.
    """
    deadline = time.monotonic() + _GUEST_TAKES_S
    while 0 <= time.time() - pending.since < _GUEST_TAKES_S and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if not vm.machine.has_device(pending.device_id):
            return False
    return True


def _go_back(vm: Vm, pending: Pending) -> None:
    from brine.hotplug.plug_nic import put_back  # as above

    try:
        put_back(vm, Vif.from_recorded(pending.before), Slot(**pending.slot))
    except BrineError:
        _record(pending, plugged=False)
        raise


def _record(pending: Pending, *, plugged: bool) -> None:
    try:
        pending.record(plugged=plugged)
    except RuntimeFileError as error:
        log.warning("%s", error)


@contextlib.contextmanager
def working_on(
    qmp_path: Path,
    *,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    qmp_timeout_s: float = QMP_TIMEOUT_S,
    limit_s: float = LIMIT_S,
    through: Relay | None = None,
) -> Iterator[Vm]:
    """Lock a VM, and connect to its monitor, for the time of the block.

    :param runtime: as in :class:`Vm`, like *timeout_s*.
    :param dry_run: do not lock, and leave interrupted work alone.
    :param lock_timeout_s: how long to wait for another command of Brine's.
    :param qmp_timeout_s: how long to wait for another client of its monitor, and then for QEMU's
        answer to each command.
    :param limit_s: how long the connection may last, beside *timeout_s*.
    :param through: reads QEMU's answers; None is this process itself.
    :raises brine.common.locks.LockedError: if another command of Brine's holds the VM.
    :raises brine.common.qmp.client.QmpError: if there is no monitor, or it does not answer.
    :raises brine.vm.peer.StrangerError: if the socket is not that of the instance's QEMU.
    :raises HotplugError: if another client holds the monitor.
    """
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(node_lock(lock_name("hotplug", qmp_path), timeout_s=lock_timeout_s))
        limit_s += timeout_s
        there = monitor(qmp_path, timeout_s=qmp_timeout_s, limit_s=limit_s, through=through)
        qmp = stack.enter_context(there)
        # A VM may have several monitors.
        identity = identity_of(qmp)
        if not dry_run:
            stack.enter_context(node_lock(f"{LOCK_PREFIX}{identity}", timeout_s=lock_timeout_s))
        machine = Machine(qmp)
        vm = Vm(qmp_path, machine, machine.vm_name(), identity, runtime, timeout_s, dry_run)
        if not dry_run:
            _settle(vm)
        yield vm
        if not dry_run:
            # The guest may have released a device after the block had stopped waiting.
            _settle(vm)


def settle_all() -> None:
    """Complete or undo interrupted work on all VMs of this node, as far as possible.

    A guest may have released a device long after it was asked.
    """
    forget_ended()
    for qmp_path in sorted(sockets()):
        try:
            settle_vm(qmp_path)
        except (BrineError, OSError) as error:
            log.info("%s: not looked at: %s", qmp_path, error)


def settle_vm(qmp_path: Path) -> None:
    """Complete or undo interrupted work on a VM, as far as possible.

    :raises BrineError: why that is not possible now; also OSError.
    """
    with _briefly(qmp_path):
        pass  # that is all


@contextlib.contextmanager
def _briefly(qmp_path: Path) -> Iterator[Vm]:
    """A VM for which another command does not wait long."""
    with (
        Relay() as relay,
        working_on(
            qmp_path,
            timeout_s=0,
            lock_timeout_s=0,
            qmp_timeout_s=_SETTLE_TIMEOUT_S,
            limit_s=_SETTLE_LIMIT_S,
            through=relay,
        ) as vm,
    ):
        yield vm


@contextlib.contextmanager
def _settling(
    kind: OperationKind, bound: Callable[[Vm], OperationKind], keys: Sequence[str]
) -> Iterator[OperationKind]:
    """Hold the VM of an interrupted operation with these keys; see
    :class:`brine.common.operation.OperationKind`. If the operation has ended, nothing
    is left to do."""
    forget_ended()
    identity = identity_in(keys)
    work = [one for one in recorded(key_of(identity)) if one.kind == kind.name]
    if not work:
        yield kind
        return
    with _briefly(Path(str(work[0].facts.get("qmp")))) as vm:
        if vm.identity != identity:
            raise HotplugError(f"{vm.qmp_path}: leads to another VM")
        yield bound(vm)


SETTLED = replace(PLUGGING, alone=partial(_settling, PLUGGING, _plugging))
"""Plugging, as ``brine operations`` lists and settles it; a record ends with its VM."""

IMAGES_SETTLED = replace(IMAGES, alone=partial(_settling, IMAGES, _imaging))
"""The same of work on the images of disks."""
