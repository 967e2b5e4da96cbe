"""Having a VM to oneself, over its QMP socket, and after what others left half-done."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from brine.common import paths
from brine.common.locks import locked
from brine.common.qmp import QmpClient, QmpTimeoutError
from brine.hotplug.errors import HotplugError
from brine.hotplug.machine import Machine
from brine.hotplug.monitor_holder import monitor_holders
from brine.hotplug.pending import LOCK_PREFIX, PendingFile, forget_ended
from brine.hotplug.vm import Vm
from brine.hotplug.vm_identity import identity_of

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
    async with contextlib.AsyncExitStack() as stack:

        def alone(name: str) -> None:
            if not only_look:
                stack.enter_context(_locked(name, lock_timeout_s))

        alone(f"hotplug-{_readable_key(qmp_path)}")
        qmp = await stack.enter_async_context(_connected(qmp_path, qmp_timeout_s))
        # A VM may have several monitors.
        identity = identity_of(qmp)
        alone(f"{LOCK_PREFIX}{identity}")
        machine, file = Machine(qmp), PendingFile(identity)
        answer = await qmp.execute("query-name")
        vm = Vm(qmp_path, machine, str(answer.get("name") or qmp_path.stem), file)
        if not only_look:
            await _settle(vm)
        yield vm


async def _settle(vm: Vm) -> None:
    forget_ended()
    if pending := vm.pending.read():
        from brine.hotplug.recovery import recover

        await recover(vm, pending)


@contextlib.contextmanager
def _locked(name: str, timeout_s: float) -> Iterator[None]:
    try:
        paths.LOCK_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = locked(paths.LOCK_DIR / f"{name}.lock", timeout_s=timeout_s)
        lock.__enter__()
    except OSError as error:
        raise HotplugError(f"{paths.LOCK_DIR}: {error.strerror}", hint="be root") from error
    with contextlib.ExitStack() as stack:
        stack.push(lock)
        yield


def _readable_key(qmp_path: Path) -> str:
    """A name that stands for a socket: something readable, and a hash of its path."""
    real = os.path.realpath(qmp_path)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    readable = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(real).stem)[:40]
    return f"{readable}-{digest}"


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
