"""The offers of the installed distributions: entry points by group, and versions."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple


class EntryPoint(NamedTuple):
    """An object that a distribution provides under a name: ``module:attribute``."""

    name: str
    value: str

    def load(self) -> Any:
        module, _, attribute = self.value.partition(":")
        return getattr(import_module(module), attribute)


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group. If two have one name, the first one counts.

    This function does without :mod:`importlib.metadata`, which takes long to load.
    """
    found: dict[str, EntryPoint] = {}
    for folder in _metadata():
        for line in _lines(f"{folder}/entry_points.txt", f"[{group}]"):
            name, is_entry, value = line.partition("=")
            if is_entry and not line.startswith(("#", ";")):
                entry = EntryPoint(name.strip(), value.partition("[")[0].strip())
                found.setdefault(entry.name, entry)
    return list(found.values())


def installed_versions() -> dict[str, str]:
    """The version of each installed part of Brine, by its name, such as ``kvmd``."""
    found: dict[str, str] = {}
    for folder in _metadata():
        if ours := _OURS.fullmatch(os.path.basename(folder)):
            found.setdefault(ours[1], ours[2])
    return dict(sorted(found.items()))


def _metadata() -> Iterator[str]:
    """The folders with the metadata of all distributions."""
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):  # not there, or an archive
            for name in sorted(os.listdir(folder or ".")):
                if name.endswith((".dist-info", ".egg-info")):
                    yield f"{folder or '.'}/{name}"


def _lines(file: str, section: str) -> Iterator[str]:
    """The lines of a section of a file of entry points, which may be missing."""
    here = False
    with contextlib.suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as lines:
        for line in map(str.strip, lines):
            if line.startswith("["):
                here = line == section
            elif here:
                yield line


_OURS = re.compile(r"brine_(\w+)-([^-]+)\.(?:dist|egg)-info")
"""The name of a part's metadata."""
