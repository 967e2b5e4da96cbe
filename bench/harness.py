"""The harness of all benchmarks: rounds in turns, timed commands, and tables of results."""

import enum
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lab.errors import LabError
from lab.ganeti import Library, Unpacked

T = TypeVar("T")

PYTHON = "/usr/bin/python3"
"""The interpreter that the packages' commands name."""
ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
UNITS = Path("/run/systemd/system")


class Length(enum.IntEnum):
    """The length of a benchmark. A trial shows that every number is there, and no more."""

    FULL = 0
    QUICK = 1
    TRIAL = 2


@dataclass(frozen=True)
class Plan:
    """The plan of a benchmark.

    :param sizes: how many VMs, or instances, of a subject that has sizes.
    :param peer: Ganeti's daemon, for a subject that is measured beside it.
    :param library: Ganeti's modules, likewise.
    """

    rounds: int
    length: Length
    sizes: Sequence[int]
    on_xen: bool
    peer: Unpacked | None = None
    library: Library | None = None

    def pick(self, full: T, quick: T, trial: T) -> T:
        """What belongs to the plan's length."""
        return (full, quick, trial)[self.length]


def tell(text: str) -> None:
    """Say how far it is."""
    print(f"bench: {text}", file=sys.stderr)


# ---- rounds


def turned(items: Sequence[T], number: int) -> Sequence[T]:
    """Each pair of rounds begins with another item, and its second round runs backwards, so that
    no contender gains from its place."""
    first = number // 2 % len(items)
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
    # Not a pipe, which a thread would have to read meanwhile.
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
    """Functions that run these commands; each returns the time that its command took."""
    return {name: partial(timed, line) for name, line in lines.items()}


@dataclass
class Round:
    """The result of one contender at one size, once.

    :param numbers: in seconds, KiB or parts of one, by what was measured; a number that is missing
        could not be measured.
    :param troubles: what went wrong.
    """

    contender: str
    size: int
    numbers: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


def median(rounds: Iterable[Round], contender: str, what: str) -> float | None:
    """The median over a contender's rounds; None if none of them has the number."""
    found = [one.numbers.get(what) for one in rounds if one.contender == contender]
    numbers = [number for number in found if number is not None]
    return statistics.median(numbers) if numbers else None


def percentiles(samples: Sequence[float]) -> list[float]:
    """The 1st to the 99th; none of fewer than two samples."""
    return statistics.quantiles(samples, n=100, method="inclusive") if len(samples) > 1 else []


# ---- the report

_SCALES = {"ms": 1e3, "us": 1e6, "%": 100, "MiB": 1 / 1024}
_DIGITS = {"/s": 0, "ticks": 0, "": 0, "MiB": 1, "KiB": 1, "us": 1}


@dataclass(frozen=True)
class TableRow:
    """One line of a table: values in its unit, and ratios of the first to other lines'."""

    title: str
    unit: str
    values: tuple[float | None, ...]
    ratios: tuple[tuple[float, str], ...] = ()
    target: str = ""
    reached: bool | None = None

    @classmethod
    def of_times(cls, title: str, samples: Sequence[float]) -> "TableRow":
        """The median, p10, p90 and p95 of samples in seconds."""
        percents = percentiles(samples) or [samples[0]] * 99
        values = (statistics.median(samples), percents[9], percents[89], percents[94])
        return cls(title, "ms", tuple(value * 1e3 for value in values))

    @classmethod
    def of_rounds(
        cls, title: str, unit: str, rounds: Sequence[Round], contenders: Sequence[str], what: str
    ) -> "TableRow":
        """Each contender's median; the first of them is beside each of the others."""
        return cls.of_values(title, unit, {one: median(rounds, one, what) for one in contenders})

    @classmethod
    def of_values(cls, title: str, unit: str, values: Mapping[str, float | None]) -> "TableRow":
        """Our value and others', by whose they are; ours is beside each of the others."""
        ours, *_ = values.values()
        others = list(values.items())[1:]
        ratios = [
            (ours / other, name if others[1:] else "")
            for name, other in others
            if ours is not None and other
        ]
        scale = _SCALES.get(unit, 1)
        scaled = [None if value is None else value * scale for value in values.values()]
        return cls(title, unit, tuple(scaled), tuple(ratios))

    def beside(self, other: "TableRow", name: str) -> "TableRow":
        """With its ratio to another row."""
        ours, theirs = self.values[0], other.values[0]
        assert ours is not None
        assert theirs
        return replace(self, ratios=(*self.ratios, (ours / theirs, name)))

    def at_most(self, limit: float, *, last: int = 1) -> "TableRow":
        """With a target for the last ratios."""
        reached = all(ratio <= limit for ratio, _ in self.ratios[-last:]) if self.ratios else None
        return replace(self, target=f"<= {limit:.3g} times", reached=reached)

    def at_least(self, limit: float) -> "TableRow":
        """With a target for the ratio."""
        reached = self.ratios[0][0] >= limit if self.ratios else None
        return replace(self, target=f">= {limit:.3g} times", reached=reached)

    def within(self, limit: float) -> "TableRow":
        """With a target for the value itself, in its unit."""
        reached = None if self.values[0] is None else self.values[0] <= limit
        return replace(self, target=f"<= {limit:g} {self.unit}", reached=reached)

    def at_most_above(self, other: "TableRow", limit: float) -> "TableRow":
        """With a target for how much more than another row's its value is, in its unit."""
        ours, theirs = self.values[0], other.values[0]
        assert ours is not None
        assert theirs is not None
        target = f"<= {limit:g} {self.unit} more"
        return replace(self, target=target, reached=ours - theirs <= limit)

    def cells(self) -> list[str]:
        """For a terminal."""
        ratios = [
            f"{ratio:,.{3 if ratio < 1 else 2}f}{' of ' if name else ''}{name}"
            for ratio, name in self.ratios
        ]
        verdict = "" if self.reached is None else ("reached" if self.reached else "MISSED")
        values = [_shown(value, self.unit) for value in self.values]
        return [f"  {self.title}", *values, ", ".join(ratios), f"{self.target}  {verdict}"]


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 1 if unit == "ms" and value >= 10 else _DIGITS.get(unit, 3)
    return f"{value:,.{digits}f} {unit}".rstrip()


@dataclass(frozen=True)
class Table:
    """Rows under the names of their values."""

    title: str
    rows: Sequence[TableRow]
    columns: Sequence[str] = ("median", "p10", "p90", "p95")

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

    def missing(self) -> Iterator[str]:
        """The rows without a number of the first contender, which is Brine where Brine is one."""
        if not self.rows:
            yield self.title
        for row in self.rows:
            first = row.values[0] if row.values else None
            if first is None or not math.isfinite(first):
                yield f"{self.title}: {row.title.strip()}"


@dataclass(frozen=True)
class Report:
    """The results of a benchmark.

    :param heads: lines about what was measured.
    :param results: every number.
    :param notes: what the tables don't say.
    :param is_right: whether Brine did all that it should.
    """

    heads: Sequence[str]
    tables: Sequence[Table]
    results: Any
    notes: Sequence[str] = ()
    is_right: bool = True

    @classmethod
    def of_rounds(
        cls,
        heads: Sequence[str],
        tables: Iterable[Table],
        rounds: Sequence[Round],
        *,
        of: str,
        peers: Collection[str],
        notes: Iterable[str] = (),
    ) -> "Report":
        """With a note for each trouble; the *peers'* troubles are not Brine's fault.

        :param of: what a size counts.
        """
        troubles = [
            f"{one.contender}, {one.size:,} {of}: {trouble}"
            for one in rounds
            for trouble in one.troubles
        ]
        is_right = not any(one.troubles for one in rounds if one.contender not in peers)
        return cls(heads, list(tables), rounds, [*notes, *dict.fromkeys(troubles)], is_right)

    def text(self) -> str:
        """For a terminal."""
        heads, notes = "\n".join(self.heads), "\n".join(self.notes)
        parts = [heads, *(table.text() for table in self.tables), notes]
        return "\n\n".join(filter(None, parts))

    def missing(self) -> list[str]:
        """The numbers that Brine should have, and has not."""
        return [one for table in self.tables for one in table.missing()]
