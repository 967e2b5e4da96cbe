"""``brine disk move`` and ``brine storage evacuate``."""

from __future__ import annotations

import argparse
import json

from brine.common.cli import print_done, undo_when_told_to_end
from brine.common.errors import printable
from brine.common.progress import ProgressLines
from brine.instance.disks.evacuate import Evacuation
from brine.instance.disks.interruption import telling_what_is_left
from brine.instance.disks.moves import MovedDisk, move_disk
from brine.instance.messages import log_to_journal
from brine.instance.store import operation_key


def move(arguments: argparse.Namespace) -> int:
    """``brine disk move``."""
    undo_when_told_to_end()
    log_to_journal("brine")
    with telling_what_is_left(operation_key(arguments.name)):
        moved = move_disk(
            arguments.name,
            arguments.disk,
            arguments.to,
            discard_snapshots=arguments.discard_snapshots,
            rate=arguments.rate,
            tell=ProgressLines(),
        )
    disk = moved.disk
    facts = {"instance": moved.name, "disk": disk.name, "uuid": disk.uuid, "unit": disk.unit}
    facts |= {"path": disk.path, "format": disk.format, "from": moved.before.unit}
    text = printable(_in_words(moved))
    print_done(text, as_json=arguments.json, **facts, changed=moved.changed, live=moved.is_live)
    return 0


def _in_words(moved: MovedDisk) -> str:
    called = f"{moved.name}: disk {moved.disk.name or moved.disk.uuid}"
    if not moved.changed:
        return f"unchanged: {called} is in {moved.disk.unit}"
    return f"moved: {called} to {moved.disk.path}"


def evacuate(arguments: argparse.Namespace) -> int:
    """``brine storage evacuate``: 1 if a volume is left."""
    undo_when_told_to_end()
    log_to_journal("brine")
    work = Evacuation(arguments.to, arguments.discard_snapshots, arguments.rate, ProgressLines())
    is_physical = arguments.type == "lvm-pv"
    how = work.of_physical if is_physical else work.of_folder
    # LVM's own moves are no operations.
    goes_on = "LVM may still be moving a volume, as lvs -a shows" if is_physical else ""
    with telling_what_is_left(goes_on=goes_on):
        how(arguments.unit)
    if arguments.json:
        rows = {"moved": work.moved, "failed": work.failed}
        facts = {key: [one.to_json() for one in found] for key, found in rows.items()}
        named = {"type": arguments.type, "name": arguments.unit, "result": _result(work)}
        print(json.dumps({**named, **facts}, indent=2))
    else:
        for one in work.moved:
            print(printable(f"moved: {one.volume} to {one.to}"))
        print(printable(f"{_result(work)}: {arguments.unit}{_left(work)}"))
    return 1 if work.failed else 0


def _result(work: Evacuation) -> str:
    return "incomplete" if work.failed else "evacuated"


def _left(work: Evacuation) -> str:
    volumes = sum(1 for one in work.failed if one.volume)
    unknown = ", ".join(one.instance for one in work.failed if not one.volume)
    left = f", {volumes} left" if volumes else ""
    return left + (f", the volumes of {unknown} not known" if unknown else "")
