"""inotify: watching one directory that may be missing, or many folders.

pyinotify gives the kernel's calls and constants. Its notifier is not used: it stops in the middle
of a read at a file name that is not UTF-8, and loses what followed (see :manpage:`inotify(7)` for
the format that is read here instead).
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyinotify

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)
# Importing pyinotify installs a handler of its own, which would print every line twice.
logging.getLogger("pyinotify").handlers.clear()

_HEADER = struct.Struct("iIII")  # wd, mask, cookie, length of the name
_READ_SIZE = 64 * 1024
_MOST_EVENTS = 200  # of a folder, until its counts are cleared
_MOST_READS = 64
_GONE: int = pyinotify.IN_DELETE_SELF | pyinotify.IN_MOVE_SELF
_LOST: int = _GONE | pyinotify.IN_UNMOUNT | pyinotify.IN_IGNORED
_APPEARED: int = pyinotify.IN_CREATE | pyinotify.IN_MOVED_TO | pyinotify.IN_ATTRIB

NAMES: int = (
    pyinotify.IN_CREATE | pyinotify.IN_MOVED_TO | pyinotify.IN_DELETE | pyinotify.IN_MOVED_FROM
)
"""Names come and go in a folder."""

TOUCHES: int = pyinotify.IN_ATTRIB | pyinotify.IN_MODIFY | pyinotify.IN_CLOSE_WRITE
"""Files in a folder are written, or get another time of change."""


class Inotify:
    """The watches of folders, with one descriptor.

    :raises OSError: if there is no inotify.
    """

    def __init__(self) -> None:
        self._kernel = pyinotify.INotifyWrapper.create()
        self.descriptor: int = self._kernel.inotify_init()
        if self.descriptor < 0:
            raise self._error()
        # pyinotify's descriptor is neither close-on-exec nor non-blocking.
        os.set_inheritable(self.descriptor, False)
        os.set_blocking(self.descriptor, False)

    def watch(self, folder: Path, mask: int) -> int:
        """Watch a folder; returns the number of the watch. Raises OSError."""
        flags = mask | pyinotify.IN_ONLYDIR
        number: int = self._kernel.inotify_add_watch(self.descriptor, str(folder), flags)
        if number < 0:
            raise self._error()
        return number

    def unwatch(self, number: int) -> None:
        """Remove a watch, which may be gone."""
        self._kernel.inotify_rm_watch(self.descriptor, number)

    def events(self) -> Iterator[tuple[int, int, bytes]]:
        """Some of the pending events, or none: the number of the watch, the mask, and the name."""
        try:
            data = os.read(self.descriptor, _READ_SIZE)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            number, mask, _, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size + length
            yield number, mask, data[offset - length : offset].rstrip(b"\0")

    def _error(self) -> OSError:
        number = self._kernel.get_errno()
        return OSError(number, os.strerror(number))


class DirectoryWatch:
    """Tells which names appear in a directory, through its removal and re-creation.

    The directory and all its parents are watched, so it may be missing, be removed, be moved
    away, or have a parent that comes and goes. Whenever events may have been missed, *rescan* is
    called: its owner then looks at the whole directory. The watch is set before, so nothing falls
    between. Where the kernel refuses a watch that is logged once, and the owner's own looks at
    intervals, with :meth:`refresh`, are what remains.

    :param appeared: called with each name that was created in the directory, moved into it, or
        changed its permissions; undecodable bytes are surrogate-escaped.
    """

    def __init__(
        self, path: Path, *, appeared: Callable[[str], None], rescan: Callable[[], None]
    ) -> None:
        self._path = path
        self._appeared = appeared
        self._rescan = rescan
        self._kernel: Inotify | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._target: int | None = None
        self._target_inode: tuple[int, int] | None = None
        self._parents: dict[int, bytes] = {}
        self._refused = False

    def start(self) -> None:
        """Set the watches and call *rescan*. Needs a running event loop."""
        try:
            self._arm(self._kernel or self._open())
        except OSError as error:
            self._say_once(f"no inotify: {error.strerror}")
        self._rescan()

    def close(self) -> None:
        """Remove the watches. May be called twice."""
        if self._kernel and self._loop:
            self._loop.remove_reader(self._kernel.descriptor)
            os.close(self._kernel.descriptor)
            self._kernel = None

    def refresh(self) -> bool:
        """Make sure that it is the directory now at the path that is watched, not an old one.

        :returns: whether that was not so, and *rescan* was called.
        """
        if self._target is not None and _inode(self._path) == self._target_inode:
            return False
        self.start()
        return True

    def _open(self) -> Inotify:
        import asyncio  # one daemon does without

        self._kernel = Inotify()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._kernel.descriptor, self._read, self._kernel)
        return self._kernel

    def _arm(self, kernel: Inotify) -> None:
        """Watch the directory and its parents as they are now.

        Parents first, from the root down: what appears below a parent after its watch was set is
        told by an event, and what was there before is found by the next step.
        """
        for watch in [*self._parents, self._target]:
            if watch is not None:
                kernel.unwatch(watch)
        self._parents = {}
        real = Path(os.path.realpath(self._path))
        for parent in reversed(real.parents):
            if (watch := self._add(kernel, parent, NAMES)) is not None:
                self._parents[watch] = os.fsencode(real.relative_to(parent).parts[0])
        self._target_inode = _inode(real)
        self._target = self._add(kernel, real, _APPEARED | _GONE)

    def _add(self, kernel: Inotify, path: Path, mask: int) -> int | None:
        try:
            # IN_MASK_ADD: a watch is one per inode, and what another path asked of it must stay.
            return kernel.watch(path, mask | pyinotify.IN_MASK_ADD)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._say_once(f"{path} can't be watched: {error.strerror}")
            return None

    def _say_once(self, trouble: str) -> None:
        if not self._refused:
            log.warning("%s; looking at intervals", trouble)
        self._refused = True

    def _read(self, kernel: Inotify) -> None:
        is_stale = False
        names: dict[bytes, None] = {}  # in order, each once
        for watch, mask, name in kernel.events():
            # Watches that we removed ourselves are lost, too, and none of these any more.
            is_lost = watch == self._target and mask & _LOST
            if is_lost or mask & pyinotify.IN_Q_OVERFLOW or self._parents.get(watch) == name:
                is_stale = True
            elif watch == self._target:
                names[name] = None
        if is_stale:
            self._arm(kernel)
            self._rescan()
            return
        for name in filter(None, names):
            self._appeared(os.fsdecode(name))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class FolderWatches(Inotify):
    """The watches of folders, each under a key, with one descriptor.

    A folder with too many events at a time loses its watch, so that its owner costs others nothing.

    :param mask: :data:`NAMES` or :data:`TOUCHES`.
    """

    def __init__(self, mask: int) -> None:
        super().__init__()
        self._mask = mask | pyinotify.IN_DONT_FOLLOW | _GONE | pyinotify.IN_UNMOUNT
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
        try:
            number = self.watch(folder, self._mask)
        except OSError as error:
            log.debug("%s can't be watched: %s", folder, error.strerror)
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
            self.unwatch(number)

    def watches(self, key: str) -> bool:
        return key in self._numbers

    def happened(self) -> Iterator[tuple[str, str]]:
        """The events since the last call: the key of the folder, and the name of the file in it,
        which is empty if the folder itself is gone."""
        for _ in range(_MOST_READS):
            events = list(self.events())
            if not events:
                return
            for number, mask, name in events:
                self.has_overflowed |= bool(mask & pyinotify.IN_Q_OVERFLOW)
                key = self._keys.get(number)
                if key is None:
                    continue
                self.counts[key] += 1
                if mask & _LOST:
                    self.remove(key)
                    yield key, ""
                elif self.counts[key] > _MOST_EVENTS and key not in self._may_be_noisy:
                    self.remove(key)
                    self.noisy.add(key)
                else:
                    yield key, os.fsdecode(name)
