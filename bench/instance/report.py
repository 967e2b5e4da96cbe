"""From samples to the tables that a person reads: medians, ratios, targets."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.instance.results import (
    BRINE_LIST,
    BRINE_LIST_JSON,
    PASS,
    PYTHONS,
    READ_SPECS,
    SYSTEMCTL_SHOW,
    UNIT,
    USUAL_IMPORTS,
    VIRSH_LIST,
    Guest,
    Results,
    Start,
    Way,
    series,
)

START_LIMIT = 0.1
LIST_LIMIT_S = 0.5


@dataclass(frozen=True)
class Row:
    """One line.

    :param p95_s: one sample of twenty is above.
    :param ratio: of the medians, to that of the line *beside*.
    """

    title: str
    median_s: float
    p95_s: float
    beside: str = ""
    ratio: float | None = None
    target: str = ""
    reached: bool | None = None

    def text(self) -> str:
        """For a terminal."""
        times = "".join(f"{value * 1e3:>10.1f}" for value in (self.median_s, self.p95_s))
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} of {self.beside}"
        verdict = "" if self.reached is None else ("reached" if self.reached else "MISSED")
        return f"  {self.title:<50}{times}  {ratio:<32}{self.target:<10}{verdict}".rstrip()


@dataclass(frozen=True)
class Table:
    """Rows with a head."""

    title: str
    rows: list[Row]

    def text(self) -> str:
        """For a terminal."""
        head = f"{self.title:<52}{'median':>10}{'p95':>10}  {'ratio':<32}target"
        return "\n".join([head, *(row.text() for row in self.rows)])


def tables(results: Results, instances: int) -> Iterator[Table]:
    """All that was measured."""
    yield Table("what a start can't be less than, ms", list(_floors(results)))
    for guest in Guest:
        yield Table(f"starting a guest, {guest}, ms", list(_starts(results, guest)))
    yield Table(f"listing {instances} instances, ms", list(_lists(results)))


def _floors(results: Results) -> Iterator[Row]:
    qemu = results.starts[series(Guest.PLAIN, Way.QEMU)]
    yield _row("QEMU alone, to its answer on QMP", _answers, qemu)
    for name in (UNIT, PYTHONS):
        yield _row(f"{name}: to the exec", _exec, results.starts[name])
        yield _row("  the command's end", _returned, results.starts[name])


def _starts(results: Results, guest: Guest) -> Iterator[Row]:
    # libvirt's guest has a user of its own, whether ours has one or not.
    peer = Guest.USUAL if guest is Guest.CONFINED else guest
    virsh = results.starts[series(peer, Way.VIRSH)]
    ours = results.starts[series(guest, Way.BRINE)]
    exec_, answers, returned = (
        _row(f"virsh start: {title}", value, virsh)
        for title, value in (
            ("to QEMU's exec", _exec),
            ("to QEMU's answer on QMP", _answers),
            ("the command's end", _returned),
        )
    )
    yield from (exec_, answers, returned)
    own = _row("brine instance start: to QEMU's exec", _exec, ours)
    yield _beside(own, returned, "virsh start", limit=START_LIMIT)
    yield _beside(replace(own, title="  the same"), exec_, "its way to the exec")
    yield _beside(_row("  to QEMU's answer on QMP", _answers, ours), answers, "its way there")
    yield _beside(_row("  the command's end", _returned, ours), returned, "virsh start")
    theirs = _row("virsh start, less QEMU's own", _overhead, virsh)
    yield theirs
    less = _row("brine instance start, less QEMU's own", _overhead, ours)
    yield _beside(less, theirs, "virsh's")


def _lists(results: Results) -> Iterator[Row]:
    for name in (PASS, USUAL_IMPORTS, READ_SPECS):
        title = f"python3 -c '{name}'" if name == USUAL_IMPORTS else name
        yield _of_list(title, results.lists[name])
    yield _of_list(SYSTEMCTL_SHOW, results.lists[SYSTEMCTL_SHOW])
    virsh = _of_list(VIRSH_LIST, results.lists[VIRSH_LIST])
    yield virsh
    for name in (BRINE_LIST, BRINE_LIST_JSON):
        row = _beside(_of_list(name, results.lists[name]), virsh, "virsh list")
        target = f"< {LIST_LIMIT_S * 1e3:g} ms"
        yield replace(row, target=target, reached=row.median_s < LIST_LIMIT_S)


def _row(title: str, value: Callable[[Start], float], starts: Sequence[Start]) -> Row:
    return _of_list(title, [value(start) for start in starts])


def _of_list(title: str, samples: Sequence[float]) -> Row:
    twentieths = statistics.quantiles(samples, n=20, method="inclusive") if samples[1:] else samples
    return Row(title, statistics.median(samples), twentieths[-1])


def _beside(row: Row, other: Row, name: str, *, limit: float | None = None) -> Row:
    ratio = row.median_s / other.median_s
    if limit is None:
        return replace(row, beside=name, ratio=ratio)
    target, reached = f"<= {limit:g}", ratio <= limit
    return replace(row, beside=name, ratio=ratio, target=target, reached=reached)


def _exec(start: Start) -> float:
    return start.exec_s


def _answers(start: Start) -> float:
    assert start.answers_s is not None
    return start.answers_s


def _returned(start: Start) -> float:
    assert start.returned_s is not None
    return start.returned_s


def _overhead(start: Start) -> float:
    """The command without what QEMU itself took until it answered."""
    return _returned(start) - (_answers(start) - start.exec_s)
