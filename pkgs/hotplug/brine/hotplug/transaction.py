"""Work on a VM: recorded before it begins, and undone step by step if it fails."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import put_aside, unfinished, write_whole
from brine.common.process import start_time_of
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpTimeoutError
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.vm.address import DeviceKind
from brine.vm.runtime_file import Runtime, change_file, qemu_id

log = logging.getLogger(__name__)

LOCK_PREFIX = "vm-"
"""Of the names of VMs' locks, which their identity follows."""

# The identity of a VM: its QEMU process, whichever socket leads to it.


def identity_of(qmp: QmpClient) -> str:
    """A unique name for the QEMU behind a connection: ``PID-START-NAMESPACE``.

    If its process is not visible, as from another PID namespace, its socket stands for it.
    """
    process = qmp.peer_process()
    started = start_time_of(process) if process else ""
    if not started:
        return f"socket-{os.stat(qmp.path).st_ino}"
    return f"{process}-{started}-{_namespace()}"


def is_running(identity: str) -> bool:
    """Whether that QEMU still runs, as far as this process can see."""
    process, _, rest = identity.partition("-")
    started, _, namespace = rest.partition("-")
    if not process.isdecimal() or namespace != _namespace():
        return True
    if found := start_time_of(int(process)):
        return found == started
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(process), 0)  # its details may be hidden
        except ProcessLookupError:
            return False
    return True


def _namespace() -> str:
    """The PID namespace of this process: other namespaces have other numbers."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


# Records of work.


class PendingAction(StrEnum):
    ADD = "add"
    REMOVE = "remove"
    MODIFY = "modify"


@dataclass(frozen=True, slots=True)
class Pending:
    """Work that was begun, and perhaps not completed: at most one for a device.

    :param request: the arguments, by which a repeated request is recognised.
    :param device: the device as a runtime file has it.
    :param before: of a change: the former device.
    :param is_out: of a change: whether the former device is unplugged.
    :param slot: of a change: the former slot, as :class:`brine.vm.slots.Slot` has it.
    :param since: when it was begun, seconds since 1970; 0 if no guest's answer is expected.
    """

    action: PendingAction
    kind: DeviceKind
    uuid: str
    device_id: str
    request: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    runtime: str | None = None
    tap: str | None = None
    before: dict[str, Any] = field(default_factory=dict)
    is_out: bool = False
    slot: dict[str, Any] = field(default_factory=dict)
    qmp: str = ""
    since: float = 0.0

    def awaits_guest(self) -> bool:
        """Whether the guest may still release a device that it was asked for."""
        return self.action is not PendingAction.ADD and not self.is_out

    def is_of(self, uuid: str) -> bool:
        """Whether it is work on the device with that UUID. Of a device that another program plugged
        in, only the beginning of the UUID is known."""
        return uuid.lower().replace("-", "").startswith(self.uuid.replace("-", ""))

    def record(self, *, plugged: bool) -> None:
        """Record in the runtime file what was plugged or unplugged."""
        if self.runtime is None:
            return

        def how(runtime: Runtime) -> Runtime:
            if plugged:
                return runtime.with_device(self.kind, self.device, link=self.device.get("path"))
            gone = self._uuid_in(runtime)
            return runtime.without_device(self.kind, gone) if gone else runtime

        change_file(Path(self.runtime), how)

    def _uuid_in(self, runtime: Runtime) -> str | None:
        """The UUID of a removed device in the runtime file."""
        devices = runtime.devices[self.kind]
        by_id = [one["uuid"] for one in devices if qemu_id(one) == self.device_id]
        # Of a device that another program plugged in, only the beginning of the UUID is known.
        by_uuid = [one["uuid"] for one in devices if one["uuid"].lower().startswith(self.uuid)]
        return next((found[0] for found in (by_id, by_uuid) if len(found) == 1), None)


class PendingFile:
    """The record of one VM, by its identity. Its reader or writer holds the VM's lock."""

    def __init__(self, identity: str) -> None:
        self.path = paths.HOTPLUG_DIR / f"{identity}.json"

    def read(self) -> list[Pending]:
        """The work that was begun, in that order.

        A damaged record, or one of another version, is reported and kept aside.
        """
        try:
            return [_parse(one) for one in json.loads(self.path.read_bytes())]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise HotplugError(f"{self.path}: can't be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            try:
                aside = put_aside(self.path, self.path.with_suffix(".damaged"))
            except OSError as fault:
                text = f"{self.path}: damaged, and can't be kept aside: {fault.strerror}"
                raise HotplugError(text) from fault
            log.error(
                "%s: this record can't be read: %s; kept as %s",
                self.path,
                error,
                aside,
            )
            return []

    def begin(self, pending: Pending) -> None:
        """Record work that is about to begin; without that, the work must not begin."""
        self._write(pending.device_id, pending)

    def end(self, device_id: str) -> None:
        """Remove a device's record: its work is completed or undone."""
        self._write(device_id)

    def _write(self, device_id: str, *new: Pending) -> None:
        others = [one for one in self.read() if one.device_id != device_id]
        data = [asdict(one) for one in (*others, *new)]
        try:
            if not data:
                self.path.unlink(missing_ok=True)
                unfinished(self.path).unlink(missing_ok=True)
                return
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # It need not survive a reboot, because no VM does.
            write_whole(self.path, json.dumps(data).encode(), mode=0o600, alone=True, durable=False)
        except OSError as error:
            raise HotplugError(f"{self.path}: can't be written: {error.strerror}") from error


def _parse(data: Any) -> Pending:
    if data["action"] == PendingAction.MODIFY and not (data["before"] and data["slot"]):
        raise ValueError("a change without what was before")
    action, kind = PendingAction(data["action"]), DeviceKind(data["kind"])
    return Pending(**{**data, "action": action, "kind": kind})


def forget_ended() -> None:
    """Remove the records and locks of VMs that have ended."""
    for file in [*paths.HOTPLUG_DIR.glob("*.json*"), *paths.LOCK_DIR.glob(f"{LOCK_PREFIX}*.lock")]:
        # The name of an unfinished file begins with a dot.
        identity = file.name.removeprefix(".").removeprefix(LOCK_PREFIX).partition(".")[0]
        if not is_running(identity):
            with contextlib.suppress(OSError):
                file.unlink()


def begun() -> Iterator[Path]:
    """The sockets of running VMs with recorded work."""
    for file in sorted(paths.HOTPLUG_DIR.glob("*.json")):
        if is_running(file.stem):
            for pending in PendingFile(file.stem).read()[:1]:
                yield Path(pending.qmp)


def being_released(qmp: Path) -> list[Pending]:
    """The work on devices that the guest of a running VM was asked to release, and may still
    release.

    :param qmp: the socket of the VM.
    """
    return [
        pending
        for file in paths.HOTPLUG_DIR.glob("*.json")
        if is_running(file.stem)
        for pending in PendingFile(file.stem).read()
        if pending.awaits_guest() and Path(pending.qmp) == qmp
    ]


# Undoing the steps of failed work, as far as QEMU still answers.


class Undo:
    """The undo operations of the steps so far.

    An undo operation is added *before* its step, because an interrupted step may have been carried
    out. So it is no error if there is nothing to undo. The error that led here is reported.
    """

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self._is_gone = is_gone
        self._steps: list[tuple[Callable[[], object], bool]] = []

    def by(self, step: Callable[[], object], *, asks_qemu: bool = False) -> None:
        """Add the undo operation of the next step, which QEMU may carry out."""
        self._steps.append((step, asks_qemu))

    def all(self) -> bool:
        """Undo the steps, the last one first; False if a step is not undone.

        This stops if QEMU does not answer, because its state is not known then, and if the guest
        keeps the device, because the device needs all its parts.
        """
        complete, is_gone = True, False
        steps, self._steps = self._steps, []
        for step, asks_qemu in reversed(steps):
            if asks_qemu and is_gone:
                continue
            try:
                step()
            except (QmpClosedError, QmpTimeoutError) as error:
                log.debug("undoing: %s", error)
                is_gone = self._is_gone()
                if not is_gone:
                    return False
            except RefusedByGuestError as error:
                log.warning("nothing is undone: %s", error)
                return False
            except BrineError as error:
                log.warning("not all is undone: %s", error)
                complete = False
        return complete


class Transaction(Undo):
    """Work on a VM that is recorded, and what undoes it."""

    def __init__(self, file: PendingFile, pending: Pending, is_gone: Callable[[], bool]) -> None:
        super().__init__(is_gone)
        self.pending = pending
        self._file = file
        file.begin(pending)

    def note(self, **known: Any) -> None:
        """Record the facts known by now, as the fields of :class:`Pending`."""
        self.pending = replace(self.pending, **known)
        self._file.begin(self.pending)

    def end(self) -> None:
        """Remove the record: the work is completed or undone."""
        try:
            self._file.end(self.pending.device_id)
        except HotplugError as error:
            log.warning("%s", error)  # the next command finds that it is done
