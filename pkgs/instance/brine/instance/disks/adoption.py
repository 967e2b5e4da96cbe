"""Adopting disks that others have made: Brine grows, moves and removes their volumes from then on.

A volume gets Brine's mark first, and then the spec names its unit. Both may be done again.
"""

from __future__ import annotations

import re
from dataclasses import replace

from brine.instance import store
from brine.instance.store import InstanceError
from brine.storage.orphans import VolumeClaims
from brine.storage.settings import is_within, load_settings
from brine.storage.volumes import volume_in
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.runtime_file import Runtime, change_file
from brine.vm.spec import Spec, parse, to_json
from brine.vm.values import tidy_path

_OF_VOLUME = re.compile(r"/dev/(?!mapper/)([^/]+)/[^/]+")


def unit_of(path: str) -> str:
    """The storage unit that has a disk at a path: a folder of this node's, or a volume group by the
    usual name of its volume. Empty if it is in none."""
    if found := _OF_VOLUME.fullmatch(path):
        return found[1]
    folders = load_settings().directories
    return next((one for one in folders if is_within(path, one)), "")


def adopt_disk(name: str, uuid: str, *, unit: str = "", called: str = "") -> Disk:
    """Adopt a disk of an instance as it is. A disk that was adopted before may get a name.

    :param uuid: of the disk.
    :param unit: where it is; empty is found out by its path.
    :param called: the name that the disk gets if it has none.
    :raises BrineError: why it can't be adopted; then nothing has changed.
    """
    with store.alone(name):
        spec = store.load(name)
        disk = next((one for one in spec.disks if one.uuid == uuid), None)
        if disk is None:
            raise InstanceError(name, f"has no disk {uuid}")
        named = _named_so(spec, disk, called)
        if disk.unit:
            if unit and tidy_path(unit) != disk.unit:
                raise InstanceError(name, f"its disk {disk.path} is in {disk.unit}, not in {unit}")
            if named != disk:
                _save(spec, named)
            return named
        disk = named
        if not (unit := unit or unit_of(disk.path)):
            hint = "brine storage create file DIR makes its folder one"
            raise InstanceError(name, f"its disk {disk.path} is in no storage unit", hint=hint)
        VolumeClaims.read()  # no other instance may have it
        volume = volume_in(unit, uuid)
        volume.adopt(disk, owner=name)
        disk = volume.disk(disk)
        _save(spec, disk)
    return disk


def _named_so(spec: Spec, disk: Disk, called: str) -> Disk:
    """The disk with a name, if it has none.

    :raises BrineError: if it has another one, or the name can't be.
    """
    if called in ("", disk.name):
        return disk
    if disk.name:
        raise InstanceError(spec.name, f"its disk {disk.path} is called {disk.name}")
    if called in [one.name for one in spec.disks]:
        hint = "give another --name"
        raise InstanceError(spec.name, f"has a disk {called} already", hint=hint)
    return parse(Disk, to_json(replace(disk, name=called)), "/disk")


def _save(spec: Spec, disk: Disk) -> None:
    disks = tuple(disk if one.uuid == disk.uuid else one for one in spec.disks)
    store.save(replace(spec, disks=disks))
    _note_in_runtime(spec.name, disk)


def _note_in_runtime(name: str, disk: Disk) -> None:
    """Have the spec of the start know it, too: what was plugged since is kept at the next start."""

    def noted(runtime: Runtime) -> Runtime:
        there = runtime.find(DeviceKind.DISK, disk.uuid) or {}
        is_same = there.get("path") == disk.path
        return runtime.with_image(disk, there["size_mib"]) if is_same else runtime

    file = InstanceFiles(name).runtime
    if file.exists():
        change_file(file, noted)
