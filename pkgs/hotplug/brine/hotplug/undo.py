"""Undoing the steps of something that failed, as far as QEMU still answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from brine.common.errors import BrineError
from brine.common.qmp_errors import QmpClosedError, QmpTimeoutError
from brine.hotplug.errors import RefusedByGuestError
from brine.hotplug.machine import Machine

log = logging.getLogger(__name__)


class Undo:
    """What undoes the steps taken so far.

    A step's undoing is noted *before* the step: one that was interrupted may have been carried out.
    So that there is nothing to undo is no fault, and the fault that led here is the one to tell.

    :param is_gone: whether QEMU has ended, and with it what it had.
    """

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self._is_gone = is_gone
        self._steps: list[tuple[Callable[[], Awaitable[object]], bool]] = []

    def by(self, step: Callable[[], Awaitable[object]], *, asks_qemu: bool = False) -> None:
        """Note what undoes the next step.

        :param asks_qemu: it is done in QEMU.
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

        Where QEMU is there and does not answer, nobody knows what it has, and where the guest keeps
        the device, it has all of it: then all stops, so that it is not taken from it half.
        """
        complete, is_gone = True, False
        steps, self._steps = self._steps, []
        for step, asks_qemu in reversed(steps):
            if asks_qemu and is_gone:
                continue
            try:
                await step()
            except (QmpClosedError, QmpTimeoutError) as error:
                log.debug("undoing: %s", error)
                is_gone = self._is_gone()
                if not is_gone:
                    return False
            except RefusedByGuestError as error:
                log.warning("nothing is undone: %s", error)
                return False
            except BrineError as error:
                log.warning("not all is undone: %s", error)
                complete = False
        return complete
