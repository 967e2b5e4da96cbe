"""Mutants: how they are made, chosen and judged."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.mutants import Mutants
from lab.mutation import by_distance, choose, mutants_of
from lab.tree import TREE

SOURCE = '''
"""1 + 1"""
from __future__ import annotations

def first(ones: list[int] | None, most: int = 3) -> int | None:
    """Not 2 < 1."""
    if not ones or len(ones) > most:  # 4 and not 5
        return None
    for one in ones:
        if 0 < one <= (
            most  # < 6
        ): break
    return one if "ä" in str(one) and one is not None else -one
'''

TESTS = """
from brine.toy.numbers import larger

def test_it():
    assert larger(2, 1)
    assert not larger(1, 2)
"""

SCRIPT = """
def larger(a, b):
    if a is None:
        return False
    return a > b

def unused(a):
    return a + 1
"""


def test_each_operator_constant_and_branch_has_a_mutant() -> None:
    found = mutants_of("brine.toy", SOURCE)
    changes = [(mutant.line, mutant.change) for mutant in found]
    assert changes == [
        (5, "3 -> 4"),
        (7, "condition negated"),
        (7, "not left out"),
        (7, "or -> and"),
        (7, "> -> >="),
        (10, "condition negated"),
        (10, "0 -> 1"),
        (10, "< -> <="),
        (10, "<= -> <"),
        (12, "break -> continue"),
        (13, "condition negated"),
        (13, "in -> not in"),
        (13, "and -> or"),
        (13, "is not -> is"),
    ]
    assert len({mutant.id for mutant in found}) == len(found)
    for mutant in found:
        changed = mutant.of(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), mutant.id
        assert len(SOURCE.splitlines()) == len(changed.splitlines())


def test_a_choice_stays_when_other_code_changes() -> None:
    before = choose(mutants_of("brine.toy", SOURCE), 5, seed=1)
    moved = choose(mutants_of("brine.toy", f"import os\n{SOURCE}"), 5, seed=1)
    assert [mutant.id for mutant in moved] == [mutant.id for mutant in before]
    assert [mutant.line for mutant in moved] == [mutant.line + 1 for mutant in before]
    assert choose(mutants_of("brine.toy", SOURCE), 5, seed=2) != before


def test_the_nearest_tests_come_first() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    tests = {"test_a": {"a"}, "test_b": {"b", "a"}, "test_c": {"c"}, "test_d": {"d"}}
    assert by_distance(imports, tests, "c") == [["test_c"], ["test_b"], ["test_a"]]


@pytest.fixture
def toy(tmp_path: Path) -> Mutants:
    """A tree with one module, whose test leaves a gap."""
    if os.geteuid() and subprocess.run(["unshare", "--user", "true"], check=False).returncode:
        pytest.skip("no namespaces of users here")
    for name, text in {
        "pkgs/toy/brine/toy/numbers.py": SCRIPT,
        "pkgs/toy/pyproject.toml": "[project]\nname = 'toy'\n",
        "tests/unit/test_numbers.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["pkgs/toy", "."]\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lab").mkdir()
    for name in ("__init__.py", "errors.py", "sandbox.py"):
        shutil.copy(TREE / "lab" / name, tmp_path / "lab")
    return Mutants(tmp_path, [file for file in tmp_path.rglob("*") if file.is_file()])


def test_a_mutant_is_killed_by_a_test_that_sees_it(toy: Mutants) -> None:
    wanted = {"condition negated", "> -> >="}
    mutants = [mutant for mutant in toy.all() if mutant.change in wanted]
    outcomes = list(toy.try_all(mutants))
    assert [(one.mutant.change, one.killed_by) for one in outcomes] == [
        ("condition negated", "tests/unit/test_numbers.py::test_it"),
        ("> -> >=", ""),
    ]
    assert str(outcomes[1]).startswith("survived pkgs/toy/brine/toy/numbers.py:5: return a > b: ")
    # The tree itself is never a mutant.
    assert (toy.tree / "pkgs/toy/brine/toy/numbers.py").read_text() == SCRIPT
