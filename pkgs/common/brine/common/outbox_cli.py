"""``brine outbox``: the events of this node that the cluster does not know yet."""

from __future__ import annotations

import argparse

from brine.common.cli import Command, add_verb


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    text = "list the events that the cluster does not know, the oldest first"
    listing = add_verb(verbs, "list", "brine.common.outbox:print_events", text)
    text = "remove events that the master has"
    acknowledge = add_verb(verbs, "acknowledge", "brine.common.outbox:acknowledge_events", text)
    acknowledge.add_argument("id", metavar="ID", nargs="+")
    for each in (listing, acknowledge):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")


COMMAND = Command("tell the cluster what happened on this node", _configure)
