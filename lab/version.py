"""Brine's version: `debian/changelog` is its source, and all other places repeat it.

`./dev version` writes it there, and a test of the linters finds a place that has another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.errors import LabError
from lab.tree import TREE

CHANGELOG = TREE / "debian/changelog"
NEWS = TREE / "NEWS"

RELEASED = {"0.2.0": "dab2f71e14b11de2c25298a79efb2c887987f507"}
"""The commit of the release before, which nodes may be upgraded from."""

_ENTRY = re.compile(r"^brine \(([^)]+)\) ", re.MULTILINE)

# Patterns of files, and what stands before the version in each.
_PLACES = {
    "docs/man/*.rst": ":Version: Brine ",
    "pkgs/common/brine/common/__init__.py": '__version__ = "',
    "pkgs/*/pyproject.toml": 'version = "',
    "rpm/*.spec": "Version: +",
    "salt/FORMULA": "version: ",
    "salt/pyproject.toml": 'version = "',
}


class Place(NamedTuple):
    """A place of the tree that repeats the version: from `start` to `end` of the file's text."""

    file: Path
    version: str
    start: int
    end: int


def versions() -> list[str]:
    """All versions in the changelog, newest first.

    Raises LabError when it has none.
    """
    if found := _ENTRY.findall(CHANGELOG.read_text()):
        return found
    raise LabError(f"{CHANGELOG} has no version", hint="see deb-changelog(5)")


def places() -> Iterator[Place]:
    """Each place that repeats the version; raises LabError when a file has none, or several."""
    for pattern, before in _PLACES.items():
        for file in sorted(TREE.glob(pattern)):
            text = file.read_text()
            found = list(re.finditer(rf"(?m)^{before}([0-9][^\s\"]*)", text))
            if len(found) != 1:
                raise LabError(f"{file} has its version {len(found)} times, not once")
            yield Place(file, found[0][1], *found[0].span(1))


def repeat_version() -> list[Path]:
    """Write the changelog's newest version to all places; returns the files that changed."""
    version = versions()[0]
    changed = [place for place in places() if place.version != version]
    for place in changed:
        text = place.file.read_text()
        place.file.write_text(text[: place.start] + version + text[place.end :])
    return [place.file for place in changed]
