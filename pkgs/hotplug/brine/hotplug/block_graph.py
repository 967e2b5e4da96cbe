"""The block graph of a running QEMU: the nodes and images of a disk, asked of QEMU.

A disk's device has a top node. Below that are the nodes of its image, and then of each backing
file. Snapshots and jobs change them, so their names tell no more than the disk: each name begins
with the id of the disk's device. QEMU opens nothing itself: each file is a set of descriptors,
whose text begins with the device's id, too, and has the disk as it is with that file on top.

Source: "Disk management" in QEMU's documentation, and the QAPI schema.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from brine.common.qmp.wire import QmpCommandError, QmpProtocolError
from brine.hotplug.device_arguments import fdset_opaque, image_nodes
from brine.hotplug.errors import HotplugError
from brine.hotplug.qemu import FdSet, Machine
from brine.vm.disk import Disk
from brine.vm.disk_files import Opened

_FILTERS = ("mirror_top", "commit_top", "copy-on-read", "throttle")
_FDSET = "/dev/fdset/"
_NUMBERS = "123456789abcdefghijklmnopqrstuvwxyz"


class Image(NamedTuple):
    """An image of a disk: its node, and the number of its set of descriptors; None is no set."""

    node: str
    fdset: int | None


class BlockGraph(NamedTuple):
    """All block nodes.

    :param nodes: QEMU's description of each, by name.
    :param children: the names of the nodes below each, by the name of the edge.
    """

    nodes: dict[str, dict[str, Any]]
    children: dict[str, dict[str, str]]

    @classmethod
    def read(cls, machine: Machine) -> BlockGraph:
        """The present one."""
        answer = machine.list_of("query-named-block-nodes", {"flat": True})
        nodes = {str(one.get("node-name")): one for one in answer}
        children: dict[str, dict[str, str]] = {name: {} for name in nodes}
        # What tells the edges without that prefix came with QEMU 10.1.
        graph = machine.qmp.execute("x-debug-query-block-graph")
        try:
            names = {one["id"]: str(one["name"]) for one in graph["nodes"]}
            for edge in graph["edges"]:
                parent, child = names[edge["parent"]], names[edge["child"]]
                if parent in nodes and child in nodes and edge["name"] != "root":
                    children[parent][str(edge["name"])] = child
        except (KeyError, TypeError) as error:
            raise QmpProtocolError(f"{machine.qmp.path}: no answer with the block graph") from error
        return cls(nodes, children)

    def below(self, *nodes: str) -> list[str]:
        """Nodes and all below them, each before those below it."""
        found: list[str] = []
        seen = set()

        def visit(name: str) -> None:
            if name not in seen:
                seen.add(name)
                for child in self.children.get(name, {}).values():
                    visit(child)
                found.append(name)

        for node in nodes:
            visit(node)
        return list(reversed(found))

    def chain(self, top: str) -> list[Image]:
        """The images from a node on, the nearest first."""
        found: list[Image] = []
        at: str | None = top
        while at in self.nodes and len(found) < len(self.nodes):
            below = self.children[at]
            if self.nodes[at].get("drv") in _FILTERS:
                at = below.get("backing") or below.get("file")
                continue
            found.append(Image(at, self.fdset_of(below.get("file", at))))
            at = below.get("backing")
        return found

    def fdset_of(self, node: str) -> int | None:
        """The number of the set that a node of a file was opened from."""
        name = str(self.nodes.get(node, {}).get("file", ""))
        number = name.removeprefix(_FDSET)
        return int(number) if name.startswith(_FDSET) and number.isdecimal() else None

    def of_device(self, device_id: str) -> list[str]:
        """The nodes of a disk, used or not, each before those below it."""
        ours = [name for name in self.nodes if name.partition(".")[0] == device_id]
        return [name for name in self.below(*ours) if name in ours]

    def size_of(self, node: str) -> int:
        """The size of a node in bytes."""
        image = self.nodes.get(node, {}).get("image")
        size = image.get("virtual-size") if type(image) is dict else None
        if type(size) is not int:
            raise QmpProtocolError(f"no size of the block node {node}: {image!r:.60}")
        return size


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


def device_of(machine: Machine, disk_uuid: str) -> str:
    """The id of a disk's device, by the disk's UUID: also of one that the VM was started with.

    :raises HotplugError: if the VM has no such disk.
    """
    for one in machine.fdsets():
        if one.uuid == disk_uuid:
            return one.device_id
    raise HotplugError(f"{machine.qmp.path.stem}: has no disk {disk_uuid} now")


def chain_of(machine: Machine, device_id: str) -> list[Image]:
    """The images of a disk, the top first."""
    top = top_node(machine, device_id)
    return BlockGraph.read(machine).chain(top)


def path_of(machine: Machine, image: Image) -> str:
    """The path of an image; empty if it is not known."""
    paths = (one.path() for one in machine.fdsets() if one.number == image.fdset)
    return next(filter(None, paths), "")


def recorded_sets(machine: Machine) -> dict[str, FdSet]:
    """The descriptors of each disk's top image, by device id, with the disk as it is."""
    found: dict[str, list[FdSet]] = {}
    for one in machine.fdsets():
        if one.uuid:
            found.setdefault(one.device_id, []).append(one)
    return {device_id: _topmost(machine, sets) for device_id, sets in found.items()}


def _topmost(machine: Machine, sets: list[FdSet]) -> FdSet:
    if len({one.number for one in sets}) > 1:  # a snapshot was laid over it, or it was moved
        with contextlib.suppress(HotplugError, QmpCommandError):
            top = chain_of(machine, sets[0].device_id)[0]
            return next(one for one in sets if one.number == top.fdset)
    return sets[-1]


# Changes of it.


def size_of_disk(machine: Machine, device_id: str) -> int:
    """The size of a disk as the guest sees it, in bytes."""
    top = top_node(machine, device_id)
    return BlockGraph.read(machine).size_of(top)


def grow_disk(machine: Machine, device_id: str, size: int) -> bool:
    """Have the guest see a larger disk; False if it sees that already. QEMU grows an image file.
    A block device has to be that large already.

    IDE tells its guest nothing: that sees the new size after its next restart.

    :param size: in bytes. A smaller one is refused: QEMU would shrink a disk that is in use.
    """
    top = top_node(machine, device_id)
    now = BlockGraph.read(machine).size_of(top)
    if size < now:
        text = f"has {now} bytes, and can't shrink to {size} while it is in use"
        raise HotplugError(f"{device_id}: {text}")
    if size > now:
        machine.qmp.execute("block_resize", {"node-name": top, "size": size})
    return size > now


def hand_over(machine: Machine, opaque: str, descriptors: tuple[int, ...], **to: int) -> int:
    """Give QEMU a set of descriptors; returns its number.

    :param opaque: the text that QEMU keeps with each; the device's id comes first.
    :param to: the ``number`` of a set that gets them, too.
    """
    arguments: dict[str, Any] = {"opaque": opaque}
    if "number" in to:
        arguments["fdset-id"] = to["number"]
    for descriptor in descriptors:
        try:
            added = machine.qmp.execute("add-fd", arguments, descriptors=[descriptor])
        except QmpCommandError as error:
            if error.error_class != "CommandNotFound":
                raise
            raise HotplugError(
                "this QEMU has no add-fd, so it can't be given a disk",
                hint="restart the VM with a newer QEMU",
            ) from error
        number = added.get("fdset-id") if type(added) is dict else None
        if type(number) is not int:
            raise QmpProtocolError(f"{machine.qmp.path}: no answer to add-fd: {added!r:.60}")
        arguments["fdset-id"] = number
    return int(arguments["fdset-id"])


def add_images(machine: Machine, device_id: str, disk: Disk, files: Opened) -> str:
    """Add the nodes of a disk's image and of its backing files, under names that are free; returns
    the top one. No device has them yet."""
    below: str | None = None
    opened = (files, *files.backing)
    names = _free_names(machine, device_id)
    for number, one in reversed(list(enumerate(_with_each_on_top(disk)))):
        file = opened[number]
        fdset = hand_over(machine, _opaque(device_id, one, is_top=number == 0), file.descriptors)
        below = _add_image(
            machine,
            next(names),
            one,
            (fdset, file.is_device),
            backing=below,
            is_layer=number > 0,
            is_writable=number <= disk.own_layers() and not disk.read_only,
        )
    assert below
    return below


def add_overlay(machine: Machine, device_id: str, disk: Disk, files: Opened) -> str:
    """Add the node of a new overlay of a disk's present image, which is not used yet.

    :param disk: as it is with the overlay.
    """
    fdset = hand_over(machine, _opaque(device_id, disk, is_top=True), files.descriptors)
    name = next(_free_names(machine, device_id))
    return _add_image(machine, name, disk, (fdset, files.is_device))


def _add_image(machine: Machine, name: str, disk: Disk, file: tuple[int, bool], **how: Any) -> str:
    for node in image_nodes(name, disk, file, **how):
        machine.qmp.execute("blockdev-add", node)
    return name


def _with_each_on_top(disk: Disk) -> Iterator[Disk]:
    """A disk, and then as it would be with each of its backing files on top."""
    yield disk
    for layer in disk.layers():
        yield replace(disk, path=layer.path, format=layer.format, backing=layer.backing)


def _opaque(device_id: str, disk: Disk, *, is_top: bool) -> str:
    """The text of a set's descriptors: only that of a disk's image has the disk's UUID."""
    return fdset_opaque(device_id, disk) if is_top else device_id


def _free_names(machine: Machine, device_id: str) -> Iterator[str]:
    answer = machine.list_of("query-named-block-nodes", {"flat": True})
    taken = {str(one.get("node-name")) for one in answer}
    for number in _NUMBERS:
        name = f"{device_id}.{number}"
        if not {name, f"{name}.f"} & taken:
            yield name
    raise HotplugError(f"{device_id}: has too many images", hint="remove some of its snapshots")


def lay_over(machine: Machine, overlays: Mapping[str, str]) -> None:
    """Have overlays on top of disks from now on, all at one moment.

    :param overlays: the overlay's node by the disk's top node.
    """
    actions = [
        {"type": "blockdev-snapshot", "data": {"node": node, "overlay": overlay}}
        for node, overlay in overlays.items()
    ]
    machine.qmp.execute("transaction", {"actions": actions})


def record_disk(machine: Machine, device_id: str, disk: Disk, files: Opened) -> None:
    """Have the descriptors of a disk's top image tell the disk as it is. Those that were there
    before go: only the new ones are opened from now on."""
    top = chain_of(machine, device_id)[0]
    if top.fdset is not None:
        record_set(machine, top.fdset, fdset_opaque(device_id, disk), files)


def record_set(machine: Machine, fdset: int, opaque: str, files: Opened) -> None:
    """Replace the descriptors of a set. A node that was opened from it stays open."""
    before = _descriptors_in(machine, fdset)
    hand_over(machine, opaque, files.descriptors, number=fdset)
    for number in before:
        machine.remove("remove-fd", {"fdset-id": fdset, "fd": number})


def _descriptors_in(machine: Machine, fdset: int) -> list[int]:
    """QEMU's numbers of the descriptors in a set."""
    try:
        return [
            int(each["fd"])
            for one in machine.list_of("query-fdsets")
            if one["fdset-id"] == fdset
            for each in one["fds"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise QmpProtocolError(f"{machine.qmp.path}: no answer to query-fdsets") from error


def remove_unused(machine: Machine, device_id: str) -> None:
    """Have QEMU close the nodes and descriptors of a disk that its device does not use; all of
    them, if there is no such device."""
    graph = BlockGraph.read(machine)
    used: list[str] = []
    if machine.has_device(device_id):
        used = graph.below(top_node(machine, device_id))
    for node in graph.of_device(device_id):
        if node not in used:
            machine.remove("blockdev-del", {"node-name": node})
    sets = {one.number for one in machine.fdsets() if one.device_id == device_id}
    for number in sorted(sets - {graph.fdset_of(node) for node in used}):
        machine.remove("remove-fd", {"fdset-id": number})


def disk_in(text: str) -> Disk | None:
    """The disk in the text of a set, if it is one."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return Disk.from_recorded(json.loads(text))
    return None
