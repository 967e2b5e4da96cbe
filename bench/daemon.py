"""A daemon that is measured beside Ganeti's, running as in its own production."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine
from bench.harness import Plan, Round, tell, turned
from lab.errors import LabError
from lab.from_source import from_source
from lab.service_manager import ServiceManager
from lab.waiting import wait_for

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
"""Fixed: libsystemd has it compiled in. In the sandbox, /run is ours."""
STOP_LIMIT_S = 10.0
WATCHDOG_S = 30
"""As in our units."""

_MANAGER_FOLDER = Path("/run/bench")
_LONGEST_MESSAGE = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class MeasuredDaemon:
    """A daemon to measure: its command and its log."""

    name: str
    command: Sequence[str]
    log: Path
    files: Mapping[Path, str] = field(default_factory=dict)  # that are to be there before it starts
    pid_file: Path | None = None  # of one that goes to the background in its own production
    runtime_dir: Path | None = None  # of one that is systemd's child in its own production
    control_dir: Path = Path()  # where kvmd looks for sockets
    env: Mapping[str, str] = field(default_factory=dict)


def ours(name: str, settings: str, *, control_dir: Path = Path()) -> MeasuredDaemon:
    """Ours from the source tree, as its unit runs it: journal, stored descriptors, watchdog."""
    file = Path(f"/run/bench/{name}.toml")
    command, environment = from_source([f"brine-{name}", "--config", str(file)])
    return MeasuredDaemon(
        name=f"brine-{name}",
        command=command,
        log=Path(f"/var/log/bench/brine-{name}.log"),
        files={file: settings},
        runtime_dir=Path(f"/run/brine-{name}"),
        control_dir=control_dir,
        env={"PYTHONPATH": environment["PYTHONPATH"]},
    )


class MeasuredProcess:
    """A daemon at work; *started_at* is the monotonic time just before it was started."""

    def __init__(
        self, daemon: MeasuredDaemon, process: subprocess.Popen[bytes], started_at: float
    ) -> None:
        self.started_at = started_at
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

    def ending(self) -> list[str]:
        """How it has ended, as one trouble; none while it runs."""
        if (status := self.exit_status()) is None:
            return []
        lines = self._daemon.log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = " ".join([line for line in lines if line.strip()][-2:]) or "nothing"
        return [f"it ended with {status}: {said}"]

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
            raise LabError(f"process {self.pid} survived SIGKILL")


@contextlib.contextmanager
def running(
    daemon: MeasuredDaemon, place: AbstractContextManager[bool], manager_core: int
) -> Iterator[MeasuredProcess]:
    """Start a daemon; stopped when the block ends.

    :param place: puts it on its cores.
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
        with place:
            started_at = time.monotonic()
            process = subprocess.Popen(
                daemon.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        started = MeasuredProcess(daemon, process, started_at)
        stack.callback(started.stop)
        yield started


def rounds_of(
    plan: Plan,
    cases: Sequence[tuple[MeasuredDaemon, int]],
    measure: Callable[[MeasuredDaemon, int], Round],
) -> Iterator[Round]:
    """Measure each daemon at its size, in turns: what disturbs the machine for a while does so at
    every size."""
    for number in range(plan.rounds):
        for daemon, size in turned(cases, number):
            tell(f"round {number + 1} of {plan.rounds}: {daemon.name}, {size:,}")
            result = measure(daemon, size)
            for trouble in result.troubles:
                tell(f"{daemon.name}: {trouble}")
            yield result


def heads(plan: Plan, priority: str, place: AbstractContextManager[bool]) -> list[str]:
    """Lines about what is measured, and whether it gets its priority."""
    assert plan.peer
    with place as is_ahead:
        given = priority if is_ahead else "normal: do not compare"
    return [
        *machine.description(),
        f"peer: {plan.peer.package} {plan.peer.version}; rounds: {plan.rounds}",
        f"daemon and generator on a core each, priority {given}",
    ]


def _pid_in_background(pid_file: Path, process: subprocess.Popen[bytes]) -> int:
    def pid() -> int:
        text = pid_file.read_text(encoding="ascii") if pid_file.exists() else ""
        return int(text) if text.endswith("\n") else 0

    if status := process.wait(STOP_LIMIT_S):
        raise LabError(f"{process.args!r} ended with {status}")
    return wait_for(str(pid_file), pid, timeout_s=STOP_LIMIT_S, interval_s=0.001)


@contextlib.contextmanager
def _supervised(runtime_dir: Path, core: int) -> Iterator[Mapping[str, str]]:
    """Be there for a service; yields the environment that systemd would give it."""
    runtime_dir.mkdir(parents=True, exist_ok=True)
    with machine.placed({core}, real_time=2):  # a daemon must not wait until the load has gone idle
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.daemon"], stdout=subprocess.PIPE, text=True
        )
    notify = _MANAGER_FOLDER / "notify"
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise LabError("the stand-in for systemd did not start")
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

    A daemon pays for each message and each descriptor that it hands over; without a peer at the
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
