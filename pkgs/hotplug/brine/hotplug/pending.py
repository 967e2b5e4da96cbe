"""What is being done to a VM, on record for whoever comes after one that was killed at it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.aside import put_aside
from brine.common.wholefile import unfinished, write_whole
from brine.hotplug.device_names import Kind
from brine.hotplug.errors import HotplugError
from brine.hotplug.vm_identity import is_running

log = logging.getLogger(__name__)

STATE_DIR = Path("/run/brine/hotplug")
LOCK_PREFIX = "vm-"
"""Of the names of VMs' locks, which their identity follows."""


class Action(StrEnum):
    """What can be begun."""

    ADD = "add"
    REMOVE = "remove"
    MODIFY = "modify"


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that was begun, and perhaps not ended.

    :param uuid: the device's.
    :param device_id: QEMU's. There is one thing begun for a device at most.
    :param request: what was asked for, so that the same request can be known again.
    :param device: the device as it goes into a runtime file.
    :param runtime: the runtime file; None if there is none.
    :param tap: a NIC's.
    :param before: of a change: the device as it was.
    :param is_out: of a change: whether the device as it was is gone.
    :param slot: of a change: where it was, as :class:`brine.hotplug.slots.Slot` has it.
    :param qmp: the VM's socket.
    :param since: when it was begun, seconds since 1970; 0 if nobody expects a guest's answer now.
    """

    action: Action
    kind: Kind
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


class PendingFile:
    """The record of one VM. Whoever reads or writes it has the VM's lock.

    :param identity: of the VM, see :func:`brine.hotplug.vm_identity.identity_of`.
    """

    def __init__(self, identity: str) -> None:
        self.path = STATE_DIR / f"{identity}.json"

    def read(self) -> list[Pending]:
        """What was begun, in that order.

        One that is damaged, or another version's, is told, and kept aside.

        :raises HotplugError: if the system does not let it be read.
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
            log.error("%s: what was begun can't be read: %s; kept as %s", self.path, error, aside)
            return []

    def begin(self, pending: Pending) -> None:
        """Put on record what is about to be done, in the place of what there was of that device.

        :raises HotplugError: if that can't be written; then nothing may be begun.
        """
        self._write([*self._others(pending.device_id), pending])

    def end(self, device_id: str) -> None:
        """It is done, or undone."""
        self._write(self._others(device_id))

    def _others(self, device_id: str) -> list[Pending]:
        return [one for one in self.read() if one.device_id != device_id]

    def _write(self, all_of_them: Iterable[Pending]) -> None:
        data = [asdict(one) for one in all_of_them]
        try:
            if not data:
                self.path.unlink(missing_ok=True)
                unfinished(self.path).unlink(missing_ok=True)
                return
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # It need not survive a reboot: no VM does.
            write_whole(self.path, json.dumps(data).encode(), mode=0o600, alone=True, durable=False)
        except OSError as error:
            raise HotplugError(f"{self.path}: can't be written: {error.strerror}") from error


def forget_ended() -> None:
    """Remove the records and locks of VMs that have ended: with them has gone what was begun."""
    for file in [*STATE_DIR.glob("*.json*"), *paths.LOCK_DIR.glob(f"{LOCK_PREFIX}*.lock")]:
        # An unfinished one begins with a point.
        identity = file.name.removeprefix(".").removeprefix(LOCK_PREFIX).partition(".")[0]
        if not is_running(identity):
            with contextlib.suppress(OSError):
                file.unlink()


def begun() -> Iterator[Path]:
    """The sockets of VMs that still run and have something on record."""
    for file in sorted(STATE_DIR.glob("*.json")):
        if is_running(file.stem):
            for pending in PendingFile(file.stem).read()[:1]:
                yield Path(pending.qmp)


def _parse(data: Any) -> Pending:
    if data["action"] == Action.MODIFY and not (data["before"] and data["slot"]):
        raise ValueError("a change without what was before")
    return Pending(**{**data, "action": Action(data["action"]), "kind": Kind(data["kind"])})
