"""Disks that two instances would write: the file system of one would be ruined."""

from __future__ import annotations

import os
from collections.abc import Iterator

from brine.common import paths
from brine.common.listening import is_listening
from brine.hotplug.disk_uses import Use, runtime_of, shared, uses_of_runtime, uses_of_spec
from brine.instance.control import control_of
from brine.instance.other_specs import other_specs
from brine.instance.schema import SpecError
from brine.instance.spec import Spec, backing_chain
from brine.instance.spec_files import InstanceError

_CONTROL_SUFFIX = ".qmp"


def refuse_shared(spec: Spec) -> None:
    """Refuse a spec that has a disk twice, or one of another instance, which one of them writes.
    What is in a CD-ROM drive is only read. An instance that is offline does not count: it does not
    run.

    :raises SpecError: which disk, and whose it is.
    """
    own: list[Use] = []
    for where, use in _uses_of(spec):
        if other := shared(use.path, read_only=use.read_only, uses=own):
            text = f"{use.path} is another of its disks too, {other.path}"
            raise SpecError(text, where=where)
        own.append(use)
    if not own:
        return
    for name, data in other_specs(spec.name):
        uses = uses_of_spec(data, runtime_of(name))
        for where, use in _uses_of(spec):
            if other := shared(use.path, read_only=use.read_only, uses=uses):
                raise SpecError(
                    f"{use.path} is a disk of {name} too, {other.path}",
                    where=where,
                    hint=f'make it read_only in both, or define {name} with "admin_state": '
                    f'"offline"; brine instance rename {name} {spec.name}, if that is its new name',
                )


def refuse_in_use(spec: Spec) -> None:
    """Refuse to start an instance with a disk that another one has, which runs.

    QEMU would refuse it as well, but does not know who has it.

    :raises InstanceError: which disk, and who has it.
    """
    if not (spec.disks or spec.cdroms):
        return
    for name in _with_monitor():
        if name == spec.name:
            continue
        uses = uses_of_runtime(runtime_of(name) or {})
        for _, use in _uses_of(spec):
            other = shared(use.path, read_only=use.read_only, uses=uses)
            if other and is_listening(control_of(name).qmp):
                hint = f"brine instance stop {name}, or make it read_only in both"
                text = f"{use.path}: is in use by {name}, as {other.path}"
                raise InstanceError(spec.name, text, hint=hint)


def _uses_of(spec: Spec) -> Iterator[tuple[str, Use]]:
    """What is a disk to a spec, each with its place there."""
    for index, disk in enumerate(spec.disks):
        yield f"/disks/{index}/path", Use(disk.path, disk.read_only)
        for each in backing_chain(disk):
            yield f"/disks/{index}/backing", Use(each.path, read_only=True)
    for index, path in enumerate(spec.cdroms):
        if path:
            yield f"/cdroms/{index}", Use(path, read_only=True)


def _with_monitor() -> list[str]:
    """The instances that have a QMP socket, so that they may run."""
    try:
        files = os.listdir(paths.CONTROL_DIR)
    except OSError:
        return []
    suffix = _CONTROL_SUFFIX
    return sorted(file.removesuffix(suffix) for file in files if file.endswith(suffix))
