"""Watching one directory for names that appear in it, whether or not it exists yet.

pyinotify gives the kernel's calls and constants. Its notifier is not used: it stops in the middle
of a read at a file name that is not UTF-8, and loses what followed (see :manpage:`inotify(7)` for
the format that is read here instead).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pyinotify

log = logging.getLogger(__name__)
# Importing pyinotify installs a handler of its own, which would print every line twice.
logging.getLogger("pyinotify").handlers.clear()

_HEADER = struct.Struct("iIII")  # wd, mask, cookie, length of the name
_READ_SIZE = 64 * 1024
_MOVED: int = (
    pyinotify.IN_CREATE | pyinotify.IN_DELETE | pyinotify.IN_MOVED_TO | pyinotify.IN_MOVED_FROM
)
_GONE: int = pyinotify.IN_DELETE_SELF | pyinotify.IN_MOVE_SELF
_APPEARED: int = pyinotify.IN_CREATE | pyinotify.IN_MOVED_TO | pyinotify.IN_ATTRIB
_LOST: int = _GONE | pyinotify.IN_UNMOUNT | pyinotify.IN_IGNORED


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
        self._kernel = pyinotify.INotifyWrapper.create()
        self._descriptor = -1
        self._target: int | None = None
        self._target_inode: tuple[int, int] | None = None
        self._parents: dict[int, bytes] = {}
        self._refused = False

    def start(self) -> None:
        """Set the watches and call *rescan*. Needs a running event loop."""
        if self._descriptor < 0:
            self._open()
        if self._descriptor >= 0:
            self._arm()
        self._rescan()

    def close(self) -> None:
        """Remove the watches. May be called twice."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def refresh(self) -> bool:
        """Make sure that it is the directory now at the path that is watched, not an old one.

        :returns: whether that was not so, and *rescan* was called.
        """
        if self._target is not None and _inode(self._path) == self._target_inode:
            return False
        self.start()
        return True

    def _open(self) -> None:
        self._descriptor = self._kernel.inotify_init()
        if self._descriptor < 0:
            self._say_once(f"no inotify: {os.strerror(self._kernel.get_errno())}")
            return
        # pyinotify's descriptor is neither close-on-exec nor non-blocking.
        os.set_inheritable(self._descriptor, False)
        os.set_blocking(self._descriptor, False)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def _arm(self) -> None:
        """Watch the directory and its parents as they are now.

        Parents first, from the root down: what appears below a parent after its watch was set is
        told by an event, and what was there before is found by the next step.
        """
        for watch in [*self._parents, self._target]:
            if watch is not None:
                self._kernel.inotify_rm_watch(self._descriptor, watch)
        self._parents = {}
        real = Path(os.path.realpath(self._path))
        for parent in reversed(real.parents):
            if (watch := self._add(parent, _MOVED)) is not None:
                self._parents[watch] = os.fsencode(real.relative_to(parent).parts[0])
        self._target_inode = _inode(real)
        self._target = self._add(real, _APPEARED | _GONE)

    def _add(self, path: Path, mask: int) -> int | None:
        # IN_MASK_ADD: a watch is one per inode, and what another path asked of it must stay.
        flags = mask | pyinotify.IN_ONLYDIR | pyinotify.IN_MASK_ADD
        watch: int = self._kernel.inotify_add_watch(self._descriptor, str(path), flags)
        if watch >= 0:
            return watch
        number = self._kernel.get_errno()
        if number != errno.ENOENT:
            self._say_once(f"{path} can't be watched: {os.strerror(number)}")
        return None

    def _say_once(self, trouble: str) -> None:
        if not self._refused:
            log.warning("%s; looking at intervals", trouble)
        self._refused = True

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_SIZE)
        except BlockingIOError:
            return
        is_stale = False
        names: dict[bytes, None] = {}  # in order, each once
        offset = 0
        while offset < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size + length
            name = data[offset - length : offset].rstrip(b"\0")
            # Watches that we removed ourselves are lost, too, and none of these any more.
            is_lost = watch == self._target and mask & _LOST
            if is_lost or mask & pyinotify.IN_Q_OVERFLOW or self._parents.get(watch) == name:
                is_stale = True
            elif watch == self._target:
                names[name] = None
        if is_stale:
            self._arm()
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
