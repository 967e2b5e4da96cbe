"""``brine disk snapshot`` and ``brine disk rollback``."""

from __future__ import annotations

import argparse
from typing import Any

from brine.common.cli import print_done, print_json, undo_when_told_to_end
from brine.common.errors import UsageError, printable, warn
from brine.common.progress import size_text
from brine.common.tables import print_table
from brine.common.times import iso_time, local_time
from brine.instance import messages, store
from brine.instance.disks import snapshots
from brine.instance.disks.interruption import telling_what_is_left
from brine.instance.disks.snapshots import DiskSnapshot, called
from brine.vm.disk import Disk

_HEADING = ("SNAPSHOT", "TAKEN", "DISKS", "USED", "WHY")


def snapshot(arguments: argparse.Namespace) -> int:
    """``brine disk snapshot``: take, list or remove one."""
    if arguments.list:
        return _list(arguments)
    if arguments.remove:
        return _remove(arguments)
    undo_when_told_to_end()
    messages.log_to_journal("brine")
    name = arguments.snapshot or snapshots.new_name()
    with telling_what_is_left(store.operation_key(arguments.name)):
        taken = snapshots.take_snapshot(arguments.name, name, space=arguments.size)
    if not arguments.json:
        for note in taken.notes:
            warn(f"{arguments.name}: {printable(note)}")
    text = f"taken: snapshot {taken.name} of {arguments.name}, {_named(taken.disks)}"
    _print_done(arguments, text, taken.name, taken.disks, notes=list(taken.notes))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    _refuse(arguments, "list", "snapshot", "size", "remove")
    found = snapshots.snapshots_of(store.load(arguments.name))
    if arguments.json:
        print_json([_row(name, disks) for name, disks in found.items()])
        return 0
    rows = [_cells(name, disks) for name, disks in found.items()]
    print_table(_HEADING, rows, none=f"{arguments.name} has no snapshots")
    return 0


def _row(name: str, disks: list[DiskSnapshot]) -> dict[str, Any]:
    rows = [
        {
            **_disk(one.disk),
            "since": iso_time(one.snapshot.since),
            "used": one.snapshot.used,
            "size": one.snapshot.size or None,
            "why": one.snapshot.why,
        }
        for one in disks
    ]
    return {"snapshot": name, "disks": rows}


def _cells(name: str, disks: list[DiskSnapshot]) -> list[str]:
    since = min(one.snapshot.since for one in disks)
    used = sum(one.snapshot.used for one in disks)
    why = next((one.snapshot.why for one in disks if one.snapshot.why), "-")
    names = ", ".join(called(one.disk) for one in disks)
    return [name, local_time(since), printable(names), size_text(used), printable(why)]


def _remove(arguments: argparse.Namespace) -> int:
    _refuse(arguments, "remove", "snapshot", "size")
    messages.log_to_journal("brine")
    name = arguments.remove
    with telling_what_is_left(store.operation_key(arguments.name)):
        disks = snapshots.remove_snapshot(arguments.name, name)
    text = f"removed: snapshot {name} of {arguments.name}, {_named(disks)}"
    _print_done(arguments, text, name, disks)
    return 0


def rollback(arguments: argparse.Namespace) -> int:
    """``brine disk rollback``."""
    messages.log_to_journal("brine")
    done = snapshots.roll_back(
        arguments.name,
        arguments.snapshot,
        force_stop=arguments.force_stop,
        discard_newer=arguments.discard_newer,
    )
    if done.others and not arguments.json:
        warn(f"{arguments.name}: not in the snapshot, and as before: {_named(done.others)}")
    text = f"rolled back: {arguments.name} to the snapshot {arguments.snapshot}, "
    _print_done(
        arguments,
        text + _named(done.disks),
        arguments.snapshot,
        done.disks,
        others=[_disk(one) for one in done.others],
        discarded=list(done.discarded),
    )
    return 0


def _refuse(arguments: argparse.Namespace, verb: str, *others: str) -> None:
    """Refuse options that have no effect together."""
    for one in others:
        if getattr(arguments, one):
            word = {"snapshot": "name"}.get(one, one)
            raise UsageError(f"--{verb} and --{word} do not go together")


def _named(disks: tuple[Disk, ...] | list[Disk]) -> str:
    return printable(", ".join(map(called, disks)))


def _disk(disk: Disk) -> dict[str, Any]:
    return {"name": disk.name, "uuid": disk.uuid, "path": disk.path}


def _print_done(
    arguments: argparse.Namespace,
    text: str,
    name: str,
    disks: tuple[Disk, ...] | list[Disk],
    **facts: Any,
) -> None:
    rows = [_disk(one) for one in disks]
    known = {"instance": arguments.name, "snapshot": name, "disks": rows, **facts}
    print_done(text, as_json=arguments.json, **known)
