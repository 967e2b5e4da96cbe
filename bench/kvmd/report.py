"""From rounds to the table that a person reads: medians, ratios, targets."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.kvmd.rounds import Round

TARGET_SIZE = 1000
"""The targets are for this many VMs."""


@dataclass(frozen=True)
class Metric:
    """One row: which number of a round, how it is shown, and what brine-kvmd should reach."""

    title: str
    value: Callable[[Round], float | None]
    unit: str
    scale: float
    ratio_limit: float | None = None
    """At most this part of the peer's number."""
    limit: float | None = None
    """At most this, in `unit`."""


METRICS = (
    Metric("connect, all appear at once", lambda r: r.connect_s, "s", 1, ratio_limit=1 / 2),
    Metric("connect, all there at start", lambda r: r.start_s, "s", 1, ratio_limit=1 / 2),
    Metric("event to file, p50", lambda r: r.p50_s, "ms", 1e3, ratio_limit=1 / 3),
    Metric("event to file, p99", lambda r: r.p99_s, "ms", 1e3, ratio_limit=1 / 2),
    Metric(
        "100 at once, first event to last file",
        lambda r: r.together_s,
        "ms",
        1e3,
        ratio_limit=1 / 3,
    ),
    Metric("memory a VM over the base (anonymous)", lambda r: r.vm_kib, "KiB", 1, limit=4),
    Metric("memory of the base (PSS)", lambda r: r.base_kib, "MiB", 1 / 1024),
    Metric("CPU when idle (utime + stime)", lambda r: r.idle_ticks, "ticks", 1, limit=0),
    Metric("CPU when idle (scheduler's count)", lambda r: r.idle_share, "%", 100),
)


@dataclass(frozen=True)
class Row:
    """A metric at one size, in its unit. None: that daemon has no number."""

    title: str
    unit: str
    ours: float | None
    peers: float | None
    ratio: float | None
    target: str
    reached: bool | None


def rows(rounds: Sequence[Round], size: int, ours: str, peer: str) -> Iterator[Row]:
    """All rows of one size."""
    for metric in METRICS:
        mine = _median(rounds, size, ours, metric)
        theirs = _median(rounds, size, peer, metric)
        ratio = mine / theirs if mine is not None and theirs else None
        target, reached = "", None
        if size == TARGET_SIZE and metric.ratio_limit is not None:
            target = f"<= {metric.ratio_limit:.2f} of it"
            reached = None if ratio is None else ratio <= metric.ratio_limit
        elif size == TARGET_SIZE and metric.limit is not None:
            target = f"<= {metric.limit:g} {metric.unit}"
            reached = None if mine is None else mine <= metric.limit
        yield Row(metric.title, metric.unit, mine, theirs, ratio, target, reached)


def table(rounds: Sequence[Round], size: int, ours: str, peer: str) -> str:
    """One size as text."""
    count = max(_count(rounds, size, ours), _count(rounds, size, peer))
    lines = [
        f"{size:,} VMs, median of {count} round{'s' * (count != 1)}",
        f"  {'':<38}{ours:>16}{peer:>16}{'ratio':>9}  target",
    ]
    for row in rows(rounds, size, ours, peer):
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = "" if row.reached is None else ("reached" if row.reached else "MISSED")
        lines.append(
            f"  {row.title:<38}{_show(row.ours, row.unit):>16}{_show(row.peers, row.unit):>16}"
            f"{ratio:>9}  {row.target:<14}{verdict}".rstrip()
        )
    troubles = [_trouble(result) for result in rounds if result.size == size]
    lines += dict.fromkeys(trouble for trouble in troubles if trouble)
    return "\n".join(lines)


def _trouble(result: Round) -> str:
    parts = [result.trouble] if result.trouble else []
    if result.missed:
        parts.append(f"{result.missed:,} verdict files never came")
    if result.lost:
        parts.append(f"{result.lost:,} new VMs were never connected to")
    return f"  {result.daemon}: {'; '.join(parts)}" if parts else ""


def _median(rounds: Sequence[Round], size: int, daemon: str, metric: Metric) -> float | None:
    values = [metric.value(r) for r in rounds if r.size == size and r.daemon == daemon]
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) * metric.scale if numbers else None


def _count(rounds: Sequence[Round], size: int, daemon: str) -> int:
    return sum(r.size == size and r.daemon == daemon for r in rounds)


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 0 if unit == "ticks" else 3 if unit in ("s", "ms", "%") else 1
    return f"{value:.{digits}f} {unit}"
