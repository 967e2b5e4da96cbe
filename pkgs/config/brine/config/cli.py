"""The command lines of ``brine config`` and ``brine uidpool``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.cli import Command, add_verb


def _serial(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no serial number; brine config versions lists them"
        )
    return int(text)


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = _verbs(parser)
    apply = _add(verbs, "apply", "apply_file", "merge declarations into the configuration")
    apply.add_argument("file", metavar="FILE", help="JSON, as in brine-config.data(5); - for stdin")
    _add_dry_run(apply)
    apply.add_argument(
        "--prune", action="store_true", help="remove objects that a section of FILE does not name"
    )

    text = "print the configuration, or a part of it, as JSON"
    show = _add(verbs, "show", "show", text, json="there is no other format")
    text = "JSON pointer, with names in place of UUIDs: /instances/web1/nics/0/ip"
    show.add_argument("pointer", nargs="?", type=str, default="", metavar="POINTER", help=text)

    verify = _add(verbs, "verify", "verify", "look for faults; status 1 if there are any")
    verify.add_argument("file", nargs="?", type=Path, metavar="FILE", help="another configuration")

    text = "check whether a copy can replace the configuration"
    check = _add(verbs, "check-copy", "check_copy", text)
    check.add_argument("file", metavar="FILE", help="another node's; - for stdin")

    diff = _add(verbs, "diff", "diff", "show the differences between two versions")
    diff.add_argument("old", nargs="?", metavar="OLD", help="serial of a kept version, or a file")
    diff.add_argument("new", nargs="?", metavar="NEW", help="the same; default: the current one")

    _add(verbs, "versions", "versions", "list the kept versions")

    restore = _add(verbs, "restore", "restore", "restore a kept version")
    restore.add_argument("serial", type=_serial, metavar="SERIAL", help="see brine config versions")
    _add_dry_run(restore)

    text = "write the values that every node should know"
    export = _add(verbs, "export-ssconf", "export_ssconf", text)
    export.add_argument("folder", type=Path, metavar="DIR", help=f"such as {paths.SSCONF_DIR}")
    _add_dry_run(export)

    text = "print all that a node has to have of the configuration, as JSON"
    export = _add(verbs, "export-node", "export_node", text, json="there is no other format")
    export.add_argument("node", metavar="NODE", help="its name")

    _add(verbs, "this-node", "show_this_node", "tell which node this host is")

    text = "give a node another name; it stays what it is"
    rename = _add(verbs, "rename-node", "rename_node", text)
    rename.add_argument("old", metavar="OLD", help="its name, or UUID")
    rename.add_argument("new", type=str, metavar="NEW", help="its new name")
    _add_dry_run(rename)

    record = _add(verbs, "record", "record_events", "record events of a node's outbox")
    record.add_argument("--node", required=True, metavar="NODE", help="whose outbox that is")
    text = "what brine outbox list --json printed there; - for stdin"
    record.add_argument("file", metavar="FILE", help=text)

    text = "replace the cluster's key in steps, which all nodes confirm"
    rotate = _add(verbs, "rotate-key", "rotate_key", text)
    group = rotate.add_mutually_exclusive_group()
    _add_dry_run(group)
    text = "go on: all nodes have confirmed this step, whose id was printed"
    group.add_argument("--confirmed", metavar="STEP", help=text)

    json, text = "print JSON, with the users of each file", "list other files that every node needs"
    _add(verbs, "extra-files", "list_extra_files", text, json=json)


def _configure_uidpool(parser: argparse.ArgumentParser) -> None:
    verbs = _verbs(parser)
    _add(verbs, "show", "show_pool", "print the pool")
    for name, summary in (
        ("add", "add user ids to the pool"),
        ("remove", "remove user ids from the pool"),
        ("set", "replace the pool; '' empties it"),
    ):
        change = _add(verbs, name, "change_pool", summary)
        text = "user ids and ranges, such as 4000-4099,5000"
        change.add_argument("ranges", nargs="+", type=str, metavar="RANGES", help=text)
        change.set_defaults(change=name)
        _add_dry_run(change)


def _verbs(parser: argparse.ArgumentParser) -> Any:
    """Add the options of the store; returns what verbs are added to."""
    text = "the configuration, if not %(default)s"
    parser.add_argument("--config", type=Path, default=paths.CONFIG_FILE, metavar="FILE", help=text)
    text = "how long to wait for another writer (default: 10)"
    parser.add_argument("--lock-timeout", type=float, default=10.0, metavar="SECONDS", help=text)
    return parser.add_subparsers(required=True, metavar="COMMAND")


def _add(
    verbs: Any, name: str, function: str, summary: str, *, json: str = "print JSON, for programs"
) -> argparse.ArgumentParser:
    parser = add_verb(verbs, name, f"brine.config.commands:{function}", summary)
    parser.add_argument("--json", action="store_true", help=json)
    return parser


def _add_dry_run(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")


COMMAND = Command("show, change, check and undo the cluster's configuration", _configure)
UIDPOOL_COMMAND = Command(
    "show and change the pool of user ids for processes of VMs", _configure_uidpool
)
