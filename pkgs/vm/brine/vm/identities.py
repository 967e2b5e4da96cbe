"""Identities: what no two VMs may have, of specs, runtime files and devices, all as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class IdentityKind(StrEnum):
    UUID = "UUID"
    MAC = "MAC address"
    DISK = "disk"


class Identity(NamedTuple):
    """One thing that an instance has, or is to have.

    :param value: the UUID, the MAC address, or the path of a disk.
    :param read_only: of a disk: several instances may have it if none of them writes it.
    :param where: its JSON pointer, if it is from a spec.
    """

    kind: IdentityKind
    value: str
    read_only: bool = False
    where: str = ""

    def is_shared_with(self, other: Identity) -> bool:
        """Whether two VMs can have both, if both are of one thing."""
        return self.read_only and other.read_only


def identities_of(spec: Mapping[str, Any]) -> Iterator[Identity]:
    """The identities of a spec, as JSON. A CD-ROM drive only reads its medium."""
    if isinstance(uuid := spec.get("uuid"), str) and uuid:
        yield Identity(IdentityKind.UUID, uuid, where="/uuid")
    for index, row in enumerate(rows_in(spec, "nics")):
        if isinstance(mac := row.get("mac"), str) and mac:
            yield Identity(IdentityKind.MAC, mac, where=f"/nics/{index}/mac")
    for index, row in enumerate(rows_in(spec, "disks")):
        yield from _identities_of_disk(row, f"/disks/{index}")
    for index, path in enumerate(_list_in(spec, "cdroms")):
        if isinstance(path, str) and path:
            yield Identity(IdentityKind.DISK, path, read_only=True, where=f"/cdroms/{index}")


def _identities_of_disk(row: Mapping[str, Any], where: str) -> Iterator[Identity]:
    if not isinstance(path := row.get("path"), str):
        return
    yield Identity(IdentityKind.DISK, path, row.get("read_only") is True, f"{where}/path")
    for layer in layers_of(row):
        if isinstance(path := layer.get("path"), str):
            yield Identity(IdentityKind.DISK, path, read_only=True, where=f"{where}/backing")


def layers_of(disk: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The backing files of a disk as a runtime file or a spec has it, the nearest first."""
    layer = disk.get("backing")
    while isinstance(layer, Mapping) and layer:
        yield layer
        layer = layer.get("backing")


def rows_in(data: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """The objects in a list of an object; none if there is no such list."""
    return (row for row in _list_in(data, key) if isinstance(row, Mapping))


def _list_in(data: Any, key: str) -> list[Any]:
    found = data.get(key) if isinstance(data, Mapping) else None
    return found if isinstance(found, list) else []
