"""The disks and NICs of a spec: as hotplug's Disk and Vif, and what this node has of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from brine.instance.store import InstanceError
from brine.vm.disk import FormatSource
from brine.vm.disk_files import DiskError, refuse_other_format
from brine.vm.spec import Spec, SpecError
from brine.vm.values import Mode

if TYPE_CHECKING:
    pass

_INTERFACES = Path("/sys/class/net")


def refuse_other_formats(spec: Spec) -> None:
    """Refuse a disk of unsaid format that looks like an image, and an overlay without backing."""
    for index, disk in enumerate(spec.disks):
        try:
            refuse_other_format(disk)
        except DiskError as error:
            where = f"/disks/{index}" if disk.backing else f"/disks/{index}/format"
            raise SpecError(str(error), where=where, hint=error.hint) from error


def with_formats_found(spec: Spec) -> Spec:
    """The spec after a start: the format of each disk is known, as the guest may write anything."""
    try:
        refuse_other_formats(spec)
    except SpecError as error:
        raise InstanceError(spec.name, str(error), hint=error.hint) from error
    disks = tuple(
        replace(disk, format_source=FormatSource.START.value)
        if disk.format_source == FormatSource.DEFAULT and os.path.exists(disk.path)
        else disk
        for disk in spec.disks
    )
    return replace(spec, disks=disks)


def missing_paths_of(spec: Spec) -> list[str]:
    """The missing files, devices and bridges of an instance, as paths."""
    paths = [spec.firmware, spec.kernel, spec.initrd, *spec.cdroms]
    for disk in spec.disks:
        paths += [disk.path, *(each.path for each in disk.layers())]
    missing = [path for path in paths if path.startswith("/") and not os.path.exists(path)]
    return missing + missing_bridges_of(spec)


def missing_bridges_of(spec: Spec) -> list[str]:
    """The missing bridges of an instance, as paths below */sys*."""
    links = [nic.link for nic in spec.nics if nic.link and nic.mode != Mode.ROUTED]
    return [str(_INTERFACES / link) for link in links if not (_INTERFACES / link).exists()]
