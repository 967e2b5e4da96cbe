"""What keeps an instance from moving to another node. Pure.

Some of that lies in the instance, and ``brine instance info`` shows it. The rest depends on the
node that it would move to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from brine.common.errors import printable
from brine.common.mounts import Mount, mount_of, mounts_in
from brine.vm.disk import Disk
from brine.vm.spec import WHOLE_CPUS, Spec
from brine.vm.values import Mode, is_folder_unit

if TYPE_CHECKING:
    from brine.instance.node_facts import NodeFacts

_HOST_DEVICE = (  # compiled for the few that have further arguments
    r"\b(vfio-[a-z]|usb-host|scsi-generic|pci-assign|host-cdrom|hostdev|tpm-passthrough|passthrough,"
    r"|usbdev\s*=|usbdevice\s*=|pci\s*=)"
)
_SWITCHED_ON = frozenset({"on", "true", "yes"})
_SWITCHED_OFF = frozenset({"off", "false", "no"})
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "gfs2", "ocfs2", "lustre", "moosefs"}
)
_BRIDGES = {Mode.BRIDGED: "bridge", Mode.OPEN_VSWITCH: "openvswitch"}


class ObstacleId(StrEnum):
    """The kinds of obstacles. Programs go by these."""

    XEN = "xen"
    EXTRA_ARGUMENTS = "extra_arguments"
    HOST_DEVICE = "host_device"
    OWNER = "owner"
    DISK = "disk"
    SNAPSHOTS = "snapshots"
    RUNTIME_FILE = "runtime_file"
    SLOTS = "slots"
    CPU = "cpu"
    ACCEL = "accel"
    QEMU = "qemu"
    MACHINE = "machine"
    LINK = "link"
    MEMORY = "memory"
    UNIT = "unit"
    SPACE = "space"
    UNFIT = "unfit"


class Obstacle(NamedTuple):
    """A reason why an instance can't move.

    :param why: in words that follow *no, because*.
    :param cold: whether it can't move either while it does not run.
    :param flags: of processors, where they are the reason.
    """

    id: ObstacleId
    why: str
    cold: bool = False
    flags: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """It in the JSON of ``brine instance info``."""
        blocks = ["live", "cold"] if self.cold else ["live"]
        return {"id": self.id, "why": self.why, "blocks": blocks, "flags": list(self.flags)}


class Movee(NamedTuple):
    """An instance that may move.

    :param spec: what it runs with, its plugged devices included; or the spec of its next start.
    :param file_fault: why its runtime file can't start the same QEMU elsewhere; empty if it can.
    :param recorded: the ids of the devices in its runtime file, None if that is not known; and so
        are those *present* in QEMU.
    :param snapshots: by the name of the disk that has them.
    :param on_network: UUIDs of disks that other nodes have at the same path.
    :param overlays_mib: what snapshots take that move along, by the UUID of the disk.
    """

    spec: Spec
    file_fault: str = ""
    recorded: Collection[str] | None = None
    present: Collection[str] | None = None
    snapshots: Mapping[str, Collection[str]] = {}
    on_network: Collection[str] = ()
    overlays_mib: Mapping[str, int] = {}


def obstacles(movee: Movee) -> list[Obstacle]:
    """What keeps an instance from moving to any node, as far as it lies in the instance."""
    return [*_of_instance(movee), *_of_devices(movee)]


def obstacles_at(movee: Movee, here: NodeFacts, there: NodeFacts) -> list[Obstacle]:
    """What keeps an instance from moving from one node to another.

    :param here: the node that it is on, and *there* the one that it is to move to.
    """
    own = [one for one in obstacles(movee) if one.id is not ObstacleId.CPU]
    parts = (_of_qemu, _of_cpu) if not movee.spec.is_xen() else ()
    other = [found for part in parts for found in part(movee.spec, here, there)]
    return [
        *own,
        *_of_unfit(there),
        *other,
        *_of_links(movee.spec, there),
        *_of_space(movee, there),
    ]


def disks_on_network(disks: Iterable[Disk], mounts: str) -> set[str]:
    """The UUIDs of disks in file systems that other nodes have, too.

    :param mounts: this process's ``mountinfo`` (:manpage:`proc(5)`).
    """
    known = mounts_in(mounts)
    return {disk.uuid for disk in disks if is_on_network(disk.path, known)}


def is_on_network(path: str, mounts: Sequence[Mount]) -> bool:
    """Whether a file is in a file system that other nodes have, too, by its name."""
    mount = mount_of(str(PurePath(path).parent), mounts)
    return mount is not None and mount.kind.removeprefix("fuse.") in _NETWORK_FILE_SYSTEMS


# In the instance.


def _of_instance(movee: Movee) -> Iterator[Obstacle]:
    spec = movee.spec
    if spec.is_xen():
        yield Obstacle(ObstacleId.XEN, "a domain of Xen's moves only while it does not run")
    devices = [one for one in spec.extra_arguments if re.search(_HOST_DEVICE, one)]
    for device in devices:
        why = printable(f"it has a device of this node: {device}")
        yield Obstacle(ObstacleId.HOST_DEVICE, why, cold=True)
    if spec.extra_arguments and not devices and not spec.is_xen():
        why = "extra_arguments is set, and Brine does not know whether another node has the same"
        yield Obstacle(ObstacleId.EXTRA_ARGUMENTS, why)
    if spec.owner:
        why = "its owner is on this node, and the instance does not run without its owner"
        yield Obstacle(ObstacleId.OWNER, why, cold=True)
    if not spec.is_xen() and _model_of(spec) in WHOLE_CPUS.values():
        why = (
            f"cpu is {_model_of(spec)}: a running guest moves only between nodes with the same "
            "processor and QEMU; salt-run brine.cpu_baseline finds a model that all nodes have"
        )
        yield Obstacle(ObstacleId.CPU, why)


def _of_devices(movee: Movee) -> Iterator[Obstacle]:
    for disk in movee.spec.disks:
        if not disk.unit and disk.uuid not in movee.on_network:
            why = f"disk {disk.path} is in no storage unit, so it can't be copied"
            yield Obstacle(ObstacleId.DISK, printable(why), cold=True)
        if names := movee.snapshots.get(disk.name or disk.uuid):
            is_lvm = not is_folder_unit(disk.unit)  # whose snapshots are in no file
            why = f"disk {disk.name or disk.uuid} has snapshots: {', '.join(names)}"
            yield Obstacle(ObstacleId.SNAPSHOTS, printable(why), cold=is_lvm)
    if movee.file_fault:
        why = f"its runtime file can't be used: {movee.file_fault}"
        yield Obstacle(ObstacleId.RUNTIME_FILE, why)
    if movee.recorded is not None and movee.present is not None:
        recorded, present = set(movee.recorded), set(movee.present)
        for fault, ids in (
            ("QEMU has devices that its runtime file lacks", present - recorded),
            ("QEMU lacks devices that its runtime file has", recorded - present),
        ):
            if ids:
                yield Obstacle(ObstacleId.SLOTS, f"{fault}: {', '.join(sorted(ids))}")


# At the other node.


def _of_unfit(there: NodeFacts) -> Iterator[Obstacle]:
    for fault in there.unfit:
        yield Obstacle(ObstacleId.UNFIT, printable(f"on {there.node}: {fault}"), cold=True)


def _of_qemu(spec: Spec, _here: NodeFacts, there: NodeFacts) -> Iterator[Obstacle]:
    cpu, node = there.cpu, there.node
    if cpu is None:
        fault = there.cpu_fault or "its QEMU is not known"
        yield Obstacle(ObstacleId.QEMU, printable(f"on {node}: {fault}"), cold=True)
        return
    if cpu.qemu != spec.qemu:
        why = f"the facts of {node} are those of {cpu.qemu}, and its QEMU is {spec.qemu}"
        yield Obstacle(ObstacleId.QEMU, printable(why), cold=True)
    if spec.accel == "kvm" and cpu.accel != "kvm":
        yield Obstacle(ObstacleId.ACCEL, f"{node} has no KVM", cold=True)
    if spec.machine not in cpu.machines:
        why = f"QEMU {cpu.qemu_version} of {node} has no machine type {spec.machine}"
        yield Obstacle(ObstacleId.MACHINE, printable(why), cold=True)


def _of_cpu(spec: Spec, here: NodeFacts, there: NodeFacts) -> Iterator[Obstacle]:
    """The flags that would change under a guest which runs."""
    if here.cpu is None or there.cpu is None:
        return
    model, node = _model_of(spec), there.node
    if model not in there.cpu.models:
        why = f"QEMU {there.cpu.qemu_version} of {node} has no processor model {model}"
        yield Obstacle(ObstacleId.CPU, printable(why), cold=True)
        return
    before, after = (_lacking(spec, one, here, there) for one in (here, there))
    lost, gained = sorted(after - before), sorted(before - after)
    parts = [f"lacks {', '.join(lost)}"] if lost else []
    parts += [f"has also {', '.join(gained)}"] if gained else []
    is_whole = model in WHOLE_CPUS.values()
    numbers = [(one.vendor, one.family, one.model, one.stepping) for one in (here.cpu, there.cpu)]
    if is_whole and numbers[0] != numbers[1] and not parts:
        parts = [f"is another one: {_numbers(there)}, and here {_numbers(here)}"]
    if parts:
        why = f"cpu is {model}, and the processor of {node} {'; it '.join(parts)}"
        yield Obstacle(ObstacleId.CPU, printable(why), flags=(*lost, *gained))


def _lacking(spec: Spec, node: NodeFacts, here: NodeFacts, there: NodeFacts) -> set[str]:
    """The flags that a guest with that spec should have, and has not on a node.

    :param here: the nodes that the guest is compared on; so is *there*.
    """
    assert node.cpu
    assert here.cpu
    assert there.cpu
    model, own = _model_of(spec), set(node.cpu.flags)
    set_on, set_off = _switches(spec)
    if model in WHOLE_CPUS.values():
        lacking = set(here.cpu.flags) | set(there.cpu.flags)
    else:
        # Other words than flags, such as those of Hyper-V, are no matter of the processor.
        lacking = {flag for flag in set_on if here.cpu.knows(flag) or there.cpu.knows(flag)}
        own -= set(node.cpu.models[model].missing) if model in node.cpu.models else set()
        lacking |= set(node.cpu.models[model].missing) if model in node.cpu.models else set()
    return lacking - own - set_off


def _numbers(node: NodeFacts) -> str:
    cpu = node.cpu
    assert cpu
    return f"{cpu.vendor} family {cpu.family}, model {cpu.model}, stepping {cpu.stepping}"


def _model_of(spec: Spec) -> str:
    return spec.cpu_or_default().partition(",")[0]


def _switches(spec: Spec) -> tuple[set[str], set[str]]:
    """The flags that a spec's processor has switched on, and off, beside those of its model."""
    on, off = set(), set()
    for word in spec.cpu_or_default().split(",")[1:]:
        name, _, value = word.lstrip("+-").replace("_", "-").partition("=")
        if word.startswith("-") or value in _SWITCHED_OFF:
            off.add(name)
        elif not value or value in _SWITCHED_ON:
            on.add(name)
    return on, off


def _of_links(spec: Spec, there: NodeFacts) -> Iterator[Obstacle]:
    links = {(nic.mode, nic.link) for nic in spec.nics if nic.mode in _BRIDGES}
    for mode, link in sorted(links):
        kind = _BRIDGES[Mode(mode)]
        if link and there.links.get(link) != kind:
            noun = "bridge" if kind == "bridge" else "bridge of Open vSwitch"
            why = printable(f"{there.node} has no {noun} {link}")
            yield Obstacle(ObstacleId.LINK, why, cold=True)


def _of_space(movee: Movee, there: NodeFacts) -> Iterator[Obstacle]:
    spec, node = movee.spec, there.node
    needed = spec.least_memory_max_mib()
    if needed > there.memory_available_mib:
        why = f"{node} has {there.memory_available_mib} MiB of memory left, and {needed} are needed"
        yield Obstacle(ObstacleId.MEMORY, why, cold=True)
    if spec.huge_pages and spec.memory_mib > there.huge_pages_free_mib:
        why = f"{node} has {there.huge_pages_free_mib} MiB of huge pages free, and"
        yield Obstacle(ObstacleId.MEMORY, f"{why} {spec.memory_mib} are needed", cold=True)
    sizes: dict[str, int] = {}
    for disk in spec.disks:
        if disk.unit and disk.uuid not in movee.on_network:
            needed = disk.size_mib + movee.overlays_mib.get(disk.uuid, 0)
            sizes[disk.unit] = sizes.get(disk.unit, 0) + needed
    for name, size_mib in sorted(sizes.items()):
        unit = there.units.get(name)
        if unit is None:
            why = printable(f"{node} has no storage unit {name}")
            yield Obstacle(ObstacleId.UNIT, why, cold=True)
        elif not unit.allocatable:
            why = printable(f"{node} makes no volumes in {name}: {unit.why}")
            yield Obstacle(ObstacleId.UNIT, why, cold=True)
        elif size_mib > unit.free_mib:
            why = f"{name} of {node} has {unit.free_mib} MiB free, and {size_mib} are needed"
            yield Obstacle(ObstacleId.SPACE, printable(why), cold=True)
