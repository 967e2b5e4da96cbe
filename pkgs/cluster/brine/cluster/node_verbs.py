"""``brine node drain``, ``fill``, ``undrain`` and ``reboot``: Salt's runner, with another face."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from brine.cluster.migrate_commands import run_salt, tell_outcome
from brine.common.cli import print_json
from brine.common.errors import BrineError, printable, tell_error, warn


def drain(arguments: argparse.Namespace) -> int:
    """``brine node drain``: 1 if an instance runs there still."""
    return _done("drain", arguments, "to", "cold", "jobs")


def fill(arguments: argparse.Namespace) -> int:
    """``brine node fill``: 1 if an instance is not at home."""
    return _done("fill", arguments, "cold", "jobs")


def undrain(arguments: argparse.Namespace) -> int:
    """``brine node undrain``."""
    return _done("undrain", arguments)


def reboot_nodes(arguments: argparse.Namespace) -> int:
    """``brine node reboot``: 1 if it has stopped at a doubt."""
    options = ("nodes", "upgrade", "batch", "cold", "jobs")
    words = {name: getattr(arguments, name) or None for name in options}
    is_plan, as_json = arguments.dry_run, arguments.json
    told = run_salt("reboot", {**words, "test": is_plan}, as_json, lambda _: True)
    if not as_json:
        for batch in told.get("batches") or []:
            print(printable(f"would reboot: {', '.join(batch['nodes'])}"))
            for line in _guests(batch, is_plan):
                print(line)
        if left_out := told.get("left_out"):
            print(printable(f"left out: {', '.join(left_out)}"))
    return tell_outcome(told, as_json)


def _done(function: str, arguments: argparse.Namespace, *options: str) -> int:
    words = {name: getattr(arguments, name) for name in ("node", *options)}
    is_plan = bool(options) and arguments.dry_run
    told = run_salt(function, {**words, "test": is_plan}, arguments.json, lambda _: True)
    if arguments.json:
        print_json({key: one for key, one in told.items() if key != "retcode"})
    else:
        for line in _lines(told, is_plan):
            print(line)
        for note in told.get("notes") or []:
            warn(printable(note))
    if not told["result"] and not arguments.json:
        tell_error(BrineError(printable(str(told["comment"]))))
    return 0 if told["result"] else 1


def _lines(told: Mapping[str, Any], is_plan: bool) -> Iterator[str]:
    yield from _guests(told, is_plan)
    for name, why in _sorted(told, "not_redistributed"):
        yield printable(f"{name} has not got the configuration yet: {why}")
    if told["result"]:
        yield printable(str(told["comment"]))


def _guests(told: Mapping[str, Any], is_plan: bool) -> Iterator[str]:
    for name, node in _sorted(told, "moved"):
        yield printable(f"{'would move' if is_plan else 'moved'}: {name} to {node}")
    for name, why in _sorted(told, "failed"):
        yield printable(f"can't move: {name}: {why}")
    for name, why in _sorted(told, "left"):
        yield printable(f"stays: {name}: {why}")


def _sorted(told: Mapping[str, Any], key: str) -> list[tuple[str, str]]:
    return sorted((told.get(key) or {}).items())
