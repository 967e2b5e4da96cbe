"""brine-confd beside Ganeti's confd."""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import machine
from bench.harness import (
    Row,
    Table,
    measure_in_sandbox,
    median,
    peer_parser,
    report,
    run_bench,
    tell,
)
from lab import ganeti, ganeti_config
from lab.confd_wire import Asks

BRINE, PEER, FLOOR = "brine-confd", "ganeti-confd", "echo"
ONE_WORKER, TWO_WORKERS = "one worker on all cores", "two workers on all cores"
BAD_TARGET_US = 100
P99_TARGET = 1.0
"""At most this part of the peer's."""
SAME_RATE = 0.95
"""A point query's rate at a larger size is the same if it is this part of that at the smallest."""
STEADY = 0.9
"""On a quiet machine the echo's rates lie so close together."""
INSTANCES_A_NODE = 10
LARGEST_DATAGRAM = 61440
"""Ganeti's clients take no larger one."""
_IP_AND_QUOTES = len('\\"10.0.0.1\\",')


@dataclass(frozen=True)
class Kind:
    """A request type, and what brine-confd should reach with it beside the peer."""

    type: Asks
    title: str
    rate_target: float | None
    """At least so many times the peer's rate."""
    is_point: bool = False
    """Asks for one of many: its rate must not depend on how many there are."""
    is_large: bool = False
    """Its answer is long, so brine-confd gives it once a datagram."""


KINDS = (
    Kind(Asks.PING, "ping", 1.5),
    Kind(Asks.NODE_ROLE, "node role", 1.5, is_point=True),
    Kind(Asks.NODE_IP_OF_INSTANCE_IP, "node IP of instance IP", 1.5, is_point=True),
    Kind(Asks.CLUSTER_MASTER, "cluster master", 1.5),
    Kind(Asks.NODE_IPS, "node IPs", 1.5, is_large=True),
    Kind(Asks.MASTER_CANDIDATE_IPS, "master candidate IPs", 1.5, is_large=True),
    Kind(Asks.INSTANCE_IPS, "instance IPs", 10, is_large=True),
    Kind(Asks.NODE_DRBD, "node's DRBD minors", None, is_large=True),
    Kind(Asks.NODE_INSTANCES, "node's instances", 10, is_point=True, is_large=True),
    Kind(Asks.INSTANCE_DISKS, "instance's disks", 10, is_point=True, is_large=True),
    Kind(Asks.CONFIG, "pointer to an instance's name", None),
)
_ASKED_OF_WORKERS = (Asks.NODE_ROLE, Asks.NODE_IP_OF_INSTANCE_IP, Asks.NODE_INSTANCES)
WORKERS_KINDS = tuple(kind for kind in KINDS if kind.type in _ASKED_OF_WORKERS)

_BAD_SIZE = 60_000


def _forged(message: bytes) -> bytes:
    """A datagram of somebody without the key, as large as they come."""
    repeated = message * ((_BAD_SIZE - 100) // len(message))
    return b'plj0{"msg": "%b", "salt": "%d", "hmac": "%b"}' % (repeated, time.time(), b"0" * 40)


BAD = {
    "letters": _forged(b"x"),
    "quotes": _forged(rb"\""),
    "escapes": _forged(rb"\u0041"),
    "JSON": b"plj0" + b"[{}," * (_BAD_SIZE // 4),
}


@dataclass(frozen=True)
class Size:
    """A cluster: so many instances, ten a node."""

    instances: int

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return max(1, self.instances // INSTANCES_A_NODE)

    def fits(self, kind: Kind) -> bool:
        """Whether the answers fit a datagram."""
        count = {Asks.INSTANCE_IPS: self.instances, Asks.NODE_IPS: self.nodes}.get(kind.type, 0)
        return count * _IP_AND_QUOTES < LARGEST_DATAGRAM


def queries_of(kind: Kind, size: Size) -> list[Any]:
    """Every different query of a kind, shuffled, the same way each time."""
    found = list(_queries(kind.type, size))
    random.Random(kind.title).shuffle(found)
    return found


def _queries(type: Asks, size: Size) -> Iterator[Any]:
    match type:
        case Asks.NODE_ROLE | Asks.NODE_DRBD | Asks.NODE_INSTANCES:
            yield from (ganeti_config.node_name(n) for n in range(1, size.nodes + 1))
        case Asks.NODE_IP_OF_INSTANCE_IP:
            yield from ({"1": ganeti_config.instance_ip(n)} for n in _instances(size))
        case Asks.INSTANCE_DISKS:
            yield from (ganeti_config.instance_name(n) for n in _instances(size))
        case Asks.CONFIG:
            for number in _instances(size):
                yield f"/instances/{ganeti_config.uuid_of('instance', number)}/name"
        case _:
            yield None


def _instances(size: Size) -> range:
    return range(1, size.instances + 1)


@dataclass(frozen=True)
class Plan:
    """What to measure, how much; `ganeti` has the fields of lab.ganeti.Confd, or is empty."""

    sizes: list[int]
    rounds: int
    seconds: float
    warm_up_s: float
    replacements: int
    ganeti: dict[str, str]
    with_brine: bool


@dataclass
class Load:
    """One kind of question, asked for a while; times in seconds. None: too few answers came."""

    rate: float
    p50_s: float | None
    p99_s: float | None
    worst_s: float | None
    answers: int
    lost: int
    wrong: int = 0
    """Replies in the sample that were not the right answer, or not authentic."""
    complaint: str = ""
    """The first of those, shortened."""
    serials: int = 0
    """How many different serial numbers the sample has."""


@dataclass
class Round:
    """One daemon at one size, once. `trouble` says why what is missing is missing."""

    daemon: str
    size: int
    favoured: bool = False
    start_s: float | None = None
    start_kib: int | None = None
    end_kib: int | None = None
    warm: dict[str, Load] = field(default_factory=dict)
    """By the kind's title, as are the others."""
    first: dict[str, Load] = field(default_factory=dict)
    """Each query asked at most once, of a daemon that was just started."""
    bad_s: dict[str, float] = field(default_factory=dict)
    """The processor time that a large datagram of somebody without the key costs, by its kind."""
    replacing: Load | None = None
    """While the configuration is replaced again and again."""
    trouble: str = ""

    def loads(self) -> list[Load]:
        """All of them."""
        replacing = [self.replacing] if self.replacing else []
        return [*self.warm.values(), *self.first.values(), *replacing]

    def is_right(self) -> bool:
        """Whether all answers came and those looked at were right."""
        return not self.trouble and not any(load.lost or load.wrong for load in self.loads())


Value = Callable[[Round], float | None]


def tables(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Table]:
    """Everything that was measured."""
    both = (BRINE, PEER)
    for instances in sizes:
        size = Size(instances)
        here = [result for result in rounds if result.size == instances]
        count = max(sum(result.daemon == name for result in here) for name in both)
        of = f"{instances:,} instances on {size.nodes:,} nodes, median of {count}"
        yield Table(f"{of}: answers a second", both, list(_rates(here, size)))
        yield Table(f"{of}: time to answer", both, list(_times(here, size)))
        if any(result.first for result in here):
            title = f"{of}: answers a second, each asked for the first time"
            yield Table(title, both, list(_first_rates(here)))
        yield Table(f"{of}: the daemon", both, list(_rest(here)))
    if flat := list(_flat(rounds, sizes)):
        yield Table(
            f"point queries, answers a second at {max(sizes):,} beside {min(sizes):,} instances",
            (f"{max(sizes):,}", f"{min(sizes):,}"),
            flat,
        )
    if workers := list(_workers(rounds)):
        yield Table(
            "two workers beside one, sharing all cores with the generator",
            ("2 workers", "1 worker"),
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


def _rates(rounds: Sequence[Round], size: Size) -> Iterator[Row]:
    for kind in filter(size.fits, KINDS):
        row = _row(rounds, _name(kind), "/s", _warm(kind, "rate"))
        yield row if kind.rate_target is None else row.at_least(kind.rate_target)


def _times(rounds: Sequence[Round], size: Size) -> Iterator[Row]:
    for kind in filter(size.fits, KINDS):
        yield _row(rounds, f"{_name(kind)}, p50", "ms", _warm(kind, "p50_s"), 1e3)
        row = _row(rounds, f"{_name(kind)}, p99", "ms", _warm(kind, "p99_s"), 1e3)
        yield row.at_most(P99_TARGET)


def _first_rates(rounds: Sequence[Round]) -> Iterator[Row]:
    for kind in KINDS:
        if any(kind.title in result.first for result in rounds):
            yield _row(rounds, _name(kind), "/s", _first(kind))


def _rest(rounds: Sequence[Round]) -> Iterator[Row]:
    yield _row(rounds, "from its start to the first answer", "s", lambda r: r.start_s)
    yield _row(rounds, "memory (PSS) before the load", "MiB", lambda r: r.start_kib, 1 / 1024)
    yield _row(rounds, "memory (PSS) after the load", "MiB", lambda r: r.end_kib, 1 / 1024)
    for name in BAD:
        cost = _row(rounds, f"60 kB of {name} from a stranger", "us", _bad(name), 1e6)
        yield cost.within(BAD_TARGET_US)
    replacing = "configuration replaced each second"
    yield _row(rounds, f"{replacing}: p99", "ms", _replacing("p99_s"), 1e3)
    yield _row(rounds, f"{replacing}: worst", "ms", _replacing("worst_s"), 1e3)
    yield _row(rounds, f"{replacing}: answers", "/s", _replacing("rate"))
    yield _row(rounds, "versions of it seen in the sample", "", _replacing("serials"))


def _flat(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Row]:
    if len(sizes) < 2:
        return
    for kind in KINDS:
        if kind.is_point:
            large, small = (
                median([r for r in rounds if r.size == size], BRINE, _warm(kind, "rate"))
                for size in (max(sizes), min(sizes))
            )
            yield Row.of_pair(_name(kind), "/s", large, small).at_least(SAME_RATE)


def _workers(rounds: Sequence[Round]) -> Iterator[Row]:
    for kind in WORKERS_KINDS:
        two, one = (median(rounds, name, _warm(kind, "rate")) for name in (TWO_WORKERS, ONE_WORKER))
        if one and two:
            yield Row.of_pair(_name(kind), "/s", two, one).at_least(1)


def _row(rounds: Sequence[Round], title: str, unit: str, value: Value, scale: float = 1) -> Row:
    ours, peers = (median(rounds, name, value, scale) for name in (BRINE, PEER))
    return Row.of_pair(title, unit, ours, peers)


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


def _run(options: argparse.Namespace) -> bool:
    """Fetch the peer, measure, and print. False if brine-confd itself had trouble."""
    peer = None
    if options.only != "brine":
        peer = ganeti.confd()
        tell(f"peer: {peer.package} {peer.version}")
    plan = Plan(
        sizes=options.sizes,
        rounds=options.rounds or (1 if options.quick else 3),
        seconds=options.seconds or (0.5 if options.quick else 1.0),
        warm_up_s=0.3,
        replacements=3 if options.quick else 5,
        ganeti={key: str(value) for key, value in asdict(peer).items()} if peer else {},
        with_brine=options.only != "ganeti",
    )
    needs = [peer.root] if peer else []
    rounds = measure_in_sandbox("bench.confd_load", plan, Round, needs=needs)
    here = machine.describe()
    which = f"{peer.package} {peer.version}" if peer else "none"
    priority = "high" if all(result.favoured for result in rounds) else "normal: do not compare"
    heads = [
        f"{here.system}, Python {here.python}; peer: {which}",
        f"daemon and generator on a core each, priority {priority}",
    ]
    found = list(tables(rounds, plan.sizes))
    more = notes(rounds, plan.sizes)
    report(heads, found, options.json, plan=plan, results=rounds, notes=more)
    return all(result.is_right() for result in rounds if result.daemon != PEER)


def _parser() -> argparse.ArgumentParser:
    parser = peer_parser(
        "confd",
        sizes=(200, 20_000),
        of="instances",
        smallest=INSTANCES_A_NODE,
        quick="0.5 s each",
    )
    help_ = "how long each request type is asked in a round (1)"
    parser.add_argument("--seconds", type=float, help=help_)
    return parser


if __name__ == "__main__":
    run_bench(_parser(), _run)
