"""Names by which what a killed program left can be told from what is in use."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

_KIND = "brine-node"


def own_name() -> str:
    """A name that no other node has, with this process's PID in it."""
    return f"{_KIND}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def left_over(folder: Path) -> Iterator[Path]:
    """The entries of `folder` whose names are of processes that have ended."""
    for path in folder.glob(f"{_KIND}-*-*"):
        pid = path.name.removeprefix(f"{_KIND}-").partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            yield path
