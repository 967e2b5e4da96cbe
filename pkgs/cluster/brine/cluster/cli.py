"""The command lines of ``brine lock``, and of what this part adds to other commands."""

from __future__ import annotations

import argparse
from typing import Any

from brine.common.cli import Command, add_verb, seconds, size, whole_number

LEVELS = ("instance", "group", "node", "storage")


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    commands = "brine.cluster.lock_commands"
    text = "list the locks of the cluster: who holds them, who waits, for what, since when"
    listing = add_verb(verbs, "list", f"{commands}:list_locks", text)
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    text = "run a command that has locks"
    run = add_verb(verbs, "run", f"{commands}:run", text)
    run.usage = "brine lock run [OPTION...] -- COMMAND [ARGUMENT...]"
    run.takes_command = True
    run.add_argument("--cluster", action="store_true", help="the cluster's own lock")
    for level in LEVELS:
        text = f"the lock of a {level}; may be given several times"
        run.add_argument(f"--{level}", metavar="NAME", action="append", default=[], help=text)
    run.add_argument("--shared", action="store_true", help="share them with others who share them")
    text = "give up after so many seconds (default: wait); 0 does not wait"
    run.add_argument("--timeout", metavar="SECONDS", type=_timeout, help=text)
    text = "for others, who see it in the list (default: the command)"
    run.add_argument("--purpose", metavar="TEXT", default="", help=text)


def _timeout(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


COMMAND = Command("have and show the locks of the cluster, on its master", _configure)


def add_config_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine config`` that are about several nodes."""
    commands = "brine.cluster.baseline_commands"
    text = "compute the processor that all of several nodes can give a guest"
    baseline = add_verb(verbs, "cpu-baseline", f"{commands}:print_baseline", text)
    text = "JSON: for each node's name the output of its brine node cpu --json; - for stdin"
    baseline.add_argument("file", metavar="FILE", help=text)
    baseline.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_move_verbs(verbs: Any) -> None:
    """Add the master's verbs of ``brine move``, for programs; all print JSON."""
    commands = "brine.cluster.move_commands"
    text = "record a move of an instance; a move that is recorded already goes on"
    begin = add_verb(verbs, "begin", f"{commands}:begin", text)
    begin.add_argument("name", metavar="INSTANCE")
    begin.add_argument("--to", metavar="NODE", required=True, help="the node that gets it")
    begin.add_argument("--cold", action="store_true", help="stop a guest that runs for the move")
    text = "JSON: auto_converge, max_downtime_ms, rate (bytes a second), plaintext"
    begin.add_argument("--wishes", metavar="JSON", default="{}", help=text)
    text = "a later fill brings it home, if a drain has moved it away"
    begin.add_argument("--keeps-home", action="store_true", help=text)
    text = "show how far a move is, and which node is to be asked for what"
    following = add_verb(verbs, "next", f"{commands}:tell_next", text)
    text = "take a node's answer, from standard input; show what follows"
    answer = add_verb(verbs, "answer", f"{commands}:answer", text)
    text = "compare a node's offer, from standard input, with the configuration"
    compare = add_verb(verbs, "compare", f"{commands}:compare", text)
    compare.add_argument("name", metavar="INSTANCE")
    text = "have a move go back, unless its claim is given away"
    abort = add_verb(verbs, "abort", f"{commands}:abort", text)
    abort.add_argument("--why", metavar="TEXT", default="aborted by a user", help="the reason")
    for one in (following, abort):
        one.add_argument("id", metavar="ID")
    for one in (begin, following, answer, compare, abort):
        one.add_argument("--json", action="store_true", help="it is JSON without this, too")


def add_node_verbs(verbs: Any) -> None:
    """Add the master's verbs of ``brine node``."""
    faces = "brine.cluster.node_verbs"
    text = "empty a node: move all instances that run there; it takes nothing new"
    drain = add_verb(verbs, "drain", f"{faces}:drain", text)
    text = "bring home what a drain has moved away; the node takes instances again"
    fill = add_verb(verbs, "fill", f"{faces}:fill", text)
    text = "have a node take instances again; nothing moves"
    undrain = add_verb(verbs, "undrain", f"{faces}:undrain", text)
    text = "reboot nodes one after another: drain, reboot, check and fill each"
    reboot = add_verb(verbs, "reboot", f"{faces}:reboot_nodes", text)
    text = "a name, or a pattern such as 'kvm*' (default: go on with what has begun)"
    reboot.add_argument("nodes", metavar="NODE", nargs="*", help=text)
    text = "upgrade all packages before the reboot"
    reboot.add_argument("--upgrade", action="store_true", help=text)
    text = "reboot at most N nodes at the same time (default: 1)"
    reboot.add_argument("--batch", metavar="N", type=whole_number(1, 100), help=text)
    text = "move all there (default: each to the node with the most free memory)"
    drain.add_argument("--to", metavar="NODE", help=text)
    for one in (drain, fill, reboot):
        text = "stop those that can't move live, move them, and start them again"
        one.add_argument("--cold", action="store_true", help=text)
        text = "move N instances at the same time (default: 4)"
        one.add_argument("--jobs", metavar="N", type=whole_number(1, 100), help=text)
        one.add_argument("--dry-run", action="store_true", help="only say what would move where")
    for one in (drain, fill, undrain):
        one.add_argument("node", metavar="NODE")
    for one in (drain, fill, undrain, reboot):
        one.add_argument("--json", action="store_true", help="print JSON, for programs")
    commands = "brine.cluster.node_commands"
    text = "plan which instances go where, for programs: a question as JSON from standard input"
    planned = add_verb(verbs, "plan", f"{commands}:print_plan", text)
    text = "write into the configuration what becomes of nodes, for programs"
    marked = add_verb(verbs, "mark", f"{commands}:mark", text)
    marked.add_argument("mark", choices=("drained", "undrained", "filling", "home"))
    text = "decide the next step of nodes that are rebooted, for programs"
    step = add_verb(verbs, "reboot-step", f"{commands}:step_reboot", text)
    step.add_argument("what", choices=("begin", "next", "answer", "abort", "look"))
    for one in (planned, marked, step):
        one.add_argument("--json", action="store_true", help="it is JSON without this, too")


def add_instance_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine instance`` that are about several nodes."""
    text = "move an instance to another node, on the cluster's master"
    migrate = add_verb(verbs, "migrate", "brine.cluster.migrate_commands:migrate", text)
    migrate.add_argument("name", metavar="INSTANCE")
    text = "the target (default: of the nodes that can take it, the one with most free memory)"
    migrate.add_argument("--to", metavar="NODE", help=text)
    text = "stop a guest that runs, and start it on the other node"
    migrate.add_argument("--cold", action="store_true", help=text)
    text = "only say what keeps it from moving"
    migrate.add_argument("--dry-run", action="store_true", help=text)
    text = "slow a guest down that changes its memory faster than it can be sent"
    migrate.add_argument("--auto-converge", action="store_true", help=text)
    number = whole_number(1, 2_000_000)
    text = "how long the guest may stand still, in milliseconds"
    migrate.add_argument("--max-downtime", metavar="MS", type=number, help=text)
    text = "how much is sent at most a second, such as 100M"
    migrate.add_argument("--rate", metavar="SIZE", type=size, help=text)
    migrate.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_operation_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine operations`` that are about several nodes."""
    commands = "brine.cluster.migrate_commands"
    text = "go on with a move between nodes, or settle other work"
    resume = add_verb(verbs, "resume", f"{commands}:resume", text)
    text = "have a move between nodes go back, if it can"
    abort = add_verb(verbs, "abort", f"{commands}:abort", text)
    for one in (resume, abort):
        one.add_argument("id", metavar="ID")
        one.add_argument("--json", action="store_true", help="print JSON, for programs")
