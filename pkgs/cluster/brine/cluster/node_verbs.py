"""``brine node drain``, ``fill`` and ``undrain``: Salt's runner ``brine``, with another face."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from brine.common.cli import print_json
from brine.common.errors import BrineError, printable, tell_error


def drain(arguments: argparse.Namespace) -> int:
    """``brine node drain``."""
    return _done("drain", arguments, _options(arguments, "to", "cold", "jobs"))


def fill(arguments: argparse.Namespace) -> int:
    """``brine node fill``."""
    return _done("fill", arguments, _options(arguments, "cold", "jobs"))


def undrain(arguments: argparse.Namespace) -> int:
    """``brine node undrain``."""
    return _done("undrain", arguments, [])


def _options(arguments: argparse.Namespace, *names: str) -> list[str]:
    given = {name: getattr(arguments, name) for name in names}
    given["test"] = arguments.dry_run
    return [f"{name}={value}" for name, value in given.items() if value]


def _done(function: str, arguments: argparse.Namespace, options: list[str]) -> int:
    told = run_salt(function, arguments.node, *options)
    if arguments.json:
        print_json(told)
    else:
        print("\n".join(_lines(told, is_plan=getattr(arguments, "dry_run", False))))
    if told["result"] is True:
        return 0
    if not arguments.json:
        tell_error(BrineError(printable(str(told["comment"]))))
    return 1


def _lines(told: Mapping[str, Any], *, is_plan: bool) -> Iterator[str]:
    for word, key in ("would move" if is_plan else "moved", "moved"), ("stays", "failed"):
        for name, where in sorted((told.get(key) or {}).items()):
            yield printable(f"{word}: {name}: {where}")
    for name, why in sorted((told.get("left") or {}).items()):
        yield printable(f"left: {name}: {why}")
    for name, why in sorted((told.get("not_redistributed") or {}).items()):
        yield printable(f"{name} has not got the configuration yet: {why}")
    if told["result"] is True:
        yield printable(str(told["comment"]))


def run_salt(function: str, *arguments: str) -> Mapping[str, Any]:
    """The answer of a function of Salt's runner ``brine``.

    :raises BrineError: if there is none.
    """
    command = ["salt-run", "--out=json", "--no-color", f"brine.{function}", *arguments]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, check=False, env=os.environ)
    except OSError as error:
        hint = "run this on the host of the Salt master, which is the cluster's master"
        raise BrineError(f"salt-run can't be run: {error.strerror}", hint=hint) from None
    try:
        told = json.loads(run.stdout)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not {"result", "comment"} <= told.keys():
        said = run.stdout.decode(errors="replace").strip() or f"status {run.returncode}"
        raise BrineError(f"salt-run brine.{function} has failed: {printable(said):.300}")
    return told
