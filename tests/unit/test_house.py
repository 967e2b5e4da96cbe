"""The measures of ./dev house, on a small house."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from lab.house import DEPTH, LONG, Module, measure, modules_of, names_passed


def module(name: str, text: str) -> Module:
    text = textwrap.dedent(text)
    return Module(name, text.splitlines(), ast.parse(text))


def test_circles_count_all_imports() -> None:
    found = measure(
        [
            module("brine.a", "import brine.b"),
            module("brine.b", "def f():\n    from brine import c\n"),
            module("brine.c", "if TYPE_CHECKING:\n    from brine.a import A\n"),
            module("brine.d", "from brine.a import A\nimport os\n"),
        ]
    )
    assert found.circles == [["brine.a", "brine.b", "brine.c"]]
    assert found.imports_in_functions == ["brine.b.f: from brine import c"]


def test_public_names_in_two_rooms() -> None:
    text = """
        def main(): ...
        def find(): ...
        def _own(): ...
    """
    found = measure([module("brine.a", text), module("brine.b", text)])
    assert found.names_in_two_rooms == ["find: brine.a, brine.b"]


def test_code_has_no_comments_docstrings_blank_lines_or_imports(tmp_path: Path) -> None:
    text = """
        '''Of two
        lines.'''
        import os

        # A comment.
        X = 1
        def f():
            '''One.'''
            return 'no docstring'
    """
    tests = tmp_path / "test_a.py"
    tests.write_text("def test_a():\n    assert True\n")
    found = measure([module("brine.a", text)], [tests])
    assert (found.code_lines, found.test_lines, found.tests_per_code) == (3, 2, 0.67)


@pytest.mark.parametrize("elifs", [False, True])
def test_what_is_too_long_or_too_deep_is_named(elifs: bool) -> None:
    lines = ["def f(x):", *["    x += 1"] * LONG, "def g(x):"]
    if elifs:
        lines += ["    if x: pass", *["    elif x: pass"] * DEPTH]
    else:
        lines += ["    " * (depth + 1) + "if x:" for depth in range(DEPTH + 1)]
        lines += ["    " * (DEPTH + 2) + "pass"]
    found = measure([module("brine.a", "\n".join(lines))])
    assert found.long_functions == [f"brine.a.f: {LONG + 1}"]
    assert found.deep_functions == ([] if elifs else [f"brine.a.g: {DEPTH + 1}"])


def test_the_whole_tree_is_measured() -> None:
    names = {one.name for one in modules_of()}
    assert {"brine.common", "brine.vm.spec", "brine.hotplug.net.tap"} <= names


def test_a_bare_name_is_counted_where_a_start_passes_it_on() -> None:
    start = """
        from brine.instance import store

        def start_instance(name):
            store.load(name)
            _begin(spec.name, key=other)

        def _begin(name, key):
            mark(name)
            later(_end)

        def _end(): mark(name=one.name)

        def stop_instance(name): mark(name)
    """
    store = "def load(name):\n    read(name, name)\n"
    modules = [module("brine.instance.start", start), module("brine.instance.store", store)]
    assert names_passed(modules, "brine.instance.start.start_instance") == 6
