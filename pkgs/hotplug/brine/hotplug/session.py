"""A locked VM: connecting to its QMP socket, changing it, and completing interrupted work."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.locks import LockedError, node_lock
from brine.common.privileges import Capability, may
from brine.common.qmp.wire import QmpClosedError, QmpCommandError, QmpTimeoutError
from brine.common.unix_socket import is_listening
from brine.hotplug import messages, plug_disk
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.nic import Nic
from brine.hotplug.qemu import Device, DeviceChange, Machine, devices_of, monitor
from brine.hotplug.relay import Relay
from brine.hotplug.timeouts import LOCK_TIMEOUT_S, QMP_TIMEOUT_S, UNPLUG_TIMEOUT_S
from brine.hotplug.transaction import (
    LOCK_PREFIX,
    Pending,
    PendingAction,
    PendingFile,
    Transaction,
    begun,
    forget_ended,
    identity_of,
)
from brine.vm.address import DeviceKind
from brine.vm.conflicts import (
    Claim,
    Identities,
    claiming,
    ide_disks,
    is_same_disk,
    refuse_taken,
)
from brine.vm.instances import instance_behind
from brine.vm.runtime_file import Json, Runtime, RuntimeFileError, lock_name, qemu_id
from brine.vm.slots import Slot

log = logging.getLogger(__name__)

LIMIT_S = 1800.0
"""How long work on a VM may take at most, whatever QEMU and its guest do."""

_SETTLE_LIMIT_S = 60.0
_SETTLE_TIMEOUT_S = 5.0
_GUEST_TAKES_S = 5.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM that this process alone may change.

    :param name: QEMU's ``-name``, or else the name of its QMP socket.
    :param runtime: its runtime file; None if there is none.
    :param timeout_s: how long the guest may take to release a device.
    :param dry_run: nothing may be changed.
    :param finished: interrupted work of others that turned out to be complete.
    """

    qmp_path: Path
    machine: Machine
    name: str
    pending: PendingFile
    runtime: Path | None
    timeout_s: float
    dry_run: bool
    finished: list[Pending] = field(default_factory=list)

    def devices(self, kind: DeviceKind) -> list[Device]:
        """The devices that Brine plugged in, by their slot."""
        return devices_of(self.machine, kind, self.name)

    def find(self, kind: DeviceKind, reference: str) -> Device | None:
        """The device with that id, UUID, MAC, serial or path."""
        wanted = reference.lower()
        may_be_path = "/" in reference or os.path.exists(reference)
        found = [
            one
            for one in self.devices(kind)
            if wanted in (one.device_id, one.value.lower())
            or one.is_of(wanted)
            or (one.path and may_be_path and is_same_disk(one.path, reference))
        ]
        if len(found) > 1:
            ids = ", ".join(one.device_id for one in found)
            raise HotplugError(f"several are known as {reference}", hint=f"choose one of {ids}")
        return found[0] if found else None

    def refuse_boot_device(self, kind: DeviceKind, reference: str) -> None:
        """Refuse to remove a device that the VM was started with."""
        is_one = self.machine.was_started_with(kind, reference)
        if not is_one and self.runtime:
            runtime = Runtime.load(self.runtime)
            is_one = any(
                self._is_boot_device(kind, one) for one in runtime.known_as(kind, reference)
            )
            if kind is DeviceKind.DISK and "/" in reference:
                is_one |= any(
                    is_same_disk(str(one.get("path")), reference) for one in ide_disks(runtime.rest)
                )
        if is_one:
            text = f"{reference}: was there when the VM started, and can't be unplugged before its"
            hint = "--no-hotplug takes it out of the runtime file" if self.runtime else None
            raise HotplugError(f"{text} next start", hint=hint)

    def _is_boot_device(self, kind: DeviceKind, device: Json) -> bool:
        """Whether the VM may have been started with a device of the runtime file.

        Brine plugged in those with an id of its own. A NIC's MAC shows it. A disk may show nothing:
        then this says yes, because a disk that is there must not count as unplugged.
        """
        if qemu_id(device):
            return False
        if kind is DeviceKind.NIC and device.get("mac"):
            return self.machine.was_started_with(kind, str(device["mac"]))
        return True

    def refuse_leaving(self, device: Device) -> None:
        """Refuse to keep a device that the guest was asked to release: it may still do so, and no
        QEMU withdraws that."""
        if any(
            one.awaits_guest() and one.device_id == device.device_id for one in self.pending.read()
        ):
            text = f"{device.device_id}: the guest was asked to release it, and may still do so"
            verb = f"{device.name.kind.value.lower()} remove"
            hint = f"{self.command(verb, device.device_id)} waits for that; then add it again"
            raise HotplugError(text, hint=hint)

    def refuse_otherwise(self, device: Device, unlike: list[str], hint: str) -> None:
        """Refuse a device that is plugged in already, if the guest may release it, or if its
        settings are unlike the request's."""
        self.refuse_leaving(device)
        if unlike:
            text = f"{device.device_id}: is plugged in already, and otherwise: {', '.join(unlike)}"
            raise HotplugError(text, hint=hint)

    def record_again(self, device: Device, uuid: str, entry: Callable[[Slot], Json]) -> None:
        """Record a plugged device that is missing in the runtime file, if there is one.

        :param entry: the device as the runtime file has it, in its slot.
        """
        if self.dry_run or not self.runtime:
            return
        kind, device_id = device.name.kind, device.device_id
        found = Runtime.load(self.runtime).find(kind, uuid)
        if found is None or qemu_id(found) != device_id:
            there = entry(self.machine.slot_of(device_id, device.name))
            known = (PendingAction.ADD, kind, uuid, device_id)
            Pending(*known, device=there, runtime=str(self.runtime)).record(plugged=True)

    def command(self, verb: str, device_id: str) -> str:
        """A command for a device, to be used in a hint.

        :param verb: such as ``nic modify``.
        """
        if self.qmp_path.parent == paths.CONTROL_DIR:
            return f"brine {verb} {self.qmp_path.stem} {device_id}"
        return f"brine {verb} {device_id} --qmp {self.qmp_path}"

    def tell(self, change: DeviceChange, *, plugged: bool) -> None:
        """Report a plugged or removed device in the journal."""
        message = (messages.PLUGGED if plugged else messages.UNPLUGGED)[change.kind]
        known = {change.kind.key: change.value, "tap": change.tap}
        messages.tell(message, self.name, change.kind, change.device_id, **known)

    def was_finished(self, request: dict[str, Any]) -> Pending | None:
        """The interrupted work of the same request, if it turned out to be complete."""
        return next((one for one in self.finished if one.request == request), None)

    def refuse_taken(self, claims: Iterable[Claim], identities: Identities | None = None) -> None:
        """Refuse what another instance of this node has.

        :raises brine.vm.conflicts.ConflictError: what, and whose it is.
        """
        refuse_taken(instance_behind(self.qmp_path, self.runtime), claims, identities)

    @contextlib.contextmanager
    def doing(
        self,
        action: PendingAction,
        change: DeviceChange,
        claims: Iterable[Claim] = (),
        **known: Any,
    ) -> Iterator[Transaction]:
        """Record the work of the block until it is completed, also in the runtime file, or undone.

        If the block fails, its steps are undone. If that fails too, the record stays, and the next
        command undoes them. The record also stays if the guest was asked to release a device: the
        guest may still do so, long after the command has stopped waiting.

        :param claims: what the VM gets that no other instance may have.
        :param known: further fields of :class:`brine.hotplug.transaction.Pending`.
        """
        if self.runtime:
            # What could not be updated is refused before anything changes.
            Runtime.load(self.runtime)
            if not os.access(self.runtime.parent, os.W_OK):
                raise RuntimeFileError(self.runtime, "can't be written: its folder is read-only")
            known["runtime"] = str(self.runtime)
        known |= {"tap": change.tap, "qmp": str(self.qmp_path.absolute()), "since": time.time()}
        pending = Pending(action, change.kind, change.uuid, change.device_id, **known)
        claimed = list(claims)
        check = partial(self.refuse_taken, claimed)
        with claiming(check) if claimed else contextlib.nullcontext():
            doing = Transaction(self.pending, pending, self.is_gone)
        is_plugged = action is not PendingAction.REMOVE
        try:
            yield doing
            pending.record(plugged=is_plugged)
        except BaseException as error:
            is_undone = doing.all()
            if isinstance(error, RefusedByGuestError):
                refused = (self.name, change.kind, change.device_id)
                messages.tell(messages.REFUSED, *refused, reason=error.reason)
            if isinstance(error, RefusedByGuestError | QmpCommandError):
                # The guest refused, or was not asked: there is no need to wait for it.
                doing.note(since=0.0)
            is_known = is_undone and not isinstance(error, QmpTimeoutError)
            if self.is_gone() or (is_known and not doing.pending.awaits_guest()):
                doing.end()
            raise
        doing.end()
        self.tell(change, plugged=is_plugged)

    def is_gone(self) -> bool:
        """Whether QEMU has ended: no process listens at the VM's socket."""
        return not is_listening(self.qmp_path)


def remove_device(vm: Vm, device: Device) -> DeviceChange:
    """Remove a device from the guest, then its backend, then its entry in the runtime file."""
    change = device.change(changed=True)
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
    for pending in vm.pending.read():
        if pending.kind is DeviceKind.NIC and not may(Capability.NET_ADMIN):
            continue  # commands for NICs complete it
        try:
            _recover(vm, pending)
        except (QmpTimeoutError, QmpClosedError):
            raise
        except BrineError as error:
            # This error must not block all further work on the VM.
            what = f"{pending.action} of {pending.device_id}"
            log.error("%s: %s was interrupted, and is half-done: %s", vm.name, what, error)
            if not isinstance(error, LockedError):
                vm.pending.end(pending.device_id)


def _recover(vm: Vm, pending: Pending) -> None:
    is_there = vm.machine.has_device(pending.device_id)
    if is_there and pending.awaits_guest():
        if _is_kept(vm, pending):
            return  # the guest was asked for it, and may still give it up
        is_there = False
    if is_there:
        _record(pending, plugged=True)
    else:
        remove_rest = plug_disk.remove_rest
        if pending.kind is DeviceKind.NIC:
            from brine.hotplug.plug_nic import remove_rest  # as above

        remove_rest(vm, pending)
        if pending.action is PendingAction.MODIFY:
            _go_back(vm, pending)
        else:
            _record(pending, plugged=False)
    vm.pending.end(pending.device_id)
    is_done = is_there or pending.action is PendingAction.REMOVE
    if is_done:
        vm.finished.append(pending)
    message = messages.FINISHED if is_done else messages.UNDONE
    action = pending.action.value
    messages.tell(message, vm.name, pending.kind, pending.device_id, action=action)


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
        put_back(vm, Nic.from_json(pending.before), Slot(**pending.slot))
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
        pending = PendingFile(identity)
        vm = Vm(qmp_path, machine, machine.vm_name(), pending, runtime, timeout_s, dry_run)
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
    for qmp_path in list(begun()):
        try:
            with (
                Relay() as relay,
                working_on(
                    qmp_path,
                    timeout_s=0,
                    lock_timeout_s=0,
                    qmp_timeout_s=_SETTLE_TIMEOUT_S,
                    limit_s=_SETTLE_LIMIT_S,
                    through=relay,
                ),
            ):
                pass  # that is all
        except (BrineError, OSError) as error:
            log.info("%s: not looked at: %s", qmp_path, error)
