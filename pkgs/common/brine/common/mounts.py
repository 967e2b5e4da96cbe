"""The mounts that a process sees, as the kernel lists them in ``mountinfo``; see
:manpage:`proc(5)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
"""Of this process."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system.

    :param place: where it is mounted.
    :param device: the numbers of its device, ``MAJOR:MINOR``; the major one is 0 if it has none.
    :param kind: such as ``ext4``; *source* is what was mounted, such as ``/dev/sda1``.
    :param root: the folder of the file system that is seen at *place*: ``/``, unless it is bound.
    """

    place: str
    device: str
    kind: str
    source: str
    root: str = "/"


def own_mounts() -> list[Mount]:
    """The mounts that this process sees, but those of a folder at its own place: the sandbox of a
    service has such ones, and they change nothing of what is there."""
    mounts: list[Mount] = []
    for one in mounts_in(MOUNTS.read_text(errors="replace")):
        below = mount_of(one.place, mounts)
        inner = PurePath(one.place).relative_to(below.place) if below else None
        is_same = below and (below.device, str(PurePath(below.root, inner or "")))
        if is_same != (one.device, one.root):
            mounts.append(one)
    return mounts


def places_in(fstab: str) -> list[str]:
    """Where the file systems are to be mounted that the text lists; see :manpage:`fstab(5)`."""
    rows = [line.split() for line in fstab.splitlines() if not line.lstrip().startswith("#")]
    return [_unescaped(row[1]) for row in rows if len(row) > 2 and row[1].startswith("/")]


def mounts_in(mountinfo: str) -> list[Mount]:
    """The mounts that the text lists, in its order."""
    parts = [line.partition(" - ") for line in mountinfo.splitlines()]
    rows = [(before.split(), after.split()) for before, _, after in parts if after]
    return [
        Mount(_unescaped(fields[4]), fields[2], rest[0], _unescaped(rest[1]), _unescaped(fields[3]))
        for fields, rest in rows
    ]


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a path is in, by its name: nothing on storage is touched."""
    parents = {path, *map(str, PurePath(path).parents)}
    found = [one for one in mounts if one.place in parents]
    longest = max((len(one.place) for one in found), default=0)
    # Of several at one place, the last one is seen.
    return next((one for one in reversed(found) if len(one.place) == longest), None)


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
