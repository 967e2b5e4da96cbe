"""Bringing to an end what others began, and were killed at.

What the guest has is kept: a device that is there was plugged, one that is gone was unplugged. A
change is gone back on, unless the new device is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.common.privileges import Capability, may
from brine.common.qmp_errors import QmpClosedError, QmpTimeoutError
from brine.hotplug import messages
from brine.hotplug.device_names import Kind
from brine.hotplug.disks import remove_disk_back_end
from brine.hotplug.nics import close_unused, remove_nic_back_end
from brine.hotplug.pending import Action, Pending
from brine.hotplug.recording import record
from brine.hotplug.runtime import RuntimeFileError
from brine.hotplug.slots import Slot
from brine.hotplug.vm import Vm

log = logging.getLogger(__name__)

_GUEST_TAKES_S = 5.0
_LOOK_S = 0.05


async def recover(vm: Vm, all_of_them: Iterable[Pending]) -> None:
    """Bring all to an end, as far as it goes; what turns out to be done is in ``vm.finished``.

    :raises brine.common.qmp.QmpError: if QEMU does not answer.
    """
    for pending in all_of_them:
        if pending.kind is Kind.NIC and not may(Capability.NET_ADMIN):
            continue  # it is for whoever works on NICs
        try:
            await _recover(vm, pending)
        except (QmpTimeoutError, QmpClosedError):
            raise
        except BrineError as error:
            # It must not stand in the way of everything else that is wanted of this VM.
            what = f"{pending.action} of {pending.device_id}"
            log.error("%s: %s was interrupted, and is half-done: %s", vm.name, what, error)
            if not isinstance(error, LockedError):
                vm.pending.end(pending.device_id)


async def _recover(vm: Vm, pending: Pending) -> None:
    is_there = await vm.machine.has_device(pending.device_id)
    is_old = pending.action is Action.REMOVE or (
        pending.action is Action.MODIFY and not pending.is_out
    )
    if is_there and is_old:
        is_there = await _is_kept(vm, pending)
    if is_there and is_old:
        return  # the guest was asked for it, and may still give it up
    if is_there:
        _record(pending, plugged=True)
        is_done = True
    else:
        await _remove_rest(vm, pending)
        if pending.action is Action.MODIFY:
            await _go_back(vm, pending)
        else:
            _record(pending, plugged=False)
        is_done = pending.action is Action.REMOVE
    vm.pending.end(pending.device_id)
    if is_done:
        vm.finished.append(pending)
    tell = messages.tell_finished if is_done else messages.tell_undone
    tell(vm.name, pending.kind, pending.device_id, pending.action)


async def _is_kept(vm: Vm, pending: Pending) -> bool:
    """Whether the guest still has a device when it has had a moment's time to let go.

    It was asked for it just now, and what comes next should not be caught in between.
    """
    deadline = time.monotonic() + _GUEST_TAKES_S
    while 0 <= time.time() - pending.since < _GUEST_TAKES_S and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
        if not await vm.machine.has_device(pending.device_id):
            return False
    return True


async def _remove_rest(vm: Vm, pending: Pending) -> None:
    if pending.kind is Kind.DISK:
        await remove_disk_back_end(vm.machine, pending.device_id)
        return
    from brine.hotplug.nic_operations import unwire_tap

    await remove_nic_back_end(vm.machine, pending.device_id)
    if wanted := pending.device:
        queues, vhost = wanted["queues"], wanted["vhost"]
        await close_unused(vm.machine, pending.device_id, queues=queues, vhost=vhost)
    if pending.tap:
        await asyncio.to_thread(unwire_tap, pending.tap)


async def _go_back(vm: Vm, pending: Pending) -> None:
    from brine.hotplug.nic_operations import put_back
    from brine.hotplug.wish import Wish

    try:
        await put_back(vm, Wish.from_json(pending.before), Slot(**pending.slot))
    except BrineError:
        _record(pending, plugged=False)
        raise


def _record(pending: Pending, *, plugged: bool) -> None:
    try:
        record(pending, plugged=plugged)
    except RuntimeFileError as error:
        log.warning("%s", error)
