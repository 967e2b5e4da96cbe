"""What is being done to a VM, on record for whoever comes after one that was killed at it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from brine.common.wholefile import write_whole
from brine.hotplug.device_names import Kind

STATE_DIR = Path("/run/brine/hotplug")


class Action(StrEnum):
    """What can be begun."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that was begun, and perhaps not ended.

    :param uuid: the device's.
    :param device_id: QEMU's.
    :param request: what was asked for, so that the same request can be known again.
    :param device: the device as it goes into a runtime file.
    :param runtime: the runtime file; None if there is none.
    :param tap: a NIC's.
    """

    action: Action
    kind: Kind
    uuid: str
    device_id: str
    request: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    runtime: str | None = None
    tap: str | None = None


class PendingFile:
    """The record of one VM. Whoever reads or writes it has the VM's lock.

    :param qmp: the VM's QMP socket: what tells one VM from another.
    """

    def __init__(self, qmp: Path, *, folder: Path = STATE_DIR) -> None:
        self.path = folder / f"{vm_key(qmp)}.json"

    def read(self) -> Pending | None:
        """What was begun; None if all is done.

        A record that can't be read was not written whole, so nothing was begun after it.
        """
        try:
            data = json.loads(self.path.read_bytes())
            return Pending(**{**data, "action": Action(data["action"]), "kind": Kind(data["kind"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None

    def write(self, pending: Pending) -> None:
        """Put on record what is about to be done. It need not survive a reboot: no VM does."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = json.dumps(asdict(pending)).encode()
        write_whole(self.path, data, mode=0o600, durable=False)

    def clear(self) -> None:
        """It is done, or undone."""
        self.path.unlink(missing_ok=True)


def vm_key(qmp: Path) -> str:
    """A file name that stands for a VM: something readable, and a hash of the socket's path."""
    real = os.path.realpath(qmp)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    readable = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(real).stem)[:40]
    return f"{readable}-{digest}"
