"""The instances of a node: their names, their specs, and what they were started with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import read_json, read_regular
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import LastStart

READERS = "be root, or in the group brine"
"""A hint for users who may not read specs."""

DOMAIN_SPEC = "# Of the spec "
"""Begins a line of a domain's configuration, which has the spec of its start."""

_SUFFIX = ".json"


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
    known: the instance may start again once its spec is mended. Other commands report the damage.
    """
    for other in instance_names():
        if other == name:
            continue
        files = InstanceFiles(other)
        try:
            status = files.spec.stat()
        except OSError:
            continue
        data = _content(files.spec, status.st_ino, status.st_mtime_ns)
        if data is None:
            data = _last_spec(other)
        if isinstance(data, Mapping):
            yield other, data


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
