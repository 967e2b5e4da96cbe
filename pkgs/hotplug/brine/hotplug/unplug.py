"""Taking a device out: the guest is asked, and has to agree."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from brine.common.printable import printable
from brine.common.qmp_errors import QmpCommandError, QmpTimeoutError
from brine.hotplug.errors import RefusedByGuestError
from brine.hotplug.machine import Machine

UNPLUG_TIMEOUT_S = 30.0

_ASK_AGAIN_S = (0.5, 1.0, 2.0)  # and so on
_LOOK_S = 0.5
_TRANSIENT = ("busy", "in the process of unplug")


async def unplug_device(
    machine: Machine, device_id: str, *, timeout_s: float = UNPLUG_TIMEOUT_S
) -> None:
    """Have a device removed, and return when it is gone; at once if it is not there.

    QEMU answers ``device_del`` before the guest does. The event that says that the device is gone
    may come before that answer, after it or instead of it, or not to this connection at all: it
    only says when to look. A guest that was just given the device may be too busy to hear of its
    removal, so that request is repeated. (QEMU itself refuses one that the guest would take
    for a change of mind.)

    :raises RefusedByGuestError: if the guest refused, or did nothing in time. The device is still
        plugged in whole.
    :raises brine.common.qmp.QmpError: if QEMU refused, or the connection fails.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pauses = itertools.chain(_ASK_AGAIN_S, itertools.repeat(_ASK_AGAIN_S[-1]))
    ask_again = loop.time()
    asking: asyncio.Task[None] | None = None
    machine.qmp.drop_events()  # they are of earlier requests
    try:
        while await machine.has_device(device_id):
            now = loop.time()
            if now >= deadline:
                raise RefusedByGuestError(device_id, await _why(machine, timeout_s))
            if asking and asking.done():
                asking.result()  # raises what QEMU had against it
                asking = None
            if now >= ask_again and asking is None:
                ask_again = now + next(pauses)
                asking = asyncio.create_task(_ask(machine, device_id))
            wait_s = min(_LOOK_S, max(ask_again - now, 0.001), deadline - now)
            await _hear(machine, device_id, wait_s, asking)
    finally:
        if asking:
            await _end(asking)


async def _ask(machine: Machine, device_id: str) -> None:
    try:
        await machine.qmp.execute("device_del", {"id": device_id})
    except QmpCommandError as error:
        is_gone = error.error_class == "DeviceNotFound"
        if not is_gone and not any(text in error.description for text in _TRANSIENT):
            raise
    except QmpTimeoutError:
        pass  # what counts is whether the device goes


async def _hear(
    machine: Machine, device_id: str, timeout_s: float, asking: asyncio.Task[None] | None
) -> None:
    """Wait so long for an event that speaks of the device, or for QEMU's answer.

    :raises RefusedByGuestError: if the guest said no.
    """
    hearing = asyncio.create_task(_next_event_of(machine, device_id))
    waiting = {hearing, asking} if asking else {hearing}
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if hearing.done() and hearing.result() == "DEVICE_UNPLUG_GUEST_ERROR":
            raise RefusedByGuestError(device_id, "it said no")
    finally:
        await _end(hearing)


async def _next_event_of(machine: Machine, device_id: str) -> str:
    while True:
        event = await machine.qmp.next_event()
        if event.data.get("device") == device_id:
            return event.name


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # whoever wanted to know has heard of it


async def _why(machine: Machine, timeout_s: float) -> str:
    try:
        status = await machine.qmp.execute("query-status")
    except QmpCommandError:
        status = {}
    if type(status) is dict and status and not status.get("running"):
        return f"the VM does not run ({printable(str(status.get('status')))})"
    return f"it did nothing within {timeout_s:g} s"
