"""Mutants of Brine, and whether its unit tests see them: `./dev mutants`.

Each mutant is a copy of the tree with one operator, constant or branch changed. The unit tests that
import its module run on it, the nearest first. A mutant is killed when one of them fails, or when
they take ten minutes; it has survived when all of them pass.

The tests run in namespaces of their own, so that a mutant can end or remove nothing of the machine.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from lab.errors import LabError
from lab.mutation import Mutant, by_distance, choose, mutants_of, names_in
from lab.tree import TREE, clone

_LONGEST_S = 600
_NONE_CHOSEN = 5
_SANDBOX = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
_INSIDE = """
import sys, pytest
from pathlib import Path
from lab.sandbox import hide_state, raise_loopback
raise_loopback()
hide_state({Path("/run/lock/none"): ""})
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    :ivar killed_by: the test that failed, ``all`` if none can begin, ``""`` if it has survived.
    :ivar tests: how many files of tests ran.
    :ivar timed_out: whether they took too long.
    """

    mutant: Mutant
    file: str
    killed_by: str
    tests: int
    timed_out: bool = False

    def __str__(self) -> str:
        state = "killed" if self.killed_by else "survived"
        mutant = self.mutant
        why = f" ({self.killed_by}{', too slow' if self.timed_out else ''})"
        end = why if self.killed_by else f" ({self.tests} files of tests)"
        return f"{state} {self.file}:{mutant.line}: {mutant.code}: {mutant.change}{end}"


class Mutants:
    """The modules of a tree, their mutants, and the tests that run on these.

    :param tree: a tree like this one: its modules are in ``pkgs/``, its tests in ``tests/unit/``.
    :param files: the files of the tree that a copy needs.
    """

    def __init__(self, tree: Path, files: Sequence[Path]) -> None:
        self.tree, self._all = tree, files
        self._files = {
            ".".join(file.relative_to(tree).with_suffix("").parts[2:]): file
            for file in sorted(tree.glob("pkgs/*/brine/**/*.py"))
        }
        helpers = [*tree.glob("lab/*.py"), *tree.glob("tests/*.py"), *tree.glob("tests/unit/*.py")]
        used = self._files | {_as_imported(file): file for file in helpers}
        programs = {
            name: target.partition(":")[0]
            for file in tree.glob("pkgs/*/pyproject.toml")
            for name, target in _scripts(file).items()
        }
        self._imports = {name: names_in(_read(file), used, programs) for name, file in used.items()}
        self._tests = {
            str(file.relative_to(tree)): self._imports[_as_imported(file)]
            for file in sorted(tree.glob("tests/unit/test_*.py"))
        }
        self._passing: set[str] = set()

    def all(self) -> Iterator[Mutant]:
        """The mutants of all modules."""
        for name, file in self._files.items():
            yield from mutants_of(name, file.read_text())

    def try_all(
        self, mutants: Sequence[Mutant], *, jobs: int = 1, tests: Sequence[str] = (), far: int = 1
    ) -> Iterator[Outcome]:
        """Run the tests of each mutant, and tell what became of it, in the given order.

        :param jobs: how many of them run at once, each in a copy of its own.
        :param tests: the files of tests to run, instead of those that import the module.
        :param far: how many groups of those, the nearest first.

        Raises LabError when a test fails without a mutant.
        """
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copies: SimpleQueue[Path] = SimpleQueue()
            for number in range(jobs):
                copies.put(self._copy(Path(folder, str(number))))

            def work(mutant: Mutant) -> Outcome:
                copy = copies.get()
                try:
                    return self._try(mutant, copy, tests, far)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(jobs) as pool:
                yield from pool.map(work, mutants)

    def _copy(self, target: Path) -> Path:
        for file in self._all:
            copy = target / file.relative_to(self.tree)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
        return target

    def _try(self, mutant: Mutant, copy: Path, given: Sequence[str], far: int) -> Outcome:
        file = self._files[mutant.module].relative_to(self.tree)
        groups = [list(given)] if given else by_distance(self._imports, self._tests, mutant.module)
        ran = 0
        for tests in [group for group in groups if group][:far]:
            ran += len(tests)
            with _changed(copy / file, mutant):
                status, failed = _run(tests, copy)
            if status not in (0, _NONE_CHOSEN):
                self._see_whether_it_passes(failed.partition("::")[0], copy)
                return Outcome(mutant, str(file), failed or "all", ran, timed_out=status is None)
        return Outcome(mutant, str(file), "", ran)

    def _see_whether_it_passes(self, test: str, copy: Path) -> None:
        if test and test not in self._passing:
            if _run([test], copy)[0] not in (0, _NONE_CHOSEN):
                text = f"{test} fails without a mutant, too"
                raise LabError(text, hint=f"./dev check {test}")
            self._passing.add(test)


@contextlib.contextmanager
def _changed(file: Path, mutant: Mutant) -> Iterator[None]:
    """A file is its mutant meanwhile. Its time of change differs, so no compiled file is stale."""
    source, status = file.read_text(), file.stat()
    file.write_text(mutant.of(source))
    os.utime(file, (status.st_atime, status.st_mtime + 1 + mutant.start))
    try:
        yield
    finally:
        file.write_text(source)
        os.utime(file, (status.st_atime, status.st_mtime))


def _run(tests: Sequence[str], copy: Path) -> tuple[int | None, str]:
    """Run tests in a copy up to the first that fails: pytest's status, or None if they take too
    long, and the name of that test."""
    command = [*_SANDBOX, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    options = ["-q", "-x", "--no-header", "--tb=no", "-rfE", "--hypothesis-seed=0"]
    command += [sys.executable, "-c", _INSIDE, *options, *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status: int | None = process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # --kill-child: with unshare goes the first process inside, and with that all others.
            process.kill()
            process.wait()
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    return status, failed[1] if failed else ""


def _as_imported(file: Path) -> str:
    """What tests import a helper of theirs as."""
    folder = file.parent.name
    return file.stem if folder == "tests" else f"{folder}.{file.stem}"


def _read(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _scripts(file: Path) -> dict[str, str]:
    """The programs of a project file: by their names, ``module:function``."""
    scripts: dict[str, str] = tomllib.loads(file.read_text())["project"].get("scripts", {})
    return scripts


def main(args: Sequence[str] | None = None) -> int:
    """Make mutants, run their tests, and print which have survived; 1 if one has."""
    parser = argparse.ArgumentParser(prog="./dev mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100, metavar="N", help="so many (100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another choice (1)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at once (1)")
    parser.add_argument("--module", metavar="NAME", help="only of modules whose name has this")
    parser.add_argument("--id", metavar="TEXT", help="only those whose id has this text")
    text = "run this instead of the unit tests that import the module; may be given repeatedly"
    parser.add_argument("--tests", action="append", default=[], metavar="FILE", help=text)
    text = "from a test to the module: 1 runs the nearest tests, 2 also those behind them (1)"
    parser.add_argument("--far", type=int, default=1, metavar="STEPS", help=text)
    parser.add_argument("--json", action="store_true", help="print them for programs, in the end")
    given = parser.parse_args(args)
    tree = Mutants(TREE, list(clone()))
    wanted = [
        mutant
        for mutant in tree.all()
        if (given.module or "") in mutant.module and (given.id or "") in mutant.id
    ]
    chosen = choose(wanted, given.count, given.seed)
    outcomes = []
    try:
        for outcome in tree.try_all(chosen, jobs=given.jobs, tests=given.tests, far=given.far):
            outcomes.append(outcome)
            if not given.json:
                print(outcome, flush=True)
    except LabError as error:
        print(f"dev: error: {error}", file=sys.stderr)
        return 2
    survived = [outcome for outcome in outcomes if not outcome.killed_by]
    if given.json:
        print(json.dumps([_shown(outcome) for outcome in outcomes], indent=2))
    else:
        print(f"{len(outcomes) - len(survived)} of {len(outcomes)} killed")
    return 1 if survived else 0


def _shown(outcome: Outcome) -> dict[str, object]:
    mutant = outcome.mutant
    return {
        "id": mutant.id,
        "file": outcome.file,
        "line": mutant.line,
        "change": mutant.change,
        "killed_by": outcome.killed_by,
        "timed_out": outcome.timed_out,
    }


if __name__ == "__main__":
    raise SystemExit(main())
