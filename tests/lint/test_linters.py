"""The linters, as tests: what they find fails like any other test."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common.cli import Parser, parser_of, verbs_only
from brine.common.entry_points import entry_points
from lab.fedora import FEDORA_NAMES
from tree_entry_points import of_tree

TREE = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent

PYTHON_FOLDERS = ["pkgs", "tests", "bench", "demo", "docs", "salt"]
MADE = {".venv", ".cache", "dist", ".git", "__pycache__"}
"""Folders of what tools make. Others may be at work there, and files come and go."""


def run_tool(*args: str | Path) -> str:
    """Run a tool in the tree, and return its output; what it finds fails the test."""
    done = subprocess.run(
        args, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{Path(args[0]).name} finds fault:\n{done.stdout}", pytrace=False)
    return done.stdout


def python_tool(name: str, *args: str) -> str:
    """Run a Python tool of this environment."""
    return run_tool(sys.executable, "-m", name, *args)


def sources(*patterns: str) -> list[Path]:
    """Files of the tree, none of them made by a tool."""
    found = [path for pattern in patterns for path in TREE.glob(pattern) if path.is_file()]
    return sorted(path for path in found if not MADE & set(path.relative_to(TREE).parts))


def all_sources() -> list[Path]:
    """Every file of the tree that no tool has made."""
    found = []
    for folder, inner, names in os.walk(TREE):
        inner[:] = [name for name in inner if name not in MADE]
        found += [Path(folder, name) for name in names]
    return sorted(path for path in found if path.is_file())


def shell_scripts() -> list[Path]:
    """Every shell script: by its name, or by its first line where it has no such name."""

    def is_script(path: Path) -> bool:
        if path.suffix == ".sh":
            return True
        with path.open("rb") as file:
            first = file.readline()
        return first.startswith(b"#!") and first.split()[0].endswith((b"/sh", b"/bash"))

    return [path for path in all_sources() if is_script(path)]


def test_ruff_finds_no_fault() -> None:
    python_tool("ruff", "check", *PYTHON_FOLDERS)


def test_python_is_formatted() -> None:
    python_tool("ruff", "format", "--check", "--diff", *PYTHON_FOLDERS)


def test_types() -> None:
    python_tool("mypy", *PYTHON_FOLDERS)


def test_types_with_the_oldest_python_of_salts_packages() -> None:
    python_tool("mypy", "--python-version=3.10", "salt")


def test_shell_scripts() -> None:
    scripts = shell_scripts()
    assert TREE / "dev" in scripts
    # busybox's shell, which some scripts are for, is what shellcheck calls dash.
    run_tool(TOOLS / "shellcheck", *scripts)


def test_maintainer_scripts() -> None:
    for kind in ("preinst", "postinst", "prerm", "postrm"):
        if scripts := sources(f"debian/*.{kind}"):
            run_tool(TOOLS / "shellcheck", "--shell=sh", *scripts)


def test_yaml() -> None:
    files = sources("salt/**/*.yaml", "salt/**/*.yml", "salt/FORMULA", "salt/pillar.example")
    files += sources("salt/examples/*", ".*.yml")
    assert files
    run_tool(TOOLS / "yamllint", "--strict", *files)


def test_salt_states() -> None:
    states = sources("salt/states/**/*.sls", "salt/states/**/*.jinja")
    assert states
    run_tool(TOOLS / "salt-lint", *states)


def test_a_tree_with_dnf_has_what_the_packages_require() -> None:
    spec = (TREE / "rpm/brine.spec").read_text()
    required = re.findall(r"^Requires: +([a-z][a-z0-9-]*)(?![a-z0-9-]*\()", spec, re.MULTILINE)
    tree = (TREE / "lab/fedora-tree.spec").read_text()
    known = {*FEDORA_NAMES, *re.findall(r"^Provides: +(\S+)", tree, re.MULTILINE)}
    assert {"systemd", "brine-common"} <= set(required)
    missing = {name for name in required if not name.startswith("brine-")} - known
    assert missing == set(), "lab/fedora.py names Debian's package for each"


@pytest.mark.parametrize("page", sources("docs/man/*.rst"), ids=lambda page: page.name)
def test_man_page_renders(page: Path, tmp_path: Path) -> None:
    rendered = tmp_path / page.stem
    python_tool("docutils", "--writer=manpage", "--strict", str(page), str(rendered))
    assert rendered.read_text().startswith('.\\"')


def test_manuals_have_each_verb() -> None:
    missing = []
    for noun, parser in parsers():
        pages = sources("docs/man/brine.1.rst", f"docs/man/brine-{noun}.[1-8].rst")
        text = "\n".join(page.read_text() for page in pages)
        # The verbs are indented, and below a heading.
        verbs = re.findall(r"(?m)^ {2,4}([a-z][a-z-]*)(?: .*)?$", parser.format_help())
        for verb in verbs:
            is_in_synopsis = re.search(rf"(?m)^\| \*\*brine {noun}\b.*\b{verb}\*\*", text)
            lines = [line for line in text.splitlines() if not line.startswith("| ")]
            if not (is_in_synopsis and re.search(rf"\b{verb}\b", "\n".join(lines))):
                missing.append(f"brine {noun} {verb}")
    assert missing == []


def options() -> Iterator[tuple[str, str, argparse.Action]]:
    """The options of all verbs: the noun, the verb and the option."""
    for noun, parser in parsers():
        for verb, its in (parser.verbs.choices if parser.verbs else {"": parser}).items():
            for action in its._actions:
                if action.option_strings and action.dest != "help":
                    yield noun, verb, action


def test_manuals_have_each_option() -> None:
    missing = []
    for noun, verb, action in options():
        text = "\n".join(page.read_text() for page in sources(f"docs/man/brine-{noun}.[1-8].rst"))
        option = action.option_strings[-1]
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text):
            missing.append(f"brine {noun} {verb} {option}")
    assert missing == []


def parsers() -> Iterator[tuple[str, Parser]]:
    """The commands of ``brine``, each with the verbs of all parts."""
    verbs = of_tree("brine.verbs")
    known = {one.name: one for one in of_tree("brine.commands")}
    for noun in dict.fromkeys([*known, *(one.name for one in verbs)]):
        parser = parser_of(noun, known[noun].load() if noun in known else verbs_only(noun))
        for added in verbs if not entry_points("brine.verbs") else ():
            if added.name == noun:
                added.load()(parser.verbs)
        yield noun, parser


@pytest.mark.parametrize("file", sources("pkgs/*/system/*.bash-completion"), ids=lambda f: f.name)
def test_bash_completion_parses(file: Path) -> None:
    run_tool("bash", "-n", file)
