"""NICs: what there is to say of one, and how it is said to QEMU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from brine.hotplug.choices import MODELS
from brine.hotplug.slots import Slot


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface of a guest.

    :param mac: as in ``52:54:00:12:34:56``.
    :param model: of :data:`brine.hotplug.choices.MODELS`.
    """

    uuid: str
    mac: str
    model: str = "virtio"


def nic_netdev(device_id: str, queues: Sequence[str], vhost: Sequence[str]) -> dict[str, Any]:
    """What moves the frames: the arguments of ``netdev_add``.

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


def nic_device(device_id: str, nic: Nic, queues: int, slot: Slot) -> dict[str, Any]:
    """What the guest sees: the arguments of ``device_add``."""
    device: dict[str, Any] = {
        "driver": MODELS[nic.model],
        "id": device_id,
        "netdev": device_id,
        "mac": nic.mac,
        # Nothing boots from it any more, and a chrooted QEMU would not find the file.
        "romfile": "",
        **slot.placement,
    }
    if queues > 1 and nic.model == "virtio":
        device["mq"] = True
        device["vectors"] = 2 * queues + 2  # two a queue, control, and configuration
    return device
