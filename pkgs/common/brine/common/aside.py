"""What can't be used is kept under another name, for people to look at."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_MOST = 100


def second_name(file: Path, aside: Path) -> Path:
    """Give *file* another name in its folder, so that its own can go to something else.

    :param aside: that name; where another file has it, there is a number behind it, as ``-2``.
    :returns: the name it got, which may be one that it had already.
    :raises OSError: if that fails; EEXIST if a hundred are kept already.
    """
    for number in range(1, _MOST + 1):
        name = aside if number == 1 else aside.with_name(f"{aside.name}-{number}")
        try:
            os.link(file, name, follow_symlinks=False)
        except FileExistsError:
            if not os.path.samestat(file.lstat(), name.lstat()):
                continue
        return name
    raise FileExistsError(errno.EEXIST, "too many are kept aside", str(aside))


def put_aside(file: Path, aside: Path) -> Path:
    """Give *file* another name in place of its own; see :func:`second_name`."""
    name = second_name(file, aside)
    file.unlink()
    return name
