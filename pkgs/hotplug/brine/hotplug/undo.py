"""Undoing the steps of something that failed, as far as QEMU still answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from brine.common.errors import BrineError
from brine.common.qmp import QmpClosedError, QmpTimeoutError
from brine.hotplug.machine import Machine

log = logging.getLogger(__name__)


class Undo:
    """What undoes the steps taken so far.

    A step's undoing is noted *before* the step: one that was interrupted may have been carried out.
    So that there is nothing to undo is no fault, and the fault that led here is the one to tell.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], Awaitable[object]], bool]] = []

    def by(self, step: Callable[[], Awaitable[object]], *, asks_qemu: bool = False) -> None:
        """Note what undoes the next step.

        :param asks_qemu: it can't be done without an answer of QEMU's.
        """
        self._steps.append((step, asks_qemu))

    def by_command(self, machine: Machine, command: str, arguments: dict[str, Any]) -> None:
        """Note the QMP command that undoes the next step."""

        async def give() -> None:
            if objection := await machine.try_execute(command, arguments):
                log.debug("%s to undo: %s", command, objection)

        self.by(give, asks_qemu=True)

    async def all(self) -> bool:
        """Undo the steps, the last one first; False if something is left that is not undone.

        With a QEMU that is gone, all is undone that was done in it.
        """
        complete = answers = True
        steps, self._steps = self._steps, []
        for step, asks_qemu in reversed(steps):
            if asks_qemu and not answers:
                continue
            try:
                await step()
            except QmpClosedError as error:
                log.debug("undoing: %s", error)
            except BrineError as error:
                log.warning("not all is undone: %s", error)
                complete = False
                answers = answers and not isinstance(error, QmpTimeoutError)
        return complete
