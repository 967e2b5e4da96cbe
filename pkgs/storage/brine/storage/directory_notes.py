"""What this node has noted of the folders that are storage units: whether their file systems are
mounted.

A folder is noted when it gets its first volume, or when it becomes a unit on a file system of its
own. From then on it has the folder of the records, and the file system that it is on is mounted at
the same place. Where one of both is not so, whatever is in the folder is of another file system.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, root_hint
from brine.common.files import read_json, sync_folder, write_whole
from brine.common.locks import node_lock
from brine.storage.unit import StorageError
from brine.vm.identities import rows_in
from brine.vm.instances import specs_but

RECORDS = ".brine"
"""The folder of the records of volumes, in a unit."""

_LOCK = "storage-directories"
_LOCK_TIMEOUT_S = 10.0
_NOT_MOUNTED = "its file system is not mounted"


def note(folder: str) -> None:
    """Note a unit that is mounted now, unless it is noted.

    :raises BrineError: if it can't be noted.
    """
    if folder in _notes():
        return
    records = Path(folder, RECORDS)
    with _telling(records), contextlib.suppress(FileExistsError):
        records.mkdir(mode=0o700)
        sync_folder(records.parent)
    with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
        _write({**_notes(), folder: mount_point(folder)})


def forget(folder: str) -> None:
    """Forget what was noted of a folder that is no unit, or none any more.

    :raises BrineError: if that can't be written.
    """
    with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
        notes = _notes()
        if folder in notes:
            _write({name: place for name, place in notes.items() if name != folder})


def fault_of_mount(folder: str) -> str:
    """Why what is in a unit's folder is not the unit's; empty if it is."""
    place = _notes().get(folder)
    if place and not os.path.ismount(place):
        return f"{_NOT_MOUNTED} at {place}"
    if _may_have_records(folder):
        return ""
    if place is not None or _is_in_specs(folder):
        return f"{_NOT_MOUNTED}: there is no folder {RECORDS} in it"
    return ""


def mount_point(folder: str) -> str:
    """Where the file system that has a folder is mounted."""
    place = Path(folder)
    while not os.path.ismount(place):
        place = place.parent
    return str(place)


def has_records(folder: str) -> bool:
    """Whether a folder has that of the records; so it was a unit's before, wherever it was."""
    return os.path.isdir(f"{folder}/{RECORDS}")


def _may_have_records(folder: str) -> bool:
    try:
        os.stat(f"{folder}/{RECORDS}")
    except OSError as error:
        return isinstance(error, PermissionError)  # of a user who may not look
    return True


def _is_in_specs(folder: str) -> bool:
    """Whether an instance has a volume in a folder: one of before there were notes."""
    with contextlib.suppress(BrineError):
        rows = (row for _, spec in specs_but(None) for row in rows_in(spec, "disks"))
        return any(row.get("unit") == folder for row in rows)
    return False


def _notes() -> dict[str, str]:
    """Where the file system of each noted folder was mounted."""
    data = read_json(paths.STORAGE_DIRECTORIES_FILE)
    if not isinstance(data, Mapping):
        return {}
    return {name: place for name, place in data.items() if isinstance(place, str)}


def _write(notes: Mapping[str, str]) -> None:
    file = paths.STORAGE_DIRECTORIES_FILE
    with _telling(file):
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(file, json.dumps(notes, indent=1).encode() + b"\n", mode=0o644, alone=True)


@contextlib.contextmanager
def _telling(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{file}: can't be written: {error.strerror}"
        raise StorageError(text, hint=root_hint(error)) from error
