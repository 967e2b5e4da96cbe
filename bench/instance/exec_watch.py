"""Hearing from the kernel that a program is about to be executed, whoever does it.

Source: fanotify(7). Unlike a process's start time in /proc it is of the exec, not of the fork, and
finer than a hundredth of a second; unlike a wrapper it takes no time of the program's.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from bench.errors import BenchError

_FAN_CLOEXEC, _FAN_NONBLOCK = 0x1, 0x2
_FAN_MARK_ADD = 0x1
_FAN_OPEN_EXEC = 0x1000
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")  # event_len, vers, reserved, metadata_len, mask, fd, pid
_READ_SIZE = 4096


class ExecWatch:
    """Tells when one program is executed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Is readable when there is news."""
        return self._descriptor

    def heard(self) -> int:
        """How often the program was executed since this was asked last."""
        times = 0
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, _READ_SIZE):
                for length, *_, file, _ in _EVENT.iter_unpack(data):
                    assert length == _EVENT.size
                    if file >= 0:
                        os.close(file)
                    times += 1
        return times


@contextlib.contextmanager
def watched(program: Path) -> Iterator[ExecWatch]:
    """Watch a program.

    :raises BenchError: if the kernel does not let us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.fanotify_init(_FAN_CLOEXEC | _FAN_NONBLOCK, os.O_RDONLY | os.O_CLOEXEC)
    if descriptor < 0:
        raise _refused(program)
    try:
        mask = ctypes.c_uint64(_FAN_OPEN_EXEC)
        path = os.fsencode(program)
        if libc.fanotify_mark(descriptor, _FAN_MARK_ADD, mask, _AT_FDCWD, path) < 0:
            raise _refused(program)
        yield ExecWatch(descriptor)
    finally:
        os.close(descriptor)


def _refused(program: Path) -> BenchError:
    text = f"{program} can't be watched: {os.strerror(ctypes.get_errno())}"
    return BenchError(text, hint="be root, on a kernel with fanotify(7)")
