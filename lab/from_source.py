"""Running Brine's commands from the source tree, uninstalled."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.tree import TREE

_METADATA = TREE / ".cache/metadata"

# What pip's generated scripts do.
_START = """
import sys
from {module} import {function}
sys.argv[0] = {name!r}
sys.exit({function}())
"""


def run_from_source(command: Sequence[str]) -> None:
    """Become `command`: one of Brine's, by the name it is installed under, or any other.

    Raises LabError when there is no such command.
    """
    args, environment = from_source(command)
    try:
        os.execvpe(args[0], args, environment)
    except OSError as error:
        raise LabError(
            f"{command[0]}: {error.strerror}", hint="see ./dev run brine --help"
        ) from None


def from_source(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that run `command` from the tree; see above."""
    projects = {path.parent: _project(path) for path in sorted(TREE.glob("pkgs/*/pyproject.toml"))}
    _describe(list(projects.values()))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in (*projects, _METADATA))
    name, *arguments = command
    for project in projects.values():
        if target := project.get("scripts", {}).get(name):
            module, _, function = target.partition(":")
            start = _START.format(module=module, function=function, name=name)
            # -P: a module in the folder that it runs in is none of its own.
            return [sys.executable, "-P", "-c", start, *arguments], environment
    return [name, *arguments], environment


def _project(path: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(path.read_text())["project"]
    return project


def _describe(projects: Sequence[dict[str, Any]]) -> None:
    """Write what an installation would: `brine` finds its sub-commands by entry points."""
    for project in projects:
        name, version = project["name"], project["version"]
        folder = _METADATA / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        _have(folder / "METADATA", header)
        groups = [
            f"[{group}]\n" + "".join(f"{entry} = {target}\n" for entry, target in entries.items())
            for group, entries in project.get("entry-points", {}).items()
        ]
        _have(folder / "entry_points.txt", "\n".join(groups))


def _have(file: Path, text: str) -> None:
    """Have a file be so, at any moment for others who read it or do the same."""
    if file.exists() and file.read_text() == text:
        return
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)
