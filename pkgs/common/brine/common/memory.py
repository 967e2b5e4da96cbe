"""Locking the memory of a daemon into RAM, so that it works while the node runs out of memory."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

from brine.common.errors import BrineError

log = logging.getLogger(__name__)

_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_MADV_POPULATE_READ = 22


class MemoryLockError(BrineError):
    """The kernel refused to lock our memory."""


def lock_memory() -> None:
    """Lock all memory of this process, now and later, into RAM (:manpage:`mlockall(2)`).

    Code that has not run yet is read in, too: it is on a disk, and that may be what hangs when it
    is needed first. Writable memory is not written to for that, as ``mlockall`` alone would do, so
    what a forked process has in common with its parent stays in common.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _lock(libc, _MCL_CURRENT | _MCL_ONFAULT)
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, permissions, *_ = line.split(maxsplit=5)
        # Without those that the kernel itself provides.
        if permissions.startswith("r") and not line.endswith(("[vvar]", "[vsyscall]")):
            start, end = (int(part, 16) for part in addresses.split("-"))
            # What can't be read in, such as what is beyond a file's end, is not needed either.
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)
    _lock(libc, _MCL_FUTURE)


def apply_memory_lock(wanted: bool) -> None:
    """Do what the setting ``memory_lock`` of a daemon says; a refusal is logged."""
    if not wanted:
        ctypes.CDLL(None).munlockall()
        return
    try:
        lock_memory()
    except MemoryLockError as error:
        log.warning("%s (%s)", error, error.hint)


def _lock(libc: ctypes.CDLL, flags: int) -> None:
    if libc.mlockall(flags) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryLockError(
            f"memory can't be locked: {reason}",
            hint="set LimitMEMLOCK=infinity on the unit, or memory_lock = false",
        )
