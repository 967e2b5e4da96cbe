"""Conflicts between instances: disks that two would write, and identities that two would have."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from typing import Any

from brine.common import paths
from brine.common.instances import specs_but
from brine.common.process import is_listening
from brine.hotplug.disk import DiskUse, runtime_of, shared, uses_of_runtime, uses_of_spec
from brine.instance.spec import AdminState, Spec, SpecError, backing_chain
from brine.instance.store import InstanceError

Planned = Mapping[str, Mapping[str, Any]]
"""Specs of instances, as JSON by name, that a dry run takes for stored."""

NONE_PLANNED: Planned = {}

# Disks that two instances would write, which would destroy the file system.


def refuse_shared(spec: Spec, planned: Planned = NONE_PLANNED) -> None:
    """Refuse a spec with a disk that it or another instance uses too, if either use writes.

    A CD-ROM drive only reads its medium. Instances that are offline do not count.
    """
    own = list(_uses_of(spec))
    for index, (where, use) in enumerate(own):
        before = [one for _, one in own[:index]]
        if other := shared(use.path, read_only=use.read_only, uses=before):
            text = f"{use.path} is another of its disks too, {other.path}"
            raise SpecError(text, where=where)
    for name, data in _other_specs(spec.name, planned) if own else ():
        uses = uses_of_spec(data, runtime_of(name))
        for where, use in own:
            if other := shared(use.path, read_only=use.read_only, uses=uses):
                raise SpecError(
                    f"{use.path} is a disk of {name} too, {other.path}",
                    where=where,
                    hint=f'make it read_only in both, or define {name} with "admin_state": '
                    f'"offline"; brine instance rename {name} {spec.name}, if that is its new name',
                )


def refuse_in_use(spec: Spec) -> None:
    """Refuse to start an instance with a disk of another running instance. QEMU would refuse it as
    well, but could not name the other instance."""
    own = list(_uses_of(spec))
    # An instance with a QMP socket may run.
    for file in sorted(paths.CONTROL_DIR.glob("*.qmp")) if own else ():
        name = file.stem
        if name == spec.name:
            continue
        uses = uses_of_runtime(runtime_of(name) or {})
        for _, use in own:
            other = shared(use.path, read_only=use.read_only, uses=uses)
            if other and is_listening(file):
                hint = f"brine instance stop {name}, or make it read_only in both"
                text = f"{use.path}: is in use by {name}, as {other.path}"
                raise InstanceError(spec.name, text, hint=hint)


def _uses_of(spec: Spec) -> Iterator[tuple[str, DiskUse]]:
    """The disks, backing files and media of a spec, each with its JSON pointer."""
    for index, disk in enumerate(spec.disks):
        yield f"/disks/{index}/path", DiskUse(disk.path, disk.read_only)
        for each in backing_chain(disk):
            yield f"/disks/{index}/backing", DiskUse(each.path, read_only=True)
    for index, path in enumerate(spec.cdroms):
        if path:
            yield f"/cdroms/{index}", DiskUse(path, read_only=True)


# Unique identities: the UUIDs of instances, and the MAC addresses of NICs.


class OtherIdentities(Container[str]):
    """The UUIDs and MAC addresses of the other instances. They are read when one is asked for: a
    definition that changes nothing asks for none."""

    def __init__(self, name: str, planned: Planned = NONE_PLANNED) -> None:
        self._name = name
        self._planned = planned

    def __contains__(self, identity: object) -> bool:
        return identity in self.owners

    @cached_property
    def owners(self) -> dict[str, str]:
        """The name of each one's owner."""
        found = {}
        for other, data in _other_specs(self._name, self._planned):
            nics = data.get("nics")
            rows = nics if isinstance(nics, list) else []
            macs = (row.get("mac") for row in rows if isinstance(row, Mapping))
            for identity in (data.get("uuid"), *macs):
                found[str(identity).lower()] = other
        return found


def refuse_twin(spec: Spec, taken: Mapping[str, str]) -> None:
    """Refuse a spec with the UUID or a MAC address of another instance that is not offline.

    :param taken: the owners of :class:`OtherIdentities`.
    """
    places = [("/uuid", "UUID", spec.uuid)]
    places += [(f"/nics/{n}/mac", "MAC address", nic.mac) for n, nic in enumerate(spec.nics)]
    for where, noun, identity in places:
        if owner := taken.get(identity.lower()):
            hint = f'leave out "uuid" and "mac" for new ones, or undefine {owner}'
            raise SpecError(f"is the {noun} of {owner}", where=where, hint=hint)


def _other_specs(name: str, planned: Planned = NONE_PLANNED) -> Iterator[tuple[str, Any]]:
    """The specs of the other instances that are not offline, as JSON, by name."""
    stored = ((other, data) for other, data in specs_but(name) if other not in planned)
    for other, data in (*stored, *planned.items()):
        if other != name and data.get("admin_state") != AdminState.OFFLINE:
            yield other, data
