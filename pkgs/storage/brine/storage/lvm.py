"""LVM: one report of all that a node has, and commands that change something.

LVM is run with an environment of its own and for a limited time: it waits for devices, and for
locks that other commands of LVM hold. See :manpage:`lvm(8)` and :manpage:`lvmreport(7)`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from brine.common.errors import install_hint, printable, warn
from brine.common.process import run_bounded
from brine.storage.lvm_program import AS_JSON, FULL_REPORT, PATH, PROGRAM, environment, running
from brine.storage.unit import StorageError

TIMEOUT_S = 60.0
"""How long a command may take."""

_OF_VOLUMES = (
    "vg_name,lv_name,lv_path,lv_attr,lv_size,lv_tags,lv_time,lv_layout,lv_role,lv_health_status,lv_active,"
    "lv_device_open,lv_merging,lv_snapshot_invalid,origin,snap_percent"
)
_NO_FAULT = re.compile(
    # What LVM says of a node without device-mapper, such as a container.
    r"WARNING:|File descriptor|/dev/mapper/control|Failure to communicate with kernel"
    r"|Check that device-mapper|Incompatible libdevmapper"
)

_NO_TARGETS = "Required device-mapper target(s) not detected"

Row = Mapping[str, str]

DISK_TAG = "brine.disk="
"""Begins the tag that marks a logical volume as that of a disk, with its UUID."""


class LvmError(StorageError):
    """A command of LVM's that failed."""


class LvmHangsError(LvmError):
    """A command of LVM's that did not end in time."""


@dataclass(frozen=True, slots=True)
class LvmReport:
    """All volume groups and physical volumes of a node, in LVM's own fields.

    Sizes are in bytes; what is true is ``1``, and what is not is ``0``.
    """

    groups: tuple[Row, ...] = ()
    physical: tuple[Row, ...] = ()

    def physical_of(self, group: Row) -> list[Row]:
        """The physical volumes of a volume group."""
        return [one for one in self.physical if one["vg_uuid"] == group["vg_uuid"]]


@lru_cache(maxsize=1)
def report() -> LvmReport:
    """What LVM has on this node; nothing, where LVM is not installed. LVM is asked once a process,
    and after each change.

    :raises LvmError: if it can't be found out.
    """
    if not is_installed():
        return LvmReport()
    text, fault = _run(*FULL_REPORT)
    try:
        parts = json.loads(text)["report"]
        report = LvmReport(_rows(parts, "vg"), _rows(parts, "pv"))
    except (ValueError, LookupError, TypeError):
        raise LvmError(f"lvm fullreport: {fault or 'its output is no report'}") from None
    if fault:  # of one of the groups; the others are in the report
        warn(f"lvm fullreport: {fault}")
    return report


@lru_cache(maxsize=1)
def volumes() -> tuple[Row, ...]:
    """The logical volumes of this node, without the parts that LVM itself makes; none, where LVM is
    not installed. As :func:`report` it is asked once.

    :raises LvmError: if they can't be found out.
    """
    if not is_installed():
        return ()
    text, fault = _run(
        "lvs",
        *AS_JSON,
        *("--config", 'report { time_format="%s" }', "-o", _OF_VOLUMES),
    )
    try:
        rows = _rows(json.loads(text)["report"], "lv")
    except (ValueError, LookupError, TypeError):
        raise LvmError(f"lvm lvs: {fault or 'its output is no report'}") from None
    if fault and not rows:
        raise LvmError(f"lvm lvs: {fault}")
    return rows


def _rows(parts: list[dict[str, list[Row]]], kind: str) -> tuple[Row, ...]:
    return tuple(row for part in parts for row in part.get(kind, ()))


def forget() -> None:
    """Have LVM be asked again: something may have changed since."""
    report.cache_clear()
    volumes.cache_clear()


def tag_of(row: Row, prefix: str) -> str:
    """The value of a logical volume's tag; empty if it has none."""
    tags = row["lv_tags"].split(",")
    return next((tag[len(prefix) :] for tag in tags if tag.startswith(prefix)), "")


def is_installed() -> bool:
    return any(os.access(f"{folder}/{PROGRAM}", os.X_OK) for folder in PATH.split(":"))


def refuse_without_lvm(about: str) -> None:
    """Refuse to look for something of LVM's where LVM is not installed.

    :raises LvmError: if it is not.
    """
    if not is_installed():
        raise _not_installed(about)


def _not_installed(about: str) -> LvmError:
    hint = install_hint(apt="lvm2", dnf="lvm2")
    return LvmError(f"{about}: LVM is not installed", hint=hint)


def change(*command: str) -> str:
    """Run a command of LVM's that changes something, such as ``pvchange``; returns what it says.

    :raises LvmError: if it fails.
    """
    try:
        said, fault = _run(*command)
    finally:
        forget()
    if _NO_TARGETS in fault:
        hint = "modprobe dm_mod dm_snapshot; containers have none: make disks in folders there"
        raise LvmError(f"lvm {command[0]}: the kernel has no device mapper for it", hint=hint)
    if fault:
        raise LvmError(f"lvm {' '.join(command)}: {fault}")
    return said


def rows(kind: str, *command: str) -> list[Row]:
    """The rows of a kind in the report of another command, such as ``pvs``. Sizes are in bytes.

    :raises LvmError: if it fails.
    """
    text, fault = _run(*command, *AS_JSON)
    if fault:
        raise LvmError(f"lvm {command[0]}: {fault}")
    return [*_rows(json.loads(text)["report"], kind)]


def program(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """A command of LVM's, and its environment.

    :raises LvmError: if it can't be run here.
    """
    if os.geteuid():
        raise LvmError(f"lvm {arguments[0]}: only root can run it", hint="be root")
    return [PROGRAM, *arguments], environment()


def fault_of(said: str, status: int) -> str:
    """What a command of LVM's that failed has said, in one line."""
    lines = (line.strip() for line in said.splitlines())
    faults = [line for line in lines if line and not _NO_FAULT.match(line)]
    return printable(faults[0]) if faults else f"exit status {status}"


def _run(*arguments: str) -> tuple[str, str]:
    """The output of a command of LVM's, and its fault in one line, if it failed."""
    command, variables = program(*arguments)
    try:
        if end := running.pop(arguments, None):
            done = end(TIMEOUT_S)
        else:
            done = run_bounded(command, timeout_s=TIMEOUT_S, environment=variables)
    except TimeoutError:
        text = f"lvm {arguments[0]}: no answer within {TIMEOUT_S:g} s"
        hint = "a device may not answer, or another command of LVM's holds a lock: see ps -e"
        raise LvmHangsError(text, hint=hint) from None
    except FileNotFoundError:
        raise _not_installed(f"lvm {arguments[0]}") from None
    return done.stdout, fault_of(done.stderr, done.returncode) if done.returncode else ""
