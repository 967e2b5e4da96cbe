"""brine-confd beside Ganeti's confd.

The load is many clients, each of which asks its next question when its last was answered.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import machine
from bench.daemon import (
    Daemon,
    PeerPlan,
    PeerRound,
    Running,
    measured,
    median,
    ours,
    peer_parser,
    plan_of,
    row_of,
    running,
)
from bench.harness import Row, Table, report, tell
from lab import confd_wire, ganeti, ganeti_config, sandbox
from lab.confd_answers import RightAnswers, normal
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
    rate_target: float | None  # at least so many times the peer's rate
    is_point: bool = False  # asks for one of many: their number must not change its rate
    is_large: bool = False  # its answer is long, so brine-confd gives it once a datagram


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
    nodes, instances = range(1, size.nodes + 1), range(1, size.instances + 1)
    found: list[Any] = [None]
    match kind.type:
        case Asks.NODE_ROLE | Asks.NODE_DRBD | Asks.NODE_INSTANCES:
            found = [ganeti_config.node_name(n) for n in nodes]
        case Asks.NODE_IP_OF_INSTANCE_IP:
            found = [{"1": ganeti_config.instance_ip(n)} for n in instances]
        case Asks.INSTANCE_DISKS:
            found = [ganeti_config.instance_name(n) for n in instances]
        case Asks.CONFIG:
            uuids = (ganeti_config.uuid_of("instance", n) for n in instances)
            found = [f"/instances/{uuid}/name" for uuid in uuids]
    random.Random(kind.title).shuffle(found)
    return found


@dataclass(frozen=True, kw_only=True)
class Plan(PeerPlan):
    """How long each type is asked, and how often the configuration is replaced."""

    seconds: float
    warm_up_s: float
    replacements: int


@dataclass
class Load:
    """One kind of question, asked for a while; times in seconds. None: too few answers came."""

    rate: float
    p50_s: float | None
    p99_s: float | None
    worst_s: float | None
    answers: int
    lost: int
    wrong: int = 0  # replies in the sample that were not the right answer, or not authentic
    complaint: str = ""  # the first of those, shortened
    serials: int = 0  # different ones in the sample


@dataclass
class Round(PeerRound):
    """One daemon at one size, once."""

    start_s: float | None = None
    start_kib: int | None = None
    end_kib: int | None = None
    # By the kind's title; then each query asked at most once, of a daemon that was just started.
    warm: dict[str, Load] = field(default_factory=dict)
    first: dict[str, Load] = field(default_factory=dict)
    # The processor time that a large datagram of somebody without the key costs, by its kind.
    bad_s: dict[str, float] = field(default_factory=dict)
    # While the configuration is replaced again and again.
    replacing: Load | None = None

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
        if first := list(_first_rates(here)):
            title = f"{of}: answers a second, each asked for the first time"
            yield Table(title, both, first)
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
        row = _row(rounds, _name(kind), "/s", _of_load("rate", kind))
        yield row if kind.rate_target is None else row.at_least(kind.rate_target)


def _times(rounds: Sequence[Round], size: Size) -> Iterator[Row]:
    for kind in filter(size.fits, KINDS):
        yield _row(rounds, f"{_name(kind)}, p50", "ms", _of_load("p50_s", kind), 1e3)
        row = _row(rounds, f"{_name(kind)}, p99", "ms", _of_load("p99_s", kind), 1e3)
        yield row.at_most(P99_TARGET)


def _first_rates(rounds: Sequence[Round]) -> Iterator[Row]:
    for kind in KINDS:
        if any(kind.title in result.first for result in rounds):
            yield _row(rounds, _name(kind), "/s", _of_load("rate", kind, "first"))


def _rest(rounds: Sequence[Round]) -> Iterator[Row]:
    yield _row(rounds, "from its start to the first answer", "s", lambda r: r.start_s)
    yield _row(rounds, "memory (PSS) before the load", "MiB", lambda r: r.start_kib, 1 / 1024)
    yield _row(rounds, "memory (PSS) after the load", "MiB", lambda r: r.end_kib, 1 / 1024)
    for name in BAD:
        title = f"60 kB of {name} from a stranger"
        cost = _row(rounds, title, "us", lambda r, name=name: r.bad_s.get(name), 1e6)  # type: ignore[misc]
        yield cost.within(BAD_TARGET_US)
    replacing = "configuration replaced each second"
    yield _row(rounds, f"{replacing}: p99", "ms", _of_load("p99_s"), 1e3)
    yield _row(rounds, f"{replacing}: worst", "ms", _of_load("worst_s"), 1e3)
    yield _row(rounds, f"{replacing}: answers", "/s", _of_load("rate"))
    yield _row(rounds, "versions of it seen in the sample", "", _of_load("serials"))


def _flat(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Row]:
    for kind in KINDS if len(sizes) > 1 else ():
        if kind.is_point:
            large, small = (
                median([r for r in rounds if r.size == size], BRINE, _of_load("rate", kind))
                for size in (max(sizes), min(sizes))
            )
            yield Row.of_pair(_name(kind), "/s", large, small).at_least(SAME_RATE)


def _workers(rounds: Sequence[Round]) -> Iterator[Row]:
    for kind in WORKERS_KINDS:
        value = _of_load("rate", kind)
        two, one = (median(rounds, name, value) for name in (TWO_WORKERS, ONE_WORKER))
        if one and two:
            yield Row.of_pair(_name(kind), "/s", two, one).at_least(1)


def _row(rounds: Sequence[Round], title: str, unit: str, value: Value, scale: float = 1) -> Row:
    return row_of(rounds, "confd", title, unit, value, scale)


def _name(kind: Kind) -> str:
    return f"{kind.type.value:>2} {kind.title}"


def _of_load(name: str, kind: Kind | None = None, when: str = "warm") -> Value:
    """A number of a load: of a kind, or of that while the configuration is replaced."""

    def value(result: Round) -> float | None:
        load = getattr(result, when).get(kind.title) if kind else result.replacing
        return getattr(load, name) if load else None

    return value


def run(options: argparse.Namespace) -> bool:
    """Measure and print. False if brine-confd itself had trouble."""
    plan = Plan(
        **plan_of(options, "confd"),
        seconds=options.seconds or (0.5 if options.quick else 1.0),
        warm_up_s=0.3,
        replacements=3 if options.quick else 5,
    )
    rounds, heads = measured("confd", plan, "high")
    found = list(tables(rounds, plan.sizes))
    more = notes(rounds, plan.sizes)
    report(heads, found, options.json, plan=plan, results=rounds, notes=more)
    return all(result.is_right() for result in rounds if result.daemon != PEER)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = peer_parser(
        "confd",
        sizes=(200, 20_000),
        of="instances",
        smallest=INSTANCES_A_NODE,
        quick="0.5 s each",
    )
    help_ = "how long each request type is asked in a round (1)"
    found.add_argument("--seconds", type=float, help=help_)
    return found


# ---- the measuring process: what is asked, and of whom

PORT = 1814
KEY = b"the benchmark's key\n"
CONFIG = ganeti.STATE / "config.data"
"""Both daemons have the same file."""
CLIENTS = 32
CLIENTS_OF_WORKERS = 128
"""More, since the kernel does not share few evenly: by their address, it is left to chance."""
MANY_BAD = 2000
MANY = 1000
"""So many different queries make a rate of first questions."""
START_PATIENCE_S = 60.0
REPLACED_EVERY_S = 1.0
MANY_REQUESTS = 20_000
"""Signed before the first is sent, each with a salt of its own."""
FRESH_REQUESTS = 100_000
"""Of those that get an answer but once: more than can be answered in the time."""
PATIENCE_S = 10.0
"""So long none of the clients may hear anything; then what they asked counts as lost."""

_ASK_AGAIN_S = 5.0
_LOOK_AGAIN_S = 0.005
_LONGEST_COMPLAINT = 200
_SERIAL = 1234567
"""Of the configuration, before it is replaced: found in its text nowhere else."""
_SAMPLE_EVERY_S = 0.01
_HIGHEST_DESCRIPTOR = 1024
_LONGEST_DATAGRAM = 65536
# Sends every datagram back to where it came from.
_ECHO = f"""
import socket
buffer = memoryview(bytearray({_LONGEST_DATAGRAM}))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("127.0.0.1", {PORT}))
    while True:
        size, source = server.recvfrom_into(buffer)
        server.sendto(buffer[:size], source)
"""


def brine(*, workers: int = 1) -> Daemon:
    """brine-confd."""
    settings = (
        f'bind = "127.0.0.1"\nport = {PORT}\nworkers = {workers}\n'
        f'config_file = "{CONFIG}"\nkey_file = "{ganeti.STATE}/hmac.key"\n'
        "reveal_secrets = true\n"  # as the peer does
    )
    return ours("confd", settings, "common", "config", "confd")


def peer(confd: ganeti.Unpacked) -> Daemon:
    """Ganeti's confd from an unpacked package."""
    command, log = confd.confd_command(PORT), Path("/var/log/bench/ganeti-confd.log")
    return Daemon(name=PEER, command=command, log=log, env=confd.environment())


def echo() -> Daemon:
    """What sends back each datagram as it came: the floor under what the generator can do."""
    command = [sys.executable, "-I", "-c", _ECHO]
    return Daemon(name=FLOOR, command=command, log=Path("/var/log/bench/echo.log"))


@dataclass(frozen=True)
class Orders:
    """What to ask, how, and how long.

    A client is a socket of its own with one request outstanding. With `once`, each query is asked
    at most once, and without any warming up. With `fresh`, no datagram is sent twice. `renames` are
    pairs of paths: the first is renamed to the second, one pair after each `REPLACED_EVERY_S`.
    """

    type: int
    queries: list[Any]
    seconds: float
    warm_up_s: float
    clients: int = CLIENTS
    once: bool = False
    fresh: bool = False
    renames: list[tuple[str, str]] = field(default_factory=list)


Sample = list[tuple[int, bytes]]
"""The numbers of some requests, and their replies, which are to be verified.

Request N asked query N modulo their count, and its reply's salt must be `salt(N)`.
"""


# ---- the measuring process: the load


def salt(number: int) -> str:
    """The reply salt of the request of that number."""
    return f"{number:08d}-7c1f-4b1e-bench"


class Clients:
    """The sockets, and what there is to ask."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        queries = orders.queries
        self._requests = [
            confd_wire.request(KEY, orders.type, queries[number % len(queries)], salt(number))
            for number in range(_count(orders))
        ]
        self._next = 0
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        for _ in range(min(orders.clients, len(self._requests))):
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            client.connect(("127.0.0.1", PORT))
            self._sockets[client.fileno()] = client
            self._poll.register(client, select.EPOLLIN)

    def ask(self, seconds: float) -> tuple[Load, Sample]:
        """Ask for so long, or once all there is; then wait for what is outstanding.

        The daemon is busy until the last answer, so those that come after the time count as well.
        """
        requests, poll = self._requests, self._poll.poll
        total, clock, batch = len(requests), time.perf_counter, len(self._sockets)
        first = self._next if self._orders.fresh else 0
        stop_after = total if self._orders.once or self._orders.fresh else sys.maxsize
        # By descriptor, in lists: the loop must cost much less than what it measures.
        calls: list[tuple[Callable[[int], bytes], Callable[[bytes], int]] | None]
        calls = [None] * _HIGHEST_DESCRIPTOR
        asked_at, asked = [0.0] * _HIGHEST_DESCRIPTOR, [0] * _HIGHEST_DESCRIPTOR
        sample: list[tuple[int, bytes]] = []
        latencies: list[float] = []
        note = latencies.append
        renames = list(reversed(self._orders.renames))

        began_at = now = clock()
        stop_at, rename_at = began_at + seconds, began_at + REPLACED_EVERY_S
        sample_at = began_at
        for sent, (descriptor, client) in enumerate(self._sockets.items(), first):
            calls[descriptor] = client.recv, client.send
            asked_at[descriptor], asked[descriptor] = clock(), sent
            client.send(requests[sent])
        sent, outstanding = first + batch, batch
        while outstanding and (ready := poll(PATIENCE_S, batch)):
            for descriptor, _ in ready:
                receive, send = calls[descriptor]  # type: ignore[misc]
                reply = receive(_LONGEST_DATAGRAM)
                now = clock()
                note(now - asked_at[descriptor])
                if now >= sample_at:
                    sample.append((asked[descriptor], reply))
                    sample_at = now + _SAMPLE_EVERY_S
                if now > stop_at or sent >= stop_after:
                    outstanding -= 1
                    continue
                asked_at[descriptor], asked[descriptor] = now, sent % total
                send(requests[sent % total])
                sent += 1
            if renames and now >= rename_at:
                os.rename(*renames.pop())
                rename_at = now + REPLACED_EVERY_S
        self._next = sent
        return _summary(latencies, now - began_at, outstanding, sample)


def _count(orders: Orders) -> int:
    if orders.once:
        return len(orders.queries)
    return FRESH_REQUESTS if orders.fresh else MANY_REQUESTS


def _summary(
    latencies: list[float], elapsed_s: float, lost: int, sample: list[tuple[int, bytes]]
) -> tuple[Load, Sample]:
    percentiles: list[float] | list[None] = [None] * 99
    if len(latencies) > 1:
        percentiles = statistics.quantiles(latencies, n=100, method="inclusive")
    load = Load(
        rate=len(latencies) / elapsed_s if latencies else 0.0,
        p50_s=percentiles[49],
        p99_s=percentiles[98],
        worst_s=max(latencies, default=None),
        answers=len(latencies),
        lost=lost,
    )
    return load, sample


def _generate(orders: Orders) -> tuple[Load, Sample]:
    """Ask what is ordered."""
    gc.disable()
    clients = Clients(orders)
    if orders.warm_up_s:
        clients.ask(orders.warm_up_s)
    return clients.ask(orders.seconds)


class Bench:
    """Both daemons' cluster at one size."""

    def __init__(self, size: Size, plan: Plan, cores: tuple[int, int]) -> None:
        self.size, self._plan = size, plan
        self._core, self._generators_core = cores
        config = ganeti_config.ganeti_config(
            nodes=size.nodes, instances=size.instances, serial=_SERIAL
        )
        config["cluster"]["serial_no"] = _SERIAL
        self._text = json.dumps(config)
        self._right = RightAnswers(config)
        self._all_cores = os.sched_getaffinity(0)

    def measure(self, daemon: Daemon) -> Round:
        """Run a daemon through all that is asked, on its core."""

        def measure(result: Round, started: Running) -> None:
            for kind in KINDS:
                if len(queries_of(kind, self.size)) >= MANY:
                    result.first[kind.title] = self._load(kind, once=True)
            result.start_kib = started.pss_kib()
            for kind in KINDS:
                if self.size.fits(kind):
                    result.warm[kind.title] = self._load(kind)
            result.end_kib = started.pss_kib()
            if daemon.name == BRINE:
                result.bad_s = {name: _cost(started, bad) for name, bad in BAD.items()}
            result.replacing = self._replace_under_load()

        return self._round(daemon, {self._core}, measure)

    def measure_floor(self) -> Round:
        """Run what sends everything back."""

        def measure(result: Round, _started: Running) -> None:
            result.warm[KINDS[0].title] = self._load(KINDS[0], versions=0)

        return self._round(echo(), {self._core}, measure)

    def measure_workers(self, count: int) -> Round:
        """Run brine-confd with some workers, and the load, on all cores."""

        def measure(result: Round, started: Running) -> None:
            for kind in WORKERS_KINDS:
                result.warm[kind.title] = self._load(
                    kind, cores=self._all_cores, clients=CLIENTS_OF_WORKERS
                )
            result.end_kib = started.pss_kib()

        name = ONE_WORKER if count == 1 else TWO_WORKERS
        return self._round(replace(brine(workers=count), name=name), self._all_cores, measure)

    def _round(
        self,
        daemon: Daemon,
        cores: Collection[int],
        measure: Callable[[Round, Running], None],
    ) -> Round:
        _prepare(self._text)
        result = Round(daemon.name, self.size.instances)
        with running(daemon, machine.favoured(cores), self._generators_core) as started:
            result.favoured = started.ahead
            if _begins_to_answer(started):
                result.start_s = time.monotonic() - started.started_at
                measure(result, started)
            else:
                result.trouble = f"gave no answer in {START_PATIENCE_S:g} s"
            result.trouble = started.end(result.trouble)
        return result

    def _replace_under_load(self) -> Load:
        kind = next(kind for kind in KINDS if kind.type == Asks.NODE_IP_OF_INSTANCE_IP)
        renames = []
        for number in range(1, self._plan.replacements + 1):
            # As a replacement is: written beside it, and complete before it takes its place.
            file = CONFIG.with_name(f"config.{number}")
            text = self._text.replace(str(_SERIAL), str(_SERIAL + number))
            file.write_text(text, encoding="utf-8")
            renames.append((str(file), str(CONFIG)))
        seconds = REPLACED_EVERY_S * (self._plan.replacements + 1)
        return self._load(kind, versions=len(renames) + 1, seconds=seconds, renames=renames)

    def _load(
        self,
        kind: Kind,
        *,
        once: bool = False,
        cores: Collection[int] = (),
        versions: int = 1,
        **more: Any,
    ) -> Load:
        """Have the generator ask, and look at a sample of the answers.

        :param versions: of the configuration, any of which may have answered; 0: don't look.
        """
        usual = {"seconds": self._plan.seconds, **more}
        warm_up_s = 0.0 if once else self._plan.warm_up_s
        fresh = kind.is_large and not once
        queries = queries_of(kind, self.size)
        orders = Orders(kind.type, queries, warm_up_s=warm_up_s, once=once, fresh=fresh, **usual)
        # In a process of its own, which is made here.
        context = multiprocessing.get_context("fork")
        with (
            machine.favoured(cores or {self._generators_core}),
            ProcessPoolExecutor(1, mp_context=context) as generator,
        ):
            load, sample = generator.submit(_generate, orders).result()
        wrong: list[str] = []
        serials = set()
        for number, reply in sample if versions else ():
            query = queries[number % len(queries)]
            try:
                heard = confd_wire.opened(KEY, reply)
            except (ValueError, KeyError, confd_wire.ForgedError) as error:
                wrong.append(f"{query}: {error}")
                continue
            serials.add(heard.serial)
            if heard.salt != salt(number) or not self._is_right(heard, kind.type, query, versions):
                wrong.append(f"{query}: {heard}")
        complaint = wrong[0][:_LONGEST_COMPLAINT] if wrong else ""
        return replace(load, wrong=len(wrong), complaint=complaint, serials=len(serials))

    def _is_right(self, heard: confd_wire.Heard, type: Asks, query: Any, versions: int) -> bool:
        serials = {self._right.serial(type), self._right.ganetis_serial(type, query)}
        if type != Asks.PING:
            serials |= {_SERIAL + later for later in range(versions)}
        is_right = normal(type, heard.answer) == self._right.answer(type, query)
        return is_right and heard.status == 0 and heard.serial in serials


def _cost(started: Running, bad: bytes) -> float:
    """The processor time that the daemon spends on such a datagram, and on receiving it.

    A ping after each says that it is done with; what that costs is taken off.
    """
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", PORT))
        client.settimeout(_ASK_AGAIN_S)
        ping = confd_wire.request(KEY, Asks.PING, None, "ping")
        for datagrams in ((ping,), (bad, ping)):
            before_s = started.cpu_s()
            for _ in range(MANY_BAD):
                for datagram in datagrams:
                    client.send(datagram)
                client.recv(_LONGEST_DATAGRAM)
            times.append(started.cpu_s() - before_s)
    return (times[1] - times[0]) / MANY_BAD


def _begins_to_answer(started: Running) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", PORT))
        # A daemon may take requests before it can answer, and should not find many when it can.
        client.settimeout(_ASK_AGAIN_S)
        give_up_at = started.started_at + START_PATIENCE_S
        while time.monotonic() < give_up_at and started.exit_status() is None:
            with contextlib.suppress(TimeoutError, ConnectionRefusedError):
                client.send(confd_wire.request(KEY, Asks.NODE_IPS, None, "start"))
                message = json.loads(json.loads(client.recv(_LONGEST_DATAGRAM)[4:])["msg"])
                # What echoes gives back a request, which has no status.
                if message.get("status", 0) == 0:
                    return True
            time.sleep(_LOOK_AGAIN_S)
    return False


def _prepare(config: str) -> None:
    """Put in place what the daemons read."""
    for folder in (ganeti.STATE, Path("/run/ganeti"), Path("/var/log/ganeti")):
        folder.mkdir(parents=True, exist_ok=True)
    ganeti.write_state(ganeti.STATE, config, KEY)


def measure(plan: Plan) -> list[Round]:
    """All rounds."""
    machine.lead_own_group()
    sandbox.hide_state({})
    sandbox.raise_loopback()
    chosen = [brine()] if plan.with_brine else []
    if plan.peer:
        chosen.append(peer(plan.peer))
    cores = machine.share_cores()
    benches = [Bench(Size(instances), plan, cores) for instances in plan.sizes]
    rounds: list[Round] = []

    def note(result: Round) -> None:
        rounds.append(result)
        if result.trouble:
            tell(f"{result.daemon}: {result.trouble}")

    for number in range(plan.rounds):
        # Who goes first changes, so that a machine that warms up favours nobody; and a machine
        # that others disturb for a while does so at every size.
        order = 1 if number % 2 == 0 else -1
        for bench in benches[::order]:
            where = f"{bench.size.instances:,} instances, round {number + 1} of {plan.rounds}"
            note(bench.measure_floor())
            for daemon in chosen[::order]:
                tell(f"{where}: {daemon.name}")
                note(bench.measure(daemon))
            if bench is benches[0] and plan.with_brine:
                for workers in (1, 2)[::order]:
                    tell(f"{where}: {workers} on all cores")
                    note(bench.measure_workers(workers))
    return rounds
