"""Specs that were checked before, so that a list of hundreds need not check them again.

The cache is a file of root's in ``/run/brine``, which other users can neither read nor replace. A
spec counts only if its file is the very one that was read: the same inode with the same size and
times. A file that changed just before it was read is not kept, as it may change once more within
the same tick of the clock. Other modules that check specs, or another Python, begin anew.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from _pickle import dumps, loads  # pickle itself takes four times as long to load
from pathlib import Path

from brine.common import paths, schema
from brine.common.files import write_whole
from brine.vm import disk, keys, nic, rules, values
from brine.vm import spec as spec_module
from brine.vm.spec import Spec

Mark = tuple[int, ...]
"""What tells a file from all others, and from itself after a change."""

_MODE = 0o600
_FEW = 16
"""So many new specs are checked each time: writing the cache would take longer."""
ROOT = 0
SETTLED_NS = 2 * 10**9


def mark_of(file: Path) -> Mark:
    """The mark of a file, whose last number is the time of its last change, in ns."""
    found = os.stat(file)
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_dev, found.st_ino, found.st_size, *times)


_CHECKED_BY = (
    sys.hexversion,
    *(
        mark_of(Path(str(one.__file__)))
        for one in (schema, disk, keys, nic, rules, spec_module, values)
    ),
)
"""The code that checks specs, as this process has loaded it."""


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
        data = dumps((_CHECKED_BY, self._found), protocol=-1)
        try:
            write_whole(paths.SPEC_CACHE_FILE, data, mode=_MODE, durable=False)
        except OSError:
            return


def _read() -> dict[str, tuple[Mark, Spec]]:
    if os.geteuid():
        return {}
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(paths.SPEC_CACHE_FILE, flags)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            # Its content becomes objects, so it must be root's alone.
            if (found.st_uid, found.st_mode) != (ROOT, stat.S_IFREG | _MODE):
                return {}
            checked_by, known = loads(file.read())
    except Exception:  # cut off, or of another version: whatever is wrong, it is made anew
        return {}
    return dict(known) if checked_by == _CHECKED_BY else {}
