"""What this node has noted of the folders that are storage units: whether their file systems are
mounted.

A folder is noted when it gets its first volume, or when it becomes a unit on a file system of its
own. From then on it has the folder of the records, and the file system that it is on is mounted at
the same place. Where one of both is not so, whatever is in the folder is of another file system.
Of one that is not noted yet, as it was only listed by hand, ``/etc/fstab`` and the units of systemd
tell whether a file system is to be mounted there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, root_hint
from brine.common.files import read_json, sync_folder, text_of, write_whole
from brine.common.locks import node_lock
from brine.common.mounts import mount_of, own_mounts, places_in
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
    if place and not is_mount_point(place):
        return f"{_NOT_MOUNTED} at {place}"
    if _may_have_records(folder):
        return ""
    if place is not None or _is_in_specs(folder):
        return f"{_NOT_MOUNTED}: there is no folder {RECORDS} in it"
    if absent := _absent_mount(folder):
        return f"{_NOT_MOUNTED} at {absent}"
    return ""


def mount_point(folder: str) -> str:
    """Where the file system that has a folder is mounted, or bound."""
    mount = mount_of(folder, own_mounts())
    return mount.place if mount else "/"


def is_mount_point(place: str) -> bool:
    """Whether a file system is mounted at a place, or a folder is bound there."""
    return place == "/" or any(one.place == place for one in own_mounts())


def _absent_mount(folder: str) -> str:
    """Where a file system that would have a folder is to be mounted, and is not; empty if there is
    none."""
    planned = places_in(text_of(paths.FSTAB_FILE))
    for place in (Path(folder), *Path(folder).parents):
        # The name may be longer than any file's.
        has_unit = os.path.exists(paths.SYSTEMD_DIR / _mount_unit(place))
        is_planned = str(place) in planned or has_unit
        if is_planned and not is_mount_point(str(place)):
            return str(place)
    return ""


def _mount_unit(place: Path) -> str:
    """The name of systemd's unit of a mount; see :manpage:`systemd.unit(5)`."""
    usual = re.compile(r"[A-Za-z0-9:_.]")
    parts = [
        "".join(chr(one) if usual.match(chr(one)) else f"\\x{one:02x}" for one in part.encode())
        for part in place.parts[1:]
    ]
    return f"{'-'.join(parts) or '-'}.mount"


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
