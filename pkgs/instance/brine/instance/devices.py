"""The devices of a spec, as those know them who plug. What NICs take is loaded for NICs only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brine.hotplug.disk import Disk
from brine.instance.spec import DiskSpec, NicSpec, Spec

if TYPE_CHECKING:
    from brine.hotplug.wish import Wish


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
    )


def wish_of(spec: Spec, nic: NicSpec) -> Wish:
    """The NIC that QEMU is given, and its wiring."""
    from brine.hotplug.choices import Mode
    from brine.hotplug.nic import Nic
    from brine.hotplug.wanted import Wiring
    from brine.hotplug.wish import Wish

    wiring = Wiring(
        instance=spec.name,
        nic=nic.uuid,
        mode=Mode(nic.mode),
        link=nic.link,
        vlan=nic.vlan,
        ips=nic.ips,
        mac=nic.mac,
        mtu=nic.mtu or None,
        index=spec.nics.index(nic),
        tags=spec.tags,
    )
    return Wish(Nic(nic.uuid, nic.mac, nic.model), wiring, queues=nic.queues, vhost=nic.vhost)
