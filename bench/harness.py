"""What all benchmarks share: command line, rounds in turns, timed commands, tables and JSON."""

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from bench import machine
from lab import sandbox
from lab.debian import host_release
from lab.errors import LabError
from lab.machine import Machine
from lab.node import boot_node
from lab.packages import build_packages
from lab.progress import step
from lab.repository import publish
from lab.signals import run_program
from lab.tree import TREE

T = TypeVar("T")

ROUNDS, QUICK_ROUNDS = 16, 3
"""Of what is measured in a node."""
PYTHON = "/usr/bin/python3"
"""The interpreter that the packages' commands name."""
ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

_NODE_FOLDER = "/srv/brine"


# ---- the command line


def node_parser(
    name: str,
    description: str,
    *,
    rounds: str = str(ROUNDS),
    quick: str = f"{QUICK_ROUNDS} rounds",
) -> argparse.ArgumentParser:
    """The command line of a subject that is measured in a node."""
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=description)
    parser.add_argument("--rounds", type=positive, help=f"how many ({rounds})")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    return parser


def positive(text: str) -> int:
    """A type for how many."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def numbers_of(of: str, *, smallest: int = 1) -> Callable[[str], list[int]]:
    """A type for some numbers of these."""

    def numbers(text: str) -> list[int]:
        found = [positive(part) for part in text.replace("_", "").split(",")]
        if min(found) < smallest:
            raise argparse.ArgumentTypeError(f"at least {smallest} {of}")
        return found

    return numbers


def rounds_in_node(options: argparse.Namespace) -> int:
    """How many rounds `node_parser` was asked for."""
    return options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)


def run_bench(subject: ModuleType) -> NoReturn:
    """Run a benchmark for a person: one clear line when it can't be done.

    :param subject: has a `parser()`, and a `run()` that returns whether all did what it should.
    """

    def main(arguments: Sequence[str]) -> int:
        try:
            return 0 if subject.run(subject.parser().parse_args(arguments)) else 1
        except LabError as error:
            print(f"bench: error: {error}", file=sys.stderr)
            return 1

    run_program(main)


# ---- the measuring process


@contextmanager
def brine_node(package: str) -> Iterator[Machine]:
    """A throw-away node with this package of Brine's, and those that it needs."""
    archives = build_packages()
    with boot_node(host_release(), name="bench") as node:
        with step("installing Brine in a node"):
            publish(node, archives)
            node.run(["apt-get", "install", "--yes", "--quiet=2", package], timeout_s=300)
        yield node


def system_of(node: Machine) -> str:
    """What a node runs, for a report."""
    said = node.shell('. /etc/os-release; echo "$PRETTY_NAME"; systemctl --version')
    return ", ".join(said.splitlines()[:2])


def measure_in_node(node: Machine, module: str, plan: Any) -> Any:
    """Run a module's `measure` in a node, where what is measured is installed."""
    for folder in ("bench", "lab"):
        node.put(TREE / folder, f"{_NODE_FOLDER}/{folder}")
    # -P: the tree's own code stays out of what is measured, which is installed.
    python = ["env", f"PYTHONPATH={_NODE_FOLDER}", PYTHON, "-P", "-m", "bench"]
    done = subprocess.run(
        node.command([*python, "--measure", module, pickle.dumps(plan).hex()]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        text = f"the measuring process ended with {done.returncode}"
        raise LabError(text, hint="its message is above")
    return pickle.loads(bytes.fromhex(done.stdout))


def measure_in_sandbox(module: str, plan: Any, *, needs: Sequence[Path]) -> Any:
    """Run a module's `measure` in a sandbox that has the source tree, and these paths."""
    arguments = ["--measure", module, pickle.dumps(plan).hex()]
    output = sandbox.run_module("bench", arguments, needs=[TREE, *needs])
    return pickle.loads(bytes.fromhex(output))


def measure(module: ModuleType, plan: str) -> None:
    """Have a module measure what the plan says, and write the results."""
    try:
        results = module.measure(pickle.loads(bytes.fromhex(plan)))
    except Exception as error:
        # Brine's own errors are known only where Brine is installed.
        if not hasattr(error, "hint"):
            raise
        hint = "" if isinstance(error, LabError) else f"\n  hint: {error.hint}"
        print(f"bench: error: {error}{hint}", file=sys.stderr)
        sys.exit(1)
    sys.stdout.write(pickle.dumps(results).hex())


def tell(text: str) -> None:
    """Say how far it is."""
    print(f"bench: {text}", file=sys.stderr)


def turned(items: Sequence[T], number: int) -> Sequence[T]:
    """Each round begins with another one, and every second goes the other way round, so that what
    comes before costs nobody more than others."""
    first = number % len(items)
    in_turn = [*items[first:], *items[:first]]
    return in_turn if number % 2 == 0 else in_turn[::-1]


def in_turns(
    what: str, rounds: int, contenders: Mapping[str, Callable[[], T]], *, warm_up: bool = False
) -> dict[str, list[T]]:
    """Run each contender once a round; returns all samples, in the order of the rounds.

    :param warm_up: first run each one once more, which does not count.
    """
    if warm_up:
        for run in contenders.values():
            run()
    samples: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        tell(f"{what}: round {number + 1} of {rounds}")
        for name, run in turned(list(contenders.items()), number):
            samples[name].append(run())
    return samples


def timed(*commands: Sequence[str]) -> float:
    """Run commands one after the other; returns how many seconds they took together."""
    # Not a pipe, which somebody would have to read meanwhile.
    with tempfile.TemporaryFile() as output:
        began_at = time.perf_counter()
        for command in commands:
            process = subprocess.Popen(
                command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            # With a limit, Python would look only now and then.
            if process.wait() != 0:
                output.seek(0)
                said = output.read().decode(errors="replace").strip()
                raise LabError(f"{' '.join(command)} failed: {said}", hint="is it busy? try again")
        return time.perf_counter() - began_at


def timing(lines: Mapping[str, Sequence[str]]) -> dict[str, Callable[[], float]]:
    """What runs each of these commands, and returns how long it took."""
    return {name: partial(timed, line) for name, line in lines.items()}


# ---- the report


@dataclass(frozen=True)
class Row:
    """One line of a table: values in its unit, and what the first of them is beside others."""

    title: str
    unit: str
    values: tuple[float | None, ...]
    ratios: tuple[tuple[float, str], ...] = ()
    target: str = ""
    reached: bool | None = None

    @classmethod
    def of_times(cls, title: str, samples: Sequence[float]) -> "Row":
        """The median, p10, p90 and p95 of samples in seconds."""
        percents = [samples[0]] * 99
        if samples[1:]:
            percents = statistics.quantiles(samples, n=100, method="inclusive")
        values = (statistics.median(samples), percents[9], percents[89], percents[94])
        return cls(title, "ms", tuple(value * 1e3 for value in values))

    @classmethod
    def of_pair(cls, title: str, unit: str, ours: float | None, other: float | None) -> "Row":
        """Ours beside another number."""
        ratios = ((ours / other, ""),) if ours is not None and other else ()
        return cls(title, unit, (ours, other), ratios)

    def less(self, title: str, seconds: float) -> "Row":
        """Each value without so much."""
        values = tuple(None if value is None else value - seconds * 1e3 for value in self.values)
        return replace(self, title=title, values=values)

    def beside(self, other: "Row", name: str) -> "Row":
        """With its ratio to another row."""
        ours, theirs = self.values[0], other.values[0]
        assert ours is not None
        assert theirs
        return replace(self, ratios=(*self.ratios, (ours / theirs, name)))

    def at_most(self, limit: float, *, last: int = 1) -> "Row":
        """With a target for the last ratios."""
        reached = all(ratio <= limit for ratio, _ in self.ratios[-last:]) if self.ratios else None
        return replace(self, target=f"<= {limit:.3g} times", reached=reached)

    def at_least(self, limit: float) -> "Row":
        """With a target for the ratio."""
        reached = self.ratios[0][0] >= limit if self.ratios else None
        return replace(self, target=f">= {limit:.3g} times", reached=reached)

    def within(self, limit: float) -> "Row":
        """With a target for the value itself, in its unit."""
        reached = None if self.values[0] is None else self.values[0] <= limit
        return replace(self, target=f"<= {limit:g} {self.unit}", reached=reached)

    def cells(self) -> list[str]:
        """For a terminal."""
        ratios = [
            f"{ratio:,.{3 if ratio < 1 else 2}f}{' of ' if name else ''}{name}"
            for ratio, name in self.ratios
        ]
        verdict = "" if self.reached is None else ("reached" if self.reached else "MISSED")
        values = [_shown(value, self.unit) for value in self.values]
        return [f"  {self.title}", *values, ", ".join(ratios), f"{self.target}  {verdict}"]


@dataclass(frozen=True)
class Table:
    """Rows under the names of their values."""

    title: str
    columns: tuple[str, ...]
    rows: list[Row]

    @classmethod
    def of_times(cls, title: str, rows: Iterable[Row]) -> "Table":
        """Of rows made by `Row.of_times`."""
        return cls(title, ("median", "p10", "p90", "p95"), list(rows))

    def text(self) -> str:
        """For a terminal."""
        lines = [["", *self.columns, "ratio", "target"], *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        last = len(widths) - 2

        def line(cells: Sequence[str]) -> str:
            # Numbers to the right; the title, the ratio and the target to the left.
            padded = [
                cell.rjust(width) if 0 < place < last else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(padded).rstrip()

        return "\n".join([self.title, *map(line, lines)])


def report(
    heads: Iterable[str],
    tables: Sequence[Table],
    file: Path | None,
    *,
    plan: Any,
    results: Any,
    notes: Iterable[str] = (),
) -> None:
    """Print tables, and write them and every number, as JSON, to a file if there is one.

    :param heads: lines about what was measured, which follow one about the machine.
    """
    here = machine.describe()
    print(f"{here.processor}, {here.cores} cores, {here.memory_mib} MiB, Linux {here.kernel}")
    for head in heads:
        print(head)
    for table in tables:
        print()
        print(table.text())
    for number, note in enumerate(dict.fromkeys(notes)):
        print(note if number else f"\n{note}")
    if file:
        found = {"machine": here, "plan": plan, "results": results, "tables": tables}
        file.write_text(json.dumps(found, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = {"/s": 0, "ticks": 0, "": 0, "MiB": 1, "KiB": 1, "us": 1}.get(unit, 3)
    if unit == "ms" and value >= 10:
        digits = 1
    return f"{value:,.{digits}f} {unit}".rstrip()
