"""A control group for a node where no systemd gives it one.

systemd-nspawn puts a node's groups below its own. Two nodes started from one group would so share
each of their units' groups, and a unit that is stopped in one would be killed in the other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.leftovers import left_over
from lab.progress import say

_REMOVE_TIMEOUT_S = 5.0


@contextmanager
def own_group(name: str) -> Iterator[list[str]]:
    """A command's prefix that runs it in a control group `name` of its own, removed afterwards.

    Groups that killed programs left are removed first; `name` is one of `lab.leftovers`.

    The group is made in the hierarchies that systemd uses: cgroup2, and where that stands beside
    version 1, the named one; see cgroups(7).
    """
    for hierarchy in _hierarchies():
        for dead in left_over(hierarchy):
            if _empty(dead):
                _remove(dead)
    groups = [hierarchy / name for hierarchy in _hierarchies()]
    for group in groups:
        group.mkdir()
    enter = 'while [ "$1" != -- ]; do echo $$ >"$1"; shift; done; shift; exec "$@"'
    try:
        yield ["sh", "-c", enter, "sh", *(str(group / "cgroup.procs") for group in groups), "--"]
    finally:
        for group in groups:
            _remove(group)


def _empty(group: Path) -> bool:
    """Whether no process is in a group or below it; not known of one that is just removed."""
    try:
        return not any(processes.read_text() for processes in group.rglob("cgroup.procs"))
    except OSError:  # ENODEV, where it went between opening and reading
        return False


def _hierarchies() -> Iterator[Path]:
    """This process's group in each of systemd's hierarchies."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0" or controllers == "name=systemd":
            for mount_point in _mounts(controllers):
                yield mount_point / group.lstrip("/")


def _mounts(controllers: str) -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, filesystem = line.partition(" - ")
        kind, _source, options = filesystem.split(maxsplit=2)
        unified = not controllers and kind == "cgroup2"
        named = controllers and kind == "cgroup" and controllers in options.split(",")
        if unified or named:
            yield Path(fields.split()[4])
            return


def _remove(group: Path) -> None:
    """Remove a group and those below it; processes that are just ending may hold it a moment."""
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while group.exists():
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        if time.monotonic() > deadline:
            say(f"cannot remove {group}: there are processes in it still")
            break
        time.sleep(0.02)
