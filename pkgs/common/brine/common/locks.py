"""Locks between processes, which end with the process that holds them (:manpage:`flock(2)`)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1


class LockError(BrineError):
    """A lock that this process can't have."""


class LockedError(LockError):
    """A lock that another process holds."""


@contextlib.contextmanager
def node_lock(name: str, *, timeout_s: float) -> Iterator[None]:
    """Hold a lock of this node's for the time of the block; see :func:`locked`.

    :raises LockError: if it can't be had.
    """
    file = paths.LOCK_DIR / f"{name}.lock"
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            stack.enter_context(locked(file, timeout_s=timeout_s))
        except OSError as error:
            hint = "be root" if isinstance(error, PermissionError) else None
            raise LockError(f"{file}: can't be locked: {error.strerror}", hint=hint) from error
        yield


@contextlib.contextmanager
def locked(file: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock *file* for the time of the block. The file is made if it is missing, and stays.

    The kernel has no wait with a limit for this kind of lock, so the function polls. Zero tries
    once.

    :raises LockedError: if another process holds it all that time.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(file, flags, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not _try(descriptor):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                text = f"{file}: locked by {_holder(descriptor)}, still after {timeout_s:g} s"
                raise LockedError(text, hint="wait for it to end, or give it more time")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # For processes that wait: the kernel does not tell which process holds a lock.
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # on a full file system the lock is no less held
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    """The holder of a lock, in words."""
    process = os.pread(descriptor, 20, 0).strip()
    if not process.isdigit():
        return "another process"
    try:
        name = Path(f"/proc/{int(process)}/comm").read_text().strip()
    except OSError:
        return f"process {int(process)}"
    return f"process {int(process)} ({name})"
