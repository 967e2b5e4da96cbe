"""A VM that one has to oneself: what is plugged into it, and what is being done to it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common.qmp import QmpCommandError, QmpTimeoutError
from brine.hotplug import messages
from brine.hotplug.device_names import DeviceName, Kind
from brine.hotplug.disks import whole_uuids
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.machine import Machine
from brine.hotplug.pending import Action, Pending, PendingFile
from brine.hotplug.undo import Undo

if TYPE_CHECKING:
    from brine.hotplug.tap_records import Record

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plugged:
    """A device that was plugged in by us.

    :param type: QEMU's name of what the guest sees, such as ``virtio-net-pci``.
    :param key: ``mac`` or ``serial``: what the guest knows it by; *value* is that.
    :param uuid: the whole one, where it is known; else its beginning.
    :param tap: of a NIC, where it is ours.
    """

    device_id: str
    name: DeviceName
    type: str
    key: str
    value: str
    uuid: str
    tap: Record | None = None

    def described(self) -> dict[str, Any]:
        """For a list."""
        found = {"device_id": self.device_id, "slot": self.name.slot, self.key: self.value}
        if self.name.kind is Kind.NIC:
            found["tap"] = self.tap.name if self.tap else None
        return {**found, "uuid": self.uuid}

    def tell_unplugged(self, instance: str) -> None:
        """Have the journal say that it was taken out."""
        known = {self.key: self.value, "tap": self.tap.name if self.tap else None}
        messages.tell_unplugged(instance, self.name.kind, self.device_id, **known)

    def is_of(self, uuid: str) -> bool:
        """Whether it is the device with that UUID."""
        try:
            return self.name.is_of(uuid) and self.uuid in (self.name.part, uuid.lower())
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM that is ours to change for the moment.

    :param qmp_path: its QMP socket.
    :param name: what it is called: QEMU's ``-name``, or else its socket's.
    :param finished: what others were killed at that turned out to be done.
    """

    qmp_path: Path
    machine: Machine
    name: str
    pending: PendingFile
    finished: list[Pending] = field(default_factory=list)

    async def devices(self, kind: Kind) -> list[Plugged]:
        """The devices that were plugged in by us, by their slot."""
        there = await self.machine.devices()
        names = {device_id: DeviceName.parse(device_id) for device_id in there}
        ours = {key: name for key, name in names.items() if name and name.kind is kind}
        if not ours:
            return []
        describe = self._nics if kind is Kind.NIC else self._disks
        found = [one async for one in describe(ours, there)]
        return sorted(found, key=lambda one: (one.name.bus, one.name.slot))

    async def _nics(
        self, ours: Mapping[str, DeviceName], types: Mapping[str, str]
    ) -> AsyncIterator[Plugged]:
        from brine.hotplug import tap_records  # with all that scripts need

        records = list(tap_records.load_all(tap_records.PLACES).values())
        for device_id, name in ours.items():
            mac = await self._value(device_id, "mac")
            if mac is None:
                continue
            mac = mac.lower()
            tap = self._tap_of(name, mac, records)
            uuid = tap.wiring.nic if tap else name.part
            yield Plugged(device_id, name, types[device_id], "mac", mac, uuid, tap)

    async def _disks(
        self, ours: Mapping[str, DeviceName], types: Mapping[str, str]
    ) -> AsyncIterator[Plugged]:
        uuids = await whole_uuids(self.machine)
        for device_id, name in ours.items():
            serial = await self._value(device_id, "serial")
            if serial is None:
                continue
            uuid = uuids.get(device_id, name.part)
            yield Plugged(device_id, name, types[device_id], "serial", serial, uuid)

    async def _value(self, device_id: str, key: str) -> str | None:
        """A property of a device; None if the guest has let go of it just now."""
        try:
            return str(await self.machine.property(device_id, key))
        except QmpCommandError as error:
            if error.error_class == "DeviceNotFound":
                return None
            raise

    def _tap_of(self, name: DeviceName, mac: str, records: Sequence[Record]) -> Record | None:
        """The tap of a NIC, if it is ours: taps know whose they are."""
        found = [
            one
            for one in records
            if one.is_here()
            and one.wiring.nic.replace("-", "").startswith(name.part)
            and one.wiring.mac.lower() == mac
        ]
        of_vm = [one for one in found if one.wiring.instance == self.name] or found
        return of_vm[0] if len(of_vm) == 1 else None

    async def find(self, kind: Kind, reference: str) -> Plugged | None:
        """The device that is known by its id, its UUID, its MAC or its serial.

        :raises HotplugError: if several are.
        """
        wanted = reference.lower()
        found = [
            one
            for one in await self.devices(kind)
            if wanted in (one.device_id, one.value.lower()) or one.is_of(wanted)
        ]
        if len(found) > 1:
            ids = ", ".join(one.device_id for one in found)
            raise HotplugError(f"several are known as {reference}", hint=f"choose one of {ids}")
        return found[0] if found else None

    def was_finished(self, request: dict[str, Any]) -> Pending | None:
        """What somebody was killed at who had asked for the same, if that turned out to be done."""
        return next((one for one in self.finished if request and one.request == request), None)

    @contextlib.asynccontextmanager
    async def doing(self, pending: Pending) -> AsyncIterator[Doing]:
        """Have what is begun in the block on record until it ends, one way or the other.

        If the block fails, its steps are undone. Where that can't be done whole, the record stays,
        and whoever comes next does it. So it does where a guest was asked for a device: it may
        still give it up, long after we ceased to wait.
        """
        if pending.runtime:
            check_writable(Path(pending.runtime))
        pending = replace(pending, qmp=str(self.qmp_path.absolute()), since=time.time())
        self.pending.begin(pending)
        doing = Doing(self, pending)
        try:
            yield doing
        except BaseException as error:
            is_undone = await doing.undo.all()
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
        """Whether nobody listens at the VM's socket any more: with QEMU has gone what it had."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            try:
                connection.connect(str(self.qmp_path))
            except BlockingIOError:
                return False
            except OSError:
                return True
        return False

    def _end(self, pending: Pending) -> None:
        try:
            self.pending.end(pending.device_id)
        except HotplugError as error:
            log.warning("%s", error)  # whoever comes next finds that it is done


class Doing:
    """Something that is being done to a VM, and what undoes it."""

    def __init__(self, vm: Vm, pending: Pending) -> None:
        self.undo = Undo(vm.is_gone)
        self._file = vm.pending
        self._pending = pending

    def guest_had_its_time(self) -> None:
        """It was asked and refused, or was not asked at all: nobody need wait for it now."""
        self._pending = replace(self._pending, since=0.0)
        self._file.begin(self._pending)

    def device_is_out(self) -> None:
        """Of a change: the device as it was is gone."""
        self._pending = replace(self._pending, is_out=True)
        self._file.begin(self._pending)

    def awaits_guest(self) -> bool:
        """Whether a guest may still give up a device that it was asked for."""
        return self._pending.action is not Action.ADD and not self._pending.is_out


def check_writable(file: Path) -> None:
    """Refuse a runtime file that could not be kept in step, before anything is done.

    :raises brine.hotplug.runtime.RuntimeFileError: what is wrong.
    """
    from brine.hotplug.runtime import Runtime, RuntimeFileError

    Runtime.load(file)
    if not os.access(file.parent, os.W_OK):
        raise RuntimeFileError(file, "can't be written: its folder is read-only")
