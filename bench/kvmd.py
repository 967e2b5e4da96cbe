"""brine-kvmd beside Ganeti's daemon of the same purpose, on scripted QMP sockets.

The load is thousands of scripted VMs in a process of their own, on a core of its own.
"""

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
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from bench.daemon import MeasuredDaemon, MeasuredProcess, heads, ours, rounds_of, running
from bench.harness import Plan, Report, Round, Table, TableRow, percentiles
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

APPEARING = "connect, all appear at once"
STARTING = "connect, all there at start"
P50, P99 = "event to file, p50", "event to file, p99"
BURST = "100 at once, first event to last file"
MEMORY = "memory a VM over the base (anonymous)"
IDLE = "CPU when idle (utime + stime)"
ROWS: Sequence[tuple[str, str, Callable[[TableRow], TableRow]]] = (
    (APPEARING, "s", lambda row: row.at_most(1 / 2)),
    (STARTING, "s", lambda row: row.at_most(0.55)),
    (P50, "ms", lambda row: row.at_most(0.45)),
    (P99, "ms", lambda row: row.at_most(0.33)),
    (BURST, "ms", lambda row: row.at_most(1 / 3)),
    (MEMORY, "KiB", lambda row: row.within(4)),
    (IDLE, "ticks", lambda row: row.within(0)),
)
"""The measured quantities, with their units and brine-kvmd's targets."""
FEW, ROWS_OF_FEW = 200, (P50, P99)
"""With so few VMs, these are to take no longer than the peer's."""


def tables(rounds: Sequence[Round], plan: Plan) -> Iterator[Table]:
    """One a size."""
    for size in plan.sizes:
        here = [one for one in rounds if one.size == size]
        rows = []
        for what, unit, target in ROWS:
            row = TableRow.of_rounds(what, unit, here, (BRINE, GANETI), what)
            if size == FEW and what in ROWS_OF_FEW:
                row = row.at_most(1)
            rows.append(target(row) if size == TARGET_SIZE else row)
        yield Table(f"{size:,} VMs, medians", rows, (BRINE, GANETI))


# ---- both daemons

_SUFFIX = ".kvmd"
# Without these three Ganeti's daemon finds that the node has nothing for it to do, and ends.
_FILES: Mapping[Path, str] = {
    ganeti.STATE / "ssconf_hypervisor_list": "kvm\n",
    ganeti.STATE / "ssconf_enabled_user_shutdown": "True\n",
    ganeti.STATE / "ssconf_node_vm_capable": f"{ganeti.NODE}=True\n",
}


def brine() -> MeasuredDaemon:
    """brine-kvmd."""
    folder = Path("/run/brine/ctrl")
    return ours("kvmd", f'control_dir = "{folder}"\n', control_dir=folder)


def peer(kvmd: ganeti.Unpacked) -> MeasuredDaemon:
    """Ganeti's kvmd from an unpacked package, in the background, with its log in its file."""
    return MeasuredDaemon(
        name=GANETI,
        command=[str(kvmd.program), "--no-user-checks"],
        control_dir=Path("/run/ganeti/kvm-hypervisor/ctrl"),
        log=Path("/var/log/ganeti/kvm-daemon.log"),
        pid_file=Path("/run/ganeti/ganeti-kvmd.pid"),
        env=kvmd.environment(),
    )


# ---- the VMs


@dataclass(frozen=True)
class Connected:
    """How many VMs are connected, were at most, and should be, and the monotonic times of the first
    socket that was made and of the last connection."""

    connected: int
    most: int
    asked: int
    first_at: float
    last_at: float


class ScriptedVm:
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
        self._by_fd: dict[int, ScriptedVm] = {}
        self._standing: deque[ScriptedVm] = deque()
        self._lost: list[ScriptedVm] = []
        self._missed = 0
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
        guest = ScriptedVm(self._folder, f"vm{next(self._numbers):06}")
        self._standing.append(guest)
        self._watch(guest.listener.fileno(), guest)

    def _watch(self, fd: int, guest: ScriptedVm) -> None:
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

    def _settle(self) -> None:
        """Have all VMs connected, then let the daemon rest."""
        self.serve(PATIENCE_S)
        for guest in [guest for guest in self._standing if not guest.ready]:
            self._lost.append(guest)  # it may still come, but is waited for no more
            self._standing.remove(guest)
        until = time.monotonic() + QUIET_S
        while (left := until - time.monotonic()) > 0:
            self._serve(left)

    def end(self, count: int) -> list[float]:
        """End the VMs that have stood longest, and put new ones in their places.

        Returns one time for all, from the first event to the last file; none if a file is missed.
        """
        guests = list(itertools.islice((guest for guest in self._standing if guest.ready), count))
        if len(guests) < count:
            self._missed += count
            return []
        for guest in guests:
            self._standing.remove(guest)
        self._connected -= count
        sent_at = guests[0].power_off()
        for guest in guests[1:]:
            guest.power_off()
        for guest in guests:
            guest.vanish()
        missed_before = self._missed
        file_exists = os.access
        for guest in guests:
            # A tight loop costs the daemon nothing on its own core; an inotify watch would.
            while not file_exists(guest.verdict_path, os.F_OK):
                if time.monotonic() - sent_at > PATIENCE_S:
                    self._missed += 1
                    break
        took_s = time.monotonic() - sent_at
        for guest in guests:
            Path(guest.verdict_path).unlink(missing_ok=True)
            self._add()
        self._settle()
        return [] if self._missed > missed_before else [took_s]

    def end_each(self, samples: int) -> list[float]:
        """So many times: end one VM, see its verdict, put a new one in its place."""
        seconds: list[float] = []
        for _ in range(samples):
            seconds += self.end(1)
            if not self._connected:  # the daemon is gone
                break
        return seconds

    def troubles(self) -> list[str]:
        """The omissions of the daemon."""
        missed = f"{self._missed:,} verdict files never came" if self._missed else ""
        lost = f"{len(self._lost):,} new VMs were never connected to" if self._lost else ""
        return [trouble for trouble in (missed, lost) if trouble]


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
def generating(folder: Path, core: int) -> Iterator[Load]:
    """Start a generator on its core, for an empty control directory; it ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, _start_generator, (folder,)) as executor:

        def load(order: str, *arguments: float) -> Future[Any]:
            return executor.submit(_obey, order, arguments)

        with machine.placed({core}, real_time=1):
            load("serve", 0).result()  # with which its process is made
        yield load
    for file in folder.iterdir():
        file.unlink()


# ---- the rounds


def measure(plan: Plan) -> Report:
    """All sizes of both daemons."""
    assert plan.peer
    _allow_descriptors(plan.sizes)
    sandbox.hide_state(_FILES)
    cores = machine.share_cores()
    lines = heads(plan, "real-time", machine.placed({cores[0]}, real_time=1))
    measure_one = partial(_measure, cores=cores, plan=plan)
    cases = [(daemon, size) for size in plan.sizes for daemon in (brine(), peer(plan.peer))]
    rounds = list(rounds_of(plan, cases, measure_one))
    return Report.of_rounds(lines, tables(rounds, plan), rounds, of="VMs", peers=[GANETI])


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


def _measure(daemon: MeasuredDaemon, size: int, *, cores: tuple[int, int], plan: Plan) -> Round:
    """Run a daemon through all phases at one size."""
    result = Round(daemon.name, size)
    core, generators_core = cores
    place = partial(machine.placed, {core}, real_time=1)
    with (
        generating(daemon.control_dir, generators_core) as load,
        running(daemon, place(), generators_core) as process,
    ):
        _measure_at_work(result, load, process, plan)
        result.troubles += process.ending()
        is_well = not result.troubles
        result.troubles += load("troubles").result()
    if not is_well:
        return result
    with generating(daemon.control_dir, generators_core) as load:
        load("appear", size, 0).result()
        served = load("serve", START_PATIENCE_S)
        with running(daemon, place(), generators_core) as process:
            seen: Connected = served.result()
            if seen.connected < seen.asked:
                trouble = f"at start, connected {seen.most:,} of {seen.asked:,} VMs"
                result.troubles.append(trouble)
            else:
                result.numbers[STARTING] = seen.last_at - process.started_at
            result.troubles += process.ending()
    return result


def _measure_at_work(result: Round, load: Load, process: MeasuredProcess, plan: Plan) -> None:
    # The daemon may still be on its way up: its first VM waits for it, with more patience.
    load("appear", WARM_UP, 0).result()
    if load("serve", START_PATIENCE_S).result().connected < WARM_UP:
        result.troubles.append(f"connected none of {WARM_UP} VMs")
        return
    load("end_each", WARM_UP).result()
    time.sleep(BREATH_S)
    base_kib = machine.memory_kib(process.pid, "Anonymous")

    seen = load("appear", result.size - WARM_UP, PATIENCE_S).result()
    if seen.connected < seen.asked:
        result.troubles.append(f"connected {seen.most:,} of {seen.asked:,} VMs")
    else:
        result.numbers[APPEARING] = seen.last_at - seen.first_at
    if process.exit_status() is not None or seen.connected < WARM_UP + TOGETHER:
        return

    time.sleep(BREATH_S)
    ticks = machine.cpu_ticks(process.pid)
    time.sleep(plan.pick(10, 5, 1))
    result.numbers[IDLE] = machine.cpu_ticks(process.pid) - ticks
    grown_kib = machine.memory_kib(process.pid, "Anonymous") - base_kib
    result.numbers[MEMORY] = grown_kib / (seen.connected - WARM_UP)

    seconds = load("end_each", plan.pick(500, 100, 20)).result()
    if found := percentiles(seconds):
        result.numbers |= {P50: found[49], P99: found[98]}
    bursts: list[float] = []
    for _ in range(plan.pick(5, 3, 1)):
        bursts += load("end", TOGETHER).result()
    if bursts:
        result.numbers[BURST] = statistics.median(bursts)
