"""The storage units of LVM: physical volumes, and volume groups."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from brine.storage import lvm
from brine.storage.unit import StorageError, StorageUnit, UnitStatus

_OFF = "its allocation is off"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LvmUnit(StorageUnit):
    """A unit that can be found only where LVM is installed."""

    @classmethod
    def find(cls, name: str) -> Self:
        lvm.refuse_without_lvm(f"{cls.type} {name}")
        # Without arguments super() does not know the class that slots make.
        return super(_LvmUnit, cls).find(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LvmPv(_LvmUnit):
    """A physical volume: a device. One that is gone is called by its UUID.

    :param group: its volume group; empty if it is in none.
    """

    type: ClassVar[str] = "lvm-pv"
    uuid: str
    group: str

    @classmethod
    def list(cls) -> Sequence[Self]:
        return [cls._of(row) for row in lvm.report().physical]

    @classmethod
    def _of(cls, row: lvm.Row) -> Self:
        group, size, free = row["vg_name"], int(row["pv_size"]), int(row["pv_free"])
        is_missing = row["pv_missing"] == "1"
        why = ""
        if is_missing:
            why = f"its device is gone, and volume group {group} needs it"
        elif not group:
            why = "it is in no volume group"
        elif row["pv_exported"] == "1":
            why = f"its volume group {group} is exported"
        elif row["pv_allocatable"] != "1":
            why = _OFF
        return cls(
            name=row["pv_uuid"] if is_missing else row["pv_name"],
            size=size,
            used=size - free,
            free=free,
            allocatable=not why,
            status=UnitStatus.MISSING if is_missing else UnitStatus.OK,
            why=why,
            uuid=row["pv_uuid"],
            group=group,
        )

    def is_called(self, name: str) -> bool:
        if self.name.startswith("/") and name.startswith("/"):
            # Devices have several names, such as those below /dev/disk.
            return os.path.realpath(self.name) == os.path.realpath(name)
        return name == self.uuid

    def modify(self, *, allocatable: bool) -> bool:
        if self.why not in ("", _OFF):
            raise StorageError(f"{self.type} {self.name}: {self.why}")
        if allocatable == self.allocatable:
            return False
        lvm.change("pvchange", "--allocatable", "y" if allocatable else "n", self.name)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LvmVg(_LvmUnit):
    """A volume group. Its free space is that of the physical volumes that are allocatable.

    :param extent: a volume has a multiple of so many bytes.
    """

    type: ClassVar[str] = "lvm-vg"
    extent: int

    def allocated(self, size: int) -> int:
        return -(-size // self.extent) * self.extent

    @classmethod
    def list(cls) -> Sequence[Self]:
        report = lvm.report()
        names = Counter(row["vg_name"] for row in report.groups)
        return [cls._of(row, report.physical_of(row), names) for row in report.groups]

    @classmethod
    def _of(cls, row: lvm.Row, physical: Sequence[lvm.Row], names: Counter[str]) -> Self:
        name, size = row["vg_name"], int(row["vg_size"])
        missing = int(row["vg_missing_pv_count"])
        usable = [
            one for one in physical if (one["pv_allocatable"], one["pv_missing"]) == ("1", "0")
        ]
        status, why = UnitStatus.OK, ""
        if missing:
            status = UnitStatus.DEGRADED
            why = f"{missing} of its {len(physical)} physical volumes missing"
        elif names[name] > 1:
            status, why = UnitStatus.DEGRADED, "several volume groups have this name"
        elif row["vg_exported"] == "1":
            why = "it is exported"
        elif not usable:
            why = "none of its physical volumes is allocatable"
        return cls(
            name=name,
            size=size,
            used=size - int(row["vg_free"]),
            extent=int(row["vg_extent_size"]),
            free=sum(int(one["pv_free"]) for one in usable),
            allocatable=not why,
            status=status,
            why=why,
        )
