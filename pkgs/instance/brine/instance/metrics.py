"""Metrics of instances: those of ``brine instance list``, and what they are promised and use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from brine.common.errors import BrineError
from brine.common.metrics import Labels, Metric, counter, gauge
from brine.instance.history import needs_verdict, verdicts_on
from brine.instance.observe import Observed, Oper, Status, look_at_all
from brine.instance.store import InstanceError
from brine.instance.unit import time_of
from brine.instance.usage import (
    Promise,
    Share,
    Usage,
    cpus_of_node,
    memory_of_node,
    share_of,
    usage_by,
)

_NO_REASON = "-"


class _Row(NamedTuple):
    """An instance as the metrics have it.

    :param reason: in a word: the RunState of one that stands still, or why one is down.
    :param share: None if the node keeps nothing for it.
    """

    seen: Observed
    reason: str
    share: Share | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class _Look:
    rows: list[_Row]
    unusable: int


def instance_metrics() -> Iterator[Metric]:
    """The entry point of the group ``brine.metrics``."""
    look = _look()
    yield from _of_all(look)
    yield from _of_each(look.rows)
    yield from _of_node(look.rows)


def _look() -> _Look:
    found = list(look_at_all())
    seen = [one for one in found if not isinstance(one, InstanceError)]
    verdicts = verdicts_on(filter(needs_verdict, seen))
    told = [
        replace(one, verdict=verdicts[one.name].who) if one.name in verdicts else one
        for one in seen
    ]
    return _Look([*map(_row, told)], len(found) - len(seen))


def _row(seen: Observed) -> _Row:
    return _Row(seen, _reason(seen), share_of(seen), usage_by(seen))


def _reason(seen: Observed) -> str:
    """Why it is in its state, in one word of a short list."""
    if seen.bar:
        return "claim"
    if seen.is_going:
        return seen.halted.state if seen.halted else _NO_REASON
    if seen.lacks_owner:
        return "owner"
    return str(seen.last_end().ended_by())


def _of_all(look: _Look) -> Iterator[Metric]:
    by_status = Counter(row.seen.state.status for row in look.rows)
    rows: list[tuple[Labels, float]] = [({"status": one}, by_status[one]) for one in Status]
    yield gauge("instances", "Instances of this node by status.", rows)
    by_reason = Counter((row.seen.state.status, row.reason) for row in look.rows)
    about = "Instances by status and reason: what ended those that are down, and in which state "
    about += "of QEMU those are that QEMU has stopped."
    counts = sorted(by_reason.items())
    yield gauge(
        "instances_by_reason",
        about,
        [({"status": status, "reason": reason}, n) for (status, reason), n in counts],
    )
    yield gauge("instances_unusable", "Instances whose state or spec is unknown.", look.unusable)
    halted = Counter(row.reason for row in look.rows if row.seen.halted and row.seen.is_going)
    about = "Instances that QEMU has stopped, by its state, such as io-error."
    yield gauge(
        "instances_halted", about, [({"state": one}, n) for one, n in sorted(halted.items())]
    )


def _of_each(rows: list[_Row]) -> Iterator[Metric]:
    names: list[Labels] = [{"name": row.seen.name} for row in rows]
    states: list[tuple[Labels, float]] = [
        ({**name, "status": row.seen.state.status, "reason": row.reason}, 1)
        for name, row in zip(names, rows, strict=True)
    ]
    yield gauge("instance_status", "The status of each instance, and its reason; always 1.", states)
    about = "Whether an instance runs; 1 also of one that QEMU has stopped."
    runs = (float(row.seen.state.oper is Oper.RUNNING) for row in rows)
    yield gauge("instance_running", about, list(zip(names, runs, strict=True)))
    since: list[tuple[Labels, float]] = []
    memory: list[tuple[Labels, float]] = []
    cpu: list[tuple[Labels, float]] = []
    promised: list[tuple[Labels, float]] = []
    vcpus: list[tuple[Labels, float]] = []
    for name, row in zip(names, rows, strict=True):
        unit, usage = row.seen.unit, row.usage
        if row.seen.state.oper is Oper.RUNNING and unit and unit.since_us:
            since.append((name, round(time_of(unit.since_us), 3)))
        if row.share:
            promised.append((name, row.share.memory))
            vcpus.append((name, row.share.vcpus))
        if usage:
            memory.append((name, usage.memory))
            cpu.append((name, usage.cpu_s))
    about = "When an instance that runs was started."
    yield gauge("instance_start_timestamp", about, since, unit="seconds")
    about = "The memory that an instance is promised."
    yield gauge("instance_memory_promised", about, promised, unit="bytes")
    about = "The memory that an instance uses, with QEMU's own and what is cached for it."
    yield gauge("instance_memory_used", about, memory, unit="bytes")
    yield gauge("instance_vcpus", "The virtual processors of an instance.", vcpus)
    about = "The processor time that an instance has used since its start."
    yield counter("instance_cpu", about, cpu, unit="seconds")


def _of_node(rows: list[_Row]) -> Iterator[Metric]:
    promise = Promise.of(row.share for row in rows if row.share)
    about = "The memory that instances are promised, beside huge pages."
    yield gauge("node_memory_promised", about, promise.memory, unit="bytes")
    about = "The huge pages that instances are promised."
    yield gauge("node_huge_pages_promised", about, promise.huge_pages, unit="bytes")
    about = "The virtual processors that instances are promised."
    yield gauge("node_vcpus_promised", about, promise.vcpus)
    if any(row.seen.domain for row in rows):
        return  # the kernel of a Xen node's domain 0 knows its own memory alone
    try:
        memory = memory_of_node()
    except (OSError, LookupError) as error:
        raise BrineError(f"the node's memory is unknown: {error}") from error
    about = "The memory of the node, beside huge pages."
    yield gauge("node_memory", about, memory.total - memory.huge_pages, unit="bytes")
    about = "The memory that is available, by the kernel."
    yield gauge("node_memory_available", about, memory.available, unit="bytes")
    yield gauge("node_huge_pages", "The huge pages of the node.", memory.huge_pages, unit="bytes")
    about = "The huge pages of the node that are free."
    yield gauge("node_huge_pages_free", about, memory.huge_pages_free, unit="bytes")
    yield gauge("node_cpus", "The processors of the node.", cpus_of_node())
