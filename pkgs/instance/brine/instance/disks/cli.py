"""The verbs of ``brine disk`` that know instances."""

from __future__ import annotations

import argparse
from typing import Any

from brine.common.cli import add_verb, size
from brine.instance.disks.storage_cli import add_copying
from brine.vm.arguments import instance_name

_COMMANDS = "brine.instance.disks.disk_commands"


def add_disk_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine disk``."""
    _extend_add(verbs.choices["add"])
    _extend_remove(verbs.choices["remove"])
    _add_grow(verbs)
    _add_adopt(verbs)
    text = "show the volumes of an instance's disks; status 1 if one is not ok"
    _of_instance(add_verb(verbs, "status", f"{_COMMANDS}:status", text))
    _add_move(verbs)
    _add_snapshot(verbs)


def _extend_add(add: argparse.ArgumentParser) -> None:
    """Have hotplug's verb make disks by their size, too."""
    add.description = "plug a disk in; or make one, by its size, for an instance"
    made = add.add_argument_group("a new disk, in the place of --path")
    made.add_argument("--size", metavar="SIZE", type=size, help="such as 10G")
    text = "a volume group, or a folder of storage.toml (default: default_unit there)"
    made.add_argument("--unit", metavar="UNIT", help=text)
    made.add_argument("--name", metavar="NAME", help="of the disk (default: disk0, disk1, ...)")
    text = "what is done about former data in a volume group: the device zeroes it, zeros are "
    text += "written, or the ends alone are wiped (default: zero)"
    made.add_argument("--wipe", choices=("zero", "full", "ends"), help=text)
    add.set_defaults(run=f"{_COMMANDS}:add")


def _extend_remove(remove: argparse.ArgumentParser) -> None:
    remove.description = "unplug a disk; one with a volume leaves the spec of its instance, too"
    text = "also delete its volume, with all data"
    remove.add_argument("--delete", action="store_true", help=text)
    remove.set_defaults(run=f"{_COMMANDS}:remove")


def _of_instance(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("instance", metavar="INSTANCE", type=instance_name)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _add_grow(verbs: Any) -> None:
    text = "have a disk grow, and its running guest see that at once"
    grow = _of_instance(add_verb(verbs, "grow", f"{_COMMANDS}:grow", text))
    grow.add_argument("disk", metavar="DISK", help="its name, UUID, path, serial or device id")
    grow.add_argument("size", metavar="SIZE", type=_new_size, help="such as 20G; or +5G")
    grow.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _new_size(text: str) -> tuple[bool, int]:
    return text.startswith("+"), size(text.removeprefix("+"))


def _add_adopt(verbs: Any) -> None:
    text = "have Brine grow, move and remove a disk that it has not made"
    adopt = _of_instance(add_verb(verbs, "adopt", f"{_COMMANDS}:adopt", text))
    adopt.add_argument("disk", metavar="DISK", help="its name, UUID, path, serial or device id")
    text = "the storage unit that it is in (default: found by its path)"
    adopt.add_argument("--unit", metavar="UNIT", default="", help=text)
    adopt.add_argument("--name", metavar="NAME", default="", help="of the disk, if it has none")


def _add_move(verbs: Any) -> None:
    text = "move a disk to another storage unit, while its instance runs"
    move = add_verb(verbs, "move", "brine.instance.disks.move_commands:move", text)
    move.add_argument("name", metavar="INSTANCE", type=instance_name)
    move.add_argument("disk", metavar="DISK", help="its name, UUID, path, serial or device id")
    text = "a volume group, or a folder of storage.toml"
    move.add_argument("--to", metavar="UNIT", required=True, help=text)
    add_copying(move)


def _add_snapshot(verbs: Any) -> None:
    text = "take, list or remove a snapshot of all disks of an instance"
    more = (
        "Take a snapshot of all disks of an instance at one moment, whether it runs or not. The "
        "guest's memory is not part of it: a rollback is like a power failure at that moment, or "
        "like a clean stop of its file systems if the guest's agent froze them. In a volume group, "
        "LVM copies what is overwritten: writes took 14 times as long, and a snapshot that has no "
        "space left is lost."
    )
    run = "brine.instance.disks.snapshot_commands"
    parser = add_verb(verbs, "snapshot", f"{run}:snapshot", text, description=more)
    parser.add_argument("name", metavar="INSTANCE", type=instance_name)
    text = "its name (default: the time)"
    parser.add_argument("--name", dest="snapshot", metavar="NAME", default="", help=text)
    text = "space of each in a volume group, such as 2G (default: a part of the disk's size)"
    parser.add_argument("--size", metavar="SIZE", type=size, default=0, help=text)
    parser.add_argument("--list", action="store_true", help="list the snapshots")
    text = "remove a snapshot: what was written since stays, and a running guest goes on"
    parser.add_argument("--remove", metavar="NAME", default="", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")

    text = "have the disks of an instance be as they were at a snapshot"
    parser = add_verb(verbs, "rollback", f"{run}:rollback", text)
    parser.add_argument("name", metavar="INSTANCE", type=instance_name)
    parser.add_argument("snapshot", metavar="SNAPSHOT")
    text = "stop the instance before, if it runs"
    parser.add_argument("--force-stop", action="store_true", help=text)
    text = "remove the snapshots that were taken after it"
    parser.add_argument("--discard-newer", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
