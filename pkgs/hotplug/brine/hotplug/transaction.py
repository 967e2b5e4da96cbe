"""Work on a VM: recorded before it begins, and undone step by step if it fails."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import put_aside
from brine.common.operation import (
    Facts,
    Operation,
    OperationKind,
    Work,
    begin,
    forget,
    remove_unfinished,
)
from brine.common.operation import pending as recorded
from brine.common.process import start_time_of
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpClosedError, QmpTimeoutError
from brine.hotplug.errors import RefusedByGuestError
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

    @classmethod
    def of(cls, facts: Facts) -> Pending:
        """The work that a record has.

        :raises ValueError: if it has another form; also TypeError and KeyError.
        """
        if facts["action"] == PendingAction.MODIFY and not (facts["before"] and facts["slot"]):
            raise ValueError("a change without what was before")
        action, kind = PendingAction(facts["action"]), DeviceKind(facts["kind"])
        return cls(**{**facts, "action": action, "kind": kind})

    def awaits_guest(self) -> bool:
        """Whether the guest may still release a device that it was asked for."""
        return self.action is not PendingAction.ADD and not self.is_out

    def awaited(self) -> str:
        """What the guest may still do, in words."""
        return f"the guest releases {self.device_id}"

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


# Their records; a reader or writer holds the VM's lock.


PLUGGING = OperationKind("hotplug", {}, is_volatile=True)
"""Work on a running VM, which ends with the VM; :mod:`brine.hotplug.session` settles it."""


def key_of(identity: str) -> str:
    """The key of the work on a VM."""
    return f"qemu/{identity}"


def identity_in(keys: Sequence[str]) -> str:
    """The VM of work with these keys."""
    return next((one.removeprefix(key_of("")) for one in keys if one.startswith(key_of(""))), "")


@contextlib.contextmanager
def begun(identity: str, pending: Pending) -> Iterator[Work]:
    """Record work on a VM, for the time of the block, which says how it ends.

    It takes the place of former work on the same device.
    """
    facts, qmp = asdict(pending), Path(pending.qmp)
    name = f"/{qmp.stem}" if qmp.parent == paths.CONTROL_DIR else str(qmp)
    process = identity.partition("-")[0]
    devices = [one for one in (pending.device, pending.before) if one]
    claims = {"instance": qmp.stem, "process": process, f"{pending.kind.value}s".lower(): devices}
    former = [one for one, other in work_on(identity) if other.device_id == pending.device_id]
    lock = f"{LOCK_PREFIX}{identity}"
    with begin(PLUGGING, f"vm{name}", key_of(identity), facts=facts, lock=lock) as work:
        work.step(
            f"{pending.action} {pending.device_id}",
            facts={"claims": claims},
            undo=("undo", facts),
            decided_by=("is_done", facts),
            rest=[("finish", facts)],
        )
        for one in former:
            forget(one)
        yield work


def work_on(identity: str) -> list[tuple[Operation, Pending]]:
    """The work that was begun on a VM, in that order. A record that can't be used is left alone,
    and ``brine operations list`` tells of it."""
    return [(record, found) for record in recorded(key_of(identity)) if (found := _of(record))]


def _of(record: Operation) -> Pending | None:
    if record.kind != PLUGGING.name:
        return None
    try:
        return Pending.of(record.facts)
    except (ValueError, TypeError, KeyError) as error:
        log.error("operation %s: this record can't be read: %s", record.id, error)
        return None


def _all() -> Iterator[tuple[Operation, Pending]]:
    """The work on all VMs that run."""
    for record in recorded():
        if (found := _of(record)) and is_running(identity_in(record.keys)):
            yield record, found


def forget_ended() -> None:
    """Remove the records and locks of VMs that have ended."""
    for record in recorded():
        identity = identity_in(record.keys)
        if identity and not is_running(identity):
            forget(record)
    remove_unfinished()
    for file in [*paths.HOTPLUG_DIR.glob("*.json*"), *paths.LOCK_DIR.glob(f"{LOCK_PREFIX}*.lock")]:
        # The name of an unfinished file begins with a dot.
        identity = file.name.removeprefix(".").removeprefix(LOCK_PREFIX).partition(".")[0]
        if not is_running(identity):
            with contextlib.suppress(OSError):
                file.unlink()


def sockets() -> set[Path]:
    """The sockets of running VMs with recorded work."""
    found = {Path(one.qmp) for _, one in _all()}
    for record in recorded():  # what works on images has its socket among its facts
        qmp = record.facts.get("qmp")
        is_left = record.is_interrupted() and is_running(identity_in(record.keys))
        if isinstance(qmp, str) and is_left:
            found.add(Path(qmp))
    for file in paths.HOTPLUG_DIR.glob("*.json"):
        if is_running(file.stem):
            with contextlib.suppress(_DamagedError):  # the next command of that VM tells
                found |= {Path(one.qmp) for one in _former(file)}
    return found


def being_released(qmp: Path) -> list[Pending]:
    """The work on devices that the guest of a running VM was asked to release, and may still
    release.

    :param qmp: the socket of the VM.
    """
    return [one for _, one in _all() if one.awaits_guest() and Path(one.qmp) == qmp]


# Brine 0.2 has one file for a VM, with all work on it.


def adopt(identity: str) -> None:
    """Record what a command of Brine 0.2 has left as this version does."""
    file = paths.HOTPLUG_DIR / f"{identity}.json"
    try:
        for pending in _former(file):
            with begun(identity, pending) as work:
                work.postpone("")
        file.unlink(missing_ok=True)
    except _DamagedError as error:
        log.error("%s; kept as %s", error, put_aside(file, file.with_suffix(".damaged")))


class _DamagedError(BrineError):
    """A file of Brine 0.2 that can't be read."""


def _former(file: Path) -> list[Pending]:
    try:
        return [Pending.of(one) for one in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _DamagedError(f"{file}: this record can't be read: {error}") from error


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

    def __init__(self, work: Work, pending: Pending, is_gone: Callable[[], bool]) -> None:
        super().__init__(is_gone)
        self.pending = pending
        self.work = work

    def note(self, **known: Any) -> None:
        """Record the facts known by now, as the fields of :class:`Pending`."""
        self.pending = replace(self.pending, **known)
        self.work.record.facts.update(known)
        self.work.note()
