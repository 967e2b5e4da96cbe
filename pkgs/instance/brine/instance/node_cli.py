"""The command line of ``brine node``."""

from __future__ import annotations

import argparse

from brine.common.cli import Command, add_verb
from brine.vm.arguments import instance_name

_MODULE = "brine.instance.node_commands"


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    text = "list the instances that are known here as other nodes', or forget whose they are"
    claims = add_verb(verbs, "claims", f"{_MODULE}:claims", text)
    text = "have this node forget whose an instance is"
    claims.add_argument("--forget", metavar="INSTANCE", type=instance_name, help=text)
    claims.add_argument("--json", action="store_true", help="print JSON, for programs")


COMMAND = Command("show and change what this node knows as a node of its cluster", _configure)
