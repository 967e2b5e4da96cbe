"""Where Brine's source tree is, and which of its files are its sources."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]

# What tools leave between people's files.
_MADE = ("__pycache__", "*.pyc", "*.egg-info", ".pybuild", "build", ".*_cache", ".hypothesis")
_MADE_AT_TOP = {".cache", ".git", ".venv", "dist"}


def source_files(*folders: str) -> Iterator[Path]:
    """Files of the tree under `folders` that people wrote, in a fixed order."""
    for folder in folders:
        for path in sorted((TREE / folder).rglob("*")):
            parts = [Path(part) for part in path.relative_to(TREE).parts]
            made = any(part.match(pattern) for part in parts for pattern in _MADE)
            if path.is_file() and not made:
                yield path


def clone() -> Iterator[Path]:
    """Every file of the tree that a clone of it would have, were all of them committed."""
    for path in sorted(TREE.iterdir()):
        if path.is_file():
            yield path
        elif path.name not in _MADE_AT_TOP:
            yield from source_files(path.name)


def digest(paths: Iterable[Path]) -> str:
    """A hash of files of the tree: of their names, modes and contents."""
    total = hashlib.sha256()
    for path in paths:
        executable = path.stat().st_mode & 0o100
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(TREE)} {executable} {content}\n".encode())
    return total.hexdigest()


def copy_sources(paths: Iterable[Path], target: Path) -> None:
    """Copy files of the tree to the same places under `target`."""
    for path in paths:
        copy = target / path.relative_to(TREE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
