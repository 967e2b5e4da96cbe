"""The arguments of QEMU's commands for disks and NICs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from brine.vm.disk import DRIVERS, Disk
from brine.vm.nic import Nic
from brine.vm.slots import Slot
from brine.vm.values import CACHE_MODES, MODELS, USUAL_MTU


def fdset_opaque(device_id: str, disk: Disk) -> str:
    """The text that QEMU keeps with a disk's descriptors; :mod:`brine.hotplug.qemu` reads it."""
    return f"{device_id} {disk.uuid} {json.dumps(disk.recorded())}"


def block_node_names(device_id: str, backing: int) -> list[str]:
    """The block nodes of a disk with so many backing files, as QEMU closes them."""
    images = [device_id, *(f"{device_id}.{number}" for number in range(1, backing + 1))]
    return [node for image in images for node in (image, f"{image}.f")]


def block_nodes(
    device_id: str, disk: Disk, files: Sequence[tuple[int, bool]]
) -> Iterator[dict[str, Any]]:
    """The block nodes of a disk: the arguments of ``blockdev-add``, in order.

    :param files: of the disk and then of each of its backing files: the number of the set that
        has its descriptors, and whether it is a block device.
    """
    _, direct, no_flush = CACHE_MODES[disk.cache]
    images = [(disk.format, disk.read_only), *((each.format, True) for each in disk.layers())]
    for number, (image_format, read_only) in reversed(list(enumerate(images))):
        fdset, is_device = files[number]
        node = f"{device_id}.{number}" if number else device_id
        shared = {
            "read-only": read_only,
            "discard": "unmap" if disk.discard else "ignore",
            "cache": {"direct": direct, "no-flush": no_flush},
        }
        is_raw = image_format == "raw"
        yield {
            "node-name": node if is_raw else f"{node}.f",
            "driver": "host_device" if is_device else "file",
            "filename": f"/dev/fdset/{fdset}",
            "aio": disk.aio,
            **shared,
        }
        if not is_raw:
            is_last = number == len(images) - 1
            yield {
                "node-name": node,
                "driver": image_format,
                "file": f"{node}.f",
                "backing": None if is_last else f"{device_id}.{number + 1}",
                **shared,
            }


def disk_device(device_id: str, disk: Disk, slot: Slot) -> dict[str, Any]:
    """The device that the guest sees: the arguments of ``device_add``."""
    write_cache, _, _ = CACHE_MODES[disk.cache]
    return {
        "driver": DRIVERS[slot.kind()],
        "id": device_id,
        "drive": device_id,
        "serial": disk.guest_serial(),
        "write-cache": "on" if write_cache else "off",
        **slot.placement,
    }


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
