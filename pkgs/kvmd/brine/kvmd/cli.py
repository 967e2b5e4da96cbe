"""``brine kvmd``: the verdicts of the KVM daemon."""

from __future__ import annotations

import argparse

from brine.common.cli import Command, add_verb
from brine.vm.arguments import instance_name


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    verdicts = add_verb(
        verbs,
        "verdicts",
        "brine.kvmd.verdict_list:print_verdicts",
        "list who ended which VM, from the journal",
        description="Lists who ended which VM of this node, oldest first, from the journal. "
        "What that has lost of each VM's last end is in a file of its own, and listed too.",
    )
    verdicts.add_argument(
        "instance",
        nargs="*",
        metavar="INSTANCE",
        type=instance_name,
        help="only of these instances",
    )
    verdicts.add_argument(
        "--since",
        metavar="WHEN",
        help="from then on: 2h (ago; also s, m, d, w), today, 12:30, '2026-01-31 12:30'",
    )
    verdicts.add_argument("--json", action="store_true", help="print a JSON list")


COMMAND = Command("show who ended this node's KVM instances", _configure)
