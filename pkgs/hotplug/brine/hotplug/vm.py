"""A locked VM: its devices, the work in progress, and the devices that it was started with."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.peer import is_listening
from brine.common.qmp.wire import QmpCommandError, QmpTimeoutError
from brine.hotplug import messages
from brine.hotplug.address import DeviceKind, DeviceName, is_path
from brine.hotplug.disk import ide_disks, is_same
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.qemu import Device, Machine, devices_of
from brine.hotplug.runtime_file import Runtime, RuntimeFileError, qemu_id
from brine.hotplug.transaction import Pending, PendingAction, PendingFile, Undo

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM that this process alone may change.

    :param qmp_path: its QMP socket.
    :param name: of the VM: QEMU's ``-name``, or else the socket's name.
    :param finished: interrupted work of others that turned out to be complete.
    """

    qmp_path: Path
    machine: Machine
    name: str
    pending: PendingFile
    finished: list[Pending] = field(default_factory=list)

    def devices(self, kind: DeviceKind) -> list[Device]:
        """The devices that Brine plugged in, by their slot."""
        return devices_of(self.machine, kind, self.name)

    def find(self, kind: DeviceKind, reference: str) -> Device | None:
        """The device with that id, UUID, MAC, serial or path.

        :raises HotplugError: if several devices match.
        """
        wanted = reference.lower()
        may_be_path = is_path(reference) or os.path.exists(reference)
        found = [
            one
            for one in self.devices(kind)
            if wanted in (one.device_id, one.value.lower())
            or one.is_of(wanted)
            or (one.path and may_be_path and is_same(one.path, reference))
        ]
        if len(found) > 1:
            ids = ", ".join(one.device_id for one in found)
            raise HotplugError(f"several are known as {reference}", hint=f"choose one of {ids}")
        return found[0] if found else None

    def command(self, verb: str, device_id: str) -> str:
        """A command for a device, to be used in a hint.

        :param verb: such as ``nic modify``.
        """
        if self.qmp_path.parent == paths.CONTROL_DIR:
            return f"brine {verb} {self.qmp_path.stem} {device_id}"
        return f"brine {verb} {device_id} --qmp {self.qmp_path}"

    def tell_unplugged(self, device: Device) -> None:
        """Report a removed device in the journal."""
        known = {device.key: device.value, "tap": device.tap.name if device.tap else None}
        messages.tell_unplugged(self.name, device.name.kind, device.device_id, **known)

    def was_finished(self, request: dict[str, Any]) -> Pending | None:
        """The interrupted work of the same request, if it turned out to be complete."""
        return next((one for one in self.finished if request and one.request == request), None)

    @contextlib.contextmanager
    def doing(self, pending: Pending) -> Iterator[Doing]:
        """Record the work of the block until it is completed or undone.

        If the block fails, its steps are undone. If that fails too, the record stays, and the next
        command undoes them. The record also stays if the guest was asked to release a device: the
        guest may still do so, long after the command has stopped waiting.
        """
        if pending.runtime:
            check_writable(Path(pending.runtime))
        pending = replace(pending, qmp=str(self.qmp_path.absolute()), since=time.time())
        self.pending.begin(pending)
        doing = Doing(self, pending)
        try:
            yield doing
        except BaseException as error:
            is_undone = doing.undo.all()
            if isinstance(error, RefusedByGuestError):
                messages.tell_refused(self.name, pending.kind, pending.device_id, error.reason)
            if isinstance(error, RefusedByGuestError | QmpCommandError):
                doing.guest_had_its_time()
            is_known = is_undone and not isinstance(error, QmpTimeoutError)
            if self.is_gone() or (is_known and not doing.awaits_guest()):
                self._end(pending)
            raise
        self._end(pending)

    def is_gone(self) -> bool:
        """Whether QEMU has ended: nobody listens at the VM's socket."""
        return not is_listening(self.qmp_path)

    def _end(self, pending: Pending) -> None:
        try:
            self.pending.end(pending.device_id)
        except HotplugError as error:
            log.warning("%s", error)  # whoever comes next finds that it is done


class Doing:
    """Work on a VM, and what undoes it."""

    def __init__(self, vm: Vm, pending: Pending) -> None:
        self.undo = Undo(vm.is_gone)
        self._file = vm.pending
        self._pending = pending

    def guest_had_its_time(self) -> None:
        """Note that the guest refused, or was not asked: nobody need wait for it."""
        self._pending = replace(self._pending, since=0.0)
        self._file.begin(self._pending)

    def device_is_out(self) -> None:
        """Note, of a change, that the former device is unplugged."""
        self._pending = replace(self._pending, is_out=True)
        self._file.begin(self._pending)

    def awaits_guest(self) -> bool:
        """Whether the guest may still release a device that it was asked for."""
        return self._pending.action is not PendingAction.ADD and not self._pending.is_out


def check_writable(file: Path) -> None:
    """Refuse a runtime file that could not be updated, before anything changes.

    :raises brine.hotplug.runtime_file.RuntimeFileError: what is wrong.
    """
    Runtime.load(file)
    if not os.access(file.parent, os.W_OK):
        raise RuntimeFileError(file, "can't be written: its folder is read-only")


# NICs and disks that the VM was started with: Brine did not plug them in.

_FOLDERS = ("/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached")
_TYPES = {
    DeviceKind.NIC: re.compile(r".*(net|e1000|rtl8139|ne2k|pcnet|i82[58]|igb|tulip|sungem)"),
    DeviceKind.DISK: re.compile(r"(virtio-blk|scsi-|ide-|nvme|usb-storage)"),
}
_KNOWN_BY = {DeviceKind.NIC: "mac", DeviceKind.DISK: "serial"}


def has_boot_device(machine: Machine, kind: DeviceKind, reference: str) -> bool:
    """Whether the VM was started with a device of that id, MAC or serial.

    :raises brine.common.qmp.client.QmpError: if QEMU does not answer, or not as it should.
    """
    wanted = reference.lower()
    for name, value in _boot_devices(machine, kind):
        if wanted in (name.lower(), value.lower()):
            return True
    return False


def refuse_boot_device(
    machine: Machine, kind: DeviceKind, reference: str, runtime: Path | None
) -> None:
    """Refuse to remove a device that the VM was started with.

    :param runtime: its runtime file, if there is one. Brine did not plug in a device there that has
        no id of Brine's.
    :raises HotplugError: if the reference names such a device.
    """
    is_one = has_boot_device(machine, kind, reference)
    if not is_one and runtime:
        recorded = Runtime.load(runtime)
        is_one = kind is DeviceKind.DISK and is_path(reference) and _is_ide(recorded, reference)
        for device in recorded.known_as(kind, reference):
            is_one = is_one or _is_there(machine, kind, device)
    if is_one:
        raise HotplugError(
            f"{reference}: was there when the VM started, and can't be unplugged before its next"
            " start",
            hint="--no-hotplug takes it out of the runtime file" if runtime else None,
        )


def _is_ide(runtime: Runtime, path: str) -> bool:
    started = runtime.rest if isinstance(runtime.rest, dict) else {}
    return any(is_same(use.path, path) for use in ide_disks(started))


def _is_there(machine: Machine, kind: DeviceKind, device: dict[str, Any]) -> bool:
    """Whether the VM may have been started with a device of the runtime file.

    A NIC's MAC shows it. A disk may show nothing: then this says yes, because a disk that is there
    must not count as unplugged.
    """
    if qemu_id(device):
        return False
    if kind is DeviceKind.NIC and device.get("mac"):
        return has_boot_device(machine, kind, str(device["mac"]))
    return True


def _boot_devices(machine: Machine, kind: DeviceKind) -> Iterator[tuple[str, str]]:
    """The names and MACs or serials of the devices of a kind."""
    for folder in _FOLDERS:
        for name, type_ in (machine.children(folder)).items():
            ours = DeviceName.parse(name)
            if _TYPES[kind].match(type_) and not (ours and ours.kind is kind):
                yield name, _property(machine, f"{folder}/{name}", _KNOWN_BY[kind])


def _property(machine: Machine, path: str, name: str) -> str:
    try:
        return str(machine.qmp.execute("qom-get", {"path": path, "property": name}))
    except QmpCommandError:
        return ""  # not every type has it
