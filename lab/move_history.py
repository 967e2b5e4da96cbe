"""What must hold of any history of moves: that of the simulator, and of real runs.

A history is a sequence of events, each a line of JSON in a file::

    {"time": 12.5, "kind": "resume", "subject": "web1", "node": "n1"}
    {"time": 14.0, "kind": "write", "subject": "web1", "node": "n1", "detail": "17"}

The journals of nodes make one, too, where brine-kvmd logs QEMU's events: ``log_level = "debug"``.
Times are in seconds. The clocks of two nodes may differ by a skew, which the caller gives.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """The kinds of events, and what their subject and detail are."""

    RESUME = "resume"  # an instance's guest begins to run on a node
    STOP = "stop"  # it no longer runs there
    LOST = "lost"  # a node, with all that runs there
    WRITE = "write"  # the guest of an instance has a write's acknowledgement; its id
    FOUND = "found"  # after the end: the instance's volumes have the write; its id
    LOCK = "lock"  # a lock is held; its owner
    UNLOCK = "unlock"
    BEGUN = "begun"  # an operation
    ENDED = "ended"  # an operation; "done" or "undone"


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """An event; *subject* and *detail* depend on its kind."""

    time: float
    kind: EventKind
    subject: str
    node: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """Where and when an instance's guest ran; the end is infinite while it runs."""

    instance: str
    node: str
    begin: float
    end: float


def read_history(lines: Iterable[str]) -> Iterator[HistoryEvent]:
    """The events of a file's lines."""
    for line in filter(str.strip, lines):
        data = json.loads(line)
        yield HistoryEvent(**{**data, "kind": EventKind(data["kind"])})


def history_line(event: HistoryEvent) -> str:
    """An event as a line of such a file."""
    return json.dumps(asdict(event))


def history_of_journal(node: str, records: Iterable[Mapping[str, Any]]) -> Iterator[HistoryEvent]:
    """When instances began to run on a node, and stopped, as QEMU's events in its journal tell. A
    guest that is started runs from its QEMU's start on, without an event."""
    for record in records:
        kind = _QMP_EVENTS.get(record.get("BRINE_QMP_EVENT", ""))
        time_usec = record.get("BRINE_EVENT_TIME_USEC")
        if record.get("BRINE_EVENT") == "started":
            kind, time_usec = EventKind.RESUME, record["__REALTIME_TIMESTAMP"]
        if kind and time_usec:
            yield HistoryEvent(int(time_usec) / 1e6, kind, record["BRINE_INSTANCE"], node)


_QMP_EVENTS = {"RESUME": EventKind.RESUME, "STOP": EventKind.STOP, "SHUTDOWN": EventKind.STOP}


def intervals(history: Iterable[HistoryEvent]) -> list[Interval]:
    """Where and when each instance ran, in the order of beginnings."""
    begun: dict[tuple[str, str], float] = {}
    found = []
    for event in sorted(history, key=lambda one: one.time):
        key = (event.subject, event.node)
        if event.kind is EventKind.RESUME:
            # A second QEMU on the same node overlaps the first.
            if key in begun:
                found.append(Interval(*key, begun[key], float("inf")))
            begun[key] = event.time
        elif event.kind is EventKind.STOP and key in begun:
            found.append(Interval(*key, begun.pop(key), event.time))
        elif event.kind is EventKind.LOST:
            for lost in [one for one in begun if one[1] == event.subject]:
                found.append(Interval(*lost, begun.pop(lost), event.time))
    found += [Interval(*key, begin, float("inf")) for key, begin in begun.items()]
    return sorted(found, key=lambda one: one.begin)


def faults_of(history: Iterable[HistoryEvent], *, skew_s: float = 0.0) -> list[str]:
    """What is wrong with a history, in words; nothing if all holds that must.

    :param skew_s: by which the clocks of nodes may differ.
    """
    events = list(history)
    return [
        *_overlaps(intervals(events), skew_s),
        *_lost_writes(events),
        *_locks(events),
        *_operations(events),
    ]


def _overlaps(found: list[Interval], skew_s: float) -> Iterator[str]:
    last: dict[str, Interval] = {}
    for one in found:
        former = last.get(one.instance)
        if former and one.begin < former.end - skew_s:
            times = f"{former.begin:.3f} to {former.end:.3f} and from {one.begin:.3f}"
            yield f"{one.instance} runs twice: on {former.node} and {one.node}, {times}"
        if former is None or one.end > former.end:
            last[one.instance] = one


def _lost_writes(events: list[HistoryEvent]) -> Iterator[str]:
    """Acknowledged writes that are gone at the end."""
    found = {(one.subject, one.detail) for one in events if one.kind is EventKind.FOUND}
    for event in events:
        if event.kind is EventKind.WRITE and (event.subject, event.detail) not in found:
            where = f"acknowledged on {event.node} at {event.time:.3f}"
            yield f"{event.subject} has lost the write {event.detail}, {where}"


def _locks(events: list[HistoryEvent]) -> Iterator[str]:
    held: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind is EventKind.LOCK:
            held[event.subject, event.detail] += 1
        elif event.kind is EventKind.UNLOCK:
            held[event.subject, event.detail] -= 1
    for (lock, owner), count in held.items():
        if count > 0:
            yield f"the lock {lock} is held by {owner} at the end"


def _operations(events: list[HistoryEvent]) -> Iterator[str]:
    begun = Counter(one.subject for one in events if one.kind is EventKind.BEGUN)
    ends = [one for one in events if one.kind is EventKind.ENDED]
    ended = Counter(one.subject for one in ends)
    for operation in sorted(begun.keys() | ended.keys()):
        if (begun[operation], ended[operation]) != (1, 1):
            counts = f"begun {begun[operation]} times, ended {ended[operation]} times"
            yield f"the operation {operation} is {counts}"
    yield from (
        f"the operation {one.subject} ended as {one.detail!r}"
        for one in ends
        if one.detail not in ("done", "undone")
    )
