"""A daemon that is measured: started in the sandbox as in its own production, and stopped again."""

import array
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine
from lab.tree import TREE

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
"""Fixed: libsystemd has it compiled in. In the sandbox, /run is ours."""
STOP_LIMIT_S = 10.0
WATCHDOG_S = 30
"""As in our units."""

_NOTIFY_SOCKET = Path("/run/bench/notify")
_LONGEST_MESSAGE = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """One that is measured: its command and the log that it writes.

    :param files: what is to be there before it starts.
    :param pid_file: set when it goes to the background, as in its own production.
    :param runtime_dir: set when it is systemd's child, as in its own production.
    """

    name: str
    command: Sequence[str]
    log: Path
    files: Mapping[Path, str] = field(default_factory=dict)
    pid_file: Path | None = None
    runtime_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def last_words(self) -> str:
        """The last two lines of its log, as one."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " ".join([line for line in lines if line.strip()][-2:]) or "nothing"


def source_path(*packages: str) -> dict[str, str]:
    """The environment for our own code from the source tree."""
    return {"PYTHONPATH": ":".join(str(TREE / "pkgs" / name) for name in packages)}


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
        return sum(machine.memory(pid).pss_kib for pid in machine.family(self.pid))

    def cpu_s(self) -> float:
        """Processor time that all its processes have used."""
        return sum(machine.cpu_time(pid).run_s for pid in machine.family(self.pid))

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
    :param manager_core: for what stands in for systemd.
    """
    env = {**os.environ, **daemon.env}
    for path in (daemon.log, *daemon.files):
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, text in daemon.files.items():
        path.write_text(text, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(daemon.log.open("ab"))
        if daemon.runtime_dir is not None:
            env |= stack.enter_context(_supervised(daemon.runtime_dir, manager_core, WATCHDOG_S))
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
def _supervised(runtime_dir: Path, core: int, watchdog_s: int) -> Iterator[Mapping[str, str]]:
    """Be there for a service; yields the environment that systemd would give it."""
    runtime_dir.mkdir(parents=True, exist_ok=True)
    with machine.placed(core, priority=2):  # a daemon must not wait until the load has gone idle
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.daemon"], stdout=subprocess.PIPE, text=True
        )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the stand-in for systemd did not start")
        yield {
            "NOTIFY_SOCKET": str(_NOTIFY_SOCKET),
            "RUNTIME_DIRECTORY": str(runtime_dir),
            "WATCHDOG_USEC": str(watchdog_s * 1_000_000),
        }
    finally:
        process.kill()
        process.communicate()
        for file in (JOURNAL_SOCKET, _NOTIFY_SOCKET, *runtime_dir.iterdir()):
            file.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    return listener


def _take_notice(listener: socket.socket, stored: dict[str, list[int]]) -> None:
    size = array.array("i").itemsize
    message, ancillary, _, _ = listener.recvmsg(_LONGEST_MESSAGE, socket.CMSG_SPACE(size))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % size])
    fields = dict(line.partition("=")[::2] for line in message.decode().splitlines())
    name = fields.get("FDNAME", "stored")
    if "FDSTORE" in fields:
        stored.setdefault(name, []).extend(descriptors)
    elif "FDSTOREREMOVE" in fields:
        for descriptor in stored.pop(name, []):
            os.close(descriptor)


def _supervise() -> None:
    """Stand in for systemd and journald until killed: take, and keep, what a service sends.

    A daemon pays for each message and each descriptor that it hands over; without somebody at the
    other end it would look faster than it is.
    """
    journal, notify = _listen(JOURNAL_SOCKET), _listen(_NOTIFY_SOCKET)
    stored: dict[str, list[int]] = {}
    poll = select.epoll()
    poll.register(journal, select.EPOLLIN)
    poll.register(notify, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        for descriptor, _ in poll.poll():
            with contextlib.suppress(BlockingIOError):
                while True:
                    if descriptor == journal.fileno():
                        journal.recv(_LONGEST_MESSAGE)
                    else:
                        _take_notice(notify, stored)


if __name__ == "__main__":
    _supervise()
