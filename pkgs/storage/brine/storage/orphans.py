"""Volumes that no instance has: what a disk that was taken away has left, or a dead node.

A volume is an instance's if its spec names it, or what it was started with or plugged since, or if
begun work does. Only people remove others.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from brine.common.errors import BrineError
from brine.common.operation import pending
from brine.common.unix_socket import is_listening
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import Volume, VolumeStatus
from brine.storage.volumes import managed_volumes
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.identities import IdentityKind, identities_of, rows_in
from brine.vm.instances import instance_names, specs_but
from brine.vm.runtime_file import LastStart


@dataclass(frozen=True, slots=True)
class Orphan:
    """A volume that no instance has.

    :param status: with its former owner.
    """

    volume: Volume
    status: VolumeStatus

    def remove(self) -> None:
        """Remove it with its snapshots, unless it is open.

        :raises StorageError: why it is not removed.
        """
        if self.status.is_open:
            hint = "stop what uses it before"
            raise StorageError(f"{self.status.path}: is in use", hint=hint)
        self.volume.remove(with_snapshots=True)


def orphans() -> list[Orphan]:
    """The volumes of this node that no instance has.

    :raises BrineError: if volumes or instances can't be found out.
    """
    # What is made meanwhile is not among them.
    found = [(volume, _status_of(volume)) for volume in managed_volumes()]
    claimed = VolumeClaims.read()
    return [Orphan(*one) for one in found if not claimed.has(*one)]


def _status_of(volume: Volume) -> VolumeStatus:
    try:
        return volume.status()
    except StorageError as error:  # such as a damaged record, which must hide no other
        return VolumeStatus(path=volume.unit, status=UnitStatus.DEGRADED, why=str(error))


@dataclass(frozen=True, slots=True)
class VolumeClaims:
    """What the instances of this node have.

    :param volumes: by unit and UUID.
    :param work: all records of begun work, as text.
    """

    volumes: frozenset[tuple[str, str]]
    paths: frozenset[str]
    work: str

    @classmethod
    def read(cls) -> VolumeClaims:
        work = json.dumps([asdict(one) for one in pending()])  # which ends in a spec
        rows = list(_disks())
        identities = identities_of({"disks": rows})
        return cls(
            frozenset((str(row.get("unit")), str(row.get("uuid")).lower()) for row in rows),
            frozenset(
                os.path.realpath(one.value) for one in identities if one.kind is IdentityKind.DISK
            ),
            work,
        )

    def has(self, volume: Volume, status: VolumeStatus) -> bool:
        return (
            (volume.unit, volume.uuid) in self.volumes
            or any(os.path.realpath(one) in self.paths for one in _paths_of(volume, status))
            or volume.uuid in self.work
        )


def _paths_of(volume: Volume, status: VolumeStatus) -> Iterator[str]:
    """The paths of a volume and of the layers below it."""
    yield status.path
    with contextlib.suppress(StorageError):  # of one that is gone
        yield from (one.path for one in volume.disk(Disk(path=status.path)).layers())


def _disks() -> Iterator[Mapping[str, Any]]:
    """The disks of all instances, as their specs and runtime files have them.

    :raises BrineError: if it is not known what an instance has.
    """
    specs = dict(specs_but(None))
    for name in instance_names():
        if name not in specs:
            text = f"{name}: its spec can't be used, and its disks are not known"
            raise BrineError(text, hint=f"brine instance info {name}")
        yield from rows_in(specs[name], "disks")
        if last := LastStart.known(name):
            # A disk that it was started with, and that its spec has no more, is gone with its end.
            started = [row.get("uuid") for row in rows_in(last.spec, "disks")]
            runs = is_listening(InstanceFiles(name).qmp)
            yield from (row for row in last.disks if runs or row.get("uuid") not in started)
