"""The block graph of a running QEMU: the nodes and images of a disk, asked of QEMU.

A disk's device has a top node. Below that are the nodes of its image, and then of each backing
file. Snapshots and jobs change them, so their names tell no more than the disk: each name begins
with the id of the disk's device.

Source: "Disk management" in QEMU's documentation, and the QAPI schema.
"""

from __future__ import annotations

from typing import Any

from brine.common.qmp.wire import QmpCommandError, QmpProtocolError
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import Machine


def top_node(machine: Machine, device_id: str) -> str:
    """The node that the guest has as a disk.

    :raises HotplugError: if there is no such device.
    """
    try:
        found = machine.property(device_id, "drive")
    except QmpCommandError as error:
        if error.error_class != "DeviceNotFound":
            raise
        raise HotplugError(f"{device_id}: the VM has no such device") from error
    if not isinstance(found, str) or not found:
        raise HotplugError(f"{device_id}: has no medium")
    return found


def size_of_disk(machine: Machine, device_id: str) -> int:
    """The size of a disk as the guest sees it, in bytes."""
    top = top_node(machine, device_id)
    return _size_of(machine, _node(machine, top))


def grow_disk(machine: Machine, device_id: str, size: int) -> bool:
    """Have the guest see a larger disk; False if it sees that already. QEMU grows an image file.
    A block device has to be that large already.

    IDE tells its guest nothing: that sees the new size after its next restart.

    :param size: in bytes. A smaller one is refused: QEMU would shrink a disk that is in use.
    """
    top = top_node(machine, device_id)
    now = _size_of(machine, _node(machine, top))
    if size < now:
        text = f"has {now} bytes, and can't shrink to {size} while it is in use"
        raise HotplugError(f"{device_id}: {text}")
    if size > now:
        machine.qmp.execute("block_resize", {"node-name": top, "size": size})
    return size > now


def _nodes(machine: Machine) -> dict[str, dict[str, Any]]:
    """QEMU's descriptions of all nodes, by name."""
    answer = machine.list_of("query-named-block-nodes", {"flat": True})
    return {str(one.get("node-name")): one for one in answer}


def _node(machine: Machine, name: str) -> dict[str, Any]:
    try:
        return _nodes(machine)[name]
    except KeyError:
        raise QmpProtocolError(f"{machine.qmp.path}: no block node {name!r:.60}") from None


def _size_of(machine: Machine, node: dict[str, Any]) -> int:
    image = node.get("image")
    size = image.get("virtual-size") if type(image) is dict else None
    if type(size) is not int:
        raise QmpProtocolError(f"{machine.qmp.path}: no size of a block node: {image!r:.60}")
    return size
