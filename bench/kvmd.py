"""brine-kvmd beside Ganeti's daemon of the same purpose, on scripted QMP sockets.

The load is thousands of scripted VMs in a process of their own, on a core of its own.
"""

import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import resource
import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench import machine
from bench.daemon import (
    Daemon,
    PeerPlan,
    PeerRound,
    Running,
    measured,
    ours,
    peer_parser,
    plan_of,
    row_of,
    running,
)
from bench.harness import Row, Table, positive, report, tell
from lab import ganeti, sandbox
from lab.errors import LabError
from lab.fake_qemu import GREETING, event_line, line_of

BRINE, GANETI = "brine-kvmd", "ganeti-kvmd"
TARGET_SIZE = 1000
"""The targets are for this many VMs."""
WARM_UP = 3
"""VMs that come and go before the base is measured: a first connection loads what stays."""
TOGETHER = 100
START_PATIENCE_S = 20.0
BREATH_S = 1.0
PATIENCE_S = 5.0
"""Give up on connections when none has come for so long, and on a verdict file when it has not."""
QUIET_S = 0.02
"""Wait so long before each ending: in life it comes out of the quiet, to a daemon gone cold."""


@dataclass(frozen=True, kw_only=True)
class Plan(PeerPlan):
    """How many VMs end one by one, and how many times a hundred at once."""

    samples: int
    bursts: int
    idle_s: float


@dataclass
class Round(PeerRound):
    """One daemon at one size, once. None: it did not get so far.

    `missed` verdict files never came; `lost` VMs, which took the place of one that had ended, were
    never connected to.
    """

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
    lost: int = 0

    def complaint(self) -> str:
        """All that went wrong, or nothing."""
        parts = [self.trouble] if self.trouble else []
        if self.missed:
            parts.append(f"{self.missed:,} verdict files never came")
        if self.lost:
            parts.append(f"{self.lost:,} new VMs were never connected to")
        return "; ".join(parts)


_Target = Callable[[Row], Row] | None
METRICS: tuple[tuple[str, str, str, float, _Target], ...] = (
    ("connect, all appear at once", "connect_s", "s", 1, lambda row: row.at_most(1 / 2)),
    ("connect, all there at start", "start_s", "s", 1, lambda row: row.at_most(1 / 2)),
    ("event to file, p50", "p50_s", "ms", 1e3, lambda row: row.at_most(1 / 3)),
    ("event to file, p99", "p99_s", "ms", 1e3, lambda row: row.at_most(1 / 2)),
    (
        *("100 at once, first event to last file", "together_s", "ms", 1e3),
        lambda row: row.at_most(1 / 3),
    ),
    ("memory a VM over the base (anonymous)", "vm_kib", "KiB", 1, lambda row: row.within(4)),
    ("memory of the base (PSS)", "base_kib", "MiB", 1 / 1024, None),
    ("CPU when idle (utime + stime)", "idle_ticks", "ticks", 1, lambda row: row.within(0)),
    ("CPU when idle (scheduler's count)", "idle_share", "%", 100, None),
)
"""A row each: its title, which number of a round, its unit and scale, and brine-kvmd's target."""


def tables(rounds: Sequence[Round], sizes: Sequence[int]) -> Iterator[Table]:
    """One a size."""
    for size in sizes:
        here = [one for one in rounds if one.size == size]
        count = max(sum(one.daemon == name for one in here) for name in (BRINE, GANETI))
        title = f"{size:,} VMs, median of {count} round{'s' * (count != 1)}"
        yield Table(title, (BRINE, GANETI), list(_rows(here, has_targets=size == TARGET_SIZE)))


def _rows(rounds: Sequence[Round], *, has_targets: bool) -> Iterator[Row]:
    for title, name, unit, scale, target in METRICS:
        row = row_of(rounds, "kvmd", title, unit, attrgetter(name), scale)
        yield target(row) if target and has_targets else row


def run(options: argparse.Namespace) -> bool:
    """Measure and print. False if brine-kvmd itself had trouble."""
    _allow_descriptors(options.sizes)
    plan = Plan(
        **plan_of(options, "kvmd"),
        samples=options.samples or (100 if options.quick else 500),
        bursts=3 if options.quick else 5,
        idle_s=options.idle or (5 if options.quick else 10),
    )
    rounds, heads = measured("kvmd", plan, "real-time")
    notes = [
        f"{one.daemon}, {one.size:,} VMs: {text}" for one in rounds if (text := one.complaint())
    ]
    found = list(tables(rounds, plan.sizes))
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = peer_parser(
        "kvmd",
        sizes=(200, 1000, 5000),
        of="VMs",
        smallest=TOGETHER + WARM_UP,
        quick="100 samples, 5 s idle",
    )
    help_ = "VMs ended one by one in a round (500)"
    found.add_argument("--samples", type=positive, help=help_)
    help_ = "idle time watched (10)"
    found.add_argument("--idle", type=positive, metavar="SECONDS", help=help_)
    return found


# ---- the measuring process: both daemons

_SUFFIX = ".kvmd"
# Without these three Ganeti's daemon finds that the node has nothing for it to do, and ends.
_FILES: Mapping[Path, str] = {
    ganeti.STATE / "ssconf_hypervisor_list": "kvm\n",
    ganeti.STATE / "ssconf_enabled_user_shutdown": "True\n",
    ganeti.STATE / "ssconf_node_vm_capable": f"{ganeti.NODE}=True\n",
}


def brine() -> Daemon:
    """brine-kvmd."""
    folder = Path("/run/brine/ctrl")
    return ours("kvmd", f'control_dir = "{folder}"\n', "common", "kvmd", control_dir=folder)


def peer(kvmd: ganeti.Unpacked) -> Daemon:
    """Ganeti's kvmd from an unpacked package, in the background, with its log in its file."""
    return Daemon(
        name=GANETI,
        command=[str(kvmd.program), "--no-user-checks"],
        control_dir=Path("/run/ganeti/kvm-hypervisor/ctrl"),
        log=Path("/var/log/ganeti/kvm-daemon.log"),
        pid_file=Path("/run/ganeti/ganeti-kvmd.pid"),
        env=kvmd.environment(),
    )


# ---- the measuring process: the VMs


@dataclass(frozen=True)
class Connected:
    """How many VMs are connected, were at most, and should be, and the monotonic times of the first
    socket that was made and of the last connection."""

    connected: int
    most: int
    asked: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class Verdicts:
    """Seconds from event to file: of one VM each, or of all that ended together. `missed` files
    never came, and `lost` of the VMs that took the places were never connected to."""

    seconds: list[float]
    missed: int
    lost: int


class Guest:
    """Greets one client at a time, answers its commands, and ends as a user's poweroff does."""

    __slots__ = ("connection", "listener", "path", "ready", "received", "verdict_path")

    def __init__(self, folder: Path, name: str) -> None:
        self.path = f"{folder}/{name}{_SUFFIX}"
        self.verdict_path = f"{folder}/{name}.shutdown"
        self.connection: socket.socket | None = None
        self.ready = False
        """The client has been through qmp_capabilities: from now on it gets events."""
        self.received = b""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # As with QEMU the path is there from bind() on, and who comes before listen() is refused.
        self.listener.bind(self.path)
        self.listener.listen(1)

    def greet(self) -> socket.socket:
        """Accept the waiting client."""
        self.connection, _ = self.listener.accept()
        self.connection.setblocking(False)
        self.connection.send(GREETING)
        return self.connection

    def answer(self) -> bool:
        """Read what the client sent and answer whole lines. False: it has hung up."""
        assert self.connection is not None
        try:
            data = self.connection.recv(4096)
        except ConnectionResetError:
            data = b""
        if not data:
            self.connection.close()
            self.connection = None
            self.ready = False
            self.received = b""
            return False
        *lines, self.received = (self.received + data).split(b"\n")
        for command in map(json.loads, lines):
            reply: dict[str, object] = {"return": {}}
            if command["execute"] == "query-status":
                reply["return"] = {"status": "running", "singlestep": False, "running": True}
            if "id" in command:
                reply["id"] = command["id"]
            self.connection.send(line_of(reply))
            self.ready = self.ready or command["execute"] == "qmp_capabilities"
        return True

    def power_off(self) -> float:
        """Send the event of a user's poweroff, end the connection, and return when it set out."""
        assert self.connection is not None
        event = event_line("SHUTDOWN", guest=True, reason="guest-shutdown")
        sent_at = time.monotonic()
        self.connection.send(event)
        self.connection.close()
        self.connection = None
        self.ready = False
        return sent_at

    def vanish(self) -> None:
        """Close what is left and remove the socket, as QEMU does last."""
        self.listener.close()
        os.unlink(self.path)


class Generator:
    """All VMs in one control directory, served by one epoll."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epoll = select.epoll()
        self._by_fd: dict[int, Guest] = {}
        self._standing: deque[Guest] = deque()
        self._lost: list[Guest] = []
        self._numbers = itertools.count()
        self._first_at = 0.0
        self._connected = 0
        self._most_connected = 0
        self._last_connected_at = 0.0

    def appear(self, count: int, patience_s: float) -> Connected:
        """Make so many VMs, and serve them if there is patience."""
        self._first_at = time.monotonic()
        for _ in range(count):
            self._add()
        return self.serve(patience_s)

    def serve(self, patience_s: float) -> Connected:
        """Answer clients until every VM is connected, or none has connected for so long."""
        progress_at, seen = time.monotonic(), self._connected
        while self._connected < len(self._standing) and time.monotonic() - progress_at < patience_s:
            self._serve(0.1)
            if self._connected > seen:
                progress_at, seen = self._last_connected_at, self._connected
        return Connected(
            connected=self._connected,
            most=self._most_connected,
            asked=len(self._standing),
            first_at=self._first_at,
            last_at=self._last_connected_at,
        )

    def _add(self) -> None:
        guest = Guest(self._folder, f"vm{next(self._numbers):06}")
        self._standing.append(guest)
        self._watch(guest.listener.fileno(), guest)

    def _watch(self, fd: int, guest: Guest) -> None:
        self._by_fd[fd] = guest
        self._epoll.register(fd, select.EPOLLIN)

    def _serve(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            guest = self._by_fd[fd]
            if fd == guest.listener.fileno():
                # One client at a time: the next one waits in the backlog until this one leaves.
                self._epoll.unregister(fd)
                self._watch(guest.greet().fileno(), guest)
                continue
            was_ready = guest.ready
            if not guest.answer():
                self._connected -= was_ready
                self._watch(guest.listener.fileno(), guest)
            elif guest.ready and not was_ready:
                self._connected += 1
                self._most_connected = max(self._most_connected, self._connected)
                self._last_connected_at = time.monotonic()

    def _settle(self) -> int:
        """Have all VMs connected, then let the daemon rest. Returns how many it never came to."""
        self.serve(PATIENCE_S)
        lost = [guest for guest in self._standing if not guest.ready]
        self._lost += lost  # it may still come, but is waited for no more
        for guest in lost:
            self._standing.remove(guest)
        until = time.monotonic() + QUIET_S
        while (left := until - time.monotonic()) > 0:
            self._serve(left)
        return len(lost)

    def end(self, count: int) -> Verdicts:
        """End the VMs that have stood longest: one time for all, first event to last file."""
        guests = list(itertools.islice((guest for guest in self._standing if guest.ready), count))
        if len(guests) < count:
            return Verdicts([], missed=count, lost=0)
        for guest in guests:
            self._standing.remove(guest)
        self._connected -= count
        sent_at = guests[0].power_off()
        for guest in guests[1:]:
            guest.power_off()
        for guest in guests:
            guest.vanish()
        missed = 0
        file_exists = os.access
        for guest in guests:
            # A tight loop costs the daemon nothing on its own core; an inotify watch would.
            while not file_exists(guest.verdict_path, os.F_OK):
                if time.monotonic() - sent_at > PATIENCE_S:
                    missed += 1
                    break
        took_s = time.monotonic() - sent_at
        for guest in guests:
            Path(guest.verdict_path).unlink(missing_ok=True)
            self._add()
        return Verdicts([] if missed else [took_s], missed, lost=self._settle())

    def end_each(self, samples: int) -> Verdicts:
        """So many times: end one VM, see its verdict, put a new one in its place."""
        seconds: list[float] = []
        missed = lost = 0
        for _ in range(samples):
            one = self.end(1)
            seconds += one.seconds
            missed += one.missed
            lost += one.lost
            if not self._connected:  # the daemon is gone
                break
        return Verdicts(seconds, missed, lost)


_generator: Generator
"""Of the generator's process."""


def _start_generator(folder: Path) -> None:
    global _generator
    _generator = Generator(folder)
    gc.disable()


def _obey(order: str, arguments: Sequence[float]) -> Any:
    return getattr(_generator, order)(*arguments)


Load = Callable[..., Future[Any]]
"""Gives an order to the generator's process, a method of `Generator` with its arguments."""


@contextlib.contextmanager
def generating(daemon: Daemon, core: int) -> Iterator[Load]:
    """Start a generator on its core, for an empty control directory; it ends with the block."""
    folder = daemon.control_dir
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, _start_generator, (folder,)) as executor:

        def load(order: str, *arguments: float) -> Future[Any]:
            return executor.submit(_obey, order, arguments)

        with machine.placed(core):
            load("serve", 0).result()  # with which its process is made
        yield load
    for file in folder.iterdir():
        file.unlink()


# ---- the measuring process: the rounds


def measure(plan: Plan) -> list[Round]:
    """All rounds."""
    sandbox.hide_state(_FILES)
    chosen = [brine()] if plan.with_brine else []
    if plan.peer:
        chosen.append(peer(plan.peer))
    cores = machine.share_cores()
    rounds = []
    for size in plan.sizes:
        for number in range(plan.rounds):
            # Who goes first changes, so that a machine that warms up or fills up favours nobody.
            for daemon in chosen if number % 2 == 0 else reversed(chosen):
                tell(f"{size:,} VMs, round {number + 1} of {plan.rounds}: {daemon.name}")
                rounds.append(_measure(daemon, size, plan, cores))
                if rounds[-1].trouble:
                    tell(f"{daemon.name}: {rounds[-1].trouble}")
    return rounds


def _measure(daemon: Daemon, size: int, plan: Plan, cores: tuple[int, int]) -> Round:
    """Run a daemon through all phases at one size."""
    result = Round(daemon.name, size)
    core, generators_core = cores
    with (
        generating(daemon, generators_core) as load,
        running(daemon, machine.placed(core), generators_core) as started,
    ):
        result.favoured = started.ahead
        _measure_at_work(result, load, started, plan)
        result.trouble = started.end(result.trouble)
    if not result.trouble:
        _measure_start(result, daemon, cores)
    return result


def _measure_at_work(result: Round, load: Load, started: Running, plan: Plan) -> None:
    load("serve", 0).result()
    # The daemon may still be on its way up: its first VM waits for it, with more patience.
    load("appear", WARM_UP, 0).result()
    if load("serve", START_PATIENCE_S).result().connected < WARM_UP:
        result.trouble = f"connected none of {WARM_UP} VMs"
        return
    load("end_each", WARM_UP).result()
    time.sleep(BREATH_S)
    result.base_kib = machine.memory_kib(started.pid, "Pss")
    base_kib = machine.memory_kib(started.pid, "Anonymous")

    seen = load("appear", result.size - WARM_UP, PATIENCE_S).result()
    result.connected = seen.most
    if seen.connected < seen.asked:
        result.trouble = f"connected {seen.most:,} of {seen.asked:,} VMs"
    else:
        result.connect_s = seen.last_at - seen.first_at
    if started.exit_status() is not None or seen.connected < WARM_UP + TOGETHER:
        return

    time.sleep(BREATH_S)
    ticks, run_s = machine.cpu_ticks(started.pid), machine.cpu_s(started.pid)
    began_at = time.monotonic()
    time.sleep(plan.idle_s)
    idle_s = time.monotonic() - began_at
    result.idle_ticks = machine.cpu_ticks(started.pid) - ticks
    result.idle_share = (machine.cpu_s(started.pid) - run_s) / idle_s
    grown_kib = machine.memory_kib(started.pid, "Anonymous") - base_kib
    result.vm_kib = grown_kib / (seen.connected - WARM_UP)

    each = load("end_each", plan.samples).result()
    result.missed, result.lost = each.missed, each.lost
    if len(each.seconds) > 1:
        percentiles = statistics.quantiles(each.seconds, n=100, method="inclusive")
        result.p50_s, result.p99_s = percentiles[49], percentiles[98]

    bursts: list[float] = []
    for _ in range(plan.bursts):
        together = load("end", TOGETHER).result()
        bursts += together.seconds
        result.missed += together.missed
        result.lost += together.lost
    if bursts:
        result.together_s = statistics.median(bursts)


def _measure_start(result: Round, daemon: Daemon, cores: tuple[int, int]) -> None:
    core, generators_core = cores
    with generating(daemon, generators_core) as load:
        load("appear", result.size, 0).result()
        served = load("serve", START_PATIENCE_S)
        with running(daemon, machine.placed(core), generators_core) as started:
            seen: Connected = served.result()
            if seen.connected < seen.asked:
                result.trouble = f"at start, connected {seen.most:,} of {seen.asked:,} VMs"
            else:
                result.start_s = seen.last_at - started.started_at
            result.trouble = started.end(result.trouble)
