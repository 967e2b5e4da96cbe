"""Working on one VM: alone, over its QMP socket, and after what others left half-done."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.locks import locked
from brine.common.qmp import QmpClient, QmpClosedError, QmpTimeoutError
from brine.hotplug.device_names import DeviceName, Kind
from brine.hotplug.disks import remove_disk_back_end
from brine.hotplug.errors import HotplugError
from brine.hotplug.machine import Machine
from brine.hotplug.nics import remove_nic_back_end
from brine.hotplug.pending import Action, Pending, PendingFile, vm_key
from brine.hotplug.runtime import Runtime

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Plugged:
    """A device that was plugged in by us.

    :param key: ``mac`` or ``serial``: what the guest knows it by; *value* is that.
    :param uuid: the whole one, where it is known; else its beginning.
    """

    device_id: str
    name: DeviceName
    key: str
    value: str
    uuid: str = ""

    def described(self) -> dict[str, Any]:
        """For a list."""
        return {"device_id": self.device_id, "slot": self.name.slot, self.key: self.value}


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM that is ours to change for the moment.

    :param qmp_path: its QMP socket.
    :param finished: what somebody was killed at that turned out to be done.
    """

    qmp_path: Path
    machine: Machine
    pending: PendingFile
    finished: Pending | None

    async def plugged(self, kind: Kind, uuid: str) -> str | None:
        """The id of the device with that UUID, if it is plugged in."""
        for device_id in await self.machine.devices():
            name = DeviceName.parse(device_id)
            if name and name.kind is kind and name.is_of(uuid):
                return device_id
        return None

    async def name(self) -> str:
        """What the VM is called: QEMU's ``-name``, or else its socket's."""
        answer = await self.machine.qmp.execute("query-name")
        return str(answer.get("name") or self.qmp_path.stem)

    async def devices(self, kind: Kind) -> list[Plugged]:
        """The devices that were plugged in by us, by their slot."""
        found = []
        for device_id in await self.machine.devices():
            name = DeviceName.parse(device_id)
            if name and name.kind is kind:
                key = "mac" if kind is Kind.NIC else "serial"
                value = str(await self.machine.property(device_id, key))
                found.append(Plugged(device_id, name, key, value))
        return sorted(found, key=lambda one: one.name.slot)

    async def find(
        self, kind: Kind, reference: str, *, runtime: Path | None = None
    ) -> Plugged | None:
        """The device that is known by its id, its UUID, its MAC or its serial.

        :param runtime: tells its whole UUID, which its id does not.
        """
        for one in await self.devices(kind):
            if reference in (one.device_id, one.value) or _is_uuid_of(reference, one):
                return replace(one, uuid=_whole_uuid(one, reference, runtime))
        return None

    @contextlib.asynccontextmanager
    async def doing(self, pending: Pending) -> AsyncIterator[None]:
        """Have what is begun in the block on record until it ends, one way or the other.

        A block that fails has undone what it did, as far as QEMU still answers. Where it does not,
        the record stays, and whoever comes next does it.
        """
        self.pending.write(pending)
        try:
            yield
        except QmpTimeoutError:
            raise  # nobody knows what QEMU still does
        except QmpClosedError:
            self.pending.clear()  # with QEMU has gone what it had
            raise
        except BaseException:
            self.pending.clear()
            raise
        self.pending.clear()


@contextlib.asynccontextmanager
async def working_on(
    qmp_path: Path,
    *,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    qmp_timeout_s: float = QMP_TIMEOUT_S,
) -> AsyncIterator[Vm]:
    """Have a VM to oneself for the time of the block.

    :raises brine.common.locks.LockedError: if another of us is at it for so long.
    :raises brine.common.qmp.QmpError: if its monitor can't be had.
    """
    lock = paths.LOCK_DIR / f"hotplug-{vm_key(qmp_path)}.lock"
    try:
        lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise HotplugError(f"{lock.parent}: {error.strerror}", hint="be root") from error
    with locked(lock, timeout_s=lock_timeout_s):
        async with QmpClient.connect(qmp_path, timeout_s=qmp_timeout_s) as qmp:
            machine, file = Machine(qmp), PendingFile(qmp_path)
            pending = file.read()
            finished = await _finish(machine, pending) if pending else None
            file.clear()
            yield Vm(qmp_path, machine, file, finished)


def _is_uuid_of(reference: str, device: Plugged) -> bool:
    try:
        return device.name.is_of(reference)
    except ValueError:
        return False


def _whole_uuid(device: Plugged, reference: str, runtime: Path | None) -> str:
    if runtime:
        for recorded in Runtime.load(runtime).devices[device.name.kind]:
            if _is_uuid_of(recorded["uuid"], device):
                return str(recorded["uuid"])
    return reference if _is_uuid_of(reference, device) else device.name.part


async def _finish(machine: Machine, pending: Pending) -> Pending | None:
    """Bring what was begun to an end, one way or the other; returns it if it is done after all.

    What the guest has is kept: a device that is there was plugged, one that is gone was unplugged.
    """
    there = await machine.has_device(pending.device_id)
    log.info("%s of %s was interrupted", pending.action, pending.device_id)
    if not there:
        if pending.kind is Kind.NIC:
            await remove_nic_back_end(machine, pending.device_id)
        else:
            await remove_disk_back_end(machine, pending.device_id)
    record(pending, plugged=there)
    return pending if there == (pending.action is Action.ADD) else None


def record(pending: Pending, *, plugged: bool) -> None:
    """Have the runtime file say what is so.

    :raises brine.hotplug.runtime.RuntimeFileError: if it can't be read or written.
    """
    if pending.runtime is None:
        return
    file = Path(pending.runtime)
    runtime = Runtime.load(file)
    if plugged:
        link: Any = pending.request.get("path")
        runtime.with_device(pending.kind, pending.device, link=link).save(file)
    else:
        runtime.without_device(pending.kind, pending.uuid).save(file)
