"""The verbs of ``brine operations``."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from brine.common.cli import undo_when_told_to_end
from brine.common.errors import BrineError, printable, tell_error
from brine.common.operation import Facts, Operation, pending, remove_unfinished, settle_one, shown
from brine.common.tables import print_table
from brine.common.times import iso_time, local_time

_HEADING = ("ID", "SINCE", "KIND", "KEY", "STATE", "PROGRESS", "WAITS FOR")


def print_operations(arguments: argparse.Namespace) -> int:
    """``brine operations list``."""
    found = pending()
    if arguments.json:
        print(json.dumps([*map(_told, found)], indent=2))
    else:
        print_table(_HEADING, map(_row, found), none="no operation is pending")
    return 0


def _told(one: Operation) -> Facts:
    times = {
        "since": iso_time(one.since),
        "deadline": iso_time(one.deadline) if one.deadline else None,
    }
    told = shown(asdict(one)) | times
    return {**told, "key": one.key, "in_progress": not one.is_interrupted()}


def _row(one: Operation) -> tuple[str, ...]:
    waits_for = one.waits_for or ("brine operations settle" if one.is_interrupted() else "")
    if one.deadline and time.time() > one.deadline:
        waits_for = f"{waits_for}; its time is over".removeprefix("; ")
    words = (one.kind, one.key, str(one.state), _progress(one), waits_for)
    return (one.id, local_time(one.since), *(printable(word) or "-" for word in words))


def _progress(one: Operation) -> str:
    if one.progress:
        return f"{100 * one.progress.get('done', 0):.0f} % {one.progress.get('text', '')}".strip()
    return one.steps[-1].name if one.steps else ""


def settle_operations(arguments: argparse.Namespace) -> int:
    """``brine operations settle``: 1 if one of them still waits."""
    undo_when_told_to_end()
    remove_unfinished()
    known = {one.id: one for one in pending()}
    rows = []
    for identity in dict.fromkeys(arguments.id or known):
        text, error = "unchanged: {} is not pending", None
        if record := known.get(identity):
            try:
                is_settled = settle_one(record)
                text = "settled: {}" if is_settled else "unchanged: {} is in progress"
            except (BrineError, OSError) as fault:
                text, error = "waiting: {}", fault
        result = text.partition(":")[0]
        rows.append({"id": identity, "result": result, "error": str(error) if error else None})
        if error and not arguments.json:
            tell_error(error if isinstance(error, BrineError) else BrineError(str(error)))
        elif not arguments.json:
            print(text.format(printable(identity)))
    if arguments.json:
        print(json.dumps(rows, indent=2))
    return 1 if any(row["error"] for row in rows) else 0
