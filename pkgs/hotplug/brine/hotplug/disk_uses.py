"""Whose a disk is: two VMs that write one would each ruin the other's file system.

A disk may have several names, such as links, or nodes of the same device: what they lead to counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common import paths
from brine.common.instance_specs import specs_but
from brine.common.listening import is_listening
from brine.common.regular_file import read_regular
from brine.hotplug.disk import Disk, backing_of
from brine.hotplug.errors import HotplugError

_OFFLINE = "offline"
_IDE = "ide"


@dataclass(frozen=True, slots=True)
class Use:
    """A disk that somebody has."""

    path: str
    read_only: bool


def shared(path: str, *, read_only: bool, uses: Iterable[Use]) -> Use | None:
    """Which of these is the disk at *path*; None if none is, or none of both is written."""
    identity = _identity(path)
    for use in uses:
        if _identity(use.path) == identity and not (use.read_only and read_only):
            return use
    return None


def is_same(path: str, other: str) -> bool:
    """Whether two paths lead to one disk."""
    return _identity(path) == _identity(other)


def refuse_disk_of_others(disk: Disk, own: str | None) -> None:
    """Refuse a disk that an instance of this node has, running or not, unless nobody writes it.

    :param own: the instance that it is for, if it is for one.
    :raises HotplugError: whose it is.
    """
    for name, uses in _uses_of_others(own):
        if other := shared(str(disk.path), read_only=disk.read_only, uses=uses):
            raise HotplugError(
                f"{disk.path}: is a disk of {name} too, {other.path}",
                hint=f"take it out of {name} first, or have it read-only in both",
            )


def uses_of_spec(spec: Mapping[str, Any], runtime: Mapping[str, Any] | None) -> list[Use]:
    """The disks that an instance has at its next start: those of its spec, with what has been
    plugged since its last one, unless its spec is another by now.

    :param spec: as JSON; so is *runtime*, its runtime file's content.
    """
    started = runtime.get("spec") if runtime else None
    keys = ("disks", "nics")
    if isinstance(started, Mapping) and all(started.get(key) == spec.get(key) for key in keys):
        return [*_plugged(runtime or {}), *_cdroms(spec)]
    return [*_uses(spec.get("disks")), *_cdroms(spec)]


def uses_of_runtime(runtime: Mapping[str, Any]) -> list[Use]:
    """The disks that an instance was started with, or has been plugged since."""
    return [*_plugged(runtime), *_cdroms(runtime.get("spec"))]


def ide_disks(runtime: Mapping[str, Any]) -> Iterator[Use]:
    """Those of IDE, which nobody plugs, so that they are only in the spec that it was started
    with."""
    spec = runtime.get("spec")
    started = spec.get("disks") if isinstance(spec, Mapping) else None
    rows = started if isinstance(started, list) else []
    return _uses([row for row in rows if isinstance(row, dict) and row.get("interface") == _IDE])


def runtime_of(name: str) -> Mapping[str, Any] | None:
    """What the runtime file of an instance says; None if it says nothing that can be used."""
    try:
        data = json.loads(read_regular(paths.RUNTIME_DIR / f"{name}.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, Mapping) else None


def _plugged(runtime: Mapping[str, Any]) -> Iterator[Use]:
    yield from _uses(runtime.get("disks"))
    yield from ide_disks(runtime)


def _cdroms(spec: Any) -> Iterator[Use]:
    """The media of CD-ROM drives, which nobody writes."""
    paths = spec.get("cdroms") if isinstance(spec, Mapping) else None
    for path in paths if isinstance(paths, list) else []:
        if isinstance(path, str) and path:
            yield Use(path, read_only=True)


def _uses_of_others(own: str | None) -> Iterator[tuple[str, list[Use]]]:
    for name, spec in specs_but(own, paths.SPECS_DIR):
        runtime = runtime_of(name)
        if spec.get("admin_state") != _OFFLINE:
            yield name, uses_of_spec(spec, runtime)
        # Its spec may have been changed since it was started.
        if runtime and is_listening(paths.CONTROL_DIR / f"{name}.qmp"):
            yield name, uses_of_runtime(runtime)


def _uses(rows: Any) -> Iterator[Use]:
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and isinstance(row.get("path"), str):
            yield Use(row["path"], row.get("read_only") is True)
            with contextlib.suppress(TypeError, KeyError, AttributeError):
                yield from (Use(str(each.path), read_only=True) for each in backing_of(row))


def _identity(path: str) -> tuple[int | str, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ("path", os.path.realpath(path))  # it may be there later
    if stat.S_ISBLK(status.st_mode):
        return ("device", status.st_rdev)
    return ("file", status.st_dev, status.st_ino)
