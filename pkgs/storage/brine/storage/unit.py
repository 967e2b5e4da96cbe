"""What a storage unit is: something with space for volumes.

The types have no relation to each other: that a volume group consists of physical volumes is LVM's
business. A unit is as it was when it was listed. Its status is *ok*; *degraded*, if a part of it is
gone or it can't be written to; or *missing*. Source: Ganeti's design for 2.1, "Storage units
modelling".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from brine.common.errors import BrineError
from brine.common.progress import size_text


class StorageError(BrineError):
    """A storage unit that can't be used, or what it can't do."""


class UnitStatus(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """LVM or a file system gives no answer. Units in a list are never so; a volume may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUnit(ABC):
    """A storage unit. Each type is a class.

    :param name: unique among the units of a type.
    :param size: in bytes, as are *used* and *free*. They need not add up to *size*: a file system
        keeps space for root, and a volume group has physical volumes that are not allocatable.
    :param allocatable: whether new volumes may take space there.
    :param why: why it is not ok, or not allocatable.
    """

    type: ClassVar[str]
    name: str
    size: int = 0
    used: int = 0
    free: int = 0
    allocatable: bool = False
    status: UnitStatus = UnitStatus.OK
    why: str = ""

    @classmethod
    @abstractmethod
    def list(cls) -> Sequence[Self]:
        """The units of this type on this node.

        :raises BrineError: if they can't be found out.
        """

    @classmethod
    def find(cls, name: str) -> Self:
        """The unit of that name.

        :raises StorageError: if there is none.
        """
        for unit in cls.list():
            if unit.is_called(name):
                return unit
        raise cls._no_unit(name)

    @classmethod
    def _no_unit(cls, name: str) -> StorageError:
        """The error of a name that no unit has."""
        hint = f"brine storage list --type {cls.type}"
        return StorageError(f"there is no {cls.type} {name}", hint=hint)

    def is_called(self, name: str) -> bool:
        """Whether a name that a person gave is the unit's."""
        return self.name == name

    def allocated(self, size: int) -> int:
        """The bytes that a new volume of a size has."""
        return size

    def refuse_without_room(self, size: int) -> None:
        """Refuse new volumes of so many bytes, if it can't have them.

        :raises StorageError: how much it has.
        """
        if not self.allocatable:
            raise StorageError(f"{self.name}: {self.why}")
        if size > self.free:
            text = f"{self.name}: has {size_text(self.free)} free, and {size_text(size)} are needed"
            raise StorageError(text, hint="brine storage list shows what other units have")

    def modify(self, *, allocatable: bool) -> bool:
        """Change whether new volumes may take space there; returns whether that was different.

        :raises BrineError: why that can't be changed.
        """
        text = f"{self.type} {self.name}: whether it is allocatable can't be changed"
        raise StorageError(text, hint="the physical volumes of LVM (lvm-pv) can be changed so")

    def repair(self) -> None:
        """Mend what makes the unit degraded.

        :raises BrineError: why it can't be mended.
        """
        raise StorageError(f"{self.type} {self.name}: Brine can't repair units of this type")
