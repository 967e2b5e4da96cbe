"""``brine outbox``: what the cluster has to learn of this node."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from brine.common.command import Command


def _list(arguments: argparse.Namespace) -> int:
    from brine.common.outbox import events
    from brine.common.table import table

    found = list(events())
    if arguments.json:
        print(json.dumps([asdict(event) for event in found], indent=2))
        return 0
    if not found:
        print("there is nothing that the cluster has not heard of")
        return 0
    rows = [("ID", "TIME", "KIND", "INSTANCE", "DATA")]
    for event in found:
        time = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="seconds")
        data = " ".join(f"{key}={value}" for key, value in event.data.items())
        rows.append((event.id, time, event.kind, event.name, data))
    print(*table(rows), sep="\n")
    return 0


def _acknowledge(arguments: argparse.Namespace) -> int:
    from brine.common.outbox import acknowledge

    for event_id in arguments.id:
        known = acknowledge(event_id)
        print(f"acknowledged: {event_id}" if known else f"unchanged: {event_id} is not there")
    return 0


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    listing = verb("list", _list, "list what the cluster has not heard of, the oldest first")
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    acknowledge = verb("acknowledge", _acknowledge, "the master has these, and they may go")
    acknowledge.add_argument("id", metavar="ID", nargs="+")


COMMAND = Command("tell the cluster what happened on this node", _configure)
