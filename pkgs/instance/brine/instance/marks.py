"""Empty files in the control directory that say something about an instance.

The group of that directory may write there, and QEMU's user may be of it: what stands in a mark's
place may be a link, or no file at all. It is replaced, and never followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_MODE = 0o660
_TRIES = 5
_IN_THE_WAY = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


def make_mark(path: Path) -> None:
    """Have a mark be there, made just now.

    :raises OSError: if it can't be made.
    """
    remove_mark(path)
    os.close(_open(path))


def remove_mark(path: Path) -> None:
    """Have a mark not be there, nor what stands in its place.

    :raises OSError: if it can't be removed, such as a folder that has something in it.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rmdir()


@contextlib.contextmanager
def held_mark(path: Path) -> Iterator[Path]:
    """Have a mark be there for the time of the block, and after it. Several can hold it.

    :raises OSError: if it can't be made.
    """
    descriptor = _held(path)
    try:
        yield path
    finally:
        os.close(descriptor)


def _held(path: Path) -> int:
    while True:
        descriptor = _open(path)
        # Whoever removes one that nobody holds has this lock for a moment, and then it is gone.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def remove_unheld(path: Path) -> None:
    """Remove a mark that nobody holds; its last holder may have been killed.

    :raises OSError: if it can't be removed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        remove_mark(path)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        remove_mark(path)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(_TRIES):
        try:
            return os.open(path, flags, _MODE)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            remove_mark(path)
    return os.open(path, flags, _MODE)
