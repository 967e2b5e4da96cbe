"""Having a VM to oneself, over its QMP socket, and after what others left half-done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.instance_units import stranger_check
from brine.common.locks import LockedError, locked
from brine.common.qmp import QmpClient
from brine.common.qmp_errors import QmpTimeoutError
from brine.hotplug.errors import HotplugError
from brine.hotplug.lock_files import lock_of
from brine.hotplug.machine import Machine
from brine.hotplug.monitor_holder import silence_of
from brine.hotplug.pending import LOCK_PREFIX, PendingFile, begun, forget_ended
from brine.hotplug.relay import Relay
from brine.hotplug.vm import Vm
from brine.hotplug.vm_identity import identity_of

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0

LIMIT_S = 1800.0
"""How long work on a VM may take in all, whatever QEMU and its guest do."""

_LOOK_AGAIN_S = 0.02
_SETTLE_LIMIT_S = 60.0
_SETTLE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def working_on(
    qmp_path: Path,
    *,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    qmp_timeout_s: float = QMP_TIMEOUT_S,
    only_look: bool = False,
    limit_s: float = LIMIT_S,
    through: Relay | None = None,
) -> AsyncIterator[Vm]:
    """Have a VM to oneself for the time of the block.

    :param lock_timeout_s: how long to wait for another one of us.
    :param qmp_timeout_s: how long to wait for another client of its monitor, and then for QEMU's
        answer to each command.
    :param only_look: what others left half-done stays so.
    :param limit_s: how long QEMU is talked to in all.
    :param through: reads what QEMU says; None is this process itself.
    :raises brine.common.locks.LockedError: if another one of us is at it for so long.
    :raises brine.common.qmp.QmpError: if there is no monitor, or it does not answer.
    :raises brine.common.instance_units.StrangerError: if it only poses as an instance's.
    :raises HotplugError: if another client has it for so long.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def alone(lock: Path) -> None:
            if not only_look:
                await stack.enter_async_context(_alone(lock, lock_timeout_s))

        await alone(lock_of("hotplug", qmp_path))
        qmp = await stack.enter_async_context(_connected(qmp_path, qmp_timeout_s, limit_s, through))
        # A VM may have several monitors.
        identity = identity_of(qmp)
        await alone(paths.LOCK_DIR / f"{LOCK_PREFIX}{identity}.lock")
        machine = Machine(qmp)
        vm = Vm(qmp_path, machine, await machine.vm_name(), PendingFile(identity))
        if not only_look:
            await _settle(vm)
        yield vm
        if not only_look:
            # A guest may have let go of a device after that, which the block did not see any more.
            await _settle(vm)


def settle_all() -> None:
    """Bring to an end what was begun with any VM of this node, as far as it goes now.

    A guest may have let go of a device long after it was asked.
    """
    forget_ended()
    for qmp_path in list(begun()):
        try:
            asyncio.run(_settle_one(qmp_path))
        except (BrineError, OSError) as error:
            log.info("%s: not looked at: %s", qmp_path, error)


async def _settle_one(qmp_path: Path) -> None:
    with Relay() as through:
        async with working_on(
            qmp_path,
            lock_timeout_s=0,
            qmp_timeout_s=_SETTLE_TIMEOUT_S,
            limit_s=_SETTLE_LIMIT_S,
            through=through,
        ):
            pass  # that is all


async def _settle(vm: Vm) -> None:
    forget_ended()
    if pending := vm.pending.read():
        from brine.hotplug.recovery import recover

        await recover(vm, pending)


@contextlib.asynccontextmanager
async def _alone(lock: Path, timeout_s: float) -> AsyncIterator[None]:
    """Hold a lock, and wait for it without holding up what else this process does."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        while True:
            try:
                lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                stack.enter_context(locked(lock, timeout_s=0))
                break
            except OSError as error:
                hint = "be root" if isinstance(error, PermissionError) else None
                raise HotplugError(f"{lock}: {error.strerror}", hint=hint) from error
            except LockedError as error:
                if time.monotonic() >= deadline:
                    raise LockedError(lock, error.holder, timeout_s) from None
            await asyncio.sleep(_LOOK_AGAIN_S)
        yield


@contextlib.asynccontextmanager
async def _connected(
    qmp_path: Path, timeout_s: float, limit_s: float, through: Relay | None
) -> AsyncIterator[QmpClient]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = QmpClient.connect(
                qmp_path,
                timeout_s=timeout_s,
                answer_timeout_s=timeout_s,
                limit_s=limit_s,
                check_peer=stranger_check(qmp_path),
                through=through,
            )
            qmp = await stack.enter_async_context(client)
        except QmpTimeoutError as error:
            raise await asyncio.to_thread(silence_of, qmp_path, timeout_s) from error
        yield qmp
