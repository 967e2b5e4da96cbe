"""The disks and NICs of a spec as hotplug's Disk and Nic."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from brine.hotplug.choices import Mode
from brine.hotplug.disk import Backing, Disk, refuse_other_format
from brine.hotplug.errors import HotplugError
from brine.instance.spec import DiskSpec, FormatSource, NicSpec, Spec, SpecError, backing_chain
from brine.instance.store import InstanceError

if TYPE_CHECKING:
    from brine.hotplug.nic import Nic


def disk_of(disk: DiskSpec) -> Disk:
    """The disk that QEMU is given."""
    return Disk(
        uuid=disk.uuid,
        path=Path(disk.path),
        format=disk.format,
        cache=disk.cache,
        aio=disk.aio,
        read_only=disk.read_only,
        discard=disk.discard,
        serial=disk.serial or None,
        backing=tuple(Backing(Path(each.path), each.format) for each in backing_chain(disk)),
    )


def refuse_other_formats(spec: Spec) -> None:
    """Refuse a disk of unsaid format that looks like an image, and an overlay without its backing.

    :raises SpecError: which one.
    """
    for index, disk in enumerate(spec.disks):
        is_said = disk.format_source != FormatSource.DEFAULT
        try:
            refuse_other_format(disk_of(disk), is_format_said=is_said)
        except HotplugError as error:
            where = f"/disks/{index}" if disk.backing else f"/disks/{index}/format"
            raise SpecError(str(error), where=where, hint=error.hint) from error


def with_formats_found(spec: Spec) -> Spec:
    """The spec as a start leaves it: each disk has the format that it was found to have.

    What a disk holds from now on is the guest's, which may encrypt it, say.

    :raises InstanceError: of a disk that looks like another format's image.
    """
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


def nic_of(spec: Spec, nic: NicSpec) -> Nic:
    """The NIC that QEMU is given."""
    from brine.hotplug.nic import Nic  # with it hashlib; not all have NICs

    return Nic(
        instance=spec.name,
        uuid=nic.uuid,
        mode=Mode(nic.mode),
        link=nic.link,
        vlan=nic.vlan,
        ips=nic.ips,
        mac=nic.mac,
        mtu=nic.mtu or None,
        index=spec.nics.index(nic),
        tags=spec.tags,
        model=nic.model,
        queues=nic.queues,
        vhost=nic.vhost,
    )
