"""What a process uses, from proc(5)."""

import os
from dataclasses import dataclass
from pathlib import Path


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
