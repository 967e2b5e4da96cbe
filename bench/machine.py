"""The machine a benchmark ran on: how its cores are shared out, and what a process there uses."""

import contextlib
import os
import platform
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_FAVOURED = -20
"""A nice value."""


@dataclass(frozen=True)
class Machine:
    """What a reader must know to compare two runs."""

    processor: str
    cores: int
    memory_mib: int
    kernel: str
    system: str
    python: str


def describe() -> Machine:
    """Read the machine's description from /proc and /etc/os-release."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    _, _, model = cpuinfo.partition("model name")
    return Machine(
        processor=model.partition("\n")[0].lstrip("\t: ") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        kernel=platform.release(),
        system=platform.freedesktop_os_release().get("PRETTY_NAME", "unknown"),
        python=platform.python_version(),
    )


def share_cores() -> tuple[int, int]:
    """Choose the daemon's core and the generator's; on a machine with only one, both get that."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) == 1:
        print("bench: one core for all, so without real-time priority", file=sys.stderr)
    return allowed[-1], allowed[-2] if len(allowed) > 1 else allowed[-1]


@contextlib.contextmanager
def placed(core: int, *, priority: int = 1) -> Iterator[bool]:
    """What is started in this block runs on one core, and there ahead of all other work.

    Yields whether the latter was granted: real-time priority is root's to give. It keeps the
    machine's other work out of the slowest samples. Children inherit both; set from outside, a
    daemon that forks could slip away. On a machine's only core it would keep the load and what is
    measured from each other, and is not asked for.
    """
    allowed = os.sched_getaffinity(0)
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setaffinity(0, {core})
    try:
        try:
            if real_time := len(allowed) > 1:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        except PermissionError:
            real_time = False
        yield real_time
    finally:
        os.sched_setscheduler(0, policy, parameters)
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def favoured(cores: Collection[int]) -> Iterator[bool]:
    """What is started in this block runs on these cores, well ahead of the machine's other work.

    Unlike what is `placed`, several such processes on one core take turns, as a daemon's own do in
    its production. Yields whether it was granted: such a priority is root's to give. Children
    inherit it.
    """
    allowed, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    os.sched_setaffinity(0, cores)
    granted = False
    try:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _MOST_FAVOURED)
            granted = True
        yield granted
    finally:
        if granted:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.sched_setaffinity(0, allowed)


def lead_own_group() -> None:
    """Make this process, and what it starts, one group to the scheduler, well ahead of others.

    Where the kernel groups processes by session (sched(7), "The autogroup feature"), a nice value
    only counts among those of one session.
    """
    os.setsid()
    favour(["self"])


def favour(processes: Iterable[object]) -> None:
    """Have the groups of these processes as far ahead of others as `lead_own_group` has ours."""
    for process in processes:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/autogroup").write_text(str(_MOST_FAVOURED), encoding="ascii")


def memory_kib(pid: int, key: str) -> int:
    """A process's memory by a key of /proc/PID/smaps_rollup.

    `Pss` has its share of the pages that others map too, so it moves when a neighbour starts.
    `Anonymous` is what the process itself has filled: heap and stacks.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(text.partition(f"\n{key}:")[2].split()[0])


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += family(int(child))
    return found


def cpu_ticks(pid: int) -> int:
    """The processor time of a process as ps shows it, utime + stime, in 1/100 s."""
    # The command's name is in parentheses and may itself hold spaces and parentheses.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def cpu_s(pid: int) -> float:
    """The processor time of all threads of a process, by the scheduler's finer count."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO, or a thread has just ended
        return cpu_ticks(pid) / os.sysconf("SC_CLK_TCK")
