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
