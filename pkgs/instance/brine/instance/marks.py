"""Empty files in the control directory that say something about an instance.

The group of that directory may write there, and QEMU's user may be of it: what stands in a mark's
place may be a link, or no file at all. It is replaced, and never followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_MODE = 0o660
_TRIES = 5
_PAUSE_S = 0.005
_LONGEST_WAIT_S = 1.0
_IN_THE_WAY = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FLOCK = "hhqqi"  # of fcntl(2): type, whence, start, length, process


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


def is_held(path: Path) -> bool:
    """Whether somebody holds a mark, as far as that can be seen. It takes no lock, so that who
    holds or removes one is not held up by those who look; and who removes one does not hold it."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return False
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
    except OSError:
        return False  # no file, and so no mark
    finally:
        os.close(descriptor)
    kind: int = struct.unpack_from("h", found)[0]
    return kind == fcntl.F_RDLCK


def _lock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _held(path: Path) -> int:
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = _open(path)
            stack.callback(os.close, descriptor)
            if _locked(descriptor, fcntl.F_RDLCK):
                if _is_at(path, descriptor):
                    stack.pop_all()
                    return descriptor
            elif time.monotonic() < deadline:
                time.sleep(_PAUSE_S)  # who removes one that nobody holds has it for a moment
            else:
                remove_mark(path)  # nobody of ours has it that long


def _locked(descriptor: int, kind: int) -> bool:
    """Lock a mark; False if another one's lock is in the way."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(kind))
    except (BlockingIOError, PermissionError):  # both are allowed to say that
        return False
    return True


def remove_unheld(path: Path) -> None:
    """Remove a mark that nobody holds; its last holder may have been killed.

    :raises OSError: if it can't be removed.
    """
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, _READ | os.O_RDWR)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            remove_mark(path)
            return
        try:
            if not _locked(descriptor, fcntl.F_WRLCK):
                return
            if _is_at(path, descriptor):
                remove_mark(path)
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether it is that file still, and not another one that somebody has put in its place."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    flags = _READ | os.O_CREAT
    for _ in range(_TRIES):
        try:
            return os.open(path, flags, _MODE)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            remove_mark(path)
    return os.open(path, flags, _MODE)
