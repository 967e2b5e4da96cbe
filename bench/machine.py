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
_AUTOGROUP = Path("/proc/self/autogroup")


@dataclass(frozen=True)
class Machine:
    """What a reader must know to compare two runs."""

    processor: str
    cores: int
    memory_mib: int
    kernel: str
    system: str
    python: str


@dataclass(frozen=True)
class Cores:
    """One core for what is measured, another for what loads it."""

    daemon: int
    generator: int


def describe() -> Machine:
    """Read the machine's description from /proc and /etc/os-release."""
    return Machine(
        processor=_first_value(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        kernel=platform.release(),
        system=platform.freedesktop_os_release().get("PRETTY_NAME", "unknown"),
        python=platform.python_version(),
    )


def share_cores() -> Cores:
    """Choose two cores; on a machine with only one, both sides get that one, which it says."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) == 1:
        print("bench: one core for all, so without real-time priority", file=sys.stderr)
    return Cores(daemon=allowed[-1], generator=allowed[-2] if len(allowed) > 1 else allowed[-1])


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


def lead_own_group() -> None:
    """Make this process, and what it starts, one group to the scheduler, well ahead of others.

    Where the kernel groups processes by session (sched(7), "The autogroup feature"), a nice value
    only counts among those of one session. Without root's rights the group is like any other.
    """
    os.setsid()
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(_MOST_FAVOURED), encoding="ascii")


def favour(pids: Iterable[int]) -> None:
    """Have the groups of these processes as far ahead of others as `lead_own_group` has ours."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(_MOST_FAVOURED), encoding="ascii")


@contextlib.contextmanager
def favoured(cores: Collection[int]) -> Iterator[bool]:
    """What is started in this block runs on these cores, well ahead of the machine's other work.

    Unlike what is `placed`, several such processes on one core take turns, as a daemon's own do in
    its production. Yields whether it was granted: such a priority is root's to give. Children
    inherit it.
    """
    allowed, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    os.sched_setaffinity(0, cores)
    try:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _MOST_FAVOURED)
            granted = True
        except PermissionError:
            granted = False
        yield granted
    finally:
        if granted:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.sched_setaffinity(0, allowed)


def _first_value(file: Path, key: str) -> str:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


@dataclass(frozen=True)
class Memory:
    """A process's memory in KiB.

    `pss` has its share of the pages that others map too, so it moves when a neighbour starts.
    `anonymous` is what the process itself has filled: heap and stacks.
    """

    pss_kib: int
    anonymous_kib: int


@dataclass(frozen=True)
class CpuTime:
    """`ticks`: utime + stime as ps shows it, in 1/100 s; `run_s`: the scheduler's finer count."""

    ticks: int
    run_s: float


def memory(pid: int) -> Memory:
    """Read /proc/PID/smaps_rollup."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        key, value, *_ = line.split()
        fields[key.rstrip(":")] = int(value)
    return Memory(pss_kib=fields["Pss"], anonymous_kib=fields["Anonymous"])


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += family(int(child))
    return found


def cpu_time(pid: int) -> CpuTime:
    """Read what all threads of a process have used so far."""
    # The command's name is in parentheses and may itself hold spaces and parentheses.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    after_name = stat.rpartition(")")[2].split()
    ticks = int(after_name[11]) + int(after_name[12])
    run_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            run_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except (
            FileNotFoundError
        ):  # a kernel without CONFIG_SCHED_INFO, or the thread has just ended
            run_ns += ticks * 10**9 // os.sysconf("SC_CLK_TCK")
            break
    return CpuTime(ticks=ticks, run_s=run_ns / 1e9)
