"""The verbs of ``brine instance`` that show: list, info, log, console."""

from __future__ import annotations

import argparse
import json
import sys

from brine.common.cli import table, undo_when_told_to_end
from brine.common.errors import tell_error
from brine.common.paths import InstanceFiles
from brine.instance import console as serial_line
from brine.instance import store
from brine.instance.console import NoLineError, lines_of, read_log
from brine.instance.history import with_reasons
from brine.instance.observe import look, look_at_all
from brine.instance.report import details, row, summary, text
from brine.instance.status import Oper
from brine.instance.store import InstanceError
from brine.instance.xen.domain import become_console


def list_all(arguments: argparse.Namespace) -> int:
    """``brine instance list``"""
    found = list(look_at_all())
    seen = with_reasons([one for one in found if not isinstance(one, InstanceError)])
    faults = [one for one in found if isinstance(one, InstanceError)]
    if arguments.json:
        print(json.dumps([summary(one) for one in seen], indent=2))
    elif seen:
        wide = arguments.wide
        print(*table([row(one, wide=wide) for one in (None, *seen)]), sep="\n")
    elif not faults:
        print("no instance is defined")
    for fault in faults:
        tell_error(fault)
    return 1 if faults else 0


def info(arguments: argparse.Namespace) -> int:
    """``brine instance info``"""
    (seen,) = with_reasons([look(arguments.name)])
    found = details(seen)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(text(found)))
    return 0


def log(arguments: argparse.Namespace) -> int:
    """``brine instance log``"""
    name = arguments.name
    try:
        is_xen = store.load(name).is_xen()
    except store.DamagedSpecError:
        is_xen = False
    data = read_log(name, is_xen=is_xen)
    lines = lines_of(data)
    if arguments.lines is not None:
        lines = lines[-arguments.lines :]
        data = b"".join(data.splitlines(keepends=True)[-arguments.lines :])
    if arguments.json:
        print(json.dumps({"name": name, "lines": lines}, indent=2))
    elif arguments.raw:
        sys.stdout.buffer.write(data)
    else:
        print(*lines, sep="\n")
    return 0


def console(arguments: argparse.Namespace) -> int:
    """``brine instance console``"""
    undo_when_told_to_end()
    name = arguments.name
    store.spec_file_of(name)  # or it is no name
    if InstanceFiles(name).domain.exists():
        _refuse_down(name)
        become_console(name)
    try:
        return serial_line.attach(name, InstanceFiles(name).serial)
    except NoLineError:
        _refuse_down(name)
        raise


def _refuse_down(name: str) -> None:
    """Tell a person who wants the console of an instance that it does not run."""
    if look(name).state.oper in (Oper.DOWN, Oper.USER_SHUTDOWN):
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")
