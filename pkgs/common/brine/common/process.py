"""Processes: their units, those at the other end of a socket, and those that this one starts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

from brine.common import paths
from brine.common.qmp.wire import QmpError

if TYPE_CHECKING:
    import subprocess

T = TypeVar("T")

PREFIX = "brine-instance@"
SUFFIX = ".service"

TERM_TIMEOUT_S = 10.0
"""How long a process may take to end after a signal: QEMU still flushes its disks."""

_CREDENTIALS = struct.Struct("3i")  # of unix(7), SO_PEERCRED: process, user, group
_SILENT_S = 2.0
_KILLED_S = 1.0


@contextlib.contextmanager
def spoken_wait(text: str) -> Iterator[None]:
    """Print on stderr why the command waits, and how long at most, after two seconds."""
    timer = threading.Timer(_SILENT_S, lambda: print(f"brine: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def begun(work: Callable[[], T]) -> Callable[[], T]:
    """Begin *work* in a thread. The result waits for its end, and returns or raises its outcome."""
    results: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> T:
        thread.join()
        for fault in faults:
            raise fault
        return results[0]

    return result


# Processes and their units.


def unit_of(name: str) -> str:
    return f"{PREFIX}{name}{SUFFIX}"


def runs_in(pid: int, unit: str) -> bool:
    """Whether a process is in the control group of a unit of the system's (:manpage:`cgroups(7)`).

    The whole path counts: a user's own service manager has units of the same names, but below a
    service of the system's. Above a unit of the system's there are slices only.
    """
    return any(
        last == unit and all(one.endswith(".slice") for one in slices)
        for *slices, last in _groups_of(pid)
    )


def slice_of(pid: int) -> str:
    """The slice of a process of a system's service (:manpage:`systemd.slice(5)`); empty if it is
    none's."""
    for *slices, last in _groups_of(pid):
        if last.endswith(SUFFIX):
            return slices[-1] if slices else "-.slice"
    return ""


def _groups_of(pid: int) -> Iterator[list[str]]:
    """The control groups of a process that may be systemd's, each as the parts of its path."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):  # of cgroup v2, and of v1
            yield path.split("/")[1:]


class Process:
    """A process, held by a descriptor, so that its number can't be another's later
    (:manpage:`pidfd_open(2)`)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def of(cls, pid: int, *, unit: str) -> Iterator[Process | None]:
        """The process with that number, if it is in the control group of *unit*; None otherwise.
        The number may be another process's by now: the group is read after the process is held."""
        try:
            descriptor = os.pidfd_open(pid) if pid > 0 else -1
        except ProcessLookupError:
            descriptor = -1
        if descriptor < 0:
            yield None
            return
        try:
            process = cls(descriptor)
            yield process if runs_in(pid, unit) and not process.ended() else None
        finally:
            os.close(descriptor)

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal. A process that has ended gets none, which is no error."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> Signals | None:
        """End it by SIGTERM, and :data:`TERM_TIMEOUT_S` later by SIGKILL; returns the one it took,
        or None if neither did."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            if self.ended(TERM_TIMEOUT_S):
                return number
        return None


def start_time_of(pid: int) -> str:
    """When a process started, in clock ticks since the boot (:manpage:`proc(5)`, field 22 of
    ``stat``); empty if this process can't see one of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # The second field is the program's name, in brackets, and may have spaces.
    return text.rpartition(")")[2].split()[19]


def main_pid() -> int:
    """The main process of this process's unit (``$MAINPID``); 0 if it has ended."""
    text = os.environ.get("MAINPID", "")
    return int(text) if text.isdecimal() else 0


# The process at the other end of a socket.


class StrangerError(QmpError):
    """Another process listens at the socket of an instance's QEMU."""


def refuse_stranger(pid: int, name: str, socket: Path) -> None:
    """Refuse a process that only poses as an instance's QEMU. Others may write to the folder of the
    sockets. They must not be told a password, be given a disk, or be believed.

    :raises StrangerError: if it is not of the instance's unit.
    """
    if not runs_in(pid, unit_of(name)):
        text = f"{socket}: somebody else than its QEMU listens there, process {pid}"
        raise StrangerError(text, hint=f"systemctl status {pid} tells who")


def stranger_check(socket: Path) -> Callable[[int], None] | None:
    """The check of a QMP socket's listener, as :func:`refuse_stranger` does it; None for a VM that
    is no instance of Brine's: its QEMU may run in any unit."""
    name = socket.stem
    is_ours = paths.InstanceFiles(name).spec.exists()
    if is_ours and socket.parent == paths.CONTROL_DIR:
        return lambda pid: refuse_stranger(pid, name, socket)
    return None


def is_listening(path: Path) -> bool:
    """Whether a process listens at a socket, even if it is busy with other clients."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except BlockingIOError:
            pass
        except OSError:
            return False
    return True


def peer_process(connection: socket.socket) -> int:
    """The id of the process that made the socket that this one is connected to (``SO_PEERCRED`` of
    :manpage:`unix(7)`); 0 if it can't be seen from here."""
    return _peer_credentials(connection)[0]


def peer_user(connection: socket.socket) -> int:
    """The user of that process when it began to listen."""
    return _peer_credentials(connection)[1]


def _peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(found)
    return process, user, group


# Programs with a time limit.


def run_bounded(
    command: Sequence[str],
    *,
    timeout_s: float | None,
    environment: Mapping[str, str],
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program without input, and return its output and its exit status.

    :func:`subprocess.run` waits for a program that it has killed. A program that waits for the
    kernel can't be killed: this function leaves it behind.

    :param how: further arguments of :class:`subprocess.Popen`, such as the user.
    :raises TimeoutError: if it takes longer; it is killed as soon as it can be.
    """
    import subprocess  # takes long to load, and many processes run no program

    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        **how,
    )
    try:
        said, said_wrong = program.communicate(timeout=timeout_s)
    except BaseException as error:
        program.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_KILLED_S)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{command[0]}: no end within {timeout_s} s") from None
        raise
    return subprocess.CompletedProcess(command, program.returncode, said, said_wrong)
