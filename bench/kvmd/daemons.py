"""How each daemon is started inside the sandbox, and where it looks for sockets."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine, packages, supervisor

TREE = Path(__file__).resolve().parents[2]
BRINE_CONFIG = Path("/run/bench/kvmd.toml")
GANETI_PID_FILE = Path("/run/ganeti/ganeti-kvmd.pid")
GANETI_NODE = "bench.example.com"
STOP_LIMIT_S = 10.0
WATCHDOG_S = 30
"""As in brine-kvmd.service."""

SANDBOX_FILES: Mapping[Path, str] = {
    BRINE_CONFIG: 'control_dir = "/run/brine/ctrl"\n',
    # Without these three Ganeti's daemon finds that the node has nothing for it to do, and ends.
    Path("/var/lib/ganeti/ssconf_hypervisor_list"): "kvm\n",
    Path("/var/lib/ganeti/ssconf_enabled_user_shutdown"): "True\n",
    Path("/var/lib/ganeti/ssconf_node_vm_capable"): f"{GANETI_NODE}=True\n",
}


@dataclass(frozen=True)
class Daemon:
    """One of the two: its command, its control directory, and the log it writes."""

    name: str
    command: Sequence[str]
    control_dir: Path
    suffix: str
    log: Path
    pid_file: Path | None = None
    """Set when it goes to the background, as in its own production."""
    runtime_dir: Path | None = None
    """Set when it is systemd's child, as in its own production."""
    env: Mapping[str, str] = field(default_factory=dict)


def brine() -> Daemon:
    """brine-kvmd from the source tree, as its unit runs it: journal, descriptor store, watchdog."""
    return Daemon(
        name="brine-kvmd",
        command=[sys.executable, "-m", "brine.kvmd", "--config", str(BRINE_CONFIG)],
        control_dir=Path("/run/brine/ctrl"),
        suffix=".kvmd",
        log=Path("/var/log/bench/brine-kvmd.log"),
        runtime_dir=Path("/run/brine-kvmd"),
        env={"PYTHONPATH": f"{TREE}/pkgs/common:{TREE}/pkgs/kvmd"},
    )


def ganeti(root: Path, program: str) -> Daemon:
    """Ganeti's kvmd from an unpacked package, in the background, with its log in its file."""
    return Daemon(
        name="ganeti-kvmd",
        command=[str(root / program), "--no-user-checks"],
        control_dir=Path("/run/ganeti/kvm-hypervisor/ctrl"),
        suffix=".kvmd",
        log=Path("/var/log/ganeti/kvm-daemon.log"),
        pid_file=GANETI_PID_FILE,
        env={"GANETI_HOSTNAME": GANETI_NODE, "LD_LIBRARY_PATH": packages.library_path(root)},
    )


class Running:
    """A daemon at work."""

    def __init__(
        self,
        pid: int,
        process: subprocess.Popen[bytes] | None,
        *,
        started_at: float,
        real_time: bool,
    ) -> None:
        self.pid = pid
        self.real_time = real_time
        self.started_at = started_at
        """Monotonic, from just before it was started."""
        self._process = process
        self._status: int | None = None

    def exit_status(self) -> int | None:
        """None while it runs; else its exit status, negative for a signal."""
        if self._process is not None:
            return self._process.poll()
        if self._status is None:
            # Gone to the background it became a child of the sandbox's first process: of us.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def stop(self) -> None:
        """Ask it to end, and make it if it does not."""
        limit = time.monotonic() + STOP_LIMIT_S
        signals = iter((signal.SIGTERM, signal.SIGKILL))
        while self.exit_status() is None:
            if (number := next(signals, None)) is None:
                raise RuntimeError(f"process {self.pid} survived SIGKILL")
            os.kill(self.pid, number)
            while self.exit_status() is None and time.monotonic() < limit:
                time.sleep(0.01)
            limit = time.monotonic() + STOP_LIMIT_S


@contextlib.contextmanager
def running(daemon: Daemon, cores: machine.Cores) -> Iterator[Running]:
    """Start a daemon on its core; stopped when the block ends."""
    env = {**os.environ, **daemon.env}
    daemon.log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(daemon.log.open("ab"))
        if daemon.runtime_dir is not None:
            env |= stack.enter_context(
                supervisor.supervised(daemon.runtime_dir, cores.generator, WATCHDOG_S)
            )
            # So it sees that its standard error is the journal's (systemd.exec(5)).
            status = os.fstat(log.fileno())
            env["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
        with machine.placed(cores.daemon) as real_time:
            started_at = time.monotonic()
            process = subprocess.Popen(
                daemon.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if daemon.pid_file is None:
            pid, own = process.pid, process
        else:
            pid, own = _pid_in_background(daemon.pid_file, process), None
        started = Running(pid, own, started_at=started_at, real_time=real_time)
        stack.callback(started.stop)
        yield started


def last_words(daemon: Daemon) -> str:
    """The last two lines of a daemon's log, as one."""
    lines = daemon.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " ".join([line for line in lines if line.strip()][-2:]) or "nothing"


def _pid_in_background(pid_file: Path, process: subprocess.Popen[bytes]) -> int:
    limit = time.monotonic() + STOP_LIMIT_S
    if status := process.wait(STOP_LIMIT_S):
        raise RuntimeError(f"{process.args!r} ended with {status}")
    while time.monotonic() < limit:
        if pid_file.exists() and (text := pid_file.read_text(encoding="ascii")).endswith("\n"):
            return int(text)
        time.sleep(0.001)
    raise RuntimeError(f"{process.args!r} wrote no {pid_file}")
