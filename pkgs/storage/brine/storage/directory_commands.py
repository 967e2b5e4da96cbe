"""The verbs of ``brine storage`` that change its settings: folders, and the default unit."""

from __future__ import annotations

import argparse
import json

from brine.common.cli import print_done
from brine.common.errors import printable
from brine.storage import directories
from brine.storage.settings import load_settings


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


def default_unit(arguments: argparse.Namespace) -> int:
    """``brine storage default``."""
    if arguments.unit is None and not arguments.none:
        unit = load_settings().default_unit
        text = printable(unit) or "no default unit"
        print(json.dumps({"default_unit": unit}) if arguments.json else text)
        return 0
    result = "modified" if directories.set_default(arguments.unit) else "unchanged"
    unit = arguments.unit or ""
    text = f"{result}: {printable(unit) or 'none'}"
    print_done(text, as_json=arguments.json, default_unit=unit)
    return 0


def _print_result(arguments: argparse.Namespace, result: str, name: str) -> None:
    text = f"{result}: {printable(name)}"
    print_done(text, as_json=arguments.json, type=arguments.type, name=name)
