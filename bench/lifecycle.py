"""When the lifecycle handler sees that an owner is gone, and what it takes of a processor."""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bench.harness import (
    Row,
    Table,
    brine_node,
    measure_in_node,
    node_parser,
    numbers_of,
    report,
    system_of,
)

LIMIT_SIZE, LIMIT_PERCENT = 1000, 1
"""The target is for this many owned VMs."""


class Way(StrEnum):
    """Who looks after the owners."""

    HANDLER = "brine-lifecycle"
    SHELL = "a loop of stat"
    SYSTEMD = "WatchdogSec="


@dataclass(frozen=True)
class Plan:
    """What to measure, how much.

    :param window_s: the time in which nothing happens but touches.
    :param gone: so many owners at most go away.
    """

    rounds: int
    sizes: Sequence[int]
    window_s: float
    gone: int = 50
    interval_s: float = 5.0
    timeout_s: int = 10


@dataclass
class Round:
    """One way with so many owners, once.

    :param share: of a processor.
    :param late_s: of each owner that was seen to be gone, how long after its watchdog expired.
    :param missed: so many were not.
    :param trouble: why nothing was measured.
    """

    way: Way
    size: int
    share: float | None = None
    late_s: list[float] = field(default_factory=list)
    missed: int = 0
    trouble: str = ""


def tables(rounds: Sequence[Round], plan: Plan) -> Iterator[Table]:
    """All that was measured."""
    shares, times = [], []
    for size in plan.sizes:
        here = [one for one in rounds if one.size == size]
        row = _row(f"{size:,} VMs", "%", here, _percent)
        shares.append(row.within(LIMIT_PERCENT) if size == LIMIT_SIZE else row)
        times.append(_row(f"{size:,} VMs, p50", "ms", here, lambda found: _late_ms(found, 49)))
        times.append(_row("  p99", "ms", here, lambda found: _late_ms(found, 98)))
    ways = tuple(map(str, Way))
    yield Table(f"of a processor, a touch each {plan.interval_s:g} s", ways, shares)
    yield Table(f"from the end of the timeout, {plan.timeout_s} s", ways, times)


def _row(
    title: str, unit: str, rounds: Sequence[Round], value: Callable[[list[Round]], float | None]
) -> Row:
    ours, *others = (value([one for one in rounds if one.way is way]) for way in Way)
    names = list(Way)[1:]
    ratios = [
        (ours / other, name)
        for other, name in zip(others, names, strict=True)
        if ours is not None and other
    ]
    return Row(title, unit, (ours, *others), tuple(ratios))


def _percent(rounds: list[Round]) -> float | None:
    found = [one.share * 100 for one in rounds if one.share is not None]
    return statistics.median(found) if found else None


def _late_ms(rounds: list[Round], percentile: int) -> float | None:
    found = [late_s * 1e3 for one in rounds for late_s in one.late_s]
    if len(found) < 2:
        return None
    return statistics.quantiles(found, n=100, method="inclusive")[percentile]


def run(options: argparse.Namespace) -> bool:
    """Measure and print. False if the handler has missed one."""
    plan = Plan(options.rounds or 1, options.sizes, 5.0 if options.quick else 20.0)
    with brine_node("brine-lifecycle") as node:
        rounds: list[Round] = measure_in_node(node, "lifecycle_node", plan)
        heads = [f"{system_of(node)}; rounds: {plan.rounds}"]
    notes = []
    for one in rounds:
        missed = f"{one.missed} owners that were gone were not seen to be" if one.missed else ""
        if trouble := one.trouble or missed:
            notes.append(f"{one.way}, {one.size:,} VMs: {trouble}")
    found = list(tables(rounds, plan))
    report(heads, found, options.json, plan=plan, results=rounds, notes=notes)
    return not any(one.missed or one.trouble for one in rounds if one.way is Way.HANDLER)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    description = "Measure how soon the handler sees an owner's end, beside two other ways."
    found = node_parser("lifecycle", description, rounds="1", quick="5 s of touches, not 20")
    help_ = "numbers of owned VMs"
    sizes = (10, 100, LIMIT_SIZE)
    found.add_argument(
        "--sizes", type=numbers_of("VMs"), default=sizes, metavar="N,...", help=help_
    )
    return found
