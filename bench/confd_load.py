"""`bench confd`'s measuring process, in the sandbox: `python3 -m bench.confd_load PLAN`.

The load is many clients, each of which asks its next question when its last was answered.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import machine
from bench.confd import (
    BAD,
    BRINE,
    FLOOR,
    KINDS,
    ONE_WORKER,
    TWO_WORKERS,
    WORKERS_KINDS,
    Kind,
    Load,
    Plan,
    Round,
    Size,
    queries_of,
)
from bench.daemon import Daemon, Running, running, source_path
from bench.harness import run_measurement, tell
from lab import confd_wire, ganeti, ganeti_config, sandbox
from lab.confd_answers import RightAnswers, normal
from lab.confd_wire import Asks

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
_SETTINGS = Path("/run/bench/confd.toml")
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
    """brine-confd from the source tree, as its unit runs it: journal, watchdog."""
    settings = (
        f'bind = "127.0.0.1"\nport = {PORT}\nworkers = {workers}\n'
        f'config_file = "{CONFIG}"\nkey_file = "{ganeti.STATE}/hmac.key"\n'
        "reveal_secrets = true\n"  # as the peer does
    )
    return Daemon(
        name=BRINE,
        command=[sys.executable, "-P", "-m", "brine.confd", "--config", str(_SETTINGS)],
        log=Path("/var/log/bench/brine-confd.log"),
        files={_SETTINGS: settings},
        runtime_dir=Path("/run/brine-confd"),
        env=source_path("common", "config", "confd"),
    )


def peer(confd: ganeti.Confd) -> Daemon:
    """Ganeti's confd from an unpacked package."""
    return Daemon(
        name="ganeti-confd",
        command=confd.command(PORT),
        log=Path("/var/log/bench/ganeti-confd.log"),
        env=confd.environment(),
    )


def echo() -> Daemon:
    """What sends back each datagram as it came: the floor under what the generator can do."""
    command = [sys.executable, "-I", "-c", _ECHO]
    return Daemon(name=FLOOR, command=command, log=Path("/var/log/bench/echo.log"))


@dataclass(frozen=True)
class Orders:
    """What to ask, how, and how long.

    A client is a socket of its own with one request outstanding. With `once`, each query is asked
    at most once, and without any warming up. With `fresh`, no datagram is sent twice. `renames` are
    pairs of paths: the first is renamed to the second, one pair after each `rename_every_s`.
    """

    port: int
    key: bytes
    type: int
    queries: list[Any]
    clients: int
    seconds: float
    warm_up_s: float = 0.0
    once: bool = False
    fresh: bool = False
    renames: list[tuple[str, str]] = field(default_factory=list)
    rename_every_s: float = 1.0


Sample = list[tuple[int, bytes]]
"""The numbers of some requests, and their replies, which are to be verified.

Request N asked query N modulo their count, and its reply's salt must be `salt(N)`.
"""


def salt(number: int) -> str:
    """The reply salt of the request of that number."""
    return f"{number:08d}-7c1f-4b1e-bench"


class Clients:
    """The sockets, and what there is to ask."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        queries = orders.queries
        self._requests = [
            confd_wire.request(
                orders.key, orders.type, queries[number % len(queries)], salt(number)
            )
            for number in range(_count(orders))
        ]
        self._next = 0
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        for _ in range(min(orders.clients, len(self._requests))):
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            client.connect(("127.0.0.1", orders.port))
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
        stop_at, rename_at = began_at + seconds, began_at + self._orders.rename_every_s
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
                rename_at = now + self._orders.rename_every_s
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

    def __init__(self, size: Size, plan: Plan, cores: machine.Cores) -> None:
        self.size, self._plan, self._cores = size, plan, cores
        config = ganeti_config.ganeti_config(
            nodes=size.nodes, instances=size.instances, serial=_SERIAL
        )
        config["cluster"]["serial_no"] = _SERIAL
        self._text = json.dumps(config)
        self._right = RightAnswers(config)
        self._all_cores = os.sched_getaffinity(0)

    def measure(self, daemon: Daemon) -> Round:
        """Run a daemon through all that is asked, on its core."""
        result = Round(daemon.name, self.size.instances)
        with self._running(daemon, result, {self._cores.daemon}) as started:
            for kind in KINDS:
                if len(queries := queries_of(kind, self.size)) >= MANY:
                    result.first[kind.title] = self._load(kind, queries, once=True)
            result.start_kib = started.pss_kib()
            for kind in KINDS:
                if self.size.fits(kind):
                    result.warm[kind.title] = self._load(kind)
            result.end_kib = started.pss_kib()
            if daemon.name == BRINE:
                result.bad_s = {name: _cost(started, bad) for name, bad in BAD.items()}
            result.replacing = self._replace_under_load()
        return result

    def measure_floor(self) -> Round:
        """Run what sends everything back."""
        result = Round(FLOOR, self.size.instances)
        with self._running(echo(), result, {self._cores.daemon}):
            result.warm[KINDS[0].title] = self._load(KINDS[0], verify=False)
        return result

    def measure_workers(self, count: int) -> Round:
        """Run brine-confd with some workers, and the load, on all cores."""
        name = ONE_WORKER if count == 1 else TWO_WORKERS
        daemon = replace(brine(workers=count), name=name)
        result = Round(name, self.size.instances)
        with self._running(daemon, result, self._all_cores) as started:
            for kind in WORKERS_KINDS:
                result.warm[kind.title] = self._load(
                    kind, cores=self._all_cores, clients=CLIENTS_OF_WORKERS
                )
            result.end_kib = started.pss_kib()
        return result

    @contextlib.contextmanager
    def _running(self, daemon: Daemon, result: Round, cores: Collection[int]) -> Iterator[Running]:
        _prepare(self._text)
        place = machine.favoured(cores)
        with running(daemon, place, self._cores.generator) as started:
            result.favoured = started.ahead
            try:
                _wait_for_answer(started)
                result.start_s = time.monotonic() - started.started_at
                yield started
            except _SilentError:
                result.trouble = f"gave no answer in {START_PATIENCE_S:g} s"
            result.trouble = started.end(result.trouble)

    def _load(
        self,
        kind: Kind,
        queries: list[Any] | None = None,
        *,
        once: bool = False,
        verify: bool = True,
        cores: Collection[int] = (),
        clients: int = CLIENTS,
    ) -> Load:
        orders = self._orders(
            kind,
            queries,
            clients=clients,
            warm_up_s=0.0 if once else self._plan.warm_up_s,
            once=once,
            fresh=kind.is_large and not once,
        )
        return self._asked(orders, cores, verify=verify)

    def _replace_under_load(self) -> Load:
        kind = next(kind for kind in KINDS if kind.type == Asks.NODE_IP_OF_INSTANCE_IP)
        renames = []
        for number in range(1, self._plan.replacements + 1):
            # As a replacement is: written beside it, and complete before it takes its place.
            file = CONFIG.with_name(f"config.{number}")
            text = self._text.replace(str(_SERIAL), str(_SERIAL + number))
            file.write_text(text, encoding="utf-8")
            renames.append((str(file), str(CONFIG)))
        orders = self._orders(
            kind,
            seconds=REPLACED_EVERY_S * (self._plan.replacements + 1),
            renames=renames,
            rename_every_s=REPLACED_EVERY_S,
        )
        return self._asked(orders, versions=len(renames) + 1)

    def _orders(self, kind: Kind, queries: list[Any] | None = None, **more: Any) -> Orders:
        usual: dict[str, Any] = {
            "clients": CLIENTS,
            "seconds": self._plan.seconds,
            "warm_up_s": self._plan.warm_up_s,
        }
        queries = queries or queries_of(kind, self.size)
        return Orders(port=PORT, key=KEY, type=kind.type, queries=queries, **{**usual, **more})

    def _asked(
        self,
        orders: Orders,
        cores: Collection[int] = (),
        *,
        verify: bool = True,
        versions: int = 1,
    ) -> Load:
        """Have the generator ask, and look at a sample of the answers.

        :param versions: of the configuration, any of which may have answered.
        """
        # In a process of its own, which is made here.
        context = multiprocessing.get_context("fork")
        with (
            machine.favoured(cores or {self._cores.generator}),
            ProcessPoolExecutor(1, mp_context=context) as generator,
        ):
            load, sample = generator.submit(_generate, orders).result()
        wrong: list[str] = []
        found = set()
        for number, reply in sample if verify else ():
            query = orders.queries[number % len(orders.queries)]
            try:
                heard = confd_wire.opened(KEY, reply)
            except (ValueError, KeyError, confd_wire.ForgedError) as error:
                wrong.append(f"{query}: {error}")
                continue
            found.add(heard.serial)
            serials = {
                self._right.serial(orders.type),
                self._right.ganetis_serial(orders.type, query),
            }
            if orders.type != Asks.PING:
                serials |= {_SERIAL + later for later in range(versions)}
            if not (
                heard.salt == salt(number)
                and heard.status == 0
                and heard.serial in serials
                and normal(orders.type, heard.answer) == self._right.answer(orders.type, query)
            ):
                wrong.append(f"{query}: {heard}")
        complaint = wrong[0][:_LONGEST_COMPLAINT] if wrong else ""
        return replace(load, wrong=len(wrong), complaint=complaint, serials=len(found))


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


class _SilentError(Exception):
    """A daemon that does not begin to answer."""


def _wait_for_answer(started: Running) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", PORT))
        # A daemon may take requests before it can answer, and should not find many when it can.
        client.settimeout(_ASK_AGAIN_S)
        while time.monotonic() < started.started_at + START_PATIENCE_S:
            if started.exit_status() is not None:
                break
            try:
                client.send(confd_wire.request(KEY, Asks.NODE_IPS, None, "start"))
                # What echoes gives back a request, which has no status.
                if (
                    json.loads(json.loads(client.recv(_LONGEST_DATAGRAM)[4:])["msg"]).get(
                        "status", 0
                    )
                    == 0
                ):
                    return
            except ConnectionRefusedError:  # nobody has the port yet
                pass
            except TimeoutError:
                continue
            time.sleep(_LOOK_AGAIN_S)
    raise _SilentError


def _prepare(config: str) -> None:
    """Put in place what the daemons read."""
    for folder in (ganeti.STATE, Path("/run/ganeti"), Path("/var/log/ganeti")):
        folder.mkdir(parents=True, exist_ok=True)
    ganeti.write_state(ganeti.STATE, config, KEY)


def _all_rounds(plan: Plan) -> Iterator[Round]:
    machine.lead_own_group()
    sandbox.hide_state({})
    sandbox.raise_loopback()
    chosen: list[Daemon] = []
    if plan.with_brine:
        chosen.append(brine())
    if plan.ganeti:
        root, program = Path(plan.ganeti["root"]), Path(plan.ganeti["program"])
        package, version = plan.ganeti["package"], plan.ganeti["version"]
        chosen.append(peer(ganeti.Confd(package, version, root, program)))
    cores = machine.share_cores()
    benches = [Bench(Size(instances), plan, cores) for instances in plan.sizes]
    for number in range(plan.rounds):
        # Who goes first changes, so that a machine that warms up favours nobody; and a machine
        # that others disturb for a while does so at every size.
        order = 1 if number % 2 == 0 else -1
        for bench in benches[::order]:
            where = f"{bench.size.instances:,} instances, round {number + 1} of {plan.rounds}"
            yield _told(bench.measure_floor())
            for daemon in chosen[::order]:
                tell(f"{where}: {daemon.name}")
                yield _told(bench.measure(daemon))
            if bench is benches[0] and plan.with_brine:
                for workers in (1, 2)[::order]:
                    tell(f"{where}: {workers} on all cores")
                    yield _told(bench.measure_workers(workers))


def _told(result: Round) -> Round:
    if result.trouble:
        tell(f"{result.daemon}: {result.trouble}")
    return result


if __name__ == "__main__":
    run_measurement(Plan, lambda plan: list(_all_rounds(plan)))
