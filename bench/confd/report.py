"""From rounds to the tables that a person reads: medians, ratios, targets."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.confd.questions import BAD, KINDS, Kind, Size
from bench.confd.results import Load, Round
from bench.confd.rounds import ONE_WORKER, TWO_WORKERS, WORKERS_KINDS

OURS, PEER, FLOOR = "brine-confd", "ganeti-confd", "echo"
BAD_TARGET_S = 100e-6
P99_TARGET = 1.0
"""At most this part of the peer's."""
SAME_RATE = 0.95
"""A point query's rate at a larger size is the same if it is this part of that at the smallest."""
STEADY = 0.9
"""On a quiet machine the echo's rates lie so close together."""

Value = Callable[[Round], float | None]


@dataclass(frozen=True)
class Row:
    """One line: ours beside another number. None: there is no such number."""

    title: str
    unit: str
    ours: float | None
    other: float | None
    target: str = ""
    reached: bool | None = None

    @property
    def ratio(self) -> float | None:
        """Ours in units of the other."""
        return self.ours / self.other if self.ours is not None and self.other else None


@dataclass(frozen=True)
class Table:
    """Rows under two names."""

    title: str
    ours: str
    other: str
    rows: list[Row]

    def text(self) -> str:
        """For a terminal."""
        lines = [self.title, f"  {'':<42}{self.ours:>16}{self.other:>16}{'ratio':>9}  target"]
        for row in self.rows:
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
            verdict = "" if row.reached is None else ("reached" if row.reached else "MISSED")
            lines.append(
                f"  {row.title:<42}{_show(row.ours, row.unit):>16}{_show(row.other, row.unit):>16}"
                f"{ratio:>9}  {row.target:<16}{verdict}".rstrip()
            )
        return "\n".join(lines)


def tables(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Table]:
    """Everything that was measured."""
    for instances in sizes:
        size = Size(instances)
        here = [result for result in rounds if result.size == instances]
        count = max(sum(result.daemon == name for result in here) for name in (OURS, PEER))
        of = f"{instances:,} instances on {size.nodes:,} nodes, median of {count}"
        yield Table(f"{of}: answers a second", OURS, PEER, list(_rates(here, size)))
        yield Table(f"{of}: time to answer", OURS, PEER, list(_times(here, size)))
        if any(result.first for result in here):
            yield Table(
                f"{of}: answers a second, each asked for the first time",
                OURS,
                PEER,
                list(_first_rates(here)),
            )
        yield Table(f"{of}: the daemon", OURS, PEER, list(_rest(here)))
    if flat := list(_flat(rounds, sizes)):
        yield Table(
            f"point queries, answers a second at {max(sizes):,} beside {min(sizes):,} instances",
            f"{max(sizes):,}",
            f"{min(sizes):,}",
            flat,
        )
    if workers := list(_workers(rounds)):
        yield Table(
            "two workers beside one, sharing all cores with the generator",
            "2 workers",
            "1 worker",
            workers,
        )


def notes(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[str]:
    """What the tables don't say."""
    floors = [load.rate for r in rounds if r.daemon == FLOOR for load in r.warm.values()]
    if floors:
        floor, least = statistics.median(floors), min(floors)
        yield f"the generator asks an echo {floor:,.0f} times a second: no daemon can be faster"
        if least < STEADY * max(floors):
            yield f"the machine was not quiet: that was between {least:,.0f} and {max(floors):,.0f}"
    for instances in sizes:
        for kind in KINDS:
            if not Size(instances).fits(kind):
                what = f"{kind.type.value} {kind.title}"
                yield f"left out at {instances:,} instances, too large for a datagram: {what}"
    for result in rounds:
        where = f"{result.daemon}, {result.size:,} instances"
        if result.trouble:
            yield f"{where}: {result.trouble}"
        for load in result.loads():
            if load.lost:
                yield f"{where}: {load.lost:,} answers never came"
            if load.wrong:
                yield f"{where}: {load.wrong:,} wrong answers in the sample, as: {load.complaint}"


def is_right(result: Round) -> bool:
    """Whether all answers came and those looked at were right."""
    return not result.trouble and not any(load.lost or load.wrong for load in result.loads())


def _rates(rounds: Sequence[Round], size: Size) -> Iterator[Row]:
    for kind in KINDS:
        if not size.fits(kind):
            continue
        ours, peer = _both(rounds, _warm(kind, "rate"))
        target, reached = "", None
        if kind.rate_target is not None:
            target = f">= {kind.rate_target:g} times"
            reached = None if ours is None or not peer else ours / peer >= kind.rate_target
        yield Row(_name(kind), "/s", ours, peer, target, reached)


def _times(rounds: Sequence[Round], size: Size) -> Iterator[Row]:
    for kind in KINDS:
        if not size.fits(kind):
            continue
        ours, peer = _both(rounds, _warm(kind, "p50_s"))
        yield Row(f"{_name(kind)}, p50", "ms", ours, peer)
        ours, peer = _both(rounds, _warm(kind, "p99_s"))
        reached = None if ours is None or not peer else ours / peer <= P99_TARGET
        yield Row(f"{_name(kind)}, p99", "ms", ours, peer, f"<= {P99_TARGET:.2f} of it", reached)


def _first_rates(rounds: Sequence[Round]) -> Iterator[Row]:
    for kind in KINDS:
        if any(kind.title in result.first for result in rounds):
            yield Row(_name(kind), "/s", *_both(rounds, _first(kind)))


def _rest(rounds: Sequence[Round]) -> Iterator[Row]:
    yield Row("from its start to the first answer", "s", *_both(rounds, lambda r: r.start_s))
    yield Row("memory (PSS) before the load", "MiB", *_both(rounds, lambda r: r.start_kib))
    yield Row("memory (PSS) after the load", "MiB", *_both(rounds, lambda r: r.end_kib))
    for name in BAD:
        ours, _ = _both(rounds, _bad(name))
        reached = None if ours is None else ours <= BAD_TARGET_S
        target = f"<= {BAD_TARGET_S * 1e6:g} us"
        yield Row(f"60 kB of {name} from a stranger", "us", ours, None, target, reached)
    replacing = "configuration replaced each second"
    yield Row(f"{replacing}: p99", "ms", *_both(rounds, _replacing("p99_s")))
    yield Row(f"{replacing}: worst", "ms", *_both(rounds, _replacing("worst_s")))
    yield Row(f"{replacing}: answers", "/s", *_both(rounds, _replacing("rate")))
    yield Row("versions of it seen in the sample", "", *_both(rounds, _replacing("serials")))


def _flat(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Row]:
    if len(sizes) < 2:
        return
    for kind in KINDS:
        if kind.is_point:
            large, small = (
                _median(
                    [r for r in rounds if r.size == size],
                    OURS,
                    _warm(kind, "rate"),
                )
                for size in (max(sizes), min(sizes))
            )
            reached = None if large is None or not small else large / small >= SAME_RATE
            yield Row(_name(kind), "/s", large, small, f">= {SAME_RATE:.2f} of it", reached)


def _workers(rounds: Sequence[Round]) -> Iterator[Row]:
    for kind in WORKERS_KINDS:
        two, one = (
            _median(rounds, name, _warm(kind, "rate")) for name in (TWO_WORKERS, ONE_WORKER)
        )
        if one and two:
            yield Row(_name(kind), "/s", two, one, "> 1 times", two > one)


def _name(kind: Kind) -> str:
    return f"{kind.type.value:>2} {kind.title}"


def _warm(kind: Kind, name: str) -> Value:
    return lambda result: _number(result.warm.get(kind.title), name)


def _first(kind: Kind) -> Value:
    return lambda result: _number(result.first.get(kind.title), "rate")


def _bad(name: str) -> Value:
    return lambda result: result.bad_s.get(name)


def _replacing(name: str) -> Value:
    return lambda result: _number(result.replacing, name)


def _number(load: Load | None, name: str) -> float | None:
    return None if load is None else getattr(load, name)


def _both(rounds: Sequence[Round], value: Value) -> tuple[float | None, float | None]:
    return _median(rounds, OURS, value), _median(rounds, PEER, value)


def _median(rounds: Sequence[Round], daemon: str, value: Value) -> float | None:
    found = [value(result) for result in rounds if result.daemon == daemon]
    numbers = [number for number in found if number is not None]
    return statistics.median(numbers) if numbers else None


def _show(value: float | None, unit: str) -> str:
    match unit:
        case _ if value is None:
            return "-"
        case "/s":
            return f"{value:,.0f}"
        case "ms":
            return f"{value * 1e3:,.3f} ms"
        case "us":
            return f"{value * 1e6:,.1f} us"
        case "MiB":
            return f"{value / 1024:,.1f} MiB"
        case "s":
            return f"{value:.2f} s"
    return f"{value:g}"
