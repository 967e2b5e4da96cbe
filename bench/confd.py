"""brine-confd beside Ganeti's confd.

The load is many clients, each of which asks its next question when its last was answered.
"""

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
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from bench.daemon import MeasuredDaemon, MeasuredProcess, heads, ours, rounds_of, running
from bench.harness import Plan, Report, Round, Table, TableRow, median, percentiles
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
MANY = 1000
"""So many different queries make a rate of first questions."""
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

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.type.value:>2} {self.title}"


PING = Kind(Asks.PING, "ping", 1.5)
NODE_IP = Kind(Asks.NODE_IP_OF_INSTANCE_IP, "node IP of instance IP", 1.5, is_point=True)
KINDS = (
    PING,
    Kind(Asks.NODE_ROLE, "node role", 1.5, is_point=True),
    NODE_IP,
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
    """The largest datagram that a sender without the key can make."""
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


def is_many(kind: Kind, size: Size) -> bool:
    """Whether there are so many different queries of a kind that they make a rate."""
    return len(queries_of(kind, size)) >= MANY


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


# ---- the tables

FIRST = "first: "
REPLACING = "configuration replaced each second: "
STARTING = "from its start to the first answer"
MEMORY_BEFORE, MEMORY_AFTER = "memory (PSS) before the load", "memory (PSS) after the load"


def tables(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Table]:
    """Everything that was measured."""
    both = (BRINE, PEER)
    for instances in sizes:
        size = Size(instances)
        here = [one for one in rounds if one.size == instances]
        row = partial(TableRow.of_rounds, rounds=here, contenders=both)
        rates, times, firsts = [], [], []
        for kind in filter(size.fits, KINDS):
            rate = row(kind.name, "/s", what=f"{kind.name} rate")
            rates.append(rate.at_least(kind.rate_target) if kind.rate_target else rate)
            times.append(row(f"{kind.name}, p50", "ms", what=f"{kind.name} p50"))
            p99 = row(f"{kind.name}, p99", "ms", what=f"{kind.name} p99")
            times.append(p99.at_most(P99_TARGET))
            if is_many(kind, size):
                firsts.append(row(kind.name, "/s", what=f"{FIRST}{kind.name} rate"))
        rest = [row(STARTING, "s", what=STARTING)]
        rest += [row(what, "MiB", what=what) for what in (MEMORY_BEFORE, MEMORY_AFTER)]
        for name in BAD:
            title = f"60 kB of {name} from a stranger"
            rest.append(row(title, "us", what=name).within(BAD_TARGET_US))
        for what in ("p99", "worst"):
            rest.append(row(f"{REPLACING}{what}", "ms", what=f"{REPLACING}{NODE_IP.name} {what}"))
        of = f"{instances:,} instances on {size.nodes:,} nodes, medians"
        yield Table(f"{of}: answers a second", rates, both)
        yield Table(f"{of}: time to answer", times, both)
        if firsts:
            yield Table(f"{of}: answers a second, each asked for the first time", firsts, both)
        yield Table(f"{of}: the daemon", rest, both)
    if len(sizes) > 1:
        yield _point_queries(rounds, max(sizes), min(sizes))
    yield _workers(rounds)


def _point_queries(rounds: Sequence[Round], most: int, fewest: int) -> Table:
    names = f"{most:,}", f"{fewest:,}"
    rows = []
    for kind in KINDS:
        if kind.is_point:
            values = {}
            for name, size in zip(names, (most, fewest), strict=True):
                here = [one for one in rounds if one.size == size]
                values[name] = median(here, BRINE, f"{kind.name} rate")
            rows.append(TableRow.of_values(kind.name, "/s", values).at_least(SAME_RATE))
    return Table(f"point queries, answers a second at {names[0]} and {names[1]}", rows, names)


def _workers(rounds: Sequence[Round]) -> Table:
    both = (TWO_WORKERS, ONE_WORKER)
    rows = [
        TableRow.of_rounds(kind.name, "/s", rounds, both, f"{kind.name} rate").at_least(1)
        for kind in WORKERS_KINDS
    ]
    return Table("two workers beside one, sharing all cores with the generator", rows, both)


def notes(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[str]:
    """The facts that the tables leave out."""
    pinged = f"{PING.name} rate"
    if floors := [one.numbers[pinged] for one in rounds if one.contender == FLOOR and one.numbers]:
        floor, least = statistics.median(floors), min(floors)
        yield f"the generator asks an echo {floor:,.0f} times a second: no daemon can be faster"
        if least < STEADY * max(floors):
            yield f"the machine was not quiet: that was between {least:,.0f} and {max(floors):,.0f}"
    for instances in sizes:
        for kind in KINDS:
            if not Size(instances).fits(kind):
                yield f"left out at {instances:,}, too large for a datagram: {kind.name}"


# ---- the queries, and the peers

PORT = 1814
KEY = b"the benchmark's key\n"
CONFIG = ganeti.STATE / "config.data"
"""Both daemons have the same file."""
CLIENTS = 32
WARM_UP_S = 0.3
CLIENTS_OF_WORKERS = 128
"""More, since the kernel does not share few evenly: by their address, it is left to chance."""
START_PATIENCE_S = 60.0
REPLACED_EVERY_S = 1.0
MANY_REQUESTS = 20_000
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


def brine(*, workers: int = 1) -> MeasuredDaemon:
    """brine-confd."""
    settings = (
        f'bind = "127.0.0.1"\nport = {PORT}\nworkers = {workers}\n'
        f'config_file = "{CONFIG}"\nkey_file = "{ganeti.STATE}/hmac.key"\n'
        "reveal_secrets = true\n"  # as the peer does
    )
    return ours("confd", settings)


def peer(confd: ganeti.Unpacked) -> MeasuredDaemon:
    """Ganeti's confd from an unpacked package."""
    command, log = confd.confd_command(PORT), Path("/var/log/bench/ganeti-confd.log")
    return MeasuredDaemon(name=PEER, command=command, log=log, env=confd.environment())


def echo() -> MeasuredDaemon:
    """An echo server: it sends each datagram back, and is the floor for the generator."""
    command = [sys.executable, "-I", "-c", _ECHO]
    return MeasuredDaemon(name=FLOOR, command=command, log=Path("/var/log/bench/echo.log"))


@dataclass(frozen=True)
class Workload:
    """The load of a generator: its queries, its way to ask, and its duration.

    A client is a socket of its own with one request outstanding. With `once`, each query is asked
    at most once, and without any warming up. Else `requests` are signed before the first is sent,
    each with a salt of its own; with `fresh`, no datagram is sent twice. `renames` are pairs of
    paths: the first is renamed to the second, one pair after each `REPLACED_EVERY_S`.
    """

    type: int
    queries: list[Any]
    requests: int
    seconds: float
    warm_up_s: float
    clients: int = CLIENTS
    once: bool = False
    fresh: bool = False
    renames: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Replies:
    """A load's result: the time of each answer, and a sample of replies to verify.

    Request N asked query N modulo their count, and its reply's salt must be `salt(N)`.
    """

    seconds: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    lost: int = 0
    sample: list[tuple[int, bytes]] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        """By what they are; those that too few answers came for are left out."""
        found = {"rate": len(self.seconds) / self.elapsed_s} if self.seconds else {}
        if percents := percentiles(self.seconds):
            found |= {"p50": percents[49], "p99": percents[98], "worst": max(self.seconds)}
        return found


# ---- the load


def salt(number: int) -> str:
    """The reply salt of the request of that number."""
    return f"{number:08d}-7c1f-4b1e-bench"


class Clients:
    """The sockets, and what there is to ask."""

    def __init__(self, load: Workload) -> None:
        self._load = load
        queries = load.queries
        self._requests = [
            confd_wire.request(KEY, load.type, queries[number % len(queries)], salt(number))
            for number in range(len(queries) if load.once else load.requests)
        ]
        self._next = 0
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        for _ in range(min(load.clients, len(self._requests))):
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            client.connect(("127.0.0.1", PORT))
            self._sockets[client.fileno()] = client
            self._poll.register(client, select.EPOLLIN)

    def ask(self, seconds: float) -> Replies:
        """Ask for so long, or once all there is; then wait for what is outstanding.

        The daemon is busy until the last answer, so those that come after the time count as well.
        """
        requests, poll = self._requests, self._poll.poll
        total, clock, batch = len(requests), time.perf_counter, len(self._sockets)
        first = self._next if self._load.fresh else 0
        stop_after = total if self._load.once or self._load.fresh else sys.maxsize
        # By descriptor, in lists: the loop must cost much less than what it measures.
        calls: list[tuple[Callable[[int], bytes], Callable[[bytes], int]] | None]
        calls = [None] * _HIGHEST_DESCRIPTOR
        asked_at, asked = [0.0] * _HIGHEST_DESCRIPTOR, [0] * _HIGHEST_DESCRIPTOR
        replies = Replies()
        note = replies.seconds.append
        renames = list(reversed(self._load.renames))

        began_at = now = clock()
        stop_at, rename_at = began_at + seconds, began_at + REPLACED_EVERY_S
        sample_at = began_at
        for sent, (descriptor, client) in enumerate(self._sockets.items(), first):
            calls[descriptor] = client.recv, client.send
            asked_at[descriptor], asked[descriptor] = clock(), sent
            client.send(requests[sent])
        sent, replies.lost = first + batch, batch
        while replies.lost and (ready := poll(PATIENCE_S, batch)):
            for descriptor, _ in ready:
                receive, send = calls[descriptor]  # type: ignore[misc]
                reply = receive(_LONGEST_DATAGRAM)
                now = clock()
                note(now - asked_at[descriptor])
                if now >= sample_at:
                    replies.sample.append((asked[descriptor], reply))
                    sample_at = now + _SAMPLE_EVERY_S
                if now > stop_at or sent >= stop_after:
                    replies.lost -= 1
                    continue
                asked_at[descriptor], asked[descriptor] = now, sent % total
                send(requests[sent % total])
                sent += 1
            if renames and now >= rename_at:
                os.rename(*renames.pop())
                rename_at = now + REPLACED_EVERY_S
        self._next, replies.elapsed_s = sent, now - began_at
        return replies


def _generate(load: Workload) -> Replies:
    """Ask for as long as the load says."""
    gc.disable()
    clients = Clients(load)
    if load.warm_up_s:
        clients.ask(load.warm_up_s)
    return clients.ask(load.seconds)


class ClusterLoad:
    """The cluster at one size, which both daemons answer for."""

    def __init__(self, size: Size, cores: tuple[int, int], plan: Plan) -> None:
        self._size, self._plan = size, plan
        self._core, self._generators_core = cores
        config = ganeti_config.ganeti_config(
            nodes=size.nodes, instances=size.instances, serial=_SERIAL
        )
        config["cluster"]["serial_no"] = _SERIAL
        self._text = json.dumps(config)
        self._right = RightAnswers(config)
        self._all_cores = os.sched_getaffinity(0)

    def measure(self, daemon: MeasuredDaemon) -> Round:
        """Run a daemon through all that it is asked."""
        _prepare(self._text)
        result = Round(daemon.name, self._size.instances)
        has_all_cores = daemon.name in (ONE_WORKER, TWO_WORKERS)
        place = machine.placed(self._all_cores if has_all_cores else {self._core})
        with running(daemon, place, self._generators_core) as process:
            if not _begins_to_answer(process):
                result.troubles.append(f"gave no answer in {START_PATIENCE_S:g} s")
            elif daemon.name == FLOOR:
                self._ask(result, PING, versions=0)
            elif has_all_cores:
                for kind in WORKERS_KINDS:
                    self._ask(result, kind, cores=self._all_cores, clients=CLIENTS_OF_WORKERS)
            else:
                result.numbers[STARTING] = time.monotonic() - process.started_at
                self._ask_all(result, process)
            result.troubles += process.ending()
        return result

    def _ask_all(self, result: Round, process: MeasuredProcess) -> None:
        for kind in KINDS:
            if is_many(kind, self._size):
                self._ask(result, kind, FIRST, once=True)
        result.numbers[MEMORY_BEFORE] = process.pss_kib()
        for kind in filter(self._size.fits, KINDS):
            self._ask(result, kind)
        result.numbers[MEMORY_AFTER] = process.pss_kib()
        if result.contender == BRINE:
            result.numbers |= {
                name: _cost(process, bad, self._plan.pick(2000, 2000, 100))
                for name, bad in BAD.items()
            }
        renames = []
        for number in range(1, self._plan.pick(5, 3, 1) + 1):
            # As a replacement is: written beside it, and complete before it takes its place.
            file = CONFIG.with_name(f"config.{number}")
            text = self._text.replace(str(_SERIAL), str(_SERIAL + number))
            file.write_text(text, encoding="utf-8")
            renames.append((str(file), str(CONFIG)))
        seconds, versions = REPLACED_EVERY_S * (len(renames) + 1), len(renames) + 1
        self._ask(result, NODE_IP, REPLACING, versions=versions, seconds=seconds, renames=renames)

    def _ask(
        self,
        result: Round,
        kind: Kind,
        prefix: str = "",
        *,
        once: bool = False,
        cores: Collection[int] = (),
        versions: int = 1,
        **more: Any,
    ) -> None:
        """Have the generator ask, and look at a sample of the answers.

        :param versions: of the configuration, any of which may have answered; 0: don't look.
        """
        usual = {"seconds": self._plan.pick(1.0, 0.5, 0.05), **more}
        fresh = kind.is_large and not once
        requests = FRESH_REQUESTS if fresh else MANY_REQUESTS
        load = Workload(
            kind.type,
            queries_of(kind, self._size),
            requests // self._plan.pick(1, 1, 10),
            warm_up_s=0.0 if once else self._plan.pick(WARM_UP_S, WARM_UP_S, 0.05),
            once=once,
            fresh=fresh,
            **usual,
        )
        # In a process of its own, which is made here.
        context = multiprocessing.get_context("fork")
        with (
            machine.placed(cores or {self._generators_core}),
            ProcessPoolExecutor(1, mp_context=context) as generator,
        ):
            replies = generator.submit(_generate, load).result()
        numbers = replies.numbers()
        result.numbers |= {f"{prefix}{kind.name} {what}": numbers[what] for what in numbers}
        if replies.lost:
            result.troubles.append(f"{kind.name}: {replies.lost:,} answers never came")
        sample = replies.sample if versions else []
        found = (self._fault(load, number, reply, versions) for number, reply in sample)
        if faults := list(filter(None, found)):
            first = faults[0][:_LONGEST_COMPLAINT]
            result.troubles.append(f"{len(faults):,} wrong answers in the sample, as: {first}")

    def _fault(self, load: Workload, number: int, reply: bytes, versions: int) -> str:
        """The fault of the reply to the request of that number, or nothing."""
        query = load.queries[number % len(load.queries)]
        try:
            heard = confd_wire.opened(KEY, reply)
        except (ValueError, KeyError, confd_wire.ForgedError) as error:
            return f"{query}: {error}"
        serials = {self._right.serial(load.type), self._right.ganetis_serial(load.type, query)}
        if load.type != Asks.PING:
            serials |= {_SERIAL + later for later in range(versions)}
        is_right = normal(load.type, heard.answer) == self._right.answer(load.type, query)
        is_right = is_right and heard.status == 0 and heard.serial in serials
        return "" if is_right and heard.salt == salt(number) else f"{query}: {heard}"


def _cost(process: MeasuredProcess, bad: bytes, count: int) -> float:
    """The processor time that the daemon spends on each of such datagrams, and on receiving it.

    A ping after each says that it is done with; what that costs is taken off.
    """
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", PORT))
        client.settimeout(_ASK_AGAIN_S)
        ping = confd_wire.request(KEY, Asks.PING, None, "ping")
        for datagrams in ((ping,), (bad, ping)):
            before_s = process.cpu_s()
            for _ in range(count):
                for datagram in datagrams:
                    client.send(datagram)
                client.recv(_LONGEST_DATAGRAM)
            times.append(process.cpu_s() - before_s)
    return (times[1] - times[0]) / count


def _begins_to_answer(process: MeasuredProcess) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", PORT))
        # A daemon may take requests before it can answer, and should not find many when it can.
        client.settimeout(_ASK_AGAIN_S)
        give_up_at = process.started_at + START_PATIENCE_S
        while time.monotonic() < give_up_at and process.exit_status() is None:
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


def measure(plan: Plan) -> Report:
    """All sizes of both daemons and the echo; workers at the first size."""
    assert plan.peer
    machine.lead_own_group()
    sandbox.hide_state({})
    sandbox.raise_loopback()
    cores = machine.share_cores()
    lines = heads(plan, "high", machine.placed({cores[0]}))
    clusters = {size: ClusterLoad(Size(size), cores, plan) for size in plan.sizes}
    cases = [(daemon, size) for size in plan.sizes for daemon in (echo(), brine(), peer(plan.peer))]
    for workers, name in ((1, ONE_WORKER), (2, TWO_WORKERS)):
        cases.append((replace(brine(workers=workers), name=name), plan.sizes[0]))
    rounds = list(rounds_of(plan, cases, lambda daemon, size: clusters[size].measure(daemon)))
    return Report.of_rounds(
        lines,
        tables(rounds, plan.sizes),
        rounds,
        of="instances",
        peers=[PEER],
        notes=notes(rounds, plan.sizes),
    )
