"""The verbs of ``brine storage``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from brine.common.cli import print_done
from brine.common.errors import BrineError, printable, tell_error
from brine.common.progress import size_text
from brine.common.tables import print_table
from brine.storage.file_directory import FileDirectory
from brine.storage.lvm_units import LvmPv, LvmVg
from brine.storage.settings import load_settings
from brine.storage.unit import StorageUnit, UnitStatus

TYPES: tuple[type[StorageUnit], ...] = (LvmPv, LvmVg, FileDirectory)

VOLUME_TYPES: tuple[type[StorageUnit], ...] = (LvmVg, FileDirectory)
"""The types of units that volumes can be in."""

_HEADING = ("TYPE", "NAME", "SIZE", "USED", "FREE", "ALLOCATABLE", "STATUS", "WHY")


def volume_units(faults: list[BrineError]) -> Iterator[StorageUnit]:
    """The units that volumes can be in.

    :param faults: gains the reason why those of a type are not known.
    """
    for kind in VOLUME_TYPES:
        try:
            yield from kind.list()
        except BrineError as error:
            faults.append(error)


def list_units(arguments: argparse.Namespace) -> int:
    """``brine storage list``: 1 if the units of a type can't be found out."""
    units, are_all = _units(arguments.type)
    _print(units, arguments, none="no storage unit is there" if are_all else "")
    return 0 if are_all else 1


def check_units(arguments: argparse.Namespace) -> int:
    """``brine storage check``: 1 if a unit is not ok."""
    units, are_all = _units(arguments.type)
    bad = [one for one in units if one.status is not UnitStatus.OK]
    _print(bad, arguments, none="all storage units are ok" if are_all else "")
    return 0 if are_all and not bad else 1


def modify_unit(arguments: argparse.Namespace) -> int:
    """``brine storage modify``."""
    unit = _type(arguments.type).find(arguments.name)
    is_changed = unit.modify(allocatable=arguments.allocatable == "yes")
    text = f"{'modified' if is_changed else 'unchanged'}: {printable(unit.name)}"
    print_done(text, as_json=arguments.json, type=unit.type, name=unit.name)
    return 0


def repair_unit(arguments: argparse.Namespace) -> int:
    """``brine storage repair``."""
    unit = _type(arguments.type).find(arguments.name)
    unit.repair()
    print_done(
        f"repaired: {printable(unit.name)}", as_json=arguments.json, type=unit.type, name=unit.name
    )
    return 0


def print_facts(_arguments: argparse.Namespace) -> int:
    """``brine storage facts``: what an allocator needs to know; 1 if the units of a type can't be
    found out, which has then no units."""
    units, are_all = _units(None)
    rows = [{**dict(_facts(one)), "has_volumes": isinstance(one, VOLUME_TYPES)} for one in units]
    facts = {"default_unit": load_settings().default_unit, "units": rows, "complete": are_all}
    print(json.dumps(facts, indent=2))
    return 0 if are_all else 1


def _type(name: str) -> type[StorageUnit]:
    return next(one for one in TYPES if one.type == name)


def _units(name: str | None) -> tuple[list[StorageUnit], bool]:
    """The units of one type, or of all, and whether these are all. A fault of a type is told, and
    hides no other type."""
    units: list[StorageUnit] = []
    faults: dict[str, BrineError] = {}
    for each in TYPES if name is None else (_type(name),):
        try:
            units += each.list()
        except BrineError as error:
            faults.setdefault(str(error), error)
    for fault in faults.values():
        tell_error(fault)
    return units, not faults


def _print(units: list[StorageUnit], arguments: argparse.Namespace, *, none: str) -> None:
    if arguments.json:
        print(json.dumps([dict(_facts(one)) for one in units], indent=2))
    else:
        print_table(_HEADING, map(_row, units), none=none)


def _facts(unit: StorageUnit) -> Iterator[tuple[str, Any]]:
    yield "type", unit.type
    yield from ((one.name, getattr(unit, one.name)) for one in fields(unit))


def _row(unit: StorageUnit) -> tuple[str, ...]:
    sizes = map(size_text, (unit.size, unit.used, unit.free))
    allocatable = "yes" if unit.allocatable else "no"
    return (unit.type, printable(unit.name), *sizes, allocatable, unit.status, printable(unit.why))
