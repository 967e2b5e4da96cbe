"""From samples to the tables that a person reads: medians, ratios, the target."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.watcher.results import (
    DRY,
    HELP,
    LIST,
    PASS,
    PYTHON,
    SHOW,
    SHOW_SOME,
    XL,
    Plan,
    Results,
    Scene,
)

LIMIT = 1.5
"""A pass, beside asking alone."""


@dataclass(frozen=True)
class Row:
    """One line.

    :param ratios: of the medians, to those of *beside*.
    """

    title: str
    median_s: float
    p95_s: float
    ratios: tuple[float, ...] = ()
    reached: bool | None = None

    def text(self) -> str:
        """For a terminal."""
        times = "".join(f"{value * 1e3:>10.1f}" for value in (self.median_s, self.p95_s))
        ratios = "".join(f"{ratio:>10.2f}" for ratio in self.ratios)
        verdict = "" if self.reached is None else ("reached" if self.reached else "MISSED")
        return f"  {self.title:<42}{times}{ratios:<20}  {verdict}".rstrip()


@dataclass(frozen=True)
class Table:
    """Rows with a head."""

    title: str
    rows: list[Row]

    def text(self) -> str:
        """For a terminal."""
        head = f"{self.title:<44}{'median':>10}{'p95':>10}{'to ask':>10}{'to list':>10}"
        return "\n".join([f"{head}  target {LIMIT:g}", *(row.text() for row in self.rows)])


def tables(results: Results, plan: Plan) -> Iterator[Table]:
    """All that was measured."""
    for scene in Scene:
        samples = results.samples.get(scene)
        if samples is None:
            continue
        if scene is Scene.XEN:
            yield Table(f"{plan.domains} {scene}, ms", list(_rows(samples, 2)))
            continue
        # Where few run systemctl has hardly anything to ask for.
        beside = 2 if scene is Scene.RUNNING else 1
        yield Table(f"{plan.instances} instances, {scene}, ms", list(_rows(samples, beside)))


def _rows(samples: Mapping[str, Sequence[float]], beside: int) -> Iterator[Row]:
    """One command a row.

    :param beside: how many ratios, from the last on, the target is for.
    """
    # Both are asked on Xen.
    show = sum(statistics.median(samples[name]) for name in (SHOW, XL) if name in samples)
    list_ = statistics.median(samples[LIST])
    for name in (PYTHON, HELP, XL, SHOW, SHOW_SOME, LIST, DRY, PASS):
        if name not in samples:
            continue
        median = statistics.median(samples[name])
        ratios = (median / show, median / list_) if name in (LIST, DRY, PASS) else ()
        reached = all(ratio <= LIMIT for ratio in ratios[-beside:]) if name == PASS else None
        yield Row(name, median, _p95(samples[name]), ratios, reached)


def _p95(samples: Sequence[float]) -> float:
    twentieths = statistics.quantiles(samples, n=20, method="inclusive") if samples[1:] else samples
    return twentieths[-1]
