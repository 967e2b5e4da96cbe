"""What a new spec does with the volumes of an instance's disks."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, fields
from typing import Any

from brine.common.progress import size_text
from brine.vm.disk import Disk
from brine.vm.spec import Spec

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class VolumeChanges:
    """What a new spec does with the volumes of an instance's disks.

    :param made: disks whose volumes are made.
    :param grown: disks whose volumes get more space.
    :param kept: disks of the former spec whose volumes stay, though the spec has them no more.
    """

    made: tuple[Disk, ...] = ()
    grown: tuple[Disk, ...] = ()
    kept: tuple[Disk, ...] = ()

    def needs_work(self) -> bool:
        return bool(self.made or self.grown)

    def to_json(self) -> dict[str, Any]:
        """It as ``--json`` shows it."""
        return {one.name: list(map(_named, getattr(self, one.name))) for one in fields(self)}

    def in_words(self, *, would: bool) -> Iterator[str]:
        """What was done, or would be, as far as it is worth a line."""
        verb = "would be " if would else ""
        for disk in self.made:
            size = size_text(disk.size_mib * _MIB)
            yield f"volume {verb}made: {disk.name}, {size} in {disk.unit}"
        for disk in self.grown:
            size = size_text(disk.size_mib * _MIB)
            yield f"volume {verb}grown: {disk.name or disk.path}, to {size}"
        for disk in self.kept:
            yield f"volume {verb}kept: {disk.path}"


def _named(disk: Disk) -> dict[str, Any]:
    return {key: getattr(disk, key) for key in ("name", "uuid", "unit", "path", "size_mib")}


NO_VOLUMES = VolumeChanges()


def changes_of(spec: Spec, before: Spec | None, made: Container[str]) -> VolumeChanges:
    """Compare the disks of two specs.

    :param made: the UUIDs of the disks whose volumes are to be made.
    """
    old = {disk.uuid: disk for disk in before.disks} if before else {}
    now = {disk.uuid for disk in spec.disks}
    return VolumeChanges(
        made=tuple(disk for disk in spec.disks if disk.uuid in made),
        grown=tuple(
            disk
            for disk in spec.disks
            if disk.unit and (was := old.get(disk.uuid)) and disk.size_mib > was.size_mib
        ),
        kept=tuple(disk for disk in old.values() if disk.unit and disk.uuid not in now),
    )
