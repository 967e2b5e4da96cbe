"""inotify watches of many folders, read in bulk.

pyinotify gives the kernel's calls and constants; see :manpage:`inotify(7)` for the format.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyinotify

log = logging.getLogger(__name__)
# Importing pyinotify installs a handler of its own, which would print every line twice.
logging.getLogger("pyinotify").handlers.clear()

_HEADER = struct.Struct("iIII")  # wd, mask, cookie, length of the name
_READ_SIZE = 64 * 1024
_MOST_EVENTS = 200  # of a folder, until its counts are cleared
_MOST_READS = 64
_LOST: int = pyinotify.IN_DELETE_SELF | pyinotify.IN_MOVE_SELF | pyinotify.IN_UNMOUNT

NAMES: int = (
    pyinotify.IN_CREATE | pyinotify.IN_MOVED_TO | pyinotify.IN_DELETE | pyinotify.IN_MOVED_FROM
)
"""Names come and go in a folder."""

TOUCHES: int = pyinotify.IN_ATTRIB | pyinotify.IN_CLOSE_WRITE
"""Files in a folder are written, or get another time of change."""


class Watches:
    """The watches of folders, each under a key, with one descriptor.

    A folder with too many events at a time loses its watch, so that its owner costs others nothing.

    :raises OSError: if there is no inotify.
    """

    def __init__(self, mask: int) -> None:
        self._mask = mask
        self._kernel = pyinotify.INotifyWrapper.create()
        self.descriptor: int = self._kernel.inotify_init()
        if self.descriptor < 0:
            raise OSError(self._kernel.get_errno(), "no inotify")
        os.set_inheritable(self.descriptor, False)
        os.set_blocking(self.descriptor, False)
        self._keys: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._may_be_noisy: set[str] = set()
        self.counts: Counter[str] = Counter()
        """How many events each folder has had, since this was cleared."""
        self.noisy: set[str] = set()
        """The keys of folders that have lost their watch by too many events."""
        self.has_overflowed = False
        """Whether the kernel has dropped events since this was set to false."""

    def add(self, key: str, folder: Path, *, may_be_noisy: bool = False) -> bool:
        """Watch a folder, which may have replaced another one; returns whether it is watched.

        :param may_be_noisy: whether there is no limit to its events.
        """
        flags = self._mask | pyinotify.IN_ONLYDIR | pyinotify.IN_DONT_FOLLOW | _LOST
        number: int = self._kernel.inotify_add_watch(self.descriptor, str(folder), flags)
        if number < 0:
            log.debug("%s can't be watched: %s", folder, os.strerror(self._kernel.get_errno()))
            return False
        if self._numbers.get(key) != number:
            self.remove(key)
        self._keys[number], self._numbers[key] = key, number
        self.noisy.discard(key)
        if may_be_noisy:
            self._may_be_noisy.add(key)
        return True

    def remove(self, key: str) -> None:
        """Stop watching a folder."""
        number = self._numbers.pop(key, None)
        if number is not None and self._keys.pop(number, ""):
            self._kernel.inotify_rm_watch(self.descriptor, number)

    def watches(self, key: str) -> bool:
        """Whether a folder is watched."""
        return key in self._numbers

    def happened(self) -> Iterator[tuple[str, str]]:
        """The events since the last call: the key of the folder, and the name of the file in it,
        which is empty if the folder itself is gone."""
        for _ in range(_MOST_READS):
            data = self._read()
            offset = 0
            while offset < len(data):
                number, mask, _, length = _HEADER.unpack_from(data, offset)
                name = data[offset + _HEADER.size : offset + _HEADER.size + length].rstrip(b"\0")
                offset += _HEADER.size + length
                self.has_overflowed |= bool(mask & pyinotify.IN_Q_OVERFLOW)
                key = self._keys.get(number)
                if key is None:
                    continue
                self.counts[key] += 1
                if mask & (_LOST | pyinotify.IN_IGNORED):
                    self.remove(key)
                    yield key, ""
                elif self.counts[key] > _MOST_EVENTS and key not in self._may_be_noisy:
                    self.remove(key)
                    self.noisy.add(key)
                else:
                    yield key, os.fsdecode(name)

    def _read(self) -> bytes:
        try:
            return os.read(self.descriptor, _READ_SIZE)
        except BlockingIOError:
            return b""
