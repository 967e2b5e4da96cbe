"""`bench kvmd`'s measuring process, in the sandbox: `python3 -m bench.kvmd_load PLAN`.

The load is thousands of scripted VMs in a process of their own, on a core of its own.
"""

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import select
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench import machine
from bench.daemon import Daemon, Running, running, source_path
from bench.harness import run_measurement, tell
from bench.kvmd import BRINE, GANETI, TOGETHER, WARM_UP, Plan, Round
from lab import peer_packages, sandbox
from lab.fake_qemu import GREETING, event_line, line_of

START_PATIENCE_S = 20.0
BREATH_S = 1.0
PATIENCE_S = 5.0
"""Give up on connections when none has come for so long, and on a verdict file when it has not."""
QUIET_S = 0.02
"""Wait so long before each ending: in life it comes out of the quiet, to a daemon gone cold."""

_SUFFIX = ".kvmd"
_BRINE_CONFIG = Path("/run/bench/kvmd.toml")
_GANETI_NODE = "bench.example.com"
_FILES: Mapping[Path, str] = {
    _BRINE_CONFIG: 'control_dir = "/run/brine/ctrl"\n',
    # Without these three Ganeti's daemon finds that the node has nothing for it to do, and ends.
    Path("/var/lib/ganeti/ssconf_hypervisor_list"): "kvm\n",
    Path("/var/lib/ganeti/ssconf_enabled_user_shutdown"): "True\n",
    Path("/var/lib/ganeti/ssconf_node_vm_capable"): f"{_GANETI_NODE}=True\n",
}


@dataclass(frozen=True, kw_only=True)
class KvmDaemon(Daemon):
    """One of the two, and where it looks for sockets."""

    control_dir: Path


def brine() -> KvmDaemon:
    """brine-kvmd from the source tree, as its unit runs it: journal, descriptor store, watchdog."""
    return KvmDaemon(
        name=BRINE,
        command=[sys.executable, "-m", "brine.kvmd", "--config", str(_BRINE_CONFIG)],
        control_dir=Path("/run/brine/ctrl"),
        log=Path("/var/log/bench/brine-kvmd.log"),
        runtime_dir=Path("/run/brine-kvmd"),
        env=source_path("common", "kvmd"),
    )


def ganeti(root: Path, program: str) -> KvmDaemon:
    """Ganeti's kvmd from an unpacked package, in the background, with its log in its file."""
    return KvmDaemon(
        name=GANETI,
        command=[str(root / program), "--no-user-checks"],
        control_dir=Path("/run/ganeti/kvm-hypervisor/ctrl"),
        log=Path("/var/log/ganeti/kvm-daemon.log"),
        pid_file=Path("/run/ganeti/ganeti-kvmd.pid"),
        env={"GANETI_HOSTNAME": _GANETI_NODE, "LD_LIBRARY_PATH": peer_packages.library_path(root)},
    )


@dataclass(frozen=True)
class Connected:
    """How many VMs are connected, were at most, and should be.

    The monotonic times are those of the first socket that was made and of the last connection.
    """

    connected: int
    most: int
    asked: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class Verdicts:
    """Seconds from event to file: of one VM each, or of all that ended together.

    `missed` files never came, and `lost` of the VMs that took the places were never connected to.
    """

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
        for line in lines:
            self._answer_line(line)
        return True

    def _answer_line(self, line: bytes) -> None:
        assert self.connection is not None
        command = json.loads(line)
        reply: dict[str, object] = {"return": {}}
        if command["execute"] == "query-status":
            reply["return"] = {"status": "running", "singlestep": False, "running": True}
        if "id" in command:
            reply["id"] = command["id"]
        self.connection.send(line_of(reply))
        if command["execute"] == "qmp_capabilities":
            self.ready = True

    def power_off(self) -> float:
        """Send the event of a user's poweroff and end the connection.

        Returns when the event set out, monotonic.
        """
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


class Load:
    """A generator at work, in a process of its own: what it is asked to do, and what it saw."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, order: str, *arguments: float) -> None:
        """Give an order, a method of the Generator's, without waiting for its end."""
        self._connection.send((order, arguments))

    def connected(self) -> Connected:
        """Wait for the end of `appear` or `serve`."""
        found: Connected = self._connection.recv()
        return found

    def appear(self, count: int, patience_s: float = 0) -> Connected:
        """See Generator.appear."""
        self.begin("appear", count, patience_s)
        return self.connected()

    def serve(self, patience_s: float) -> Connected:
        """See Generator.serve."""
        self.begin("serve", patience_s)
        return self.connected()

    def verdicts(self, order: str, count: int) -> Verdicts:
        """Have the generator `end` so many VMs at once, or `end_each`."""
        self.begin(order, count)
        found: Verdicts = self._connection.recv()
        return found


@contextlib.contextmanager
def generating(daemon: KvmDaemon, core: int) -> Iterator[Load]:
    """Start a generator on its core, for an empty control directory; it ends with the block."""
    daemon.control_dir.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_generate, args=(theirs, daemon.control_dir), daemon=True)
    with machine.placed(core):
        process.start()
    theirs.close()
    try:
        yield Load(ours)
    finally:
        process.kill()
        process.join()
        ours.close()
        for file in daemon.control_dir.iterdir():
            file.unlink()


def _generate(connection: Connection, folder: Path) -> None:
    """Obey orders until killed."""
    generator = Generator(folder)
    gc.disable()
    while True:
        order, arguments = connection.recv()
        connection.send(getattr(generator, order)(*arguments))


def measure(daemon: KvmDaemon, size: int, plan: Plan, cores: machine.Cores) -> Round:
    """Run a daemon through all phases at one size."""
    result = Round(daemon.name, size)
    with (
        generating(daemon, cores.generator) as load,
        running(daemon, machine.placed(cores.daemon), cores.generator) as started,
    ):
        result.real_time = started.ahead
        _measure_at_work(result, load, started, plan)
        result.trouble = started.end(result.trouble)
    if not result.trouble:
        _measure_start(result, daemon, cores)
    return result


def _measure_at_work(result: Round, load: Load, started: Running, plan: Plan) -> None:
    load.serve(0)
    # The daemon may still be on its way up: its first VM waits for it, with more patience.
    load.appear(WARM_UP)
    if load.serve(START_PATIENCE_S).connected < WARM_UP:
        result.trouble = f"connected none of {WARM_UP} VMs"
        return
    load.verdicts("end_each", WARM_UP)
    time.sleep(BREATH_S)
    base = machine.memory(started.pid)
    result.base_kib = base.pss_kib

    seen = load.appear(result.size - WARM_UP, PATIENCE_S)
    result.connected = seen.most
    if seen.connected < seen.asked:
        result.trouble = f"connected {seen.most:,} of {seen.asked:,} VMs"
    else:
        result.connect_s = seen.last_at - seen.first_at
    if started.exit_status() is not None or seen.connected < WARM_UP + TOGETHER:
        return

    time.sleep(BREATH_S)
    before, began_at = machine.cpu_time(started.pid), time.monotonic()
    time.sleep(plan.idle_s)
    after, ended_at = machine.cpu_time(started.pid), time.monotonic()
    result.idle_ticks = after.ticks - before.ticks
    result.idle_share = (after.run_s - before.run_s) / (ended_at - began_at)
    grown_kib = machine.memory(started.pid).anonymous_kib - base.anonymous_kib
    result.vm_kib = grown_kib / (seen.connected - WARM_UP)

    each = load.verdicts("end_each", plan.samples)
    result.missed, result.lost = each.missed, each.lost
    if len(each.seconds) > 1:
        percentiles = statistics.quantiles(each.seconds, n=100, method="inclusive")
        result.p50_s, result.p99_s = percentiles[49], percentiles[98]

    bursts: list[float] = []
    for _ in range(plan.bursts):
        together = load.verdicts("end", TOGETHER)
        bursts += together.seconds
        result.missed += together.missed
        result.lost += together.lost
    if bursts:
        result.together_s = statistics.median(bursts)


def _measure_start(result: Round, daemon: KvmDaemon, cores: machine.Cores) -> None:
    with generating(daemon, cores.generator) as load:
        load.appear(result.size)
        load.begin("serve", START_PATIENCE_S)
        with running(daemon, machine.placed(cores.daemon), cores.generator) as started:
            seen = load.connected()
            if seen.connected < seen.asked:
                result.trouble = f"at start, connected {seen.most:,} of {seen.asked:,} VMs"
            else:
                result.start_s = seen.last_at - started.started_at
            result.trouble = started.end(result.trouble)


def _all_rounds(plan: Plan) -> Iterator[Round]:
    sandbox.hide_state(_FILES)
    chosen: list[KvmDaemon] = []
    if plan.with_brine:
        chosen.append(brine())
    if plan.ganeti_root:
        chosen.append(ganeti(Path(plan.ganeti_root), plan.ganeti_program))
    cores = machine.share_cores()
    for size in plan.sizes:
        for number in range(plan.rounds):
            # Who goes first changes, so that a machine that warms up or fills up favours nobody.
            for daemon in chosen if number % 2 == 0 else reversed(chosen):
                tell(f"{size:,} VMs, round {number + 1} of {plan.rounds}: {daemon.name}")
                result = measure(daemon, size, plan, cores)
                if result.trouble:
                    tell(f"{daemon.name}: {result.trouble}")
                yield result


if __name__ == "__main__":
    run_measurement(Plan, lambda plan: list(_all_rounds(plan)))
