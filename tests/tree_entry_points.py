"""The entry points of the parts in this tree, of which none need be installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

from brine.common.entry_points import EntryPoint


def of_tree(group: str) -> list[EntryPoint]:
    """The entry points that the parts would have if they were installed."""
    found: list[EntryPoint] = []
    for file in sorted(Path(__file__).parents[1].glob("pkgs/*/pyproject.toml")):
        groups = tomllib.loads(file.read_text())["project"].get("entry-points", {})
        found += [EntryPoint(*entry) for entry in groups.get(group, {}).items()]
    return found
