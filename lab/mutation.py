"""Mutants of a module: each is its source with one operator, constant or branch changed.

Pure. A mutant has an id that stays while its function stays, whatever else moves in the file. So a
seed chooses the same mutants from one version to the next, but for those of code that has changed.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_CALCULATED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
}
_JOINED: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_NEVER_OF_TESTS = ("TYPE_CHECKING", "__name__ == '__main__'")
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    """One change of a module's source.

    :ivar module: its dotted name.
    :ivar place: the names of the classes and functions around the change, joined by dots.
    :ivar line: the change's line in the file, from 1.
    :ivar start: where the changed characters begin in the source.
    :ivar end: where they end.
    :ivar old: these characters.
    :ivar new: what the mutant has instead.
    :ivar code: the line with the change, without the spaces around it.
    :ivar number: tells apart mutants of one place that are else alike, from 0.
    """

    module: str
    place: str
    line: int
    start: int
    end: int
    old: str
    new: str
    code: str
    number: int = 0

    @property
    def change(self) -> str:
        """The change in words: ``< -> <=``, ``not left out``, ``condition negated``."""
        if not self.new:
            return f"{self.old} left out"
        is_branch = self.new == _negated(self.old)
        return "condition negated" if is_branch else f"{self.old} -> {self.new}"

    @property
    def id(self) -> str:
        """What names it: ``brine.vm.slots:free: if a < b:: < -> <=``."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.module}:{self.place}: {self.code}: {self.change}{again}"

    def of(self, source: str) -> str:
        """The mutant of the source that it was found in."""
        return source[: self.start] + self.new + source[self.end :]


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, by their places in it."""
    tree = ast.parse(source)
    lines = source.splitlines()
    position = _Positions(source)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for place, start, end, new in sorted(_changes(tree, source, position), key=lambda one: one[1]):
        line = source.count("\n", 0, start) + 1
        text = lines[line - 1].strip()
        mutant = Mutant(module, place, line, start, end, source[start:end], new, text)
        found.append(replace(mutant, number=seen[mutant.id]))
        seen[mutant.id] += 1
    return found


def choose(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many mutants, the same ones for the same seed; a mutant's turn depends on its id alone."""

    def turn(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.id}".encode()).digest()

    return sorted(mutants, key=turn)[:count]


class _Positions:
    """Where in a source a node begins and ends. Syntax trees count bytes of UTF-8 in a line."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def __call__(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


_Change = tuple[str, int, int, str]


def _changes(tree: ast.Module, source: str, position: _Positions) -> Iterator[_Change]:
    """Each change of a module: its place, its first and last position, and the new text."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, place = waiting.pop()
        for start, end, new in _changes_of(node, source, position):
            yield place, start, end, new
        inner = f"{place}.{node.name}".lstrip(".") if isinstance(node, _NAMED) else place
        waiting += [(child, inner) for child in _behaving(node)]


def _behaving(node: ast.AST) -> list[ast.AST]:
    """The children of a node that act when the program runs, and whose positions are known."""
    if isinstance(node, ast.JoinedStr):
        return []  # Python 3.11 does not know the places in it
    left_out: list[ast.AST | None] = []
    if isinstance(node, ast.ClassDef):
        left_out += node.decorator_list  # whether it is frozen and has slots
    if isinstance(node, ast.arg | ast.AnnAssign):
        left_out.append(node.annotation)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        left_out.append(node.returns)
    if isinstance(node, ast.Module):
        left_out += [one for one in node.body if _is_of_no_test(one)]
    return [child for child in ast.iter_child_nodes(node) if child not in left_out]


def _is_of_no_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in _NEVER_OF_TESTS


def _changes_of(node: ast.AST, source: str, position: _Positions) -> Iterator[tuple[int, int, str]]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for operator, (left, right) in zip(node.ops, pairwise(operands), strict=True):
            yield from _between(left, right, _COMPARED[type(operator)], source, position)
    elif isinstance(node, ast.BoolOp):
        for left, right in pairwise(node.values):
            yield from _between(left, right, _JOINED[type(node.op)], source, position)
    elif isinstance(node, ast.BinOp) and type(node.op) in _CALCULATED:
        yield from _between(node.left, node.right, _CALCULATED[type(node.op)], source, position)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield position.start(node), position.start(node) + len("not"), ""
    elif isinstance(node, ast.If | ast.IfExp):
        start, end = position.start(node.test), position.end(node.test)
        yield start, end, _negated(source[start:end])
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
        yield position.start(node), position.end(node), new
    elif isinstance(node, ast.Break | ast.Continue):
        new = "continue" if isinstance(node, ast.Break) else "break"
        yield position.start(node), position.end(node), new


def _negated(condition: str) -> str:
    return f"not ({condition})"


def _between(
    left: ast.expr,
    right: ast.expr,
    change: tuple[str, str],
    source: str,
    position: _Positions,
) -> Iterator[tuple[int, int, str]]:
    """The change of an operator, which stands between two operands, as do brackets and comments."""
    old, new = change
    start, end = position.end(left), position.start(right)
    between = re.sub(r"#.*", lambda match: " " * len(match[0]), source[start:end])
    pattern = rf"\b{old}\b" if old[0].isalpha() else old
    if match := re.search(pattern, between):
        yield start + match.start(), start + match.end(), new


def by_distance(
    imports: Mapping[str, set[str]], tests: Mapping[str, set[str]], module: str
) -> list[list[str]]:
    """The tests that import a module: first those that do themselves, then those that import one
    which does, and so on. Groups may be empty.

    :param imports: the modules that each module imports.
    :param tests: the modules that each test imports.
    """
    found: list[list[str]] = []
    left = set(tests)
    reached: set[str] = set()
    new = {module}
    while new:
        found.append(sorted(test for test in left if tests[test] & new))
        left.difference_update(found[-1])
        reached |= new
        new = {name for name, used in imports.items() if used & new} - reached
    return found


def names_in(tree: ast.AST, modules: Container[str], programs: Mapping[str, str]) -> set[str]:
    """The modules that a syntax tree imports or names in a text, such as ``"module:function"``.

    :param programs: the modules of programs, by the programs' names, which a text may have, too.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
            found.update(f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(":")[0]
            found.add(programs.get(text, text))
    return {name for name in found if name in modules}
