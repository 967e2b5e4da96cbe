"""The instances of a node: their names, their specs, and what they were started with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import read_json, read_regular
from brine.vm.files import InstanceFiles
from brine.vm.identities import layers_of, rows_in
from brine.vm.runtime_file import LastStart

READERS = "be root, or in the group brine"
"""A hint for users who may not read specs."""

DOMAIN_SPEC = "# Of the spec "
"""Begins a line of a domain's configuration, which has the spec of its start."""

_SUFFIX = ".json"
_PATH_KEYS = ("disks", "cdroms")
# An object in JSON that may be damaged, up to the next one in it; and its path.
_OBJECT = re.compile(r"\{[^{}]*")
_BACKING = re.compile(r'"backing"\s*:\s*$')
_PATH = re.compile(r'"path"\s*:\s*("/(?:[^"\\\n]|\\.)*")')
_READ_ONLY = re.compile(r'"read_only"\s*:\s*true')


def name_by_uuid(uuid: str) -> str | None:
    """The name of the instance of a UUID; None if there is none.

    :raises BrineError: if the specs can't be read.
    """
    wanted = uuid.lower()
    found = (name for name, data in specs_but(None) if str(data.get("uuid")).lower() == wanted)
    return next(found, None)


def specs_but(name: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and specs of all instances but *name*, as JSON.

    In the place of a damaged spec stands what its instance was started as last, as far as that is
    known, with all disks that the text of the spec names: the instance may start again once its
    spec is mended. Other commands report the damage.
    """
    for other in instance_names():
        if other == name:
            continue
        files = InstanceFiles(other)
        try:
            status = files.spec.stat()
        except FileNotFoundError:
            continue
        except OSError:
            yield other, _presumed(other)
            continue
        data = _content(files.spec, status.st_ino, status.st_mtime_ns)
        yield other, data if _names_its_disks(data) else _presumed(other)


def instance_names() -> list[str]:
    """The names that files of specs have, sorted."""
    folder = paths.SPECS_DIR
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = READERS if isinstance(error, PermissionError) else None
        raise BrineError(f"{folder}: can't be read: {error.strerror}", hint=hint) from error
    # An unfinished one begins with a point.
    found = [one for one in files if one.endswith(_SUFFIX) and not one.startswith(".")]
    return sorted(one.removesuffix(_SUFFIX) for one in found)


@lru_cache(maxsize=4096)
def _content(file: Path, _inode: int, _written_ns: int) -> Any:
    # A process that defines hundreds of instances reads each spec once.
    return read_json(file)


def _names_its_disks(data: Any) -> bool:
    """Whether data has its disks as a spec has them, whatever else is wrong with it."""
    if not isinstance(data, Mapping):
        return False
    disks, cdroms = (data.get(key, []) for key in _PATH_KEYS)
    if not isinstance(disks, list) or not isinstance(cdroms, list):
        return False
    rows = [layer for row in disks for layer in (row, *_layers_in(row))]
    return all(isinstance(row, Mapping) and isinstance(row.get("path"), str) for row in rows)


def _layers_in(row: Any) -> Iterator[Any]:
    yield from layers_of(row) if isinstance(row, Mapping) else ()


def _presumed(name: str) -> Mapping[str, Any]:
    """What an instance with a damaged spec may have at its next start."""
    last = LastStart.known(name)
    started = {**(last.spec or {}), **last.devices()} if last else {}
    try:
        text = read_regular(InstanceFiles(name).spec).decode(errors="replace")
    except OSError:
        text = ""
    return {**started, "disks": [*rows_in(started, "disks"), *_disks_in(text)]}


def _disks_in(text: str) -> Iterator[Mapping[str, Any]]:
    """The disks that the text of a spec names, which may be no JSON. One that is only below another
    is read-only."""
    before = ""
    for found in _OBJECT.findall(text):
        is_read_only = bool(_BACKING.search(before) or _READ_ONLY.search(found))
        for path in _PATH.findall(found):
            yield {"path": _string(path), "read_only": is_read_only}
        before = found


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text.strip('"')


def hypervisor_in_spec(name: str) -> str | None:
    """The hypervisor that an instance's spec names; None if there is no such spec."""
    data = read_json(InstanceFiles(name).spec)
    return str(data.get("hypervisor", "kvm")) if isinstance(data, Mapping) else None


# What an instance was started with.


def started_with(name: str) -> Any:
    """The spec of an instance's last start, as JSON; None if that is not known."""
    files = InstanceFiles(name)
    if not files.has_domain():
        return _last_spec(name)
    try:
        for line in read_regular(files.domain).decode(errors="replace").splitlines():
            if line.startswith(DOMAIN_SPEC):
                return json.loads(line.removeprefix(DOMAIN_SPEC))
    except (OSError, ValueError, RecursionError):
        return None
    return None


def _last_spec(name: str) -> Mapping[str, Any] | None:
    last = LastStart.known(name)
    return last.spec if last else None


def instance_behind(qmp: Path, runtime: Path | None) -> str | None:
    """The name of the instance with a QMP socket or a runtime file; None if the VM may be none."""
    if runtime:
        file = Path(os.path.realpath(runtime))
        if file.parent == Path(os.path.realpath(paths.RUNTIME_DIR)):
            return file.stem
    # Unlike Path.resolve(), this accepts a loop of symbolic links.
    socket = Path(os.path.realpath(qmp))
    return socket.stem if socket.parent == Path(os.path.realpath(paths.CONTROL_DIR)) else None
