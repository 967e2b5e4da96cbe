"""The verbs of ``brine storage`` that know instances. All of that command's verbs load this
module, so it loads little itself."""

from __future__ import annotations

import argparse
from typing import Any

from brine.common.cli import add_verb, size


def add_storage_verbs(verbs: Any) -> None:
    """Add the verbs of ``brine storage``."""
    text = "move all volumes off a storage unit, one after another"
    evacuate = add_verb(verbs, "evacuate", "brine.instance.disks.move_commands:evacuate", text)
    types = ("lvm-pv", "file")
    evacuate.add_argument("type", metavar="TYPE", choices=types, help=" or ".join(types))
    evacuate.add_argument("unit", metavar="NAME", help="as brine storage list shows it")
    text = "the unit of what has no space in its volume group"
    evacuate.add_argument("--to", metavar="UNIT", default="", help=text)
    add_copying(evacuate)


def add_copying(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb that copies volumes."""
    text = "remove the snapshots of a volume that goes to another unit; what its disk has now moves"
    parser.add_argument("--discard-snapshots", action="store_true", help=text)
    text = "copy at most so much a second, such as 50M"
    parser.add_argument("--rate", metavar="SIZE", type=size, default=0, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
