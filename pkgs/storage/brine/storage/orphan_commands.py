"""The verb of ``brine storage`` for volumes that no instance has."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from brine.common.errors import BrineError, UsageError, printable, tell_error, warn
from brine.common.progress import size_text
from brine.common.tables import print_table
from brine.common.times import iso_time
from brine.storage.orphans import Orphan, orphans, possible_orphans, refuse_unknown
from brine.storage.unit import UnitStatus

_HEADING = ("UUID", "UNIT", "SIZE", "USED", "AGE", "OWNER", "DISK", "WHY")
_NONE = "each volume is an instance's"
_AGES = (("d", 86400), ("h", 3600), ("min", 60))


def list_orphans(arguments: argparse.Namespace) -> int:
    """``brine storage orphans``: lists them; with ``--remove`` removes those that are named, or
    all. 1 if one can't be removed."""
    if arguments.uuid and not arguments.remove:
        raise UsageError("a UUID goes with --remove")
    found, faults = possible_orphans()
    if arguments.remove:
        refuse_unknown(faults)
    for name, fault in faults.items():
        text = f"{name}: its spec can't be used, and these volumes may be its own: {fault}"
        warn(text, hint=f"brine instance info {name}")
    if unknown := {*arguments.uuid} - {one.volume.uuid for one in found}:
        hint = "brine storage orphans lists those that there are"
        raise UsageError(f"{min(unknown)}: is no volume without an instance", hint=hint)
    if not arguments.remove:
        _print(arguments, found)
        return 0
    chosen = [one for one in found if not arguments.uuid or one.volume.uuid in arguments.uuid]
    if chosen and not arguments.uuid and not arguments.yes:
        _ask_to_remove(chosen)
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
        print(_NONE)
    return 0 if len(removed) == len(chosen) else 1


def _ask_to_remove(found: Sequence[Orphan]) -> None:
    """Ask a person whether all volumes that no instance has may go.

    :raises UsageError: if they may not, or there is no one to ask.
    """
    if not sys.stdin.isatty():
        text = f"--remove asks about the volumes ({len(found)}), and standard input is no terminal"
        raise UsageError(text, hint="--yes, or name the UUIDs of those that may go")
    for one in found:
        owner = f"  {one.status.owner} {one.status.name}".rstrip()
        print(printable(f"{one.status.path}  {size_text(one.status.size)}{owner}"), file=sys.stderr)
    print("Remove these volumes, with all data? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("the volumes stay")


def _print(arguments: argparse.Namespace, found: list[Orphan]) -> None:
    if arguments.json:
        print(json.dumps([_facts(one) for one in found], indent=2))
    else:
        print_table(_HEADING, map(_row, found), none=_NONE)
        whole = [one for one in found if one.status.status is not UnitStatus.MISSING]
        for one in whole[:1]:
            text = "gives an instance such a volume again"
            print(printable(f"brine disk add INSTANCE --path {one.status.path}: {text}"))


def _facts(one: Orphan) -> dict[str, Any]:
    status = one.status
    return {
        "uuid": one.volume.uuid,
        "unit": one.volume.unit,
        "driver": one.volume.driver,
        "path": status.path,
        "size": status.size,
        "used": status.used,
        "since": iso_time(status.since) if status.since else None,
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
