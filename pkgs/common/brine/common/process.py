"""Processes: their units, their ends, and programs with a time limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import Signals
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

_SERVICE = ".service"

TERM_TIMEOUT_S = 10.0
"""How long a process may take to end after a signal: QEMU still flushes its disks."""

_KILLED_S = 1.0


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
        if last.endswith(_SERVICE):
            return slices[-1] if slices else "-.slice"
    return ""


def group_of(pid: int) -> str:
    """The control group of a process's service, as a path below the root; empty if it is none's."""
    for groups in _groups_of(pid):
        for number, one in enumerate(groups, 1):
            if one.endswith(_SERVICE):
                return "/".join(groups[:number])
    return ""


def _groups_of(pid: int) -> Iterator[list[str]]:
    """The control groups of a process that may be systemd's, each as the parts of its path."""
    try:
        with open(f"/proc/{pid}/cgroup", errors="replace") as file:
            lines = file.read().splitlines()
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
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    # The second field is the program's name, in brackets, and may have spaces.
    return text.rpartition(")")[2].split()[19]


def main_pid() -> int:
    """The main process of this process's unit (``$MAINPID``); 0 if it has ended."""
    text = os.environ.get("MAINPID", "")
    return int(text) if text.isdecimal() else 0


# Programs with a time limit.


ENDING_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""The beginning of a command that ends with this process, however that ends."""


def run_bounded(
    command: Sequence[str],
    *,
    timeout_s: float | None,
    environment: Mapping[str, str],
    asked: str | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its output and its exit status.

    :param asked: its input; None is none.
    :param how: further arguments of :class:`subprocess.Popen`, such as the user.
    :raises TimeoutError: if it takes longer; it is killed as soon as it can be.
    """
    return begin_program(command, environment=environment, asked=asked, **how)(timeout_s)


def begin_program(
    command: Sequence[str], *, environment: Mapping[str, str], asked: str | None = None, **how: Any
) -> Callable[[float | None], subprocess.CompletedProcess[str]]:
    """Begin to run a program, as :func:`run_bounded` does. The result waits for its end, for so
    many seconds from then on, and returns or raises as that function does.

    :func:`subprocess.run` waits for a program that it has killed. A program that waits for the
    kernel can't be killed: this function leaves it behind.
    """
    import subprocess  # takes long to load, and many processes run no program

    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if asked is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        **how,
    )

    def end(timeout_s: float | None) -> subprocess.CompletedProcess[str]:
        try:
            said, said_wrong = program.communicate(asked, timeout=timeout_s)
        except BaseException as error:
            program.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_KILLED_S)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"{command[0]}: no end within {timeout_s} s") from None
            raise
        return subprocess.CompletedProcess(command, program.returncode, said, said_wrong)

    return end
