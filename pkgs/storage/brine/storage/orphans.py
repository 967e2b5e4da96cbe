"""Volumes that no instance has: what a disk that was taken away has left, or a dead node.

A volume is an instance's if its spec names it, or what it was started with or plugged since, or if
begun work does. Only people remove others.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
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
from brine.vm.runtime_file import LastStart
from brine.vm.spec import Spec, to_json
from brine.vm.stored_spec import stored_specs


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

    :raises BrineError: if volumes can't be found out, or a spec can't be used.
    """
    found, faults = possible_orphans()
    refuse_unknown(faults)
    return found


def possible_orphans() -> tuple[list[Orphan], dict[str, BrineError]]:
    """The volumes of this node that no spec has which can be used; and, by the names of instances,
    why others can't: each volume may be one of theirs.

    :raises BrineError: if volumes or instances can't be found out.
    """
    # What is made meanwhile is not among them.
    found = [(volume, _status_of(volume)) for volume in managed_volumes()]
    claims, faults = VolumeClaims.known()
    return [Orphan(*one) for one in found if not claims.has(*one)], faults


def refuse_unknown(faults: Mapping[str, BrineError]) -> None:
    """Refuse to decide that no instance has a volume while a spec can't be used.

    :param faults: why specs can't be used, by the names of their instances.
    :raises BrineError: if there are any.
    """
    for name, fault in faults.items():
        text = f"{name}: its spec can't be used, and its disks are not known: {fault}"
        raise BrineError(text, hint=f"brine instance info {name}")


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
    def read(cls, *, but: str = "") -> VolumeClaims:
        """What they have for certain.

        :param but: an instance whose spec is left out.
        :raises BrineError: if a spec can't be used: it may have any volume.
        """
        claims, faults = cls.known(but=but)
        refuse_unknown(faults)
        return claims

    @classmethod
    def known(cls, *, but: str = "") -> tuple[VolumeClaims, dict[str, BrineError]]:
        """What they have as far as that is known; and, by name, why specs can't be used."""
        work = json.dumps([asdict(one) for one in pending()])  # which ends in a spec
        specs, faults = stored_specs(but=but)
        rows = list(_disks(specs))
        identities = identities_of({"disks": rows})
        claims = cls(
            frozenset((str(row.get("unit")), str(row.get("uuid")).lower()) for row in rows),
            frozenset(
                os.path.realpath(one.value) for one in identities if one.kind is IdentityKind.DISK
            ),
            work,
        )
        return claims, faults

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


def _disks(specs: Iterable[Spec]) -> Iterator[Mapping[str, Any]]:
    """The disks of instances, as their specs and runtime files have them."""
    for spec in specs:
        yield from (to_json(disk) for disk in spec.disks)
        if last := LastStart.known(spec.name):
            # A disk that it was started with, and that its spec has no more, is gone with its end.
            started = [row.get("uuid") for row in rows_in(last.spec, "disks")]
            runs = is_listening(InstanceFiles(spec.name).qmp)
            yield from (row for row in last.disks if runs or row.get("uuid") not in started)
