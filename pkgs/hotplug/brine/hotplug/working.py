"""Having a VM to oneself, over its QMP socket, and after what others left half-done."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from brine.common import paths
from brine.common.locks import locked
from brine.common.qmp import QmpClient, QmpTimeoutError
from brine.hotplug.errors import HotplugError
from brine.hotplug.machine import Machine
from brine.hotplug.monitor_holder import monitor_holders
from brine.hotplug.pending import PendingFile, vm_key
from brine.hotplug.vm import Vm

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0


@contextlib.asynccontextmanager
async def working_on(
    qmp_path: Path,
    *,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    qmp_timeout_s: float = QMP_TIMEOUT_S,
    only_look: bool = False,
) -> AsyncIterator[Vm]:
    """Have a VM to oneself for the time of the block.

    :param lock_timeout_s: how long to wait for another one of us.
    :param qmp_timeout_s: how long to wait for another client of its monitor, and then for QEMU's
        answer to each command.
    :param only_look: what others left half-done stays so.
    :raises brine.common.locks.LockedError: if another one of us is at it for so long.
    :raises brine.common.qmp.QmpError: if there is no monitor, or it does not answer.
    :raises HotplugError: if another client has it for so long.
    """
    lock = paths.LOCK_DIR / f"hotplug-{vm_key(qmp_path)}.lock"
    try:
        lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with locked(lock, timeout_s=lock_timeout_s):
            async with _connected(qmp_path, qmp_timeout_s) as qmp:
                vm = await _begin(qmp, qmp_path, only_look=only_look)
                yield vm
    except PermissionError as error:
        raise HotplugError(f"{error.filename}: {error.strerror}", hint="be root") from error


@contextlib.asynccontextmanager
async def _connected(qmp_path: Path, timeout_s: float) -> AsyncIterator[QmpClient]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = QmpClient.connect(qmp_path, timeout_s=timeout_s, answer_timeout_s=timeout_s)
            qmp = await stack.enter_async_context(client)
        except QmpTimeoutError as error:
            if holders := monitor_holders(qmp_path):
                raise HotplugError(
                    f"{qmp_path}: the monitor is in use, and was for {timeout_s:g} s:"
                    f" {', '.join(holders)}",
                    hint="it serves one client at a time; have it let go, or use another socket",
                ) from error
            raise QmpTimeoutError(
                f"{qmp_path}: QEMU does not answer, and did not for {timeout_s:g} s",
                hint="nobody else has its monitor: see whether it hangs or is stopped",
            ) from error
        yield qmp


async def _begin(qmp: QmpClient, qmp_path: Path, *, only_look: bool) -> Vm:
    machine, file = Machine(qmp), PendingFile(qmp_path)
    answer = await qmp.execute("query-name")
    vm = Vm(qmp_path, machine, str(answer.get("name") or qmp_path.stem), file)
    if not only_look and (pending := file.read()):
        from brine.hotplug.recovery import recover

        await recover(vm, pending)
    return vm
