"""brine-kvmd beside Ganeti's daemon of the same purpose, on scripted QMP sockets."""

import argparse
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.harness import (
    Row,
    Table,
    measure_in_sandbox,
    median,
    peer_parser,
    positive,
    report,
    run_bench,
    tell,
)
from lab import peer_packages
from lab.errors import LabError

TARGET_SIZE = 1000
"""The targets are for this many VMs."""
WARM_UP = 3
"""VMs that come and go before the base is measured: a first connection loads what stays."""
TOGETHER = 100
BRINE, GANETI = "brine-kvmd", "ganeti-kvmd"

_GANETI_PACKAGE = r"^ganeti-haskell-[0-9.]+$"


@dataclass(frozen=True)
class Plan:
    """What to measure, how much; `ganeti_program` is a path in `ganeti_root`, both may be ""."""

    sizes: list[int]
    rounds: int
    samples: int
    bursts: int
    idle_s: float
    ganeti_root: str
    ganeti_program: str
    with_brine: bool


@dataclass
class Round:
    """One daemon at one size, once. None: it did not get so far, and `trouble` says why."""

    daemon: str
    size: int
    real_time: bool = False
    connected: int = 0
    connect_s: float | None = None
    start_s: float | None = None
    base_kib: int | None = None
    vm_kib: float | None = None
    idle_share: float | None = None
    idle_ticks: int | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    together_s: float | None = None
    missed: int = 0
    """VMs whose verdict file never came."""
    lost: int = 0
    """VMs that took the place of one that had ended, and were never connected to."""
    trouble: str = ""

    def complaint(self) -> str:
        """All that went wrong, or nothing."""
        parts = [self.trouble] if self.trouble else []
        if self.missed:
            parts.append(f"{self.missed:,} verdict files never came")
        if self.lost:
            parts.append(f"{self.lost:,} new VMs were never connected to")
        return "; ".join(parts)


@dataclass(frozen=True)
class Metric:
    """One row: which number of a round, how it is shown, and what brine-kvmd should reach."""

    title: str
    value: Callable[[Round], float | None]
    unit: str
    scale: float = 1
    ratio_limit: float | None = None
    """At most this part of the peer's number."""
    limit: float | None = None
    """At most this, in `unit`."""


METRICS = (
    Metric("connect, all appear at once", lambda r: r.connect_s, "s", ratio_limit=1 / 2),
    Metric("connect, all there at start", lambda r: r.start_s, "s", ratio_limit=1 / 2),
    Metric("event to file, p50", lambda r: r.p50_s, "ms", 1e3, ratio_limit=1 / 3),
    Metric("event to file, p99", lambda r: r.p99_s, "ms", 1e3, ratio_limit=1 / 2),
    Metric(
        *("100 at once, first event to last file", lambda r: r.together_s, "ms", 1e3),
        ratio_limit=1 / 3,
    ),
    Metric("memory a VM over the base (anonymous)", lambda r: r.vm_kib, "KiB", limit=4),
    Metric("memory of the base (PSS)", lambda r: r.base_kib, "MiB", 1 / 1024),
    Metric("CPU when idle (utime + stime)", lambda r: r.idle_ticks, "ticks", limit=0),
    Metric("CPU when idle (scheduler's count)", lambda r: r.idle_share, "%", 100),
)


def tables(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Table]:
    """One a size."""
    for size in sizes:
        here = [one for one in rounds if one.size == size]
        count = max(sum(one.daemon == name for one in here) for name in (BRINE, GANETI))
        title = f"{size:,} VMs, median of {count} round{'s' * (count != 1)}"
        yield Table(title, (BRINE, GANETI), [_row(here, metric, size) for metric in METRICS])


def _row(rounds: Sequence[Round], metric: Metric, size: int) -> Row:
    ours, peers = (median(rounds, name, metric.value, metric.scale) for name in (BRINE, GANETI))
    row = Row.of_pair(metric.title, metric.unit, ours, peers)
    if size == TARGET_SIZE and metric.ratio_limit is not None:
        return row.at_most(metric.ratio_limit)
    if size == TARGET_SIZE and metric.limit is not None:
        return row.within(metric.limit)
    return row


def _run(options: argparse.Namespace) -> bool:
    """Fetch the peer, measure, and print. False if brine-kvmd itself had trouble."""
    _allow_descriptors(options.sizes)
    root = program = ""
    peer = "none"
    if options.only != "brine":
        package = peer_packages.newest(_GANETI_PACKAGE)
        peer = f"{package} {peer_packages.version(package)}"
        tell(f"peer: {peer}")
        program = f"usr/lib/ganeti/{package.rpartition('-')[2]}/usr/sbin/ganeti-kvmd"
        root = str(peer_packages.unpacked(package, program))
    plan = Plan(
        sizes=options.sizes,
        rounds=options.rounds or (1 if options.quick else 3),
        samples=options.samples or (100 if options.quick else 500),
        bursts=3 if options.quick else 5,
        idle_s=options.idle or (5 if options.quick else 10),
        ganeti_root=root,
        ganeti_program=program,
        with_brine=options.only != "ganeti",
    )
    needs = [Path(root)] if root else []
    rounds = measure_in_sandbox("bench.kvmd_load", plan, Round, needs=needs)
    here = machine.describe()
    priority = "real-time" if all(one.real_time for one in rounds) else "normal: do not compare"
    heads = [
        f"{here.system}, Python {here.python}; peer: {peer}",
        f"daemon and generator on a core each, priority {priority}",
    ]
    notes = [
        f"{one.daemon}, {one.size:,} VMs: {text}" for one in rounds if (text := one.complaint())
    ]
    found = list(tables(rounds, options.sizes))
    report(heads, found, options.json, plan=plan, results=rounds, notes=notes)
    return not any(one.complaint() for one in rounds if one.daemon == BRINE)


def _allow_descriptors(sizes: Sequence[int]) -> None:
    """Raise the soft limit to two a VM, which the generator needs: a listener and a connection."""
    needed = 2 * max(sizes) + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        raise LabError(
            f"{max(sizes):,} VMs need {needed:,} open files, and the hard limit is {hard:,}",
            hint="raise it (ulimit -Hn, as root), or give smaller --sizes",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def _parser() -> argparse.ArgumentParser:
    parser = peer_parser(
        "kvmd",
        sizes=(200, 1000, 5000),
        of="VMs",
        smallest=TOGETHER + WARM_UP,
        quick="100 samples, 5 s idle",
    )
    help_ = "VMs ended one by one in a round (500)"
    parser.add_argument("--samples", type=positive, help=help_)
    help_ = "idle time watched (10)"
    parser.add_argument("--idle", type=positive, metavar="SECONDS", help=help_)
    return parser


if __name__ == "__main__":
    run_bench(_parser(), _run)
