"""Disks that two instances would write: each has a file system of its own, which would be ruined.

A disk may have several names, such as links, or nodes of the same device: what they lead to counts.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.regular_file import read_regular
from brine.instance.control import control_of, is_listening
from brine.instance.other_specs import other_specs
from brine.instance.schema import SpecError
from brine.instance.spec import DiskSpec, Interface, Spec
from brine.instance.spec_files import InstanceError

_CONTROL_SUFFIX = ".qmp"


@dataclass(frozen=True, slots=True)
class Use:
    """A disk of an instance."""

    path: str
    read_only: bool


def refuse_shared(spec: Spec) -> None:
    """Refuse a spec that has a disk twice, or one of another instance, which one of them writes.
    One that is offline does not count: it does not run.

    :raises SpecError: which disk, and whose it is.
    """
    own: list[Use] = []
    for index, disk in enumerate(spec.disks):
        if other := _shared(disk, own):
            text = f"{disk.path} is another of its disks too, {other.path}"
            raise SpecError(text, where=f"/disks/{index}/path")
        own.append(_use_of(disk))
    if not own:
        return
    for name, data in other_specs(spec.name):
        uses = list(_uses(data.get("disks")))
        for index, disk in enumerate(spec.disks):
            if other := _shared(disk, uses):
                raise SpecError(
                    f"{disk.path} is a disk of {name} too, {other.path}",
                    where=f"/disks/{index}/path",
                    hint=f'make it read_only in both, or define {name} with "admin_state": '
                    '"offline"',
                )


def refuse_in_use(spec: Spec) -> None:
    """Refuse to start an instance with a disk that another one has, which runs.

    QEMU would refuse it as well, but does not know who has it.

    :raises InstanceError: which disk, and who has it.
    """
    if not spec.disks:
        return
    for name in _with_monitor():
        if name == spec.name:
            continue
        uses = list(_running(name))
        for disk in spec.disks:
            other = _shared(disk, uses)
            if other and is_listening(control_of(name).qmp):
                hint = f"brine instance stop {name}, or make it read_only in both"
                text = f"{disk.path}: is in use by {name}, as {other.path}"
                raise InstanceError(spec.name, text, hint=hint)


def _shared(disk: DiskSpec, uses: Iterable[Use]) -> Use | None:
    """Which of these is the same disk; None if none is, or none of both is written."""
    identity = _identity(disk.path)
    for use in uses:
        if _identity(use.path) == identity and not (use.read_only and disk.read_only):
            return use
    return None


def _identity(path: str) -> tuple[int | str, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ("path", os.path.realpath(path))  # it may be there later
    if stat.S_ISBLK(status.st_mode):
        return ("device", status.st_rdev)
    return ("file", status.st_dev, status.st_ino)


def _use_of(disk: DiskSpec) -> Use:
    return Use(disk.path, disk.read_only)


def _with_monitor() -> list[str]:
    """The instances that have a QMP socket, so that they may run."""
    try:
        files = os.listdir(paths.CONTROL_DIR)
    except OSError:
        return []
    suffix = _CONTROL_SUFFIX
    return sorted(file.removesuffix(suffix) for file in files if file.endswith(suffix))


def _running(name: str) -> Iterator[Use]:
    """The disks that an instance was started with, or has been plugged since."""
    data = _json(paths.RUNTIME_DIR / f"{name}.json")
    if not isinstance(data, dict):
        return
    yield from _uses(data.get("disks"))
    spec = data.get("spec")
    # Nobody plugs those of IDE, so they are only there.
    started = spec.get("disks") if isinstance(spec, dict) else None
    rows = started if isinstance(started, list) else []
    ide = [row for row in rows if isinstance(row, dict) and row.get("interface") == Interface.IDE]
    yield from _uses(ide)


def _uses(rows: Any) -> Iterator[Use]:
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and isinstance(row.get("path"), str):
            yield Use(row["path"], row.get("read_only") is True)


def _json(file: Path) -> Any:
    try:
        return json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None
