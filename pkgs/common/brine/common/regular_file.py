"""Reading what should be a file, where somebody may have put something else."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(file: Path) -> bytes:
    """All of a regular file, or of one that a symbolic link leads to; never waits for anybody.

    :raises OSError: if it can't be read, or is something else: a FIFO, which would have us wait for
        a writer, a device, which may never end, or a socket.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Is no regular file", str(file))
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)
