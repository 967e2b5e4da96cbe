"""The command line of ``brine lifecycle``."""

from __future__ import annotations

import argparse

from brine.common.cli import Command, add_verb, seconds
from brine.vm.arguments import instance_name

_COMMANDS = "brine.lifecycle.commands"


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    listing = add_verb(verbs, "list", f"{_COMMANDS}:list_owned", "list the instances with an owner")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    own = add_verb(
        verbs,
        "own",
        f"{_COMMANDS}:own",
        "be the owner of an instance",
        description="Owns an instance until it ends. With -- COMMAND, runs the command, owns the "
        "instance as long as the command runs, and ends it then. SIGTERM asks for the instance's "
        "end, and waits for it.",
    )
    own.add_argument("name", metavar="INSTANCE", type=instance_name)
    own.add_argument(
        "--interval",
        type=seconds,
        metavar="S",
        help="seconds between two touches of the watchdog; by default a third of its timeout",
    )
    own.add_argument("--start", action="store_true", help="start the instance")
    own.takes_command = True
    own.usage = "%(prog)s [-h] [--interval S] [--start] INSTANCE [-- COMMAND...]"
    prestop = add_verb(
        verbs,
        "prestop",
        f"{_COMMANDS}:prestop",
        "ask for the end of an instance, and wait for it",
    )
    prestop.add_argument("name", metavar="INSTANCE", type=instance_name)
    prestop.add_argument(
        "--timeout", type=seconds, metavar="S", help="fail after so many seconds; by default never"
    )
    prepare = add_verb(
        verbs, "prepare", f"{_COMMANDS}:prepare", "make the folders that owners share"
    )
    prepare.add_argument("names", metavar="INSTANCE", type=instance_name, nargs="*")
    prepare.add_argument("--all", action="store_true", help="of all instances with an owner")


COMMAND = Command("tie instances to their owners", _configure)
