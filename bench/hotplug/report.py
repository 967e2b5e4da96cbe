"""From samples to the tables that a person reads: medians, ratios, targets."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench.hotplug.names import (
    PASS,
    TAP_BARE,
    TAP_COMMAND,
    TAP_IP,
    TAP_LIBRARY,
    USUAL,
    VIRSH_VERSION,
    WITHOUT_NETLINK,
)
from bench.hotplug.results import Device, Pair, Results, Way, series

LIBRARY_LIMIT = 1.3
COMMAND_LIMIT = 2.0
START_LIMIT_S = 0.1


@dataclass(frozen=True)
class Row:
    """One line.

    :param p10_s: and *p90_s*: a tenth of the samples are below, and above.
    :param ratio: of the medians, to that of the line *beside*.
    """

    title: str
    median_s: float
    p10_s: float
    p90_s: float
    beside: str = ""
    ratio: float | None = None
    target: str = ""
    reached: bool | None = None

    def text(self) -> str:
        """For a terminal."""
        times = "".join(
            f"{value * 1e3:>10.1f}" for value in (self.median_s, self.p10_s, self.p90_s)
        )
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} of {self.beside}"
        verdict = "" if self.reached is None else ("reached" if self.reached else "MISSED")
        return f"  {self.title:<50}{times}  {ratio:<24}{self.target:<10}{verdict}".rstrip()


@dataclass(frozen=True)
class Table:
    """Rows with a head."""

    title: str
    rows: list[Row]

    def text(self) -> str:
        """For a terminal."""
        head = f"{self.title:<52}{'median':>10}{'p10':>10}{'p90':>10}  {'ratio':<24}target"
        return "\n".join([head, *(row.text() for row in self.rows)])


def tables(results: Results) -> Iterator[Table]:
    """All that was measured."""
    for device in Device:
        yield Table(f"{device}, ms", [*_in_process(results, device), *_commands(results, device)])
    yield Table("commands that need no netlink, ms", list(_starts(results)))
    yield Table("making a tap, on a bridge and up, ms", list(_taps(results)))


def _in_process(results: Results, device: Device) -> Iterator[Row]:
    """The library beside the floor."""
    row = partial(_of_pairs, results, device)
    count = {way: results.orders[series(device, way)] for way in (Way.FEWEST, Way.SAME)}
    yield row(f"the {count[Way.FEWEST]} QMP commands that change something", Way.FEWEST, _both)
    floor = row(f"floor: all {count[Way.SAME]} QMP commands", Way.SAME, _both)
    yield floor
    library = row("library", Way.LIBRARY, _both)
    yield _beside(library, floor, "the floor", limit=LIBRARY_LIMIT)
    library = row("library, without the guest's own time", Way.LIBRARY, _without_guest)
    floors = {"floor": Way.SAME}
    if device is Device.NIC:
        floors["floor and a bare tap"] = Way.SAME_AND_TAP
    for name, way in floors.items():
        floor = row(f"{name}, without the guest's own time", way, _without_guest)
        yield floor
        yield _beside(library, floor, "the floor")


def _commands(results: Results, device: Device) -> Iterator[Row]:
    """Whole commands beside libvirt's."""
    row = partial(_of_pairs, results, device)
    virsh = row("virsh attach-device + detach-device", Way.VIRSH, _both)
    yield virsh
    ours = row(f"brine {device} add + remove", Way.COMMAND, _both)
    yield _beside(ours, virsh, "virsh", limit=COMMAND_LIMIT)
    guest_s = _guest_s(results, device)
    alone = _less(f"  virsh, less the guest's own {guest_s * 1e3:.0f} ms", virsh, guest_s)
    yield alone
    yield _beside(_less(f"  brine {device}, less the same", ours, guest_s), alone, "virsh")
    for verb, peers, value in (("add", "attach", _add), ("remove", "detach", _remove)):
        peer = row(f"  virsh {peers}-device", Way.VIRSH, value)
        yield peer
        yield _beside(row(f"  brine {device} {verb}", Way.COMMAND, value), peer, "virsh")


def _of_pairs(
    results: Results, device: Device, title: str, way: Way, value: Callable[[Pair], float]
) -> Row:
    return _row(title, [value(pair) for pair in results.pairs[series(device, way)]])


def _guest_s(results: Results, device: Device) -> float:
    """What the guest usually takes to let go, where that can be seen."""
    pairs = [pair for way in Way for pair in results.pairs.get(series(device, way), ())]
    return statistics.median(pair.guest_s for pair in pairs if pair.guest_s is not None)


def _starts(results: Results) -> Iterator[Row]:
    python = _row(PASS, results.singles[PASS])
    yield python
    usual = _row(f"python3 -c '{USUAL}'", results.singles[USUAL])
    yield usual
    yield _row(VIRSH_VERSION, results.singles[VIRSH_VERSION])
    for name in WITHOUT_NETLINK:
        row = _row(name, results.singles[name])
        target = f"< {START_LIMIT_S * 1e3:g} ms"
        yield _beside(row, usual, "those imports", target=(target, row.median_s < START_LIMIT_S))


def _taps(results: Results) -> Iterator[Row]:
    bare = _row(TAP_BARE, results.singles[TAP_BARE])
    ip = _row(TAP_IP, results.singles[TAP_IP])
    yield bare
    yield ip
    yield _beside(_row(TAP_LIBRARY, results.singles[TAP_LIBRARY]), ip, "ip")
    command = _row(TAP_COMMAND, results.singles[TAP_COMMAND])
    yield _beside(command, ip, "ip")


def _row(title: str, samples: Sequence[float]) -> Row:
    tenths = statistics.quantiles(samples, n=10, method="inclusive") if samples[1:] else samples
    return Row(title, statistics.median(samples), tenths[0], tenths[-1])


def _less(title: str, row: Row, seconds: float) -> Row:
    return Row(title, row.median_s - seconds, row.p10_s - seconds, row.p90_s - seconds)


def _beside(
    row: Row,
    other: Row,
    name: str,
    *,
    limit: float | None = None,
    target: tuple[str, bool] | None = None,
) -> Row:
    ratio = row.median_s / other.median_s
    if limit is not None:
        target = (f"<= {limit:g}", ratio <= limit)
    text, reached = target or ("", None)
    return Row(row.title, row.median_s, row.p10_s, row.p90_s, name, ratio, text, reached)


def _add(pair: Pair) -> float:
    return pair.add_s


def _remove(pair: Pair) -> float:
    return pair.remove_s


def _both(pair: Pair) -> float:
    return pair.add_s + pair.remove_s


def _without_guest(pair: Pair) -> float:
    return pair.add_s + pair.remove_s - (pair.guest_s or 0.0)
