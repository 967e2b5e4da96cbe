"""What a volume is: where the bytes of a disk are, in a storage unit.

A volume is identified by its unit and by the UUID of its disk. Each driver is a class. Brine grows
and removes only volumes that it has made or adopted: these have its mark.

All that changes a volume may be done again after it was killed at any place, and succeeds then.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from brine.common.progress import Tell, tell_nothing
from brine.storage.unit import StorageError, UnitStatus
from brine.vm.disk import Disk
from brine.vm.values import is_folder_unit

REMOVAL_BEGUN = "partial: its removal has begun, and must be completed"
"""Why a snapshot can't be used, of which a part may be gone."""

_MIB = 1 << 20
_SNAPSHOT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


def is_snapshot_name(text: str) -> bool:
    """Whether a snapshot may have a name: lower-case letters, digits, dots, dashes and underscores,
    at most 32."""
    return bool(_SNAPSHOT_NAME.fullmatch(text))


def path_of_new(unit: str, uuid: str, image: str) -> str:
    """The path that a new volume of a disk gets.

    :param image: its format.
    """
    return f"{unit}/{uuid}.{image}" if is_folder_unit(unit) else f"/dev/{unit}/brine-{uuid}"


def rounded(size: int) -> int:
    """A size in bytes, up to the next MiB."""
    return -(-size // _MIB) * _MIB


class Wipe(StrEnum):
    """What is done about data that a former owner of the space has left there.

    The ends of a new volume, where signatures are, are wiped in each case.
    """

    ZERO = "zero"
    """The device zeroes all of it, by itself if it can."""
    FULL = "full"
    """Zeros are written to all of it."""
    ENDS = "ends"
    """Former data can be read."""


class UnusableVolumeError(StorageError):
    """A volume that must not be used as it is, even if its path can be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSnapshot:
    """A snapshot of a volume.

    :param since: when it was made, in seconds since 1970.
    :param used: bytes that it takes; *size* is how many it may take, 0 is no limit.
    :param why: it can't be used; empty if it can.
    :param path: of a device that has the volume as it was then; empty if there is none.
    """

    name: str
    since: float = 0.0
    used: int = 0
    size: int = 0
    why: str = ""
    path: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether its removal has begun."""
        return self.why == REMOVAL_BEGUN

    def fault(self) -> str:
        """Why it can't be used, with its name."""
        return f"snapshot {self.name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRequest:
    """A volume that is to be made.

    :param size: in bytes; it is rounded up to what the unit allocates, and to whole MiB.
    :param is_exact: of a copy: not to whole MiB.
    :param snapshots: of a copy whose files are written then: those that it gets, the oldest first,
        each with the bytes that its file takes.
    :param owner: the name of the instance, for people.
    :param name: of the disk, for people.
    :param stripes: the number of physical volumes that it is spread over; *stripe_size* is the
        size of each piece in bytes, 0 is LVM's own. Without effect on files.
    """

    size: int
    owner: str = ""
    name: str = ""
    format: str = "raw"
    stripes: int = 1
    stripe_size: int = 0
    wipe: Wipe = Wipe.ZERO
    is_exact: bool = False
    snapshots: tuple[VolumeSnapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """A file or device of a volume.

    :param format: of an image; empty if the volume does not know.
    :param snapshot: the one that all below it is; None of the lowest file.
    """

    path: str
    format: str = ""
    snapshot: VolumeSnapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeStatus:
    """The state of a volume.

    :param size: in bytes, as the guest sees it; *used* is what it takes in its unit, with its
        snapshots.
    :param owner: the name of the instance that it was made for; *name* is its disk's. They may
        have other names by now.
    :param since: when it was made, in seconds since 1970.
    :param is_open: whether a process or the kernel uses it.
    :param snapshots: the oldest first.
    """

    path: str
    format: str = "raw"
    size: int = 0
    used: int = 0
    owner: str = ""
    name: str = ""
    since: float = 0.0
    is_open: bool = False
    status: UnitStatus = UnitStatus.OK
    why: str = ""
    snapshots: tuple[VolumeSnapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class Volume(ABC):
    """The volume of a disk, which need not exist.

    Example::

        volume = volume_in(disk.unit, disk.uuid)
        volume.create(VolumeRequest(size=10 << 30, owner="web1", name="data"))
        disk = volume.disk(disk)  # with its path

    :param unit: the name of its storage unit.
    :param uuid: of its disk.
    :raises StorageError: from each method: why it can't be done; then nothing has changed.
    """

    driver: ClassVar[str]
    unit: str
    uuid: str

    @abstractmethod
    def create(self, request: VolumeRequest, tell: Tell = tell_nothing) -> None:
        """Make it, empty. One that was made by this UUID before, and whose making was interrupted,
        is made anew."""

    @abstractmethod
    def adopt(self, disk: Disk, *, owner: str) -> None:
        """Have what a disk has in the unit be the volume; its data and path stay. An adopted
        volume that is adopted again stays so."""

    @abstractmethod
    def disk(self, disk: Disk) -> Disk:
        """The disk with its unit, path, format, backing files and size as the volume has them."""

    @abstractmethod
    def status(self, *, with_use: bool = True) -> VolumeStatus:
        """Its state; *missing* if it does not exist.

        :param with_use: whether to find out if it is open, for which a file is opened, too.
        """

    def certain_status(self) -> VolumeStatus:
        """Its state, to decide by: *missing* only if it is not in its unit. What is in a volume
        group that LVM does not see now, or in a folder that is not mounted, is not gone.

        :raises StorageError: if its unit is not seen.
        """
        status = self.status()
        if status.status is UnitStatus.MISSING:
            self._refuse_unseen()
        return status

    @abstractmethod
    def _refuse_unseen(self) -> None:
        """Refuse a unit that is not seen now, with all that is in it."""

    @abstractmethod
    def files(self) -> Sequence[VolumeFile]:
        """All that it consists of, the lowest first: copied byte by byte, these are the volume.

        :raises StorageError: if there is more to it, such as what LVM keeps of snapshots.
        """

    @abstractmethod
    def settle_copy(self) -> None:
        """Have a volume whose files were copied from another node's be like one that was made
        here."""

    @abstractmethod
    def prepare(self) -> None:
        """Have its path lead to it, so that it can be opened, with nothing of a former owner's in
        it: a growth that was interrupted is ended.

        :raises UnusableVolumeError: if a part of it is gone, or may be a former owner's.
        """

    @abstractmethod
    def grow(self, size: int) -> None:
        """Have it have at least so many bytes. A guest does not see that by itself.

        If an image is open, its user must grow it: then only the space is looked at."""

    @abstractmethod
    def copy_from(self, source: Disk, tell: Tell = tell_nothing) -> None:
        """Copy what a disk has into the volume, which was made just now, and is not smaller. No one
        writes the source meanwhile."""

    @abstractmethod
    def snapshot(self, name: str, *, space: int = 0) -> None:
        """Make a snapshot; :meth:`disk` is what its user writes from now on.

        :param space: how many bytes it may take, where that is fixed; 0 is a part of the volume.
        """

    @abstractmethod
    def rollback(self, name: str, *, size: int = 0) -> None:
        """Have the volume, which is not open, be as it was at a snapshot, its newest. The snapshot
        stays.

        :param size: the bytes that the volume has at least from then on.
        """

    @abstractmethod
    def discard(self, name: str) -> None:
        """Remove the newest snapshot, as a part of a rollback to an older one: what an image has
        got since is lost. It needs no space."""

    @abstractmethod
    def remove_snapshot(self, name: str, tell: Tell = tell_nothing) -> None:
        """Remove a snapshot of a volume whose image is not open. What was written since stays."""

    @abstractmethod
    def merging(self, name: str) -> None:
        """Note that a snapshot is removed from now on, here or on another disk: until that is done,
        the volume is as it was, and no rollback to this snapshot is possible any more."""

    @abstractmethod
    def merged(self, name: str) -> None:
        """Note that the user of its image has merged the layer of a snapshot into the one below."""

    @abstractmethod
    def remove(self, *, with_snapshots: bool = False) -> None:
        """Remove it, unless it is open, or has snapshots and these are to stay. One that does not
        exist is removed."""
