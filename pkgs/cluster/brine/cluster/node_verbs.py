"""``brine node drain``, ``fill`` and ``undrain``: Salt's runner ``brine``, with another face."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from brine.cluster.migrate_commands import run_salt
from brine.common.cli import print_json
from brine.common.errors import BrineError, printable, tell_error


def drain(arguments: argparse.Namespace) -> int:
    """``brine node drain``: 1 if an instance runs there still."""
    return _done("drain", arguments, "to", "cold", "jobs")


def fill(arguments: argparse.Namespace) -> int:
    """``brine node fill``: 1 if an instance is not at home."""
    return _done("fill", arguments, "cold", "jobs")


def undrain(arguments: argparse.Namespace) -> int:
    """``brine node undrain``."""
    return _done("undrain", arguments)


def _done(function: str, arguments: argparse.Namespace, *options: str) -> int:
    words = {name: getattr(arguments, name) for name in ("node", *options)}
    is_plan = bool(options) and arguments.dry_run
    told = run_salt(function, {**words, "test": is_plan}, arguments.json, lambda _: True)
    if arguments.json:
        print_json({key: one for key, one in told.items() if key != "retcode"})
    else:
        for line in _lines(told, is_plan):
            print(line)
    if not told["result"] and not arguments.json:
        tell_error(BrineError(printable(str(told["comment"]))))
    return 0 if told["result"] else 1


def _lines(told: Mapping[str, Any], is_plan: bool) -> Iterator[str]:
    for word, key in ("would move" if is_plan else "moved", "moved"), ("stays", "failed"):
        for name, where in sorted((told.get(key) or {}).items()):
            yield printable(f"{word}: {name}: {where}")
    for name, why in sorted((told.get("left") or {}).items()):
        yield printable(f"left: {name}: {why}")
    for name, why in sorted((told.get("not_redistributed") or {}).items()):
        yield printable(f"{name} has not got the configuration yet: {why}")
    if told["result"]:
        yield printable(str(told["comment"]))
