"""The volumes of a node: which driver has one."""

from __future__ import annotations

from dataclasses import replace

from brine.storage.file_directory import FileDirectory
from brine.storage.file_volume import FileVolume
from brine.storage.lvm_units import LvmVg
from brine.storage.plain_volume import PlainVolume
from brine.storage.settings import load_settings
from brine.storage.unit import StorageError, StorageUnit
from brine.storage.volume import Volume
from brine.vm.disk import Disk
from brine.vm.values import is_folder_unit, unit_fault


def volume_in(unit: str, uuid: str) -> Volume:
    """The volume of a disk in a unit, by their names; it need not exist."""
    if is_folder_unit(unit):
        return FileVolume(unit, uuid)
    return PlainVolume(unit, uuid)


def unit_with_volumes(name: str) -> StorageUnit:
    """The unit of that name which volumes can be in: a folder, or a volume group.

    :raises StorageError: if there is none.
    """
    if fault := unit_fault(name):
        raise StorageError(f"{name or repr(name)}: {fault}", hint="brine storage list")
    kind: type[StorageUnit] = FileDirectory if is_folder_unit(name) else LvmVg
    return kind.find(name)


def refuse_without_room(unit: str, size: int) -> None:
    """Refuse new volumes of so many bytes in a unit that can't have them.

    :raises StorageError: how much it has.
    """
    unit_with_volumes(unit).refuse_without_room(size)


def as_it_is(disk: Disk) -> Disk:
    """A disk as its volume is now, with the size that was asked for.

    :raises StorageError: if there is no such volume.
    """
    return replace(volume_in(disk.unit, disk.uuid).disk(disk), size_mib=disk.size_mib)


def volumes_of(unit: str) -> list[Volume]:
    """The volumes in a unit that Brine has made or adopted.

    :raises BrineError: if they can't be found out.
    """
    if is_folder_unit(unit):
        return list(FileVolume.list(unit))
    return [one for one in PlainVolume.list() if one.unit == unit]


def managed_volumes() -> list[Volume]:
    """All volumes on this node that Brine has made or adopted.

    :raises BrineError: if they can't be found out.
    """
    files = [one for folder in load_settings().directories for one in FileVolume.list(folder)]
    return [*files, *PlainVolume.list()]
