"""The verbs of ``brine disk`` and ``brine storage`` that know instances."""

from __future__ import annotations

import argparse
from typing import Any

from brine.common.cli import add_verb, size
from brine.vm.arguments import instance_name


def add_disk_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine disk``."""
    text = "move a disk to another storage unit, while its instance runs"
    move = add_verb(verbs, "move", "brine.instance.disks.move_commands:move", text)
    move.add_argument("name", metavar="INSTANCE", type=instance_name)
    move.add_argument("disk", metavar="DISK", help="its name, UUID, path or serial")
    text = "a volume group, or a folder of storage.toml"
    move.add_argument("--to", metavar="UNIT", required=True, help=text)
    _add_copying(move)
    _add_snapshot(verbs)


def add_storage_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine storage``."""
    text = "move all volumes off a storage unit, one after another"
    evacuate = add_verb(verbs, "evacuate", "brine.instance.disks.move_commands:evacuate", text)
    types = ("lvm-pv", "file")
    evacuate.add_argument("type", metavar="TYPE", choices=types, help=" or ".join(types))
    evacuate.add_argument("unit", metavar="NAME", help="as brine storage list shows it")
    text = "the unit of what has no space in its volume group"
    evacuate.add_argument("--to", metavar="UNIT", default="", help=text)
    _add_copying(evacuate)


def _add_copying(parser: argparse.ArgumentParser) -> None:
    text = "copy at most so much a second, such as 50M"
    parser.add_argument("--rate", metavar="SIZE", type=size, default=0, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


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
