"""``brine node claims``: the instances of other nodes that this one knows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from brine.common.cli import print_done
from brine.common.errors import UsageError
from brine.common.tables import print_table
from brine.common.times import iso_time, local_time
from brine.instance import store
from brine.instance.claim_changes import forget_claim
from brine.instance.claims import KnownClaims, notes
from brine.instance.messages import log_to_journal
from brine.instance.store import InstanceError


def claims(arguments: argparse.Namespace) -> int:
    if name := arguments.forget:
        log_to_journal("brine")
        if not forget_claim(name):
            raise UsageError(f"{name}: no claim is known here", hint="brine node claims lists them")
        print_done(f"forgotten: the claim of {name}", as_json=arguments.json, name=name)
        return 0
    shown = iso_time if arguments.json else local_time
    rows = [{**row, "since": shown(row["since"]) if row["since"] else None} for row in _rows()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    keys = ("name", "node", "serial", "since", "why")
    cells = [tuple(str(row[key] or "-") for key in keys) for row in rows]
    heading = ("NAME", "NODE", "SERIAL", "LEFT", "WHY")
    print_table(heading, cells, none="no instance of another node is known")
    return 0


def _rows() -> Iterator[dict[str, Any]]:
    """The instances that this node may not run: those with a spec, and those that have left."""
    known = KnownClaims()
    for spec in store.load_all():
        if isinstance(spec, InstanceError):
            continue  # brine instance list tells it
        if bar := known.bar_to(spec):
            yield {
                "name": spec.name,
                "uuid": spec.uuid,
                "node": bar.node or None,
                "serial": spec.claim_serial or None,
                "since": None,
                "defined": True,
                "why": bar.why,
            }
    for note in notes():
        yield {
            "name": note.name,
            "uuid": note.uuid,
            "node": note.node,
            "serial": note.serial,
            "since": note.since,
            "defined": False,
            "why": "has left this node",
        }
