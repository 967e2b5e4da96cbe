"""A VM that this process has locked: its devices, what is refused of them, and recorded work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.qmp.wire import QmpCommandError, QmpTimeoutError
from brine.common.unix_socket import is_listening
from brine.hotplug import messages
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.known_devices import Device, DeviceChange, devices_of
from brine.hotplug.qemu import Machine
from brine.hotplug.transaction import (
    Pending,
    PendingAction,
    Transaction,
    begun,
    work_on,
)
from brine.vm.address import DeviceKind
from brine.vm.conflicts import IdentityKeys, identities_lock, is_same_disk, refuse_taken
from brine.vm.identities import Identity
from brine.vm.instances import instance_behind
from brine.vm.runtime_file import Json, Runtime, RuntimeFileError, qemu_id
from brine.vm.slots import Slot


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM that this process alone may change.

    :param name: QEMU's ``-name``, or else the name of its QMP socket.
    :param identity: its QEMU process, as :func:`brine.hotplug.transaction.identity_of` has it.
    :param runtime: its runtime file; None if there is none.
    :param timeout_s: how long the guest may take to release a device.
    :param dry_run: nothing may be changed.
    :param finished: interrupted work of others that turned out to be complete.
    """

    qmp_path: Path
    machine: Machine
    name: str
    identity: str
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
                    is_same_disk(str(one.get("path")), reference) for one in runtime.ide_disks()
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
        begun_work = (one for _, one in work_on(self.identity) if one.awaits_guest())
        if any(one.device_id == device.device_id for one in begun_work):
            text = f"{device.device_id}: the guest was asked to release it, and may still do so"
            verb = f"{device.name.kind.value.lower()} remove"
            hint = f"{self.command(verb, device.device_id)} waits for that; then add it again"
            raise HotplugError(text, hint=hint)

    def refuse_otherwise(self, device: Device, unlike: list[str], hint: str) -> None:
        """Refuse a device that is plugged in already, if the guest may release it, or if its
        settings are unlike the request's."""
        self.refuse_leaving(device)
        if unlike:
            text = (
                f"{device.device_id}: already plugged in with other settings: {', '.join(unlike)}"
            )
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

    def refuse_taken(
        self, identities: Iterable[Identity], keys: IdentityKeys | None = None
    ) -> None:
        """Refuse what another instance of this node has.

        :raises brine.vm.conflicts.ConflictError: what, and whose it is.
        """
        refuse_taken(instance_behind(self.qmp_path, self.runtime), identities, keys)

    @contextlib.contextmanager
    def doing(
        self,
        action: PendingAction,
        change: DeviceChange,
        identities: Iterable[Identity] = (),
        **known: Any,
    ) -> Iterator[Transaction]:
        """Record the work of the block until it is completed, also in the runtime file, or undone.

        If the block fails, its steps are undone. If that fails too, the record stays, and the next
        command undoes them. The record also stays if the guest was asked to release a device: the
        guest may still do so, long after the command has stopped waiting.

        :param identities: what the VM gets that no other instance may have.
        :param known: further fields of :class:`brine.hotplug.transaction.Pending`.
        """
        if self.runtime:
            # A device that can't be updated is refused before anything changes.
            Runtime.load(self.runtime)
            if not os.access(self.runtime.parent, os.W_OK):
                raise RuntimeFileError(self.runtime, "can't be written: its folder is read-only")
            known["runtime"] = str(self.runtime)
        known |= {"tap": change.tap, "qmp": str(self.qmp_path.absolute()), "since": time.time()}
        pending = Pending(action, change.kind, change.uuid, change.device_id, **known)
        wanted = list(identities)
        check = partial(self.refuse_taken, wanted)
        with contextlib.ExitStack() as stack:
            with identities_lock(check) if wanted else contextlib.nullcontext():
                work = stack.enter_context(begun(self.identity, pending))
            doing = Transaction(work, pending, self.is_gone)
            is_plugged = action is not PendingAction.REMOVE
            try:
                yield doing
                pending.record(plugged=is_plugged)
            except BaseException as error:
                self._undo(doing, change, error)
                raise
            work.over()
        self.tell(change, plugged=is_plugged)

    def _undo(self, doing: Transaction, change: DeviceChange, error: BaseException) -> None:
        """Undo work that has failed; what is not undone, or not known, stays recorded."""
        is_undone = doing.all()
        if isinstance(error, RefusedByGuestError):
            refused = (self.name, change.kind, change.device_id)
            messages.tell(messages.REFUSED, *refused, reason=error.reason)
        if isinstance(error, RefusedByGuestError | QmpCommandError):
            # The guest refused, or was not asked: there is no need to wait for it.
            doing.note(since=0.0)
        is_known = is_undone and not isinstance(error, QmpTimeoutError)
        awaits_guest = doing.pending.awaits_guest()
        if self.is_gone() or (is_known and not awaits_guest):
            doing.work.over()
        else:
            doing.work.postpone(doing.pending.awaited() if awaits_guest else str(error))

    def is_gone(self) -> bool:
        """Whether QEMU has ended: no process listens at the VM's socket."""
        return not is_listening(self.qmp_path)
