"""``brine node info`` and ``brine instance top``: what instances may use, and what they do use."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brine.common import __version__
from brine.common.cli import print_json
from brine.common.errors import BrineError, printable, tell_error
from brine.common.files import text_of
from brine.common.own_node import own_name
from brine.common.progress import size_text
from brine.common.tables import is_screen, print_table
from brine.hotplug.net.records import list_taps
from brine.instance.observe import Observed, look_at_all
from brine.instance.store import InstanceError
from brine.instance.usage import (
    Promise,
    Usage,
    cpus_of_node,
    memory_of_node,
    share_of,
    usage_by,
)
from brine.storage.commands import volume_units

_TAPS = Path("/sys/class/net")
_HEADING = ("NAME", "CPU", "MEMORY", "READ", "WRITTEN", "RECEIVED", "SENT")
_CLEAR = "\x1b[H\x1b[J"


# What the node has.


def node_info(arguments: argparse.Namespace) -> int:
    """``brine node info``: 1 if something is not known; it is then left out."""
    found = list(look_at_all())
    seen = [one for one in found if not isinstance(one, InstanceError)]
    faults: list[BrineError] = [one for one in found if isinstance(one, InstanceError)]
    facts = _facts(seen, faults)
    for fault in faults:
        tell_error(fault)
    if arguments.json:
        print_json(facts)
    else:
        print("\n".join(_lines(facts)))
    return 1 if faults else 0


def _facts(seen: Sequence[Observed], faults: list[BrineError]) -> dict[str, Any]:
    promise = Promise.of(filter(None, map(share_of, seen)))
    used = [usage for one in seen if (usage := usage_by(one))]
    return {
        "node": own_name(),
        "version": __version__,
        "memory": {
            **asdict(memory_of_node()),
            "promised": promise.memory,
            "huge_pages_promised": promise.huge_pages,
            "used_by_instances": sum(one.memory for one in used),
        },
        "cpus": {"total": cpus_of_node(), "promised": promise.vcpus},
        "instances": dict(sorted(Counter(str(one.state.status) for one in seen).items())),
        "units": list(_units(faults)),
    }


def _units(faults: list[BrineError]) -> Iterator[dict[str, Any]]:
    for unit in volume_units(faults):
        yield {
            "type": unit.type,
            "name": unit.name,
            "size": unit.size,
            "free": unit.free,
            "allocatable": unit.allocatable,
            "why": unit.why,
        }


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    memory, cpus = facts["memory"], facts["cpus"]
    yield f"Node:        {printable(facts['node'])}, Brine {facts['version']}"
    text = f"{size_text(memory['total'])}, {size_text(memory['available'])} available"
    text += f"; promised {size_text(memory['promised'])}"
    yield f"Memory:      {text}, used by instances {size_text(memory['used_by_instances'])}"
    if memory["huge_pages"]:
        text = f"{size_text(memory['huge_pages'])}, {size_text(memory['huge_pages_free'])} free"
        yield f"Huge pages:  {text}; promised {size_text(memory['huge_pages_promised'])}"
    yield f"CPUs:        {cpus['total']}; promised {cpus['promised']}"
    counts = [f"{number} {status}" for status, number in facts["instances"].items()]
    yield f"Instances:   {', '.join(counts) or 'none'}"
    for unit in facts["units"]:
        state = f"{size_text(unit['free'])} of {size_text(unit['size'])} free"
        why = "" if unit["allocatable"] else f", takes no volumes: {unit['why']}"
        yield printable(f"Storage:     {unit['name']}, {state}{why}")


# What instances use.


@dataclass(frozen=True, slots=True)
class _Sample:
    """What an instance has used since its start; bytes, and seconds of processor time.

    :param received: by the guest, and *sent* by it.
    """

    usage: Usage
    read: int | None
    written: int | None
    received: int
    sent: int


def top(arguments: argparse.Namespace) -> int:
    """``brine instance top``: again and again on a terminal, else once."""
    before, since = _samples(), time.monotonic()
    while True:
        time.sleep(arguments.interval)
        now, at = _samples(), time.monotonic()
        rows = _rates(before, now, at - since)
        if arguments.json:
            print_json(rows)
            return 0
        if is_screen():
            print(_CLEAR, end="")
        print_table(_HEADING, map(_cells, rows), none="no instance runs")
        if not is_screen():
            return 0
        sys.stdout.flush()
        before, since = now, at


def _samples() -> dict[str, _Sample]:
    traffic = Counter[tuple[str, str]]()
    for tap in list_taps():
        for name in ("rx_bytes", "tx_bytes"):
            count = text_of(f"{_TAPS}/{tap.name}/statistics/{name}").strip()
            traffic[tap.instance, name] += int(count) if count.isdecimal() else 0
    found = {}
    for one in look_at_all():
        if isinstance(one, InstanceError) or not (usage := usage_by(one)):
            continue
        blocks = _blocks(one.unit.main_pid) if one.unit and not one.domain else {}
        found[one.name] = _Sample(
            usage,
            blocks.get("read_bytes"),
            blocks.get("write_bytes"),
            traffic[one.name, "tx_bytes"],
            traffic[one.name, "rx_bytes"],
        )
    return found


def _blocks(pid: int) -> dict[str, int]:
    """What a process has read and written on storage (:manpage:`proc(5)`: ``io``)."""
    rows = (line.partition(": ") for line in text_of(f"/proc/{pid}/io").splitlines())
    return {name: int(count) for name, _, count in rows}


def _rates(
    before: Mapping[str, _Sample], now: Mapping[str, _Sample], seconds: float
) -> list[dict[str, Any]]:
    """The rates of each instance, the busiest processor first."""

    def rate(was: float | None, by_now: float | None) -> float | None:
        if was is None or by_now is None:
            return None
        return max(by_now - was, 0) / seconds

    rows = []
    for name in before.keys() & now.keys():
        was, by_now = before[name], now[name]
        cpu = rate(was.usage.cpu_s, by_now.usage.cpu_s) or 0
        row: dict[str, Any] = {"name": name, "cpu_percent": round(100 * cpu, 1)}
        row["memory_bytes"] = by_now.usage.memory
        for key in ("read", "written", "received", "sent"):
            found = rate(getattr(was, key), getattr(by_now, key))
            row[f"{key}_bytes_per_second"] = None if found is None else round(found)
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["cpu_percent"], row["name"]))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    rates = [row[f"{key}_bytes_per_second"] for key in ("read", "written", "received", "sent")]
    texts = ["-" if one is None else f"{size_text(one)}/s" for one in rates]
    memory = size_text(row["memory_bytes"])
    return (printable(row["name"]), f"{row['cpu_percent']:.0f} %", memory, *texts)
