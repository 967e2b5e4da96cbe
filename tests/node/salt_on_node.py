"""Nodes on which Salt's loader has our modules, and what tests ask of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

from lab.node import Node
from lab.tree import TREE

EXTENSIONS = "/var/cache/salt/minion/extmods"
"""Where a minion has its copies of our modules."""

# Which functions Salt's loader finds, as a minion's or a master's. It imports their modules.
_LOADED = """
import json, salt.config, salt.loader, sys
role = sys.argv[1]
opts = getattr(salt.config, f"{role}_config")(f"/etc/salt/{role}")
loaders = {"runners": salt.loader.runner(opts), "pillar": salt.loader.pillars(opts, {})}
if role == "minion":
    loaders["modules"] = modules = salt.loader.minion_mods(opts)
    loaders["states"] = salt.loader.states(opts, modules, None, None)
    loaders["grains"] = salt.loader.grain_funcs(opts)
    loaders["beacons"] = salt.loader.beacons(opts, modules)
asked = json.load(sys.stdin)
print(json.dumps([[kind, name] for kind, name in asked if name in loaders.get(kind, ())]))
"""

Functions = set[tuple[str, str]]


def loaded(node: Node, role: str, home: str = "/opt/salt") -> Functions:
    """The functions of the tree's modules that a minion or a master has: kind and name.

    `home` is the folder of Salt's Python environment.
    """
    command = [f"{home}/bin/python", "-c", _LOADED, role]
    found = node.run(command, stdin=json.dumps(sorted(of_the_tree()))).stdout
    return {(kind, name) for kind, name in json.loads(found)}


def of_the_tree() -> Functions:
    """All functions that Salt's loader has to find in modules of ours: kind and name."""
    return set(_functions())


def _functions() -> Iterator[tuple[str, str]]:
    for file in (TREE / "salt/states").glob("_*/brine*.py"):
        kind = file.parent.name.lstrip("_")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                # An external pillar has one function, and no name of it.
                name = file.stem if kind == "pillar" else f"{file.stem}.{node.name.rstrip('_')}"
                yield kind, name
