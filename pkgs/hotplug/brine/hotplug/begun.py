"""Interrupted plugging, as ``brine operations`` lists and settles it; a record ends with its VM."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

from brine.common import paths
from brine.common.operation import Operation, OperationKind, OperationState, waiting_error
from brine.hotplug.session import settle_vm
from brine.hotplug.transaction import LOCK_PREFIX, Pending, PendingFile, is_running


def _begun() -> list[Operation]:
    return [
        _operation(file, one)
        for file in sorted(paths.HOTPLUG_DIR.glob("*.json"))
        if is_running(file.stem)
        for one in PendingFile(file.stem).read()
    ]


def _operation(file: Path, pending: Pending) -> Operation:
    qmp = Path(pending.qmp)
    since = pending.since
    if not since:
        with contextlib.suppress(OSError):
            since = file.stat().st_mtime
    awaits = f"the guest releases {pending.device_id}" if pending.awaits_guest() else ""
    return Operation(
        id=f"{file.stem}-{pending.device_id}",
        kind=PLUGGING.name,
        key=f"instance/{qmp.stem}" if qmp.parent == paths.CONTROL_DIR else f"vm{qmp}",
        state=OperationState.BEGUN,
        since=since,
        waits_for=awaits,
        facts=asdict(pending),
        lock=f"{LOCK_PREFIX}{file.stem}",
    )


def _settle(operation: Operation) -> None:
    settle_vm(Path(operation.facts["qmp"]))
    for still in _begun():
        if still.id == operation.id:
            still.waits_for = still.waits_for or "what a command for NICs does, as root"
            raise waiting_error(still)


PLUGGING = OperationKind("hotplug", {}, others=_begun, settle_other=_settle)
