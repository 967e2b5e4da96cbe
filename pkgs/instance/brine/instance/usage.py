"""What a node has, what its instances are promised of it, and what they use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brine.common.files import text_of
from brine.common.process import group_of
from brine.instance.observe import Observed
from brine.instance.running_spec import running_spec
from brine.instance.store import is_here
from brine.vm.spec import AdminState

_MEMORY_FILE = Path("/proc/meminfo")
_MEMORY_ROW = re.compile(r"^(\w+):\s+(\d+)", re.MULTILINE)
_GROUPS_DIR = "/sys/fs/cgroup"
_KIB = 1 << 10
_MIB = 1 << 20
_UTIME, _RSS = 14, 24  # of the fields of stat, counted from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """The memory of this node, in bytes. On Xen it is that of the domain 0."""

    total: int
    available: int
    huge_pages: int
    huge_pages_free: int


def memory_of_node() -> NodeMemory:
    """The memory of this node, by the kernel."""
    rows = {name: int(kib) for name, kib in _MEMORY_ROW.findall(_MEMORY_FILE.read_text())}
    huge_page = rows.get("Hugepagesize", 0) * _KIB
    return NodeMemory(
        total=rows["MemTotal"] * _KIB,
        available=rows["MemAvailable"] * _KIB,
        huge_pages=rows.get("HugePages_Total", 0) * huge_page,  # a number of pages, and no KiB
        huge_pages_free=rows.get("HugePages_Free", 0) * huge_page,
    )


def cpus_of_node() -> int:
    """How many processors the node has that work."""
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Share:
    """What an instance is promised.

    :param memory: in bytes.
    :param in_huge_pages: whether its memory is huge pages, which the node sets aside.
    """

    memory: int
    vcpus: int
    in_huge_pages: bool = False


@dataclass(frozen=True, slots=True)
class Promise:
    """What all instances of a node are promised, those that should run and those that do."""

    memory: int
    huge_pages: int
    vcpus: int

    @classmethod
    def of(cls, shares: Iterable[Share]) -> Promise:
        shares = list(shares)
        huge = sum(one.memory for one in shares if one.in_huge_pages)
        return cls(sum(one.memory for one in shares) - huge, huge, sum(one.vcpus for one in shares))


@dataclass(frozen=True, slots=True)
class Usage:
    """What an instance uses: its QEMU with all helpers, by the kernel's account of its unit.

    :param memory: in bytes, with what the kernel caches for it.
    :param cpu_s: processor time since its start.
    """

    memory: int
    cpu_s: float


def usage_of(pid: int) -> Usage | None:
    """The usage of the unit that a process is in (:manpage:`cgroups(7)`, version 2); where the
    kernel has no such account, that of the process. None if it has ended."""
    folder = f"{_GROUPS_DIR}/{group_of(pid)}"
    memory = text_of(f"{folder}/memory.current")
    rows = dict(line.split(" ", 1) for line in text_of(f"{folder}/cpu.stat").splitlines())
    took = rows.get("usage_usec", "")
    own = _of_process(pid)
    if own is None:
        return None
    return Usage(
        int(memory) if memory.isdecimal() else own.memory,
        int(took) / 1e6 if took.isdecimal() else own.cpu_s,
    )


def _of_process(pid: int) -> Usage | None:
    """The usage of a process (:manpage:`proc(5)`: ``stat``)."""
    # The second field is the program's name, in brackets, and may have spaces.
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < _RSS:
        return None
    ticks = int(fields[_UTIME - 3]) + int(fields[_UTIME - 2])
    memory = int(fields[_RSS - 3]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(memory, ticks / os.sysconf("SC_CLK_TCK"))


def share_of(seen: Observed) -> Share | None:
    """What the node has to give it: to one that runs what it was started with."""
    spec = seen.spec
    is_wanted = spec.admin_state == AdminState.UP and is_here(spec) and not seen.bar
    if not (seen.is_going or is_wanted):
        return None
    running = running_spec(seen)
    started = running.started if running else {}
    memory, vcpus = (started.get(key) for key in ("memory_mib", "vcpus"))
    return Share(
        (memory if isinstance(memory, int) else spec.memory_mib) * _MIB,
        vcpus if isinstance(vcpus, int) else spec.vcpus,
        in_huge_pages=bool(started.get("huge_pages", spec.huge_pages)),
    )


def usage_by(seen: Observed) -> Usage | None:
    """What an instance uses; None if it does not run."""
    if seen.domain:
        return Usage(seen.domain.memory_mib * _MIB, seen.domain.cpu_s)
    pid = seen.unit.main_pid if seen.unit else 0
    return usage_of(pid) if pid and seen.is_going else None
