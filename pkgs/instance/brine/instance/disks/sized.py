"""Disks by size, as people write them in specs: each gets the volume that it has, or a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from brine.storage.volume import path_of_new
from brine.vm.disk import Disk
from brine.vm.identities import layers_of
from brine.vm.spec import Spec, SpecError, to_json
from brine.vm.values import tidy_path, unit_fault

_OF_VOLUME = ("uuid", "unit", "path", "format", "format_source", "backing")


@dataclass(frozen=True, slots=True)
class SizedDisks:
    """A spec as people write it, with paths.

    :param made: the UUIDs of disks whose volumes are to be made.
    """

    data: dict[str, Any]
    made: frozenset[str] = frozenset()


def with_volumes(
    data: dict[str, Any], before: Spec | None, default_unit: Callable[[], str]
) -> SizedDisks:
    """Give each disk that the instance has in a volume, by its UUID, name or path, what that volume
    has: also what only its snapshots have changed. A disk by its size that it does not have gets
    the place of a new volume.

    :param default_unit: the unit of a disk that names none; empty if the node has none.
    :raises SpecError: what is wrong with a disk.
    """
    rows = data.get("disks")
    if not isinstance(rows, list):
        return SizedDisks(data)
    found: list[Any] = []
    made = set()
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            found.append(row)  # which is told later
            continue
        old = _old(row, before)
        where = f"/disks/{index}"
        if old and old.unit:
            _refuse_change(row, old, where)
            kept = to_json(old)
            carried = {key: kept[key] for key in _OF_VOLUME}
            said = {key: row.get(key) or kept[key] for key in ("name", "size_mib")}
            found.append({**row, **carried, **said})
        elif "path" in row or "size_mib" not in row:
            found.append(row)
        elif old:
            text = f"{old.path} is no volume of Brine's"
            hint = "brine disk adopt makes it one; or leave out size_mib, and give its path"
            raise SpecError(text, where=f"{where}/size_mib", hint=hint)
        else:
            found.append(_new(row, where, default_unit))
            made.add(found[-1]["uuid"])
    return SizedDisks({**data, "disks": found}, frozenset(made))


def _old(row: Mapping[str, Any], before: Spec | None) -> Disk | None:
    """The disk that the instance has already: by its UUID, its name, or its path, or that of a
    layer below its snapshots."""
    disks = before.disks if before else ()
    for key in ("uuid", "name"):
        if given := row.get(key):
            for disk in disks:
                if str(given).lower() == getattr(disk, key):
                    return disk
    if isinstance(path := row.get("path"), str):
        for disk in disks:
            files = [disk.path, *(layer.path for layer in disk.layers() if disk.unit)]
            if tidy_path(path) in files:
                return disk
    return None


def _refuse_change(row: Mapping[str, Any], old: Disk, where: str) -> None:
    """Refuse a row that is not the volume that a disk has."""
    if (uuid := row.get("uuid")) and str(uuid).lower() != old.uuid:
        text = f"the disk {old.name or old.path} has the UUID {old.uuid}"
        hint = "leave it out; or give another disk another name and path"
        raise SpecError(text, where=f"{where}/uuid", hint=hint)
    size, unit = row.get("size_mib"), row.get("unit")
    unit = tidy_path(unit) if isinstance(unit, str) else unit
    if unit not in (None, "", old.unit):
        hint = f"brine disk move INSTANCE {old.name or old.uuid} --to {unit or 'UNIT'}"
        raise SpecError(f"the disk is in {old.unit}", where=f"{where}/unit", hint=hint)
    if type(size) is int and 0 < size < old.size_mib:
        text = f"is {size}, and the disk has {old.size_mib}: a disk can't shrink"
        raise SpecError(text, where=f"{where}/size_mib")
    files = [old.path, *(layer.path for layer in old.layers())]
    if isinstance(path := row.get("path"), str) and tidy_path(path) not in files:
        text = f"the volume of the disk is {old.path}"
        raise SpecError(text, where=f"{where}/path", hint="give another disk another name and UUID")
    for layer in layers_of(row):
        if layer.get("path") not in files:
            text = f"{layer.get('path')} is not below the disk's volume {old.path}"
            raise SpecError(text, where=f"{where}/backing", hint="leave it out")
    # The format of an overlay is that of a snapshot, and no one's wish.
    image = old.format if old.backing else row.get("format", old.format)
    if image != old.format:
        text = f"is {image}, and the disk's volume is {old.format}"
        raise SpecError(text, where=f"{where}/format")


def _new(row: dict[str, Any], where: str, default_unit: Callable[[], str]) -> dict[str, Any]:
    size = row.get("size_mib")
    if type(size) is not int or size < 1:
        text = f"must be a whole number of MiB from 1, but is {size!r}"
        raise SpecError(text, where=f"{where}/size_mib")
    if not row.get("name"):
        hint = 'give "name": "data", by which the next definition knows it again'
        raise SpecError("a disk by its size needs a name", where=where, hint=hint)
    if row.get("backing"):
        text = "a volume that Brine makes has no backing file"
        hint = "leave it out; or give the path of an image in the place of size_mib, and adopt it"
        raise SpecError(text, where=f"{where}/backing", hint=hint)
    unit = row.get("unit") or default_unit()
    if not unit:
        hint = "brine storage list shows them; default_unit in storage.toml is for all disks"
        raise SpecError('no storage unit is named: give "unit"', where=where, hint=hint)
    if fault := unit_fault(unit) if isinstance(unit, str) else "must be a string":
        raise SpecError(fault, where=f"{where}/unit")
    identity = str(row.get("uuid") or uuid4()).lower()
    image = row.get("format", "raw")
    path = path_of_new(unit, identity, image)
    return {**row, "uuid": identity, "unit": unit, "format": image, "path": path}
