"""Taking a device out: the guest is asked, and has to agree."""

from __future__ import annotations

import asyncio

from brine.common.qmp import QmpCommandError, QmpTimeoutError
from brine.hotplug.errors import RefusedByGuestError
from brine.hotplug.machine import Machine

UNPLUG_TIMEOUT_S = 30.0

_ASK_AGAIN_S = 2.0
_LOOK_S = 0.5


async def unplug_device(
    machine: Machine, device_id: str, *, timeout_s: float = UNPLUG_TIMEOUT_S
) -> None:
    """Have a device removed, and return when it is gone; at once if it is not there.

    QEMU answers ``device_del`` before the guest does. The event that says that the device is gone
    may come before that answer or after it, or not to this connection at all, so QEMU is asked
    now and then. A guest that was just given the device may be too busy to hear of its removal,
    so that request is repeated.

    :raises RefusedByGuestError: if the guest refused, or did nothing in time. The device is still
        plugged in whole.
    :raises brine.common.qmp.QmpError: if the connection fails.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    ask_again = loop.time()
    objection = "it did nothing"
    while await machine.has_device(device_id):
        now = loop.time()
        if now >= deadline:
            raise RefusedByGuestError(device_id, await _why(machine, objection, timeout_s))
        if now >= ask_again:
            ask_again = now + _ASK_AGAIN_S
            objection = await machine.try_execute("device_del", {"id": device_id}) or objection
        wait_s = min(_LOOK_S, ask_again - now, deadline - now)
        if await _heard_of(machine, device_id, max(wait_s, 0.001)):
            return


async def _heard_of(machine: Machine, device_id: str, timeout_s: float) -> bool:
    """Whether an event said in that time that the device is gone."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            event = await machine.qmp.next_event(timeout_s=max(deadline - loop.time(), 0))
        except QmpTimeoutError:
            return False
        if event.data.get("device") != device_id:
            continue
        if event.name == "DEVICE_DELETED":
            return True
        if event.name == "DEVICE_UNPLUG_GUEST_ERROR":
            raise RefusedByGuestError(device_id, "it said no")


async def _why(machine: Machine, objection: str, timeout_s: float) -> str:
    try:
        status = await machine.qmp.execute("query-status")
    except QmpCommandError:
        status = {}
    if status and not status.get("running"):
        return f"the VM does not run ({status.get('status')})"
    return f"{objection} within {timeout_s:g} s"
