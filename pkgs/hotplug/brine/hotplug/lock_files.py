"""Locks that are named for a file or a socket, by whatever path it is reached."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from brine.common import paths


def lock_of(purpose: str, file: Path) -> Path:
    """The lock for a purpose: its name has something readable, and a hash of the real path."""
    real = os.path.realpath(file)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    readable = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(real).stem)[:40]
    return paths.LOCK_DIR / f"{purpose}-{readable}-{digest}.lock"
