"""NICs as QEMU is told of them: the arguments of its commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brine.vm.slots import Slot
from brine.vm.values import MODELS, USUAL_MTU

if TYPE_CHECKING:
    from brine.vm.nic import Nic


def nic_netdev(device_id: str, queues: Sequence[str], vhost: Sequence[str]) -> dict[str, Any]:
    """The back end of a NIC: the arguments of ``netdev_add``.

    :param queues: names or numbers of the tap's descriptors, as QEMU knows them; so is *vhost*.
    """
    several = len(queues) > 1
    netdev: dict[str, Any] = {
        "type": "tap",
        "id": device_id,
        "fds" if several else "fd": ":".join(queues),
    }
    if vhost:
        netdev["vhost"] = True
        netdev["vhostfds" if several else "vhostfd"] = ":".join(vhost)
    return netdev


def nic_device(device_id: str, nic: Nic, queues: int, slot: Slot, mtu: int) -> dict[str, Any]:
    """The device that the guest sees: the arguments of ``device_add``.

    :param mtu: of the tap, in bytes. The guest learns an MTU other than the usual one, if the model
        can tell it. So a NIC with the usual MTU is the same device as in older versions.
    """
    device: dict[str, Any] = {
        "driver": MODELS[nic.model],
        "id": device_id,
        "netdev": device_id,
        "mac": nic.mac,
        # The VM has booted already, and a chrooted QEMU would not find the file.
        "romfile": "",
        **slot.placement,
    }
    if mtu != USUAL_MTU and nic.model == "virtio":
        device["host_mtu"] = mtu
    if queues > 1 and nic.model == "virtio":
        device["mq"] = True
        device["vectors"] = 2 * queues + 2  # two a queue, control, and configuration
    return device
