"""The folders of owners, those of specs and of markers: what comes and goes in them.

inotify tells of names at once; of changes of watchdogs, which are many, it is asked once a second.
A folder that inotify can't watch, or that has too many events, is looked at by the clock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Collection, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from brine.common import paths
from brine.common.inotify import NAMES, TOUCHES, FolderWatches
from brine.instance import owner
from brine.vm.values import vm_name_fault

log = logging.getLogger(__name__)

_NOISE_S = 10.0  # so long a folder with too many events is looked at by the clock
_SPECS, _MARKS, _FOLDERS = "/specs", "/marks", "/folders"
_SPEC, _START = ".json", ".start"


class FolderChange(Enum):
    """What has changed of an instance.

    ``SPEC``: its spec; ``START``: a run of it begins; ``FOLDER``: its owner's folder came or went;
    ``FILES``: files came or went in that; ``LOST``: that was removed or unmounted; ``ANY``:
    something of all instances, as the kernel has dropped events.
    """

    SPEC = auto()
    START = auto()
    FOLDER = auto()
    FILES = auto()
    LOST = auto()
    ANY = auto()


class Touched(NamedTuple):
    """The instances whose watchdogs have changed, and those with folders that have to be looked at,
    as it is not known whether they have."""

    changed: set[str]
    unknown: set[str]


class OwnerFolders:
    """The watches of all folders."""

    def __init__(self) -> None:
        self._names = FolderWatches(NAMES)
        self._touches = FolderWatches(TOUCHES)
        self._unwatched: set[str] = set()
        self._noisy_until_s = 0.0

    @property
    def descriptor(self) -> int:
        """Is readable when something has come or gone."""
        return self._names.descriptor

    def watch_places(self) -> bool:
        """Watch the folders of all instances; returns whether one of them is new."""
        found = False
        places = {_SPECS: paths.SPECS_DIR, _MARKS: paths.MARKS_DIR, _FOLDERS: paths.LIFECYCLE_DIR}
        for key, folder in places.items():
            if not self._names.watches(key) and self._names.add(key, folder, may_be_noisy=True):
                found = True
        return found

    def watch(self, name: str) -> None:
        """Watch the folder of an instance's owner, which may have replaced another one."""
        folder = owner.folder_of(name)
        uid = _user_of(folder)
        if uid is None:
            self._unwatched.discard(name)
        elif uid != os.geteuid():
            # It is root's until its file system is mounted, and inotify does not tell of mounts.
            self._unwatched.add(name)
        elif self._names.add(name, folder) and self._touches.add(name, folder):
            self._unwatched.discard(name)
        else:
            if name not in self._unwatched:
                log.warning("%s can't be watched: it is looked at each second", folder)
            self._unwatched.add(name)

    def unwatch(self, name: str) -> None:
        """Stop watching the folder of an instance's owner."""
        self._names.remove(name)
        self._touches.remove(name)
        self._unwatched.discard(name)

    def happened(self) -> Iterator[tuple[FolderChange, str]]:
        """What has come or gone since the last call, with the instance's name."""
        for key, name in self._names.happened():
            if key == _SPECS:
                if name.endswith(_SPEC):
                    yield FolderChange.SPEC, name.removesuffix(_SPEC)
            elif key == _MARKS:
                if name.endswith(_START):
                    yield FolderChange.START, name.removesuffix(_START)
            elif key == _FOLDERS:
                yield FolderChange.FOLDER, name
            else:
                yield (FolderChange.FILES if name else FolderChange.LOST), key
        if self._names.has_overflowed:
            self._names.has_overflowed = False
            yield FolderChange.ANY, ""

    def touched(self, known: Collection[str], now_s: float) -> Touched:
        """The changes of watchdogs since the last call, of instances that are *known*."""
        changed = {key for key, _ in self._touches.happened()}
        if self._touches.has_overflowed:
            self._touches.has_overflowed = False
            changed.update(known)
        noisy = self._names.noisy | self._touches.noisy | self._unwatched
        self._names.counts.clear()
        self._touches.counts.clear()
        to_watch = set(self._unwatched)
        if noisy and now_s >= self._noisy_until_s:
            self._noisy_until_s = now_s + _NOISE_S
            to_watch = noisy
        for name in to_watch.intersection(known):
            self.watch(name)
        return Touched((changed - noisy).intersection(known), noisy.intersection(known))


def names_with_folder() -> set[str]:
    """The instances with a folder of an owner."""
    with contextlib.suppress(OSError), os.scandir(paths.LIFECYCLE_DIR) as entries:
        return {
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and not vm_name_fault(entry.name)
        }
    return set()


def is_any_there() -> bool:
    """Whether any folder is there, for which the path unit would start the handler again."""
    with contextlib.suppress(OSError):
        return bool(os.listdir(paths.LIFECYCLE_DIR))
    return False


def is_read_only(name: str) -> bool:
    """Whether the folder of an instance's owner can't be written at present."""
    with contextlib.suppress(OSError):
        return bool(os.statvfs(owner.folder_of(name)).f_flag & os.ST_RDONLY)
    return False


def _user_of(folder: Path) -> int | None:
    """Whose a folder is; None if there is none."""
    with contextlib.suppress(OSError):
        found = os.stat(folder, follow_symlinks=False)
        return found.st_uid if stat.S_ISDIR(found.st_mode) else None
    return None
