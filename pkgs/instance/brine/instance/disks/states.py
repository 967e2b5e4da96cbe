"""The state of disks: whether their volumes are whole, for people and before a start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from brine.common.errors import BrineError, printable, warn
from brine.instance.store import InstanceError
from brine.storage.lvm import LvmError, LvmHangsError
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import UnusableVolumeError, VolumeStatus
from brine.storage.volumes import volume_in
from brine.vm.disk import Disk
from brine.vm.disk_files import size_of
from brine.vm.spec import Spec
from brine.vm.values import is_folder_unit

_PROGRAM = "brine-instance"
_MIB = 1 << 20
_OF_DISK = ("name", "uuid", "unit", "path", "size_mib", "by_hand")


class DiskState(NamedTuple):
    """The state of a disk.

    :param driver: of its volume; empty if it has none of Brine's.
    """

    disk: Disk
    driver: str
    made: VolumeStatus

    @classmethod
    def of(cls, disk: Disk) -> DiskState:
        """The state of a disk now. What can't be found out is *unknown*."""
        if not disk.unit:
            return cls(disk, "", _status_at(disk))
        volume = volume_in(disk.unit, disk.uuid)
        try:
            made = volume.status(with_use=False)
        except (BrineError, OSError) as error:
            is_known = isinstance(error, StorageError) and not isinstance(error, LvmError)
            is_known = is_known and not isinstance(error.__cause__, PermissionError)
            status = UnitStatus.DEGRADED if is_known else UnitStatus.UNKNOWN
            made = VolumeStatus(path=disk.path, status=status, why=str(error))
        return cls(disk, volume.driver, made)

    @classmethod
    def unknown(cls, disk: Disk, why: str) -> DiskState:
        """The state of a disk of which nothing is known."""
        return cls(disk, "", VolumeStatus(path=disk.path, status=UnitStatus.UNKNOWN, why=why))

    @property
    def is_ok(self) -> bool:
        return self.made.status is UnitStatus.OK

    @property
    def is_unknown(self) -> bool:
        return self.made.status is UnitStatus.UNKNOWN

    def words(self) -> str:
        """It for people, such as *disk data in vg1 is missing: ...*."""
        label = self.disk.name or self.disk.uuid
        why = f": {self.made.why}" if self.made.why else ""
        return printable(f"disk {label} in {self.disk.unit} is {self.made.status}{why}")

    def row(self) -> dict[str, Any]:
        """It as JSON."""
        disk, made = self.disk, self.made
        return {
            **{key: getattr(disk, key) for key in _OF_DISK},
            "driver": self.driver,
            "made": made.size,
            "used": made.used,
            "snapshots": [one.name for one in made.snapshots],
            "status": made.status,
            "why": made.why,
        }


def _status_at(disk: Disk) -> VolumeStatus:
    """The state of a disk that is no volume of Brine's."""
    if not os.path.exists(disk.path):
        why = "there is no such file or device"
        return VolumeStatus(path=disk.path, status=UnitStatus.MISSING, why=why)
    return VolumeStatus(path=disk.path, size=size_of(disk) * _MIB)


def begin_look(
    specs: Iterable[Spec], *, timeout_s: float
) -> Callable[[], Mapping[str, list[DiskState]]]:
    """Begin to look at the volumes of instances. The result waits for that, for a limited time, and
    returns their states by the name of the instance."""
    wanted = [(spec.name, disk) for spec in specs for disk in spec.disks if disk.unit]
    wanted.sort(key=lambda one: not is_folder_unit(one[1].unit))  # LVM may take long
    found: dict[tuple[str, str], DiskState] = {}

    def look() -> None:
        for name, disk in wanted:
            found[name, disk.uuid] = DiskState.of(disk)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()

    def result() -> Mapping[str, list[DiskState]]:
        looking.join(timeout_s)
        states: dict[str, list[DiskState]] = {}
        for name, disk in wanted:
            late = DiskState.unknown(disk, f"no answer within {timeout_s:g} s")
            states.setdefault(name, []).append(found.get((name, disk.uuid), late))
        return states

    return result


# Before a start.


def prepare_volumes(spec: Spec) -> None:
    """Have the paths of an instance's volumes lead to them: LVM may not have activated some.

    :raises InstanceError: if a volume can't be used: which disk, in which unit, and why.
    """
    hang: LvmHangsError | None = None
    for disk in spec.disks:
        if disk.unit:
            hang = _prepare(spec.name, disk, hang) or hang


def _prepare(name: str, disk: Disk, hang: LvmHangsError | None) -> LvmHangsError | None:
    """Prepare a volume.

    :param hang: of LVM, which is not asked again: a start has no time to wait for it once more.
    :returns: that of LVM, if this one met it.
    """
    try:
        if hang and not is_folder_unit(disk.unit):
            raise hang
        volume_in(disk.unit, disk.uuid).prepare()
    except StorageError as error:
        text = f"its disk {disk.name or disk.uuid} in {disk.unit}: {error}"
        if not isinstance(error, LvmError):
            state = DiskState.of(disk)
            text = text if state.is_ok else f"its {state.words()}"
        paths = [disk.path, *(one.path for one in disk.layers())]
        if isinstance(error, UnusableVolumeError) or not all(map(os.path.exists, paths)):
            raise InstanceError(name, text, hint=f"brine disk status {name}") from error
        # Such as an LVM that hangs: what is there can be opened all the same.
        warn(f"{name}: {text}", program=_PROGRAM)
        return error if isinstance(error, LvmHangsError) else None
    return None
