"""Keeping a daemon in RAM, so that it still answers when the node swaps itself to death."""

from __future__ import annotations

import ctypes
import logging
import os

from brine.common.errors import BrineError

log = logging.getLogger(__name__)

_MCL_CURRENT = 1
_MCL_FUTURE = 2
_MCL_ONFAULT = 4


class MemoryLockError(BrineError):
    """The kernel refused to lock our memory."""


def lock_memory() -> None:
    """Lock the pages that this process uses, now and later, into RAM (:manpage:`mlockall(2)`).

    Pages are locked when they are first used: address space that is only reserved (thread
    stacks, an allocator's arenas) costs nothing.

    :raises MemoryLockError: where RLIMIT_MEMLOCK does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryLockError(
            f"memory can't be locked: {reason}",
            hint="set LimitMEMLOCK=infinity on the unit, or memory_lock = false",
        )


def unlock_memory() -> None:
    """Undo :func:`lock_memory`."""
    ctypes.CDLL(None).munlockall()


def apply_memory_lock(wanted: bool) -> None:
    """Do what the setting ``memory_lock`` of a daemon says; a refusal is logged."""
    if not wanted:
        unlock_memory()
        return
    try:
        lock_memory()
    except MemoryLockError as error:
        log.warning("%s (%s)", error, error.hint)
