"""Which folders are storage units: they are made and listed, or removed; and which unit is the
default.

``/etc/brine/storage.toml`` is changed in these keys alone; people's comments stay.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, replace
from pathlib import Path

from tomlkit import dumps, parse

from brine.common.errors import root_hint
from brine.common.files import fault_of_writers, read_regular, write_whole
from brine.common.locks import node_lock
from brine.common.settings import SettingsError
from brine.storage import directory_notes
from brine.storage.directory_notes import RECORDS
from brine.storage.file_directory import FileDirectory
from brine.storage.file_volume import FileVolume
from brine.storage.orphans import VolumeClaims
from brine.storage.settings import (
    StorageSettings,
    checked,
    folder_fault,
    load_settings,
    settings_file,
)
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volumes import unit_with_volumes

_LOCK = "storage-settings"
_LOCK_TIMEOUT_S = 10.0
_OF_FILE_SYSTEMS = {"lost+found"}


def create(folder: str) -> bool:
    """Make a folder, if it is not there, and list it; returns whether it was not listed.

    :raises BrineError: why it can't be a unit; then nothing has changed.
    """
    _refuse(folder)
    with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
        settings = load_settings()
        is_made = _make(folder)
        try:
            is_unit = folder in settings.directories
            is_known = directory_notes.has_records(folder)
            if is_known or not is_unit:
                directory_notes.forget(folder)  # it may have come to another file system
            if why := FileDirectory.at(folder).why:
                raise StorageError(f"{folder}: {why}")
            if is_known if is_unit else directory_notes.is_mount_point(folder):
                directory_notes.note(folder)
            if is_unit:
                return is_made
            _write(replace(settings, directories=(*settings.directories, folder)))
        except BaseException:
            if is_made:
                os.rmdir(folder)
            raise
    return True


def remove(folder: str) -> None:
    """Remove a unit that has nothing in it, and its folder unless that is a mount point.

    :raises BrineError: why it can't be removed; then nothing has changed.
    """
    with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
        settings = load_settings()
        unit = FileDirectory.find(folder)
        if unit.name == settings.default_unit:
            text = f"{folder}: is the default unit of new disks"
            raise StorageError(text, hint="name another one: brine storage default UNIT, or --none")
        # They need not be seen: it may not be mounted.
        if used := [disk for one, disk in VolumeClaims.read().volumes if one == folder]:
            text = f"{folder}: instances have volumes in it ({len(used)}), such as {min(used)}"
            raise StorageError(text, hint="move them before: brine storage evacuate file")
        try:
            inside = sorted(set(os.listdir(folder)) - {*_OF_FILE_SYSTEMS, RECORDS})
            inside += [f"the record of {one.uuid}" for one in FileVolume.list(folder)]
        except FileNotFoundError:
            inside = []
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}", hint=root_hint(error)) from error
        if inside:
            text = f"{folder}: is not empty ({len(inside)}); it has {inside[0]}"
            raise StorageError(text, hint="remove or move them before")
        others = tuple(one for one in settings.directories if one != unit.name)
        _write(replace(settings, directories=others))
        directory_notes.forget(folder)
        if unit.status is UnitStatus.MISSING:
            return  # what is there is another file system's
        with contextlib.suppress(OSError):  # a mount point stays, and so does what just got a file
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(f"{folder}/{RECORDS}")
            os.rmdir(folder)


def set_default(unit: str | None) -> bool:
    """Set the unit of new disks that name none; returns whether that was another one.

    :param unit: a volume group, or a folder that is a unit; None if there is to be none.
    :raises BrineError: if it is no unit; then nothing has changed.
    """
    with node_lock(_LOCK, timeout_s=_LOCK_TIMEOUT_S):
        if unit is not None:
            unit_with_volumes(unit)
        settings = load_settings()
        if (unit or "") == settings.default_unit:
            return False
        _write(replace(settings, default_unit=unit or ""))
    return True


def _refuse(folder: str) -> None:
    if fault := folder_fault(folder):
        raise StorageError(f"{folder}: {fault}")
    if os.path.realpath(folder) != folder:
        text = f"{folder}: a link is on its path"
        raise StorageError(text, hint=f"the folder is {os.path.realpath(folder)}")
    if fault := fault_of_writers(folder):
        raise StorageError(f"{folder}: {fault}")


def _make(folder: str) -> bool:
    try:
        os.mkdir(folder, 0o750)
    except FileExistsError:
        return False
    except FileNotFoundError:
        parent = Path(folder).parent
        raise StorageError(f"{parent}: there is no such folder", hint=f"mkdir {parent}") from None
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}", hint=root_hint(error)) from error
    return True


def _write(settings: StorageSettings) -> None:
    checked(settings)
    file = settings_file()
    try:
        document = parse(read_regular(file).decode() if file.exists() else "")
        for key, value in asdict(settings).items():
            if key in document or value:
                document[key] = list(value) if isinstance(value, tuple) else value
        file.parent.mkdir(mode=0o755, exist_ok=True)
        write_whole(file, dumps(document).encode())
    except OSError as error:
        raise SettingsError(file, f"can't be written: {error.strerror}") from error
