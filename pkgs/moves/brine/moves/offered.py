"""An offer as the other node reads it: what an instance would bring along, and what of that keeps
it from coming here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from brine.common import paths
from brine.common.errors import DATA_FAULTS, BrineError, printable
from brine.hotplug.net.wiring import check_wiring
from brine.instance import store
from brine.instance.claims import note_of
from brine.instance.disks.volumes import default_unit
from brine.instance.kvm.runtime_devices import spec_now
from brine.instance.kvm.uefi import find_uefi
from brine.instance.movable import Movee, Obstacle, ObstacleId, obstacles_at
from brine.instance.node_facts import NodeFacts, facts_of
from brine.moves import records
from brine.moves.belongings import Belonging
from brine.moves.cluster_keys import Agreement, ClusterKeys
from brine.moves.migration import MoveError
from brine.moves.named_files import faults_of_files
from brine.storage.unit import StorageError, UnitStatus
from brine.storage.volume import VolumeSnapshot, is_snapshot_name, path_of_new
from brine.storage.volumes import unit_with_volumes, volume_in
from brine.vm.address import DeviceKind
from brine.vm.disk import MOST_BACKING, Disk, FormatSource
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import Runtime
from brine.vm.spec import Spec, known_part, parse
from brine.vm.values import FORMATS, Mode, is_folder_unit
from brine.vm.vif import Vif

_MIB = 1 << 20
_LATEST = 1 << 40
"""Of moments, in seconds since 1970."""
_PASSWORDS = "vnc"
"""The folder in Brine's own of the files with passwords that move along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedDisk:
    """A disk of an offer.

    :param device_id: QEMU's; empty if it does not run.
    :param copies: whether this node gets a volume of its own.
    :param size: as the guest sees it, in bytes.
    :param format: of its lowest file.
    :param snapshots: that it brings along, the oldest first.
    """

    uuid: str
    device_id: str
    copies: bool
    size: int
    format: str
    unit: str
    snapshots: tuple[VolumeSnapshot, ...] = ()


class ReceivedOffer:
    """What another node offers, see :func:`brine.moves.offer.make_offer`.

    :raises MoveError: if it is no offer.
    """

    def __init__(self, data: Any) -> None:
        try:
            self.spec = parse(Spec, known_part(Spec, data["spec"]))
            self.node = NodeFacts.from_json(data["node"])
            self.is_live = data["live"] is True
            self.runs = data["runs"] is True
            self.disks = tuple(_disk_of(one) for one in data["disks"])
            self.bitmaps = {str(key): [*map(str, names)] for key, names in data["bitmaps"].items()}
            self.runtime = _runtime_of(self.spec.name, data["runtime"]) if self.is_live else None
            self.comes_along = frozenset(Belonging(one) for one in data["comes_along"])
            self.uefi_bytes = int(data["uefi_bytes"])
            self.cluster_keys = [str(one) for one in data["cluster_keys"]]
            self.tries = data.get("tries")
        except DATA_FAULTS as error:
            raise MoveError(printable(f"is no offer of an instance: {error!s:.200}")) from None

    @property
    def name(self) -> str:
        """Of the instance."""
        return self.spec.name

    def copied(self) -> list[OfferedDisk]:
        """The disks of which this node gets volumes."""
        return [one for one in self.disks if one.copies]

    def units(self) -> dict[str, str]:
        """The storage unit of each copied disk on this node, by UUID: the one of that name, or else
        the unit of disks that name none."""
        return {one.uuid: _unit_here(one.unit) for one in self.copied()}

    def spec_here(self, units: Mapping[str, str]) -> Spec:
        """The spec as it is on this node: the volumes, which need not be there, are in these units.

        :param units: by the UUID of the disk.
        """
        offered = {one.uuid: one for one in self.disks}
        disks = [
            _disk_in(disk, units[disk.uuid], offered[disk.uuid]) if disk.uuid in units else disk
            for disk in self.spec.disks
        ]
        return replace(self.spec, disks=tuple(disks))

    def runtime_here(self, spec: Spec) -> Runtime | None:
        """The runtime file with this node's paths; None if it does not run.

        :param spec: of :meth:`spec_here`, with volumes that are there.
        """
        found, sizes = self.runtime, {one.uuid: one.size for one in self.copied()}
        for disk in spec.disks:
            if found and disk.uuid in sizes:
                found = found.with_image(disk, -(-sizes[disk.uuid] // _MIB))
        return found

    def obstacles(self) -> list[Obstacle]:
        """Why it can't come to this node, in the way that it is offered."""
        units = self.units()
        spec = self.spec_here(units)
        if refused := list(self._refused(spec, units)):  # not even asked for what it has
            return [Obstacle(ObstacleId.UNFIT, printable(one), cold=True) for one in refused]
        if self.lacks_password():  # it comes along
            spec = replace(spec, vnc_password_file="")
        movee = Movee(
            spec,
            on_network={one.uuid for one in self.disks if not one.copies},
            overlays_mib={
                one.uuid: -(-sum(each.used for each in one.snapshots) // _MIB) for one in self.disks
            },
        )
        faults: list[BrineError] = []
        found = obstacles_at(movee, self.node, facts_of(spec.qemu, spec, faults))
        found += [Obstacle(ObstacleId.UNFIT, str(one), cold=True) for one in faults]
        found += [
            Obstacle(ObstacleId.UNFIT, printable(one), cold=True) for one in self._here(units)
        ]
        return [one for one in found if self.is_live or one.cold]

    def lacks_password(self) -> bool:
        """Whether this node does not have the file with the password of VNC, and gets it. One that
        is there may be other instances', too."""
        has_one = Belonging.VNC_PASSWORD in self.comes_along
        return has_one and not os.path.lexists(self.spec.vnc_password_file)

    def agree(self) -> Agreement:
        """Choose what the key of this move is derived of.

        :raises MoveError: if this node can have no key that the source has.
        """
        return ClusterKeys.read().agree(self.cluster_keys, self.node.node)

    def _refused(self, spec: Spec, units: Mapping[str, str]) -> Iterator[str]:
        """What the instance must not have of this node, or bring to it.

        :param spec: as it is on this node.
        """
        file = PurePath(spec.vnc_password_file)
        if self.lacks_password():
            folder = paths.ETC_DIR / _PASSWORDS
            if file.parent != folder:
                yield f"{file}: is not here, and a move brings only files of {folder} along"
        specs = [spec]
        try:
            if runtime := self.runtime_here(spec):  # it may say otherwise
                specs.append(spec_now(spec.name, runtime))
        except BrineError as error:
            yield str(error)
        volumes = {disk.path for disk in spec.disks if disk.uuid in units}
        yield from dict.fromkeys(one for each in specs for one in faults_of_files(each, volumes))

    def _of_password(self) -> Iterator[str]:
        """Until an instance is here, the file that it brings has no password of any guest's."""
        file = self.spec.vnc_password_file
        for record in records.pending():
            other = record.facts.get("offered") or {}
            is_brought = record.name != self.name and record.facts.get("makes_password")
            if is_brought and other.get("spec", {}).get("vnc_password_file") == file:
                yield f"{file}: {record.name} brings it, and is not here yet: move this one later"

    def _of_firmware(self) -> Iterator[str]:
        """With variables of another size QEMU would refuse the guest, when it has left."""
        try:
            here = find_uefi(self.spec)[1].stat().st_size
        except (BrineError, OSError) as error:
            yield str(error)
            return
        if here != self.uefi_bytes:
            text = f"UEFI here has {here} bytes of variables, and the guest's {self.uefi_bytes}"
            yield f"{text}: both nodes need one release of the firmware"

    def _here(self, units: Mapping[str, str]) -> Iterator[str]:
        """What is in the way on this node that other nodes could not know."""
        spec = self.spec
        try:
            self.agree()
        except BrineError as error:
            yield str(error)
        if store.spec_file_of(spec.name).exists():
            yield f"this node has an instance {spec.name} already"
        if (note := note_of(spec.uuid)) and note.serial > spec.claim_serial > 0:
            yield f"its claim has serial {spec.claim_serial}, and this node has seen {note.serial}"
        if self.uefi_bytes:
            yield from self._of_firmware()
        if Belonging.VNC_PASSWORD in self.comes_along:
            yield from self._of_password()
        for nic in spec.nics:
            if nic.mode == Mode.ROUTED:
                try:
                    check_wiring(Vif.of(spec, nic))
                except BrineError as error:
                    yield f"NIC {nic.mac}: {error}"
        there = {disk.uuid: disk for disk in spec.disks}
        sizes = {one.uuid: one.size for one in self.copied()}
        for uuid, unit in units.items():
            if uuid not in there:
                yield f"its spec has no disk {uuid}: it was redefined since its start"
                continue
            if not (self.is_live or is_folder_unit(unit) or there[uuid].format == "raw"):
                yield f"{unit}: has no {there[uuid].format} images, and it is copied as it is"
            try:
                found = unit_with_volumes(unit).allocated(sizes[uuid])
                if found != sizes[uuid]:
                    text = f"{unit}: a disk of {sizes[uuid]} bytes has {found} there"
                    yield f"{text}: brine disk grow gives it as many before"
                status = volume_in(unit, uuid).status()
                if status.status is not UnitStatus.MISSING:
                    yield f"{status.path}: is there already"
            except StorageError as error:
                yield str(error)
        if self.runtime:
            plugged = {row["uuid"] for row in self.runtime.devices[DeviceKind.DISK]}
            if unknown := sorted(plugged - {one.uuid for one in self.disks}):
                yield f"its spec has no disk {unknown[0]}: it was redefined since its start"


def recorded_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a node keeps of an offer that it takes. It has compared the processor, whose description
    is most of an offer; and it writes its record while the guest stands still."""
    return {**data, "node": {**data["node"], "cpu": None}}


def _disk_of(data: Mapping[str, Any]) -> OfferedDisk:
    snapshots = tuple(_snapshot_of(one) for one in data.get("snapshots", ()))
    if len({one.name for one in snapshots}) < len(snapshots) or len(snapshots) > MOST_BACKING:
        raise ValueError("two snapshots of one name, or too many")
    if data["format"] not in FORMATS:
        raise ValueError("a format that is not known here")
    return OfferedDisk(
        uuid=str(data["uuid"]),
        device_id=str(data["device_id"]),
        copies=data["copies"] is True,
        size=int(data["size_bytes"]),
        format=str(data["format"]),
        unit=str(data["unit"]),
        snapshots=snapshots,
    )


def _snapshot_of(data: Mapping[str, Any]) -> VolumeSnapshot:
    name, since, used = str(data["name"]), float(data["since"]), int(data["used_bytes"])
    if not (is_snapshot_name(name) and 0 <= since < _LATEST and used >= 0):  # a file is named so
        raise ValueError("a snapshot that can't be")
    return VolumeSnapshot(name=name, since=since, used=used)


def _runtime_of(name: str, text: str) -> Runtime:
    return Runtime.of(json.loads(text), InstanceFiles(name).runtime)


def _unit_here(name: str) -> str:
    try:
        unit_with_volumes(name)
    except StorageError:
        return default_unit() or name
    return name


def _disk_in(disk: Disk, unit: str, offered: OfferedDisk) -> Disk:
    """A disk in a unit of this node, whose volume need not be there: as its lowest file is."""
    is_raw = not is_folder_unit(unit)  # a volume group has no images
    image = "raw" if is_raw else offered.format
    path = path_of_new(unit, disk.uuid, image)
    return replace(
        disk,
        unit=unit,
        path=path,
        format=image,
        format_source=(
            FormatSource.ADMIN.value if is_raw and disk.format != "raw" else disk.format_source
        ),
        backing=None,
        size_mib=disk.size_mib or -(-offered.size // _MIB),
    )
