"""A VM that one has to oneself, and what is being done to it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.listening import is_listening
from brine.common.qmp_errors import QmpCommandError, QmpTimeoutError
from brine.hotplug import messages
from brine.hotplug.device_names import Kind
from brine.hotplug.disk_uses import is_same
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.machine import Machine
from brine.hotplug.pending import Action, Pending, PendingFile
from brine.hotplug.plugged import Plugged, plugged
from brine.hotplug.references import is_path
from brine.hotplug.undo import Undo

log = logging.getLogger(__name__)


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
        return await plugged(self.machine, kind, self.name)

    async def find(self, kind: Kind, reference: str) -> Plugged | None:
        """The device that is known by its id, its UUID, its MAC, its serial or its path.

        :raises HotplugError: if several are.
        """
        wanted = reference.lower()
        found = [
            one
            for one in await self.devices(kind)
            if wanted in (one.device_id, one.value.lower())
            or one.is_of(wanted)
            or (one.path and is_path(reference) and is_same(one.path, reference))
        ]
        if len(found) > 1:
            ids = ", ".join(one.device_id for one in found)
            raise HotplugError(f"several are known as {reference}", hint=f"choose one of {ids}")
        return found[0] if found else None

    def command(self, verb: str, device_id: str) -> str:
        """The command that does something to a device, for a hint.

        :param verb: such as ``nic modify``.
        """
        if self.qmp_path.parent == paths.CONTROL_DIR:
            return f"brine {verb} {self.qmp_path.stem} {device_id}"
        return f"brine {verb} {device_id} --qmp {self.qmp_path}"

    def tell_unplugged(self, device: Plugged) -> None:
        """Have the journal say that a device was taken out."""
        known = {device.key: device.value, "tap": device.tap.name if device.tap else None}
        messages.tell_unplugged(self.name, device.name.kind, device.device_id, **known)

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
        return not is_listening(self.qmp_path)

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
