"""The verbs of ``brine storage`` that make and remove folders."""

from __future__ import annotations

import argparse

from brine.common.cli import print_done
from brine.common.errors import printable
from brine.storage import directories


def create_unit(arguments: argparse.Namespace) -> int:
    """``brine storage create``."""
    is_new = directories.create(arguments.name)
    _print_result(arguments, "created" if is_new else "unchanged", arguments.name)
    return 0


def remove_unit(arguments: argparse.Namespace) -> int:
    """``brine storage remove``."""
    directories.remove(arguments.name)
    _print_result(arguments, "removed", arguments.name)
    return 0


def _print_result(arguments: argparse.Namespace, result: str, name: str) -> None:
    text = f"{result}: {printable(name)}"
    print_done(text, as_json=arguments.json, type=arguments.type, name=name)
