"""Specs that were checked before, so that a list of hundreds need not check them again.

The cache is a file of root's in ``/run/brine``, which other users can neither read nor replace. A
spec counts only if its file is the very one that was read: the same inode with the same size and
times. A file that changed just before it was read is not kept, as it may change once more within
the same tick of the clock. Another version of Brine, or of Python, begins anew.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from _pickle import dumps, loads  # pickle itself takes four times as long to load
from pathlib import Path

from brine.common import paths
from brine.common.files import read_regular, write_whole
from brine.vm import spec as spec_module
from brine.vm.spec import Spec

Mark = tuple[int, ...]
"""What tells a file from all others, and from itself after a change."""

_MODE = 0o600
_FEW = 16
"""So many new specs are checked each time: writing the cache would take longer."""
ROOT = 0
SETTLED_NS = 2 * 10**9


class SpecCache:
    """The checked specs of a node, for one pass over all of them."""

    def __init__(self) -> None:
        self._known = _read()
        self._found: dict[str, tuple[Mark, Spec]] = {}
        self._new = 0

    def find(self, name: str, mark: Mark) -> Spec | None:
        """The spec of an instance, if its file has not changed."""
        known = self._known.get(name)
        if known is None or known[0] != mark:
            return None
        self._found[name] = known
        return known[1]

    def add(self, name: str, mark: Mark, spec: Spec) -> None:
        """Keep a spec, which was read after the *mark* was taken."""
        if time.time_ns() - mark[-1] < SETTLED_NS:
            return
        self._found[name] = (mark, spec)
        self._new += 1

    def write(self) -> None:
        """Write the specs of this pass for the next one, which else checks them again."""
        if self._new < _FEW or os.geteuid():
            return
        data = dumps((_version(), self._found), protocol=-1)
        try:
            write_whole(_file(), data, mode=_MODE, durable=False)
        except OSError:
            return


def mark_of(file: Path) -> Mark:
    """The mark of a file, whose last number is the time of its last change, in ns."""
    found = os.stat(file)
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_dev, found.st_ino, found.st_size, *times)


def _read() -> dict[str, tuple[Mark, Spec]]:
    if os.geteuid():
        return {}
    file = _file()
    try:
        found = os.lstat(file)
        # Its content becomes objects, so it must be root's alone.
        if (found.st_uid, found.st_mode) != (ROOT, stat.S_IFREG | _MODE):
            return {}
        version, known = loads(read_regular(file))
    except Exception:  # cut off, or of another version: whatever is wrong, it is made anew
        return {}
    return dict(known) if version == _version() else {}


def _version() -> Mark:
    return (sys.hexversion, *mark_of(Path(spec_module.__file__)))


def _file() -> Path:
    return paths.SPEC_CACHE_FILE
