"""Emptying a storage unit: ``brine storage evacuate``.

New volumes are kept off it first. Then each volume that lies on it goes elsewhere, one after
another: within its volume group where that has space, else to the unit that is named. A
volume that can't be moved stays, is named, and stops no other. The same command, run again, goes on
with what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from brine.common.errors import BrineError, tell_error
from brine.common.progress import Tell, tell_nothing
from brine.instance.disks.moves import move_disk
from brine.storage import pvmove
from brine.storage.file_directory import FileDirectory
from brine.storage.file_volume import FileVolume
from brine.storage.lvm_units import LvmPv, LvmVg
from brine.storage.pvmove import Occupant
from brine.storage.settings import is_within
from brine.storage.unit import StorageError, UnitStatus
from brine.vm.disk import Disk
from brine.vm.spec import Spec
from brine.vm.stored_spec import stored_specs


@dataclass(frozen=True, slots=True)
class LeftVolume:
    """What became of one volume.

    :param volume: its name in the unit, for people; empty stands for the volumes of an instance of
        which nothing is known.
    :param instance: whose it is; empty if it is no instance's, and so is the name of the *disk*.
    :param to: where it is now: another unit, or its volume group; empty if it is where it was.
    """

    volume: str
    instance: str = ""
    disk: str = ""
    to: str = ""
    error: BrineError | None = None

    def to_json(self) -> dict[str, Any]:
        row = {
            "volume": self.volume or None,
            "instance": self.instance or None,
            "disk": self.disk or None,
        }
        if self.error is None:
            return {**row, "to": self.to}
        return {**row, "error": str(self.error), "hint": self.error.hint}


@dataclass(slots=True)
class Evacuation:
    """The work on one unit.

    :param to: the unit that volumes go to, if their volume group has no space; empty is none.
    :param discard_snapshots: whether volumes that go to another unit lose their snapshots.
    :param rate: how many bytes a second are copied at most; 0 is no limit.
    """

    to: str = ""
    discard_snapshots: bool = False
    rate: int = 0
    tell: Tell = tell_nothing
    moved: list[LeftVolume] = field(default_factory=list)
    failed: list[LeftVolume] = field(default_factory=list)

    def of_physical(self, name: str) -> None:
        """Empty a physical volume.

        :raises BrineError: if its volumes can't be found out.
        """
        pv = LvmPv.find(name)
        if pv.status is UnitStatus.MISSING:
            text = f"{pv.type} {pv.name}: {pv.why}, and nothing can be copied from it"
            hint = f"brine storage check; vgreduce --removemissing {pv.group} gives up what it had"
            raise StorageError(text, hint=hint)
        if not pv.group:
            return
        if self.to == pv.group and not LvmVg.find(pv.group).free:
            text = f"{pv.type} {pv.name}: is a part of {pv.group}, which has no other space"
            raise StorageError(text, hint="give another unit: --to")
        pv.modify(allocatable=False)
        pvmove.finish_interrupted(self.tell)
        owners = self._owners()
        for occupant in pvmove.occupants(pv):
            self._try(_named(occupant, owners), partial(self._off, pv, occupant))

    def _off(self, pv: LvmPv, occupant: Occupant, row: LeftVolume) -> str:
        """Have a volume leave a physical volume; returns where it is."""
        fault: BrineError | None = None
        if LvmVg.find(occupant.group).free >= occupant.size:
            try:
                pvmove.move_off(pv, occupant, rate=self.rate, tell=self.tell)
                return occupant.group
            except StorageError as error:  # its stripes need devices of their own, say
                fault = error
        if self.to in ("", occupant.group):
            text = f"{occupant.group} has no space for its {occupant.size >> 20} MiB elsewhere"
            raise fault or StorageError(text, hint="give a unit that has: --to UNIT")
        return self._elsewhere(row)

    def of_folder(self, name: str) -> None:
        """Empty a folder of files.

        :raises BrineError: if it is none, or no other unit is named.
        """
        unit = FileDirectory.find(name)
        if not self.to or self.to == unit.name:
            text = f"{unit.name}: no other unit is named that takes its volumes"
            raise StorageError(text, hint="give --to UNIT")
        if unit.status is UnitStatus.MISSING:
            raise StorageError(f"{unit.name}: {unit.why}", hint="brine storage check")
        owned = self._owners()
        for spec, disk in owned.values():
            if is_within(disk.path, unit.name):
                row = LeftVolume(disk.path, spec.name, disk.name or disk.uuid)
                self._try(row, self._elsewhere)
        for volume in FileVolume.list(unit.name):
            if (volume.unit, volume.uuid) not in owned:
                self._try(LeftVolume(f"{volume.unit}/{volume.uuid}"), self._elsewhere)

    def _owners(self) -> dict[tuple[str, str], tuple[Spec, Disk]]:
        """The disks of this node's instances, by unit and UUID. Instances whose disks are not known
        have failed."""
        specs, faults = stored_specs()
        for name, fault in faults.items():
            text = f"{name}: its spec can't be used, and its volumes stay: {fault}"
            error = BrineError(text, hint=f"brine instance info {name}")
            tell_error(error)
            self.failed.append(LeftVolume("", name, error=error))
        return {(disk.unit, disk.uuid): (spec, disk) for spec in specs for disk in spec.disks}

    def _elsewhere(self, row: LeftVolume) -> str:
        if not row.instance:
            raise StorageError(
                f"{row.volume}: is in no spec that can be used, so Brine does not move it",
                hint="brine storage orphans; or move or remove it by hand",
            )
        move_disk(
            row.instance,
            row.disk,
            self.to,
            discard_snapshots=self.discard_snapshots,
            rate=self.rate,
            tell=self.tell,
        )
        return self.to

    def _try(self, row: LeftVolume, how: Callable[[LeftVolume], str]) -> None:
        try:
            self.moved.append(replace(row, to=how(row)))
        except BrineError as error:
            tell_error(error, "" if row.volume in str(error) else row.volume)
            self.failed.append(replace(row, error=error))


def _named(occupant: Occupant, owners: dict[tuple[str, str], tuple[Spec, Disk]]) -> LeftVolume:
    volume = f"{occupant.group}/{occupant.name}"
    if found := owners.get((occupant.group, occupant.disk)):
        spec, disk = found
        return LeftVolume(volume, spec.name, disk.uuid)
    return LeftVolume(volume)
