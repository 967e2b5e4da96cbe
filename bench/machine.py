"""The machine a benchmark runs on: what it is, who runs where, and what a process there uses."""

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

_MOST_FAVOURED = -20
"""A nice value."""
_PROCESSORS = Path("/sys/fs/cgroup/cpu")
_MOST_SHARES = "65536"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def description(*packages: str) -> list[str]:
    """The facts that a reader needs to compare two runs.

    :param packages: Debian's, whose versions matter.
    """
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    _, _, model = cpuinfo.partition("model name")
    processor = model.partition("\n")[0].lstrip("\t: ") or platform.machine()
    memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    hardware = f"{processor}, {len(os.sched_getaffinity(0))} cores, {memory_mib} MiB"
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown system")
    query = ["dpkg-query", "--show", "--showformat=, ${Package} ${Version}", "--", *packages]
    versions = subprocess.check_output(query, text=True) if packages else ""
    return [
        f"{hardware}, Linux {platform.release()}",
        f"{system}, Python {platform.python_version()}{versions}",
    ]


def share_cores() -> tuple[int, int]:
    """Choose the daemon's core and the generator's; on a machine with only one, both get that."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) == 1:
        print("bench: one core for all, so without real-time priority", file=sys.stderr)
    return allowed[-1], allowed[-2] if len(allowed) > 1 else allowed[-1]


@contextlib.contextmanager
def placed(cores: Collection[int], *, real_time: int = 0) -> Iterator[bool]:
    """Run the processes started in this block on these cores, ahead of the machine's other work.

    Yields whether it is ahead: only root may give priority. Children inherit both the cores and the
    priority; a daemon that forks could slip away if they were set from outside.

    :param real_time: a real-time priority, which keeps other work out of the slowest samples. On a
        machine's only core it would keep the load and the daemon from each other, and is not given.
        With 0 it is a nice value: several such processes on one core take turns, as a daemon's own
        do in its production.
    """
    allowed, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    is_ahead = False
    os.sched_setaffinity(0, cores)
    try:
        with contextlib.suppress(PermissionError):
            if not real_time:
                os.setpriority(os.PRIO_PROCESS, 0, _MOST_FAVOURED)
                is_ahead = True
            elif len(allowed) > 1:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(real_time))
                is_ahead = True
        yield is_ahead
    finally:
        os.sched_setscheduler(0, policy, parameters)
        if is_ahead and not real_time:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.sched_setaffinity(0, allowed)


def lead_own_group() -> None:
    """Make this process, and what it starts, one group to the scheduler, well ahead of others.

    Where the kernel groups processes by session (sched(7), "The autogroup feature"), a nice value
    only counts among those of one session.
    """
    os.setsid()
    _favour("self")


def favour(*programs: str) -> None:
    """Have the groups of these programs as far ahead of others as `lead_own_group` has ours."""
    for process in subprocess.check_output(["pidof", *programs], text=True).split():
        _favour(process)


@contextlib.contextmanager
def group_ahead() -> Iterator[bool]:
    """Have this process, and all that it starts, be one group to the scheduler, ahead of others,
    for the time of the block. Within the group all are alike, whatever sessions they are of.

    Yields whether it is: the machine must have cgroups(7) of version 1 for processors, and its
    root must ask.
    """
    group = _PROCESSORS / f"bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.shares").write_text(_MOST_SHARES, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        for process in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):  # it has ended
                (_PROCESSORS / "cgroup.procs").write_text(process, encoding="ascii")
        with contextlib.suppress(OSError):
            group.rmdir()


def _favour(process: str) -> None:
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


def cpu_ticks(pid: int, *, of_children: bool = False) -> int:
    """The processor time of a process, or of the children that it has waited for.

    It is as ps(1) shows it: utime + stime, in 1/100 s.
    """
    # The command's name is in parentheses and may itself hold spaces and parentheses.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    first = 13 if of_children else 11
    return sum(map(int, stat.rpartition(")")[2].split()[first : first + 2]))


def cpu_s(pid: int, *, with_children: bool = False) -> float:
    """The processor time of all threads of a process, by the scheduler's finer count.

    :param with_children: and of the children that it has waited for, in steps of 1/100 s.
    """
    children_s = cpu_ticks(pid, of_children=True) / _TICKS_A_SECOND if with_children else 0.0
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        own_s = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO, or a thread has just ended
        own_s = cpu_ticks(pid) / _TICKS_A_SECOND
    return own_s + children_s
