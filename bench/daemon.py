"""A daemon that is measured beside Ganeti's: its plan, and its run as in its own production."""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.harness import Row, measure_in_sandbox, numbers_of, positive, tell
from lab import ganeti
from lab.service_manager import ServiceManager
from lab.tree import TREE

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
"""Fixed: libsystemd has it compiled in. In the sandbox, /run is ours."""
STOP_LIMIT_S = 10.0
WATCHDOG_S = 30
"""As in our units."""

_MANAGER_FOLDER = Path("/run/bench")
_LONGEST_MESSAGE = 64 * 1024


# ---- what is measured, and the report


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What to measure, how much; without a *peer* our own daemon alone."""

    sizes: list[int]
    rounds: int
    peer: ganeti.Unpacked | None
    with_brine: bool


@dataclass
class PeerRound:
    """One daemon at one size, once. `trouble` says why what is missing is missing."""

    daemon: str
    size: int
    favoured: bool = False
    trouble: str = ""


def peer_parser(
    name: str, *, sizes: Sequence[int], of: str, smallest: int, quick: str
) -> argparse.ArgumentParser:
    """The command line of such a subject.

    :param of: what there are so many of, and at least the *smallest* number.
    """
    description = f"Measure brine-{name} beside Ganeti's daemon (fetched, not installed)."
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=description)
    help_ = f"numbers of {of}"
    type_ = numbers_of(of, smallest=smallest)
    parser.add_argument("--sizes", type=type_, default=[*sizes], metavar="N,...", help=help_)
    parser.add_argument("--rounds", type=positive, help="rounds a size (3)")
    parser.add_argument("--quick", action="store_true", help=f"1 round, {quick}")
    help_ = "run one daemon without the other"
    parser.add_argument("--only", choices=("brine", "ganeti"), help=help_)
    help_ = "also write every round's numbers"
    parser.add_argument("--json", type=Path, metavar="FILE", help=help_)
    return parser


def plan_of(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """The fields of `PeerPlan`. Fetches the peer."""
    peer = None
    if options.only != "brine":
        peer = ganeti.daemon(name)
        tell(f"peer: {peer.package} {peer.version}")
    return {
        "sizes": options.sizes,
        "rounds": options.rounds or (1 if options.quick else 3),
        "peer": peer,
        "with_brine": options.only != "ganeti",
    }


def measured(name: str, plan: PeerPlan, priority: str) -> tuple[Any, list[str]]:
    """Measure in the sandbox; returns the rounds, and lines about what was measured."""
    peer = plan.peer
    rounds = measure_in_sandbox(name, plan, needs=[peer.root] if peer else [])
    here = machine.describe()
    which = f"{peer.package} {peer.version}" if peer else "none"
    if not all(result.favoured for result in rounds):
        priority = "normal: do not compare"
    heads = [
        f"{here.system}, Python {here.python}; peer: {which}",
        f"daemon and generator on a core each, priority {priority}",
    ]
    return rounds, heads


def median(
    rounds: Iterable[Any], daemon: str, value: Callable[[Any], float | None], scale: float = 1
) -> float | None:
    """The median over a daemon's rounds; None if none of them has the number."""
    found = [value(one) for one in rounds if one.daemon == daemon]
    numbers = [number for number in found if number is not None]
    return statistics.median(numbers) * scale if numbers else None


def row_of(
    rounds: Sequence[Any],
    name: str,
    title: str,
    unit: str,
    value: Callable[[Any], float | None],
    scale: float = 1,
) -> Row:
    """The medians of ours and of the peer."""
    ours, peers = (median(rounds, f"{who}-{name}", value, scale) for who in ("brine", "ganeti"))
    return Row.of_pair(title, unit, ours, peers)


# ---- the daemon


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """One that is measured: its command and the log that it writes."""

    name: str
    command: Sequence[str]
    log: Path
    files: Mapping[Path, str] = field(default_factory=dict)  # that are to be there before it starts
    pid_file: Path | None = None  # of one that goes to the background in its own production
    runtime_dir: Path | None = None  # of one that is systemd's child in its own production
    control_dir: Path = Path()  # where kvmd looks for sockets
    env: Mapping[str, str] = field(default_factory=dict)

    def last_words(self) -> str:
        """The last two lines of its log, as one."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " ".join([line for line in lines if line.strip()][-2:]) or "nothing"


def ours(name: str, settings: str, *packages: str, control_dir: Path = Path()) -> Daemon:
    """Our daemon from the source tree, as its unit runs it: journal, stored descriptors, watchdog.

    :param packages: of the tree, that it needs.
    """
    file = Path(f"/run/bench/{name}.toml")
    return Daemon(
        name=f"brine-{name}",
        command=[sys.executable, "-P", "-m", f"brine.{name}", "--config", str(file)],
        log=Path(f"/var/log/bench/brine-{name}.log"),
        files={file: settings},
        runtime_dir=Path(f"/run/brine-{name}"),
        control_dir=control_dir,
        env={"PYTHONPATH": ":".join(str(TREE / "pkgs" / package) for package in packages)},
    )


class Running:
    """A daemon at work."""

    def __init__(
        self, daemon: Daemon, process: subprocess.Popen[bytes], *, started_at: float, ahead: bool
    ) -> None:
        self.ahead = ahead
        """Whether it has the priority that was asked for."""
        self.started_at = started_at
        """Monotonic, from just before it was started."""
        self._daemon = daemon
        self._process: subprocess.Popen[bytes] | None = process
        self._status: int | None = None
        self.pid = process.pid
        if daemon.pid_file is not None:
            self.pid, self._process = _pid_in_background(daemon.pid_file, process), None

    def pss_kib(self) -> int:
        """Memory of all its processes; pages that they share are counted once."""
        return sum(machine.memory_kib(pid, "Pss") for pid in machine.family(self.pid))

    def cpu_s(self) -> float:
        """Processor time that all its processes have used."""
        return sum(map(machine.cpu_s, machine.family(self.pid)))

    def exit_status(self) -> int | None:
        """None while it runs; else its exit status, negative for a signal."""
        if self._process is not None:
            return self._process.poll()
        if self._status is None:
            # Gone to the background it became a child of the sandbox's first process: of us.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def end(self, trouble: str) -> str:
        """The trouble it had, with how it ended if it did."""
        if (status := self.exit_status()) is None:
            return trouble
        subject = f"{trouble}, then" if trouble else "it"
        return f"{subject} ended with {status}: {self._daemon.last_words()}"

    def stop(self) -> None:
        """Ask it to end, and make it if it does not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.exit_status() is not None:
                return
            os.kill(self.pid, number)
            limit = time.monotonic() + STOP_LIMIT_S
            while self.exit_status() is None and time.monotonic() < limit:
                time.sleep(0.01)
        if self.exit_status() is None:
            raise RuntimeError(f"process {self.pid} survived SIGKILL")


@contextlib.contextmanager
def running(
    daemon: Daemon, place: AbstractContextManager[bool], manager_core: int
) -> Iterator[Running]:
    """Start a daemon; stopped when the block ends.

    :param place: puts it on its cores, and yields whether it is ahead of other work there.
    """
    env = {**os.environ, **daemon.env}
    for path, text in {daemon.log: "", **daemon.files}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(daemon.log.open("ab"))
        if daemon.runtime_dir is not None:
            env |= stack.enter_context(_supervised(daemon.runtime_dir, manager_core))
            # So it sees that its standard error is the journal's (systemd.exec(5)).
            status = os.fstat(log.fileno())
            env["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
        with place as ahead:
            started_at = time.monotonic()
            process = subprocess.Popen(
                daemon.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        started = Running(daemon, process, started_at=started_at, ahead=ahead)
        stack.callback(started.stop)
        yield started


def _pid_in_background(pid_file: Path, process: subprocess.Popen[bytes]) -> int:
    limit = time.monotonic() + STOP_LIMIT_S
    if status := process.wait(STOP_LIMIT_S):
        raise RuntimeError(f"{process.args!r} ended with {status}")
    while time.monotonic() < limit:
        if pid_file.exists() and (text := pid_file.read_text(encoding="ascii")).endswith("\n"):
            return int(text)
        time.sleep(0.001)
    raise RuntimeError(f"{process.args!r} wrote no {pid_file}")


@contextlib.contextmanager
def _supervised(runtime_dir: Path, core: int) -> Iterator[Mapping[str, str]]:
    """Be there for a service; yields the environment that systemd would give it."""
    runtime_dir.mkdir(parents=True, exist_ok=True)
    with machine.placed(core, priority=2):  # a daemon must not wait until the load has gone idle
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.daemon"], stdout=subprocess.PIPE, text=True
        )
    notify = _MANAGER_FOLDER / "notify"
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the stand-in for systemd did not start")
        yield {
            "NOTIFY_SOCKET": str(notify),
            "RUNTIME_DIRECTORY": str(runtime_dir),
            "WATCHDOG_USEC": str(WATCHDOG_S * 1_000_000),
        }
    finally:
        process.kill()
        process.communicate()
        for file in (JOURNAL_SOCKET, notify, *runtime_dir.iterdir()):
            file.unlink(missing_ok=True)


def _supervise() -> None:
    """Stand in for systemd and journald until killed: take, and keep, what a service sends.

    A daemon pays for each message and each descriptor that it hands over; without somebody at the
    other end it would look faster than it is.
    """
    JOURNAL_SOCKET.parent.mkdir(parents=True, exist_ok=True)
    with (
        ServiceManager(_MANAGER_FOLDER),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal,
    ):
        journal.bind(str(JOURNAL_SOCKET))
        print("ready", flush=True)
        while True:
            journal.recv(_LONGEST_MESSAGE)


if __name__ == "__main__":
    _supervise()
