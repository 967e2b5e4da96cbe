"""Undoing steps that QEMU has taken, as far as it still answers."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import Any

from brine.common.qmp import QmpError
from brine.hotplug.machine import Machine

log = logging.getLogger(__name__)


def undoing(
    undo: AsyncExitStack, machine: Machine, command: str, arguments: dict[str, Any]
) -> None:
    """Have *command* given if a later step fails.

    To be called before the step that it undoes: one that was interrupted may have been carried
    out. That there is nothing to undo is no fault, and the fault that led here is the one to tell.
    """

    async def give() -> None:
        try:
            objection = await machine.try_execute(command, arguments)
        except QmpError as error:
            log.debug("%s to undo: %s", command, error)
            return
        if objection:
            log.debug("%s to undo: %s", command, objection)

    undo.push_async_callback(give)
