"""Measures of the tree, for who looks after its shape: `./dev house` prints them.

Each is read from syntax trees, but for two walks, which are run. No measure passes or fails.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from lab.tree import TREE
from lab.walks import walks

LONG = 50
"""The lines of a function that is too long: without its docstring, comments and blank lines."""
BRANCHES = 15
DEPTH = 4

_KNOWN_TWICE = frozenset({"main", "load_settings"})
_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.BoolOp, ast.match_case)
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Module:
    """A module of Brine: its dotted name, its lines, and its syntax tree."""

    name: str
    lines: list[str]
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """All functions and methods, with the modules' names before theirs."""
        for node in ast.walk(self.tree):
            if isinstance(node, _FUNCTIONS):
                yield f"{self.name}.{node.name}", node


@dataclass
class House:
    """What is measured: lists name the places, the longest or the worst first."""

    circles: list[list[str]] = field(default_factory=list)
    names_in_two_rooms: list[str] = field(default_factory=list)
    imports_in_functions: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    branching_functions: list[str] = field(default_factory=list)
    deep_functions: list[str] = field(default_factory=list)
    code_lines: int = 0
    test_lines: int = 0
    tests_per_code: float = 0.0
    names_passed_by_a_start: int = 0


def modules_of(tree: Path = TREE) -> list[Module]:
    """The modules of all parts."""
    found = []
    for file in sorted(tree.glob("pkgs/*/brine/**/*.py")):
        name = ".".join(file.relative_to(tree).with_suffix("").parts[2:]).removesuffix(".__init__")
        text = file.read_text()
        found.append(Module(name, text.splitlines(), ast.parse(text)))
    return found


def measure(modules: Sequence[Module], tests: Iterable[Path] = ()) -> House:
    """Measure modules, and count the lines of code of their tests."""
    house = House(circles=circles(imports_of(modules)))
    places: dict[str, list[str]] = defaultdict(list)
    long: list[tuple[int, str]] = []
    branching: list[tuple[int, str]] = []
    deep: list[tuple[int, str]] = []
    for module in modules:
        house.code_lines += len(code_lines(module.lines, module.tree))
        for node in module.tree.body:
            if isinstance(node, _FUNCTIONS) and not node.name.startswith("_"):
                places[node.name].append(module.name)
        for name, function in module.functions():
            long.append((len(code_lines(module.lines, function)), name))
            inside = list(ast.walk(function))
            branching.append((sum(isinstance(one, _BRANCHES) for one in inside), name))
            deep.append((_depth(function), name))
            late = [one for one in inside if isinstance(one, _IMPORTS)]
            house.imports_in_functions += [f"{name}: {ast.unparse(one)}" for one in late]
    house.names_in_two_rooms = sorted(
        f"{name}: {', '.join(there)}"
        for name, there in places.items()
        if len(there) > 1 and name not in _KNOWN_TWICE
    )
    house.long_functions = _over(LONG, long)
    house.branching_functions = _over(BRANCHES, branching)
    house.deep_functions = _over(DEPTH, deep)
    house.names_passed_by_a_start = names_passed(modules, "brine.instance.start.start_instance")
    for file in tests:
        text = file.read_text()
        house.test_lines += len(code_lines(text.splitlines(), ast.parse(text)))
    house.tests_per_code = round(house.test_lines / max(house.code_lines, 1), 2)
    return house


def names_passed(modules: Sequence[Module], start: str) -> int:
    """How often a bare name of an instance is an argument, in a function and all that it calls.

    Calls of functions are followed, those of methods are not.
    """
    names = {module.name for module in modules}
    functions = {
        f"{module.name}.{node.name}": (module, node)
        for module in modules
        for node in module.tree.body
        if isinstance(node, _FUNCTIONS)
    }
    known = {module.name: _known_in(module, names) for module in modules}
    seen: set[str] = set()
    waiting, count = [start], 0
    while waiting:
        if (name := waiting.pop()) in seen or name not in functions:
            continue
        seen.add(name)
        module, function = functions[name]
        for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            count += sum(map(_is_bare_name, given))
            waiting += [_called(ast.unparse(one), module, known) for one in [call.func, *given]]
    return count


def _is_bare_name(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] == "name"


def _called(text: str, module: Module, known: dict[str, dict[str, str]]) -> str:
    """The whole name of what a module calls *text*, if that is a function's."""
    first, _, rest = text.partition(".")
    whole = known[module.name].get(first, f"{module.name}.{first}")
    return f"{whole}.{rest}" if rest else whole


def _known_in(module: Module, names: set[str]) -> dict[str, str]:
    """What a module imports of Brine, by the name that it has there."""
    return {
        one.asname or one.name: f"{node.module}.{one.name}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if node.module in names or f"{node.module}.{one.name}" in names
    }


def code_lines(lines: Sequence[str], tree: ast.AST) -> set[int]:
    """The lines of a tree that are code: no docstrings, comments, blank lines or imports."""
    first, last = getattr(tree, "lineno", 1), getattr(tree, "end_lineno", len(lines))
    found = {
        number
        for number in range(first, last + 1)
        if lines[number - 1].strip() and not lines[number - 1].lstrip().startswith("#")
    }
    for node in ast.walk(tree):
        if isinstance(node, _IMPORTS) or _is_text(node):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a statement is a text alone, as a docstring is."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def imports_of(modules: Sequence[Module]) -> dict[str, set[str]]:
    """The modules that each one imports, wherever it does: in functions and for types, too."""
    names = {module.name for module in modules}
    found: dict[str, set[str]] = {}
    for module in modules:
        mine = found.setdefault(module.name, set())
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                mine.update(one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{one.name}" for one in node.names}
                mine.update(whole & names or {str(node.module)})
        mine &= names - {module.name}
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, on whatever way."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = imports[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in imports}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in imports
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def _depth(tree: ast.AST) -> int:
    """How deep blocks stand in blocks. An elif is no deeper than its if."""
    deepest = 0
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTIONS):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(tree, ast.If) and tree.orelse == [node]
        own = int(isinstance(node, _BLOCKS) and not is_elif)
        deepest = max(deepest, own + _depth(node))
    return deepest


def _over(most: int, found: list[tuple[int, str]]) -> list[str]:
    return [f"{name}: {number}" for number, name in sorted(found, reverse=True) if number > most]


def main(args: Sequence[str] | None = None) -> int:
    """Print the measures of this tree."""
    parser = argparse.ArgumentParser(prog="./dev house", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all places, for programs")
    parser.add_argument("--places", action="store_true", help="name the places, too")
    text = "also walk a start and a plug on a node, which takes a minute, and root"
    parser.add_argument("--walk", action="store_true", help=text)
    given = parser.parse_args(args)
    house = vars(measure(modules_of(), sorted(TREE.glob("tests/**/*.py"))))
    if given.walk:
        for command, facts in walks().items():
            house[f"files of {command}"] = facts["files"]
            house[f"changes of room of {command}"] = facts["changes_of_room"]
    if given.json:
        print(json.dumps(house, indent=2))
        return 0
    for name, value in house.items():
        print(f"{name.replace('_', ' '):22} {_count(value)}")
        for place in value if given.places and isinstance(value, list) else ():
            print(f"    {place if isinstance(place, str) else ' '.join(place)}")
    return 0


def _count(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
