"""The storage units that are folders, whose volumes are files."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import ClassVar, Self

from brine.common.files import fault_of_writers
from brine.storage.directory_notes import fault_of_mount
from brine.storage.settings import folder_fault, load_settings
from brine.storage.unit import StorageError, StorageUnit, UnitStatus

ANSWER_S = 5.0
"""How long a file system, such as that of a dead NFS server, may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDirectory(StorageUnit):
    """A folder that ``/etc/brine/storage.toml`` lists. Its space is that of its file system."""

    type: ClassVar[str] = "file"

    @classmethod
    def list(cls) -> Sequence[Self]:
        folders = load_settings().directories
        found: dict[str, Self] = {}
        asking = [Thread(target=cls._ask, args=(one, found), daemon=True) for one in folders]
        for each in asking:
            each.start()
        for each in asking:
            each.join(ANSWER_S)
        silent = f"its file system does not answer within {ANSWER_S:g} s"
        return [found.get(one) or cls._missing(one, silent) for one in folders]

    @classmethod
    def _ask(cls, folder: str, found: dict[str, Self]) -> None:
        found[folder] = cls.at(folder)

    @classmethod
    def _no_unit(cls, name: str) -> StorageError:
        hint = "brine storage list --type file"
        if not folder_fault(name):
            hint = f"brine storage create file {name}"
        return StorageError(f"{name}: is no storage unit", hint=hint)

    def refuse_without_room(self, size: int) -> None:
        if self.status is UnitStatus.MISSING:
            hint = f"mount it, or name another unit: findmnt --target {self.name}"
            raise StorageError(f"{self.name}: {self.why}", hint=hint)
        StorageUnit.refuse_without_room(self, size)

    @classmethod
    def at(cls, folder: str) -> Self:
        """The unit that a folder is, or would be."""
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                return cls._missing(folder, "it is no folder")
            if why := fault_of_mount(folder):
                return cls._missing(folder, why)
            space = os.statvfs(folder)
        except OSError as error:
            return cls._missing(folder, error.strerror or str(error))
        why = ""
        if space.f_flag & os.ST_RDONLY:
            why = "its file system is mounted read-only"
        elif fault := fault_of_writers(folder):
            why = fault
        size = space.f_blocks * space.f_frsize
        return cls(
            name=folder,
            size=size,
            used=size - space.f_bfree * space.f_frsize,
            free=space.f_bavail * space.f_frsize,
            allocatable=not why,
            status=UnitStatus.DEGRADED if why else UnitStatus.OK,
            why=why,
        )

    @classmethod
    def _missing(cls, folder: str, why: str) -> Self:
        return cls(name=folder, status=UnitStatus.MISSING, why=why)
