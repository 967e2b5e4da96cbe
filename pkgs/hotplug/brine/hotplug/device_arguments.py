"""The arguments of QEMU's commands for disks and NICs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from brine.vm.disk import DRIVERS, Disk
from brine.vm.nic import Nic
from brine.vm.slots import Slot
from brine.vm.values import CACHE_MODES, MODELS, USUAL_MTU


def fdset_opaque(device_id: str, disk: Disk) -> str:
    """The text that QEMU keeps with a disk's descriptors; :mod:`brine.hotplug.qemu` reads it."""
    return f"{device_id} {disk.uuid} {json.dumps(disk.recorded())}"


def block_nodes(
    device_id: str, disk: Disk, files: Sequence[tuple[int, bool]]
) -> Iterator[dict[str, Any]]:
    """The block nodes of a disk: the arguments of ``blockdev-add``, in order.

    :param files: of the disk and then of each of its backing files: the number of the set that
        has its descriptors, and whether it is a block device.
    """
    images = [disk.format, *(each.format for each in disk.layers())]
    for number, image_format in reversed(list(enumerate(images))):
        is_last = number == len(images) - 1
        yield from image_nodes(
            f"{device_id}.{number}" if number else device_id,
            replace(disk, format=image_format),
            files[number],
            backing=None if is_last else f"{device_id}.{number + 1}",
            is_layer=number > 0,
            is_writable=not disk.read_only if number == 0 else number <= disk.own_layers(),
        )


def image_nodes(
    node: str,
    disk: Disk,
    file: tuple[int, bool],
    *,
    backing: str | None = None,
    is_layer: bool = False,
    is_writable: bool = True,
) -> Iterator[dict[str, Any]]:
    """The block nodes of one image, in order.

    :param node: the name of the last one; the one of its file, if it has its own, has ``.f`` after
        that. So all nodes of a disk begin with its device's id.
    :param file: as in :func:`block_nodes`.
    :param backing: the node of what is below it.
    :param is_layer: it is below others, and is not written now.
    :param is_writable: whether its descriptors are for writing.
    """
    _, direct, no_flush = CACHE_MODES[disk.cache]
    shared = {
        "discard": "unmap" if disk.discard else "ignore",
        "cache": {"direct": direct, "no-flush": no_flush},
    }
    fdset, is_device = file
    # The node of a file that may be written later is not reopened for that.
    is_one = disk.format == "raw" and not (is_layer and is_writable)
    yield {
        "node-name": node if is_one else f"{node}.f",
        "driver": "host_device" if is_device else "file",
        "filename": f"/dev/fdset/{fdset}",
        "aio": disk.aio,
        "read-only": not is_writable,
        **shared,
    }
    if not is_one:
        chain = {} if disk.format == "raw" else {"backing": backing}
        yield {
            "node-name": node,
            "driver": disk.format,
            "file": f"{node}.f",
            "read-only": is_layer or not is_writable,
            **chain,
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
