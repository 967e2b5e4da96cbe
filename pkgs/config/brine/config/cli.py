"""The command lines of ``brine config`` and ``brine uidpool``."""

from __future__ import annotations

import argparse
from pathlib import Path

from brine.common import paths
from brine.common.cli import Command, add_verb

_COMMANDS = "brine.config.commands"
_POOL = "brine.config.uidpool"


def _configure(parser: argparse.ArgumentParser) -> None:
    _add_store_options(parser)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    apply = add_verb(
        verbs,
        "apply",
        f"{_COMMANDS}:apply_file",
        "merge declarations into the configuration",
    )
    apply.add_argument("file", metavar="FILE", help="JSON, as in brine-config.data(5); - for stdin")
    _add_dry_run(apply)
    apply.add_argument(
        "--prune", action="store_true", help="remove objects that a section of FILE does not name"
    )
    _add_json(apply)

    show = add_verb(
        verbs, "show", f"{_COMMANDS}:show", "print the configuration, or a part of it, as JSON"
    )
    show.add_argument(
        "pointer",
        nargs="?",
        default="",
        metavar="POINTER",
        help="JSON pointer, with names in place of UUIDs: /instances/web1/nics/0/ip",
    )
    _add_json(show, "there is no other format")

    verify = add_verb(
        verbs, "verify", f"{_COMMANDS}:verify", "look for faults; status 1 if there are any"
    )
    verify.add_argument("file", nargs="?", type=Path, metavar="FILE", help="another configuration")
    _add_json(verify)

    diff = add_verb(verbs, "diff", f"{_COMMANDS}:diff", "show the differences between two versions")
    diff.add_argument("old", nargs="?", metavar="OLD", help="serial of a kept version, or a file")
    diff.add_argument("new", nargs="?", metavar="NEW", help="the same; default: the current one")
    _add_json(diff)

    _add_json(add_verb(verbs, "versions", f"{_COMMANDS}:versions", "list the kept versions"))

    restore = add_verb(verbs, "restore", f"{_COMMANDS}:restore", "restore a kept version")
    restore.add_argument("serial", type=int, metavar="SERIAL", help="see brine config versions")
    _add_dry_run(restore)
    _add_json(restore)

    export = add_verb(
        verbs,
        "export-ssconf",
        f"{_COMMANDS}:export_ssconf",
        "write the values that every node should know",
    )
    export.add_argument("folder", type=Path, metavar="DIR", help=f"such as {paths.SSCONF_DIR}")
    _add_dry_run(export)
    _add_json(export)

    extra = add_verb(
        verbs,
        "extra-files",
        f"{_COMMANDS}:list_extra_files",
        "list other files that every node needs",
    )
    _add_json(extra, "print JSON, with the users of each file")


def _configure_uidpool(parser: argparse.ArgumentParser) -> None:
    _add_store_options(parser)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_json(add_verb(verbs, "show", f"{_POOL}:show", "print the pool"))
    for name, function, summary in (
        ("add", "add", "add user ids to the pool"),
        ("remove", "remove", "remove user ids from the pool"),
        ("set", "replace_pool", "replace the pool; '' empties it"),
    ):
        change = add_verb(verbs, name, f"{_POOL}:{function}", summary)
        change.add_argument(
            "ranges",
            nargs="+",
            metavar="RANGES",
            help="user ids and ranges, such as 4000-4099,5000",
        )
        _add_dry_run(change)
        _add_json(change)


def _add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=paths.CONFIG_FILE,
        metavar="FILE",
        help="the configuration, if not %(default)s",
    )
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for another writer (default: 10)",
    )


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")


def _add_json(parser: argparse.ArgumentParser, summary: str = "print JSON, for programs") -> None:
    parser.add_argument("--json", action="store_true", help=summary)


COMMAND = Command("show, change, check and undo the cluster's configuration", _configure)
UIDPOOL_COMMAND = Command(
    "show and change the pool of user ids for processes of VMs", _configure_uidpool
)
