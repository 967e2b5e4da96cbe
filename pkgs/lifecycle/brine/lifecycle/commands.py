"""The verbs of ``brine lifecycle``."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError, UsageError, tell_error, warn
from brine.common.tables import print_table
from brine.instance import owner, store
from brine.instance.messages import log_to_journal
from brine.instance.observe import Observed, look_at_all
from brine.instance.owner import TERMINATE, WATCHDOG, find_file, folder_of, make_folder
from brine.instance.store import InstanceError, NoSpecError
from brine.lifecycle.owner_process import Folder, OwnerError, OwnerProcess, ask_and_wait
from brine.vm.spec import OwnerSpec
from brine.vm.values import vm_name_fault

_INTERVALS = 3  # so often a watchdog is touched within its timeout
_USUAL_INTERVAL_S = 1.0  # the shortest timeout is two seconds
_HEADING = ("NAME", "OWNER", "STATUS", "EXPIRES", "WHY")


def own(arguments: argparse.Namespace) -> int:
    """``brine lifecycle own``"""
    log_to_journal("brine")
    name = _name(arguments.name)
    found = _owner_of(name)
    if os.geteuid() == 0 and found:
        _make_folder(name, found)
    interval_s = arguments.interval
    if interval_s is None:
        interval_s = found.watchdog_timeout / _INTERVALS if found else _USUAL_INTERVAL_S
    elif found and interval_s >= found.watchdog_timeout:
        text = f"--interval {interval_s:g} is no less than the timeout of its watchdog"
        raise UsageError(text, hint=f"that is {found.watchdog_timeout} s; a third of it is usual")
    folder = Folder(name)
    if paths.MARKS_DIR.is_dir():  # which no container has
        owner.warn_without_handler()
    return OwnerProcess(
        folder, interval_s=interval_s, starts=arguments.start, command=arguments.command
    ).run()


def prestop(arguments: argparse.Namespace) -> int:
    """``brine lifecycle prestop``"""
    name = _name(arguments.name)
    if not folder_of(name).is_dir():
        try:
            _owner_of(name)
        except NoSpecError as error:
            warn(str(error), hint=error.hint)  # nothing of it is left to wait for
    if ask_and_wait(name, arguments.timeout):
        return 0
    text = f"has not ended within {arguments.timeout:g} s; its owner's request stays"
    raise OwnerError(name, text, hint="systemctl status brine-lifecycle tells why")


def prepare(arguments: argparse.Namespace) -> int:
    """``brine lifecycle prepare``"""
    if bool(arguments.names) == arguments.all:
        raise UsageError("give the names of instances, or --all")
    failed = False
    for name in store.names() if arguments.all else arguments.names:
        try:
            found = store.load(_name(name)).owner
            if found:
                _make_folder(name, found)
                print(f"prepared: {folder_of(name)}")
            elif not arguments.all:
                raise _no_owner(name)
        except BrineError as error:
            tell_error(error)
            failed = True
    return 1 if failed else 0


def _make_folder(name: str, found: OwnerSpec) -> None:
    with store.alone(name):
        make_folder(name, found)


def list_owned(arguments: argparse.Namespace) -> int:
    """``brine lifecycle list``"""
    rows, faults = [], []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            # Without a spec, an instance has an owner if it has a folder.
            faults += [seen] if folder_of(seen.name).is_dir() else []
        elif seen.spec.owner:
            rows.append(_summary(seen, seen.spec.owner, time.time()))
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(_HEADING, map(_row, rows), none="" if faults else "no instance has an owner")
    if rows:
        owner.warn_without_handler()
    for fault in faults:
        tell_error(fault)
    return 1 if faults else 0


def _summary(seen: Observed, owner_spec: OwnerSpec, now: float) -> dict[str, Any]:
    """An instance in the JSON of the list.

    :param now: in seconds since 1970.
    """
    timeout_s = float(owner_spec.watchdog_timeout)
    watchdog = request = None
    owners: list[int] = []
    try:
        folder = Folder(seen.name)
        watchdog, request = (
            find_file(folder.descriptor, WATCHDOG),
            find_file(folder.descriptor, TERMINATE),
        )
        owners = [one.pid for one in folder.owners() if one.is_visible()]
        os.close(folder.descriptor)
        fault = owner.why_not_alive(watchdog, timeout_s, now)
    except OwnerError as error:
        fault = str(error).removeprefix(f"{seen.name}: ")
    except OSError as error:
        fault = f"{folder_of(seen.name)}: {error.strerror}"
    counts = watchdog is not None and not owner.fault_of(watchdog, now)
    touched_s = max(round(watchdog.age_s(now), 1), 0.0) if watchdog and counts else None
    faults = [fault, f"the request {request.fault}" if request and request.fault else ""]
    return {
        "name": seen.name,
        "owner": "gone" if fault else "alive",
        "touched_s": touched_s,
        "expires_s": None if fault or touched_s is None else round(timeout_s - touched_s, 1),
        "watchdog_timeout": timeout_s,
        "request": request is not None and not request.fault,
        "owners": owners,
        "status": seen.state.status,
        "why": "; ".join(filter(None, faults)),
    }


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    touched, expires = row["touched_s"], row["expires_s"]
    why = [row["why"]] if row["why"] else []
    if row["request"]:
        why.append("its owner has asked for its end")
    if len(row["owners"]) > 1:
        why.append(f"{len(row['owners'])} owners, of whom process {row['owners'][0]} counts")
    return (
        row["name"],
        row["owner"] if touched is None else f"{row['owner']}, {touched:.0f} s ago",
        row["status"],
        "-" if expires is None else f"in {expires:.0f} s",
        "; ".join(why) or "-",
    )


def _name(name: str) -> str:
    if fault := vm_name_fault(name):
        raise UsageError(f"{name!r}: {fault}")
    return name


def _owner_of(name: str) -> OwnerSpec | None:
    """The owner that an instance's spec names; None if the spec can't be read, as in a container.

    :raises BrineError: if the instance has no owner.
    """
    if not paths.SPECS_DIR.is_dir():
        return None
    try:
        found = store.load(name).owner
    except InstanceError:
        if os.geteuid() == 0:
            raise
        return None
    if found is None:
        raise _no_owner(name)
    return found


def _no_owner(name: str) -> OwnerError:
    hint = 'define it with "owner": {"watchdog_timeout": 15}; see brine-spec(5)'
    return OwnerError(name, "its spec has no owner", hint=hint)
