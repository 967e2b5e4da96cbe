"""How each daemon is started inside the sandbox, and what it finds there."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import machine, procfs, supervisor
from lab import ganeti

TREE = Path(__file__).resolve().parents[2]
PORT = 1814
KEY = b"the benchmark's key\n"
CONFIG = ganeti.STATE / "config.data"
"""Both daemons have the same file."""
STOP_LIMIT_S = 10.0
WATCHDOG_S = 30
_SETTINGS = Path("/run/bench/confd.toml")
_RUNTIME = Path("/run/brine-confd")


@dataclass(frozen=True)
class Daemon:
    """One of the two: its command and the log it writes."""

    name: str
    command: Sequence[str]
    log: Path
    settings: str = ""
    """The text of its settings file, if it has one."""
    runtime_dir: Path | None = None
    """Set when it is systemd's child, as in its own production."""
    env: Mapping[str, str] = field(default_factory=dict)


def brine(*, workers: int = 1) -> Daemon:
    """brine-confd from the source tree, as its unit runs it: journal, watchdog."""
    settings = (
        f'bind = "127.0.0.1"\nport = {PORT}\nworkers = {workers}\n'
        f'config_file = "{CONFIG}"\nkey_file = "{ganeti.STATE}/hmac.key"\n'
        "reveal_secrets = true\n"  # as the peer does
    )
    return Daemon(
        name="brine-confd",
        command=[sys.executable, "-P", "-m", "brine.confd", "--config", str(_SETTINGS)],
        log=Path("/var/log/bench/brine-confd.log"),
        settings=settings,
        runtime_dir=_RUNTIME,
        env={"PYTHONPATH": f"{TREE}/pkgs/common:{TREE}/pkgs/config:{TREE}/pkgs/confd"},
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
    return Daemon(
        name="echo",
        command=[sys.executable, "-P", "-m", "bench.confd.echo", str(PORT)],
        log=Path("/var/log/bench/echo.log"),
        env={"PYTHONPATH": f"{TREE}/tests:{TREE}"},
    )


def prepare(config: str) -> None:
    """Inside the sandbox: put in place what the daemons read."""
    for folder in (ganeti.STATE, Path("/run/ganeti"), Path("/var/log/ganeti"), _SETTINGS.parent):
        folder.mkdir(parents=True, exist_ok=True)
    ganeti.write_state(ganeti.STATE, config, KEY)


class Running:
    """A daemon at work."""

    def __init__(self, process: subprocess.Popen[bytes], *, favoured: bool) -> None:
        self.favoured = favoured
        self.started_at = time.monotonic()
        """Monotonic, from just after it was started."""
        self._process = process

    def pss_kib(self) -> int:
        """Memory of all its processes; pages that they share are counted once."""
        return sum(procfs.memory(pid).pss_kib for pid in procfs.family(self._process.pid))

    def cpu_s(self) -> float:
        """Processor time that all its processes have used."""
        return sum(procfs.cpu_time(pid).run_s for pid in procfs.family(self._process.pid))

    def exit_status(self) -> int | None:
        """None while it runs; else its exit status, negative for a signal."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to end, and make it if it does not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
                return
        raise RuntimeError(f"process {self._process.pid} survived SIGKILL")


@contextlib.contextmanager
def running(daemon: Daemon, cores: Collection[int], manager_core: int) -> Iterator[Running]:
    """Start a daemon on its cores; stopped when the block ends.

    `manager_core` is for what stands in for systemd.
    """
    env = {**os.environ, **daemon.env}
    daemon.log.parent.mkdir(parents=True, exist_ok=True)
    _SETTINGS.write_text(daemon.settings, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(daemon.log.open("ab"))
        if daemon.runtime_dir is not None:
            env |= stack.enter_context(
                supervisor.supervised(daemon.runtime_dir, manager_core, WATCHDOG_S)
            )
            # So it sees that its standard error is the journal's (systemd.exec(5)).
            status = os.fstat(log.fileno())
            env["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
        with machine.favoured(cores) as favoured:
            process = subprocess.Popen(
                daemon.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            started = Running(process, favoured=favoured)
        stack.callback(started.stop)
        yield started


def last_words(daemon: Daemon) -> str:
    """The last two lines of a daemon's log, as one."""
    lines = daemon.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " ".join([line for line in lines if line.strip()][-2:]) or "nothing"


def renamed(daemon: Daemon, name: str) -> Daemon:
    """The same under another name, for a setting of its own."""
    return replace(daemon, name=name)
