"""Locks between processes, on folders themselves: there is no lock file to leave behind."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_lock(path: Path, operation: int) -> Iterator[None]:
    """Hold a lock on a folder; `operation` is one for fcntl.flock().

    Raises BlockingIOError where it includes LOCK_NB and the lock is held.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, operation)
        yield
    finally:
        os.close(folder)
