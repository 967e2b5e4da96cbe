"""The verb of ``brine storage`` for volumes that no instance has."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from brine.common.cli import print_table
from brine.common.errors import BrineError, UsageError, printable, tell_error
from brine.common.progress import size_text
from brine.storage.orphans import Orphan, orphans

_HEADING = ("UUID", "UNIT", "SIZE", "USED", "AGE", "OWNER", "DISK", "WHY")
_AGES = (("d", 86400), ("h", 3600), ("min", 60))


def list_orphans(arguments: argparse.Namespace) -> int:
    """``brine storage orphans``: lists them; with ``--remove`` removes those that are named, or
    all. 1 if one can't be removed."""
    found = orphans()
    if arguments.uuid and not arguments.remove:
        raise UsageError("a UUID goes with --remove")
    if unknown := {*arguments.uuid} - {one.volume.uuid for one in found}:
        hint = "brine storage orphans lists those that there are"
        raise UsageError(f"{min(unknown)}: is no volume without an instance", hint=hint)
    if not arguments.remove:
        _print(arguments, found)
        return 0
    chosen = [one for one in found if not arguments.uuid or one.volume.uuid in arguments.uuid]
    removed = []
    for one in chosen:
        if one.volume not in [other.volume for other in orphans()]:
            continue  # an instance has got it meanwhile
        try:
            one.remove()
        except BrineError as error:
            tell_error(error)
        else:
            removed.append(one)
            if not arguments.json:
                print(printable(f"removed: {one.status.path}"))
    if arguments.json:
        print(json.dumps([_facts(one) for one in removed], indent=2))
    elif not chosen:
        print("each volume is an instance's")
    return 0 if len(removed) == len(chosen) else 1


def _print(arguments: argparse.Namespace, found: list[Orphan]) -> None:
    if arguments.json:
        print(json.dumps([_facts(one) for one in found], indent=2))
    else:
        print_table(_HEADING, map(_row, found), none="each volume is an instance's")


def _facts(one: Orphan) -> dict[str, Any]:
    status = one.status
    return {
        "uuid": one.volume.uuid,
        "unit": one.volume.unit,
        "driver": one.volume.driver,
        "path": status.path,
        "size": status.size,
        "used": status.used,
        "since": status.since,
        "owner": status.owner,
        "disk": status.name,
        "snapshots": [each.name for each in status.snapshots],
        "is_open": status.is_open,
        "status": status.status,
        "why": status.why,
    }


def _row(one: Orphan) -> tuple[str, ...]:
    status = one.status
    why = status.why or ("it is in use" if status.is_open else "")
    sizes = map(size_text, (status.size, status.used))
    texts = (_age(time.time() - status.since), status.owner or "-", status.name or "-", why)
    return (one.volume.uuid, printable(one.volume.unit), *sizes, *map(printable, texts))


def _age(seconds: float) -> str:
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return "0min"
