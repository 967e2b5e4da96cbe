"""The command line of ``brine storage``."""

from __future__ import annotations

import argparse

from brine.common.cli import Command, add_verb

_TYPES = ("lvm-pv", "lvm-vg", "file")


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, function: str, text: str) -> argparse.ArgumentParser:
        added = add_verb(verbs, name, f"brine.storage.{function}", text)
        added.add_argument("--json", action="store_true", help="print JSON, for programs")
        return added

    def of_one_type(added: argparse.ArgumentParser) -> None:
        added.add_argument("--type", choices=_TYPES, help="only units of this type")

    listing = verb("list", "commands:list_units", "list the storage units of this node")
    of_one_type(listing)
    text = "list units that are not ok; status 1 if there are any"
    of_one_type(verb("check", "commands:check_units", text))
    modify = verb(
        "modify", "commands:modify_unit", "change whether new volumes may take space in a unit"
    )
    modify.add_argument("type", metavar="TYPE", choices=_TYPES, help=" or ".join(_TYPES))
    modify.add_argument("name", metavar="NAME", help="as brine storage list shows it")
    text = "whether they may"
    modify.add_argument("--allocatable", choices=("yes", "no"), required=True, help=text)
    create = verb(
        "create", "directory_commands:create_unit", "make a folder that is a storage unit"
    )
    remove = verb(
        "remove", "directory_commands:remove_unit", "remove an empty folder that is a storage unit"
    )
    for each in (create, remove):
        each.add_argument("type", metavar="TYPE", choices=("file",), help="file")
        each.add_argument("name", metavar="DIR", help="an absolute path")
    text = "show the unit of new disks that name none, or set it"
    default = verb("default", "directory_commands:default_unit", text)
    either = default.add_mutually_exclusive_group()
    either.add_argument("unit", metavar="UNIT", nargs="?", help="a volume group, or a folder")
    either.add_argument("--none", action="store_true", help="have none")
    repair = verb("repair", "commands:repair_unit", "mend what makes a unit degraded")
    repair.add_argument("type", metavar="TYPE", choices=_TYPES, help=" or ".join(_TYPES))
    repair.add_argument("name", metavar="NAME", help="as brine storage list shows it")
    text = "print the space of all units as JSON, for what decides where disks go"
    verb("facts", "commands:print_facts", text)
    text = "list volumes that no instance has; or remove them, with all data"
    orphans = verb("orphans", "orphan_commands:list_orphans", text)
    text = "remove them, or those that are named"
    orphans.add_argument("--remove", action="store_true", help=text)
    text = "do not ask before all of them are removed"
    orphans.add_argument("--yes", action="store_true", help=text)
    orphans.add_argument("uuid", metavar="UUID", nargs="*", type=str.lower, help="of a volume")


COMMAND = Command("show and change the storage units, where disks have their space", _configure)
