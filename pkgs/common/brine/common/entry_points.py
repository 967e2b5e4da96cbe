"""The offers of the installed distributions: entry points by group, and versions."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple


class EntryPoint(NamedTuple):
    """An object that a distribution provides under a name: ``module:attribute``."""

    name: str
    value: str

    def load(self) -> Any:
        module, _, attribute = self.value.partition(":")
        return getattr(import_module(module), attribute)


_SHARED = frozenset({"brine.verbs"})
"""The groups in which several distributions have an entry point of one name."""


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group. If two have one name, the first one counts; but several parts
    may add verbs to one command.

    This function does without :mod:`importlib.metadata`, which takes long to load.
    """
    return list(_groups(tuple(sys.path)).get(group, {}).values())


def installed_versions() -> dict[str, str]:
    """The version of each installed part of Brine, by its name, such as ``kvmd``."""
    found: dict[str, str] = {}
    for folder in _metadata(sys.path):
        name, _, version = os.path.basename(folder).rpartition(".")[0].partition("-")
        if name.startswith("brine_"):
            found.setdefault(name.removeprefix("brine_"), version.partition("-")[0])
    return dict(sorted(found.items()))


@lru_cache(maxsize=1)
def _groups(folders: tuple[str, ...]) -> dict[str, dict[object, EntryPoint]]:
    """The entry points of all groups, by group and what tells them apart; they are read once a
    process."""
    found: dict[str, dict[object, EntryPoint]] = {}
    for folder in _metadata(folders):
        group = ""
        for line in _lines(f"{folder}/entry_points.txt"):
            name, is_entry, value = line.partition("=")
            if line.startswith("["):
                group = line.strip("[]")
            elif is_entry and not line.startswith(("#", ";")):
                entry = EntryPoint(name.strip(), value.partition("[")[0].strip())
                key = entry if group in _SHARED else entry.name
                found.setdefault(group, {}).setdefault(key, entry)
    return found


def _metadata(folders: Iterable[str]) -> Iterator[str]:
    """The folders with the metadata of all distributions."""
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(OSError):  # not there, or an archive
            for name in sorted(os.listdir(folder or ".")):
                if name.endswith((".dist-info", ".egg-info")):
                    yield f"{folder or '.'}/{name}"


def _lines(file: str) -> list[str]:
    """The lines of a file of entry points, which may be missing."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as lines:
        return [line.strip() for line in lines]
    return []
