"""The verbs of ``brine outbox``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from brine.common.outbox import ClusterEvent, acknowledge, events
from brine.common.tables import print_table
from brine.common.times import local_time

_HEADING = ("ID", "TIME", "KIND", "INSTANCE", "DATA")


def print_events(arguments: argparse.Namespace) -> int:
    """``brine outbox list``."""
    found = list(events())
    if arguments.json:
        print(json.dumps([asdict(event) for event in found], indent=2))
    else:
        nothing = "no event waits for the cluster"
        print_table(_HEADING, map(_row, found), none=nothing)
    return 0


def _row(event: ClusterEvent) -> tuple[str, ...]:
    data = " ".join(f"{key}={value}" for key, value in event.data.items())
    return event.id, local_time(event.time), event.kind, event.name, data


def acknowledge_events(arguments: argparse.Namespace) -> int:
    """``brine outbox acknowledge``."""
    known = {event_id: acknowledge(event_id) for event_id in dict.fromkeys(arguments.id)}
    if arguments.json:
        print(json.dumps({"acknowledged": [event_id for event_id in known if known[event_id]]}))
        return 0
    for event_id, was_there in known.items():
        print(f"acknowledged: {event_id}" if was_there else f"unchanged: {event_id} is not there")
    return 0
