"""QEMU's command line for a spec.

Disks and NICs are described by the same objects as when they are plugged in later. QEMU gets all
of them as open descriptors: it needs no right to open anything, and may be any user in any root.
Source: QEMU's qemu(1), and the QAPI schema for what is written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from brine.hotplug.device_arguments import (
    block_nodes,
    disk_device,
    fdset_opaque,
    nic_device,
    nic_netdev,
)
from brine.instance.kvm.layout import SCSI_CONTROLLER, Layout, cdrom_id
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk, Interface
from brine.vm.files import InstanceFiles
from brine.vm.slots import Slot
from brine.vm.spec import Spec
from brine.vm.values import USUAL_MTU

_FIRST_DISPLAY = 5900
_MOST_DISPLAYS = 99
FLASH = ("uefi-code", "uefi-variables")
_AGENT_CHANNEL = "org.qemu.guest_agent.0"


class DiskFiles(NamedTuple):
    """The open descriptors of a disk or a CD-ROM.

    :param fdset: the number of their set.
    :param backing: of the backing files, in the disk's order.
    """

    fdset: int
    descriptors: Sequence[int]
    is_device: bool = False
    backing: Sequence[DiskFiles] = ()
    size_mib: int = 0


class TapFiles(NamedTuple):
    """The open descriptors of a tap, and of vhost; and its MTU in bytes."""

    queues: Sequence[int]
    vhost: Sequence[int] = ()
    mtu: int = USUAL_MTU


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a start gives to QEMU.

    :param disks: by UUID; so are *nics*.
    :param cdroms: in the spec's order; None is an empty drive.
    :param boot: the descriptors of the firmware, the kernel and the initrd that the spec names.
    :param console_log: gets a copy of the serial line's output; None is nowhere.
    :param uefi: the firmware's program, and the instance's variables; None leaves the firmware to
        QEMU, or to the image that the spec names.
    :param user: the ids of the user and the group that QEMU becomes; None keeps those of its start.
    :param root: a folder that becomes its root; None leaves it the node's.
    :param version: of QEMU, needed with a user or a root.
    """

    disks: Mapping[str, DiskFiles] = field(default_factory=dict)
    nics: Mapping[str, TapFiles] = field(default_factory=dict)
    cdroms: Sequence[DiskFiles | None] = ()
    boot: Mapping[str, int] = field(default_factory=dict)
    console_log: DiskFiles | None = None
    uefi: tuple[DiskFiles, DiskFiles] | None = None
    user: tuple[int, int] | None = None
    root: Path | None = None
    version: tuple[int, int] = (0, 0)


def qemu_args(spec: Spec, layout: Layout, given: Resources) -> list[str]:
    """The command line, the program first."""
    boot = _boot_indices(spec)
    return [
        spec.qemu,
        *("-name", _joined(f"guest={_escaped(spec.name)}", "debug-threads=on")),
        *("-uuid", spec.uuid),
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *_machine(spec, given.uefi, given.boot),
        *_channels(spec, given),
        *_controllers(spec, layout),
        *_disks(spec, layout, given, boot),
        *_cdroms(layout, given, boot),
        *_nics(spec, layout, given, boot),
        *_display(spec),
        *confinement(given),
        *spec.extra_arguments,
    ]


def medium_node(node_name: str, fdset: int, *, is_device: bool) -> dict[str, Any]:
    """The block node of a medium, as an argument of ``blockdev-add``.

    :param fdset: the number of the set that has its descriptor.
    """
    return {
        "node-name": node_name,
        "driver": "host_device" if is_device else "file",
        "filename": f"/dev/fdset/{fdset}",
        "read-only": True,
    }


def _machine(
    spec: Spec, uefi: tuple[DiskFiles, DiskFiles] | None, boot: Mapping[str, int]
) -> Iterator[str]:
    machine = [spec.machine, f"accel={spec.accel}"]
    machine += [f"pflash{number}={node}" for number, node in enumerate(FLASH)] if uefi else []
    yield from ("-machine", _joined(*machine, *([] if spec.acpi else ["acpi=off"])))
    yield from ("-cpu", spec.cpu_or_default())
    topology = {"sockets": spec.sockets, "cores": spec.cores, "threads": spec.threads}
    parts = [f"{name}={number}" for name, number in topology.items() if number]
    yield from ("-smp", _joined(str(spec.vcpus), *parts))
    yield from ("-m", f"{spec.memory_mib}M")
    if spec.huge_pages:
        yield from ("-mem-path", spec.huge_pages, "-mem-prealloc")
    if spec.memory_lock:
        yield from ("-overcommit", "mem-lock=on")
    yield from ("-rtc", f"base={spec.rtc}")
    if spec.reboot_behavior == "exit":
        yield from ("-action", "reboot=shutdown")
    # A guest that panics ends as a crash, which systemd sees by QEMU's status.
    yield from ("-device", "pvpanic", "-action", "panic=exit-failure")
    if uefi:
        for number, files in enumerate(uefi):
            yield from flash_back_end(number, files)
    elif spec.firmware:
        yield from ("-bios", f"/proc/self/fd/{boot['firmware']}")
    if spec.kernel:
        yield from ("-kernel", f"/proc/self/fd/{boot['kernel']}")
        yield from ("-initrd", f"/proc/self/fd/{boot['initrd']}") if spec.initrd else ()
        yield from ("-append", spec.append) if spec.append else ()
    else:
        # Only from devices with a place in the order.
        yield from ("-boot", "strict=on")


def _channels(spec: Spec, given: Resources) -> Iterator[str]:
    yield from monitors(spec.name)
    if not spec.serial_console:
        return
    yield from serial_back_end(spec.name, given.console_log)
    yield from ("-serial", "chardev:serial")


def _controllers(spec: Spec, layout: Layout) -> Iterator[str]:
    for number, (port, slot) in enumerate(layout.ports.items(), 1):
        properties = [f"id={port}", f"chassis={number}", f"addr={slot:#x}"]
        yield from ("-device", _joined("pcie-root-port", *properties))
    if any(disk.interface == Interface.SCSI for disk in spec.disks):
        yield from ("-device", f"virtio-scsi-pci,id={SCSI_CONTROLLER}")
    if spec.usb_tablet:
        yield from ("-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0")
    if spec.guest_agent:
        yield from ("-device", "virtio-serial-pci,id=channels")
        yield from agent_back_end(spec.name)
        yield from ("-device", f"virtserialport,chardev=agent,name={_AGENT_CHANNEL}")


def _disks(spec: Spec, layout: Layout, given: Resources, boot: Mapping[str, int]) -> Iterator[str]:
    for number, each in enumerate(spec.disks):
        files = given.disks[each.uuid]
        if slot := layout.disks.get(each.uuid):
            device_id = slot.device_id(DeviceKind.DISK, each.uuid)
            device = disk_device(device_id, each, slot)
        else:
            device_id = f"ide{number}"
            slot = Slot("ide", number, layout.ide[device_id])
            device = {**disk_device(device_id, each, slot), "driver": "ide-hd"}
        yield from disk_back_end(device_id, each, files)
        yield from device_args(device, boot.get(each.uuid))


def _cdroms(layout: Layout, given: Resources, boot: Mapping[str, int]) -> Iterator[str]:
    for number, files in enumerate(given.cdroms):
        device_id = cdrom_id(number)
        device = {"driver": "ide-cd", "id": device_id, **layout.ide[device_id]}
        if files:
            yield from medium_back_end(device_id, files)
            device["drive"] = device_id
        yield from device_args(device, boot.get(device_id))


def _nics(spec: Spec, layout: Layout, given: Resources, boot: Mapping[str, int]) -> Iterator[str]:
    for each in spec.nics:
        slot, files = layout.nics[each.uuid], given.nics[each.uuid]
        device_id = slot.device_id(DeviceKind.NIC, each.uuid)
        yield from nic_back_end(device_id, files)
        device = nic_device(device_id, each, len(files.queues), slot, files.mtu)
        if each.uuid in boot:
            del device["romfile"]  # which it boots with
        yield from device_args(device, boot.get(each.uuid))


def _display(spec: Spec) -> Iterator[str]:
    if not spec.vnc_bind:
        return
    yield from ("-device", "VGA")
    options = []
    if spec.vnc_bind.startswith("/"):
        # By its name, or an equals sign in the path would make another option of it.
        address = f"vnc=unix:{spec.vnc_bind}"
    else:
        host = f"[{spec.vnc_bind}]" if ":" in spec.vnc_bind else spec.vnc_bind
        display = spec.vnc_port - _FIRST_DISPLAY if spec.vnc_port else 0
        address = f"{host}:{display}"
        if not spec.vnc_port:
            options.append(f"to={_MOST_DISPLAYS}")
    # The password is set over QMP, where other users cannot see it. Until then VNC is closed.
    options += ["password=on"] if spec.vnc_password_file else []
    yield from ("-vnc", _joined(_escaped(address), *options))


def confinement(given: Resources) -> Iterator[str]:
    """The privileges that QEMU drops last before the guest runs."""
    yield from ("-sandbox", "on,obsolete=deny,resourcecontrol=deny,spawn=deny")
    who = ":".join(map(str, given.user)) if given.user else None
    if given.version >= (9, 1):  # before, two options say that
        parts = [f"user={who}"] if who else []
        parts += [f"chroot={_escaped(given.root)}"] if given.root else []
        yield from ("-run-with", _joined(*parts)) if parts else ()
        return
    yield from ("-chroot", str(given.root)) if given.root else ()
    yield from ("-runas", who) if who else ()


def _boot_indices(spec: Spec) -> dict[str, int]:
    """The places in the boot order: by UUID, or a CD-ROM's id."""
    if spec.kernel:
        return {}
    devices: dict[str, Iterable[str]] = {
        "disk": [disk.uuid for disk in spec.disks],
        "cdrom": [cdrom_id(number) for number in range(len(spec.cdroms))],
        "network": [nic.uuid for nic in spec.nics],
    }
    order = [device for kind in spec.boot_order for device in devices[kind]]
    return {device: index for index, device in enumerate(order, 1)}


def fdset_args(files: DiskFiles, opaque: str) -> Iterator[str]:
    """Open descriptors, which QEMU inherits."""
    for number in files.descriptors:
        properties = [f"fd={number}", f"set={files.fdset}", f"opaque={_escaped(opaque)}"]
        yield from ("-add-fd", _joined(*properties))


def blockdev_args(nodes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Block nodes."""
    for node in nodes:
        yield from ("-blockdev", json.dumps(node))


def monitors(name: str) -> Iterator[str]:
    """The sockets by which an instance's QEMU is controlled."""
    control = InstanceFiles(name)
    # The unit's monitor comes last: if that answers, the others do.
    for path in (control.events, control.qmp, control.unit):
        yield from ("-qmp", _joined(f"unix:{_escaped(path)}", "server=on", "wait=off"))


def serial_back_end(name: str, console_log: DiskFiles | None) -> Iterator[str]:
    """What is behind the serial line, with its log."""
    line = _socket("serial", InstanceFiles(name).serial)
    if console_log:
        yield from fdset_args(console_log, "console-log")
        # Otherwise QEMU would truncate it, which fails on a pipe.
        line = _joined(line, f"logfile=/dev/fdset/{console_log.fdset}", "logappend=on")
    yield from ("-chardev", line)


def agent_back_end(name: str) -> Iterator[str]:
    """What is behind the channel of the guest agent."""
    yield from ("-chardev", _socket("agent", InstanceFiles(name).agent))


def disk_back_end(device_id: str, disk: Disk, files: DiskFiles) -> Iterator[str]:
    """What is behind the device of a disk: its descriptors and its block nodes."""
    yield from fdset_args(files, fdset_opaque(device_id, disk))
    for each in files.backing:
        yield from fdset_args(each, device_id)
    images = [(one.fdset, one.is_device) for one in (files, *files.backing)]
    yield from blockdev_args(block_nodes(device_id, disk, images))


def medium_back_end(device_id: str, files: DiskFiles) -> Iterator[str]:
    """What is behind a CD-ROM drive with a medium."""
    yield from fdset_args(files, device_id)
    yield from blockdev_args([medium_node(device_id, files.fdset, is_device=files.is_device)])


def nic_back_end(device_id: str, files: TapFiles) -> Iterator[str]:
    """What is behind the device of a NIC."""
    queues, vhost = (list(map(str, numbers)) for numbers in (files.queues, files.vhost))
    yield from ("-netdev", json.dumps(nic_netdev(device_id, queues, vhost)))


def flash_back_end(number: int, files: DiskFiles) -> Iterator[str]:
    """The firmware's program (0), which is only read, or its variables (1)."""
    yield from fdset_args(files, FLASH[number])
    node = medium_node(FLASH[number], files.fdset, is_device=False)
    yield from blockdev_args([{**node, "read-only": number == 0}])


def device_args(device: Mapping[str, Any], boot_index: int | None = None) -> Iterator[str]:
    """A device that the guest sees."""
    index = {} if boot_index is None else {"bootindex": boot_index}
    yield from ("-device", json.dumps({**device, **index}))


def _socket(name: str, path: Path) -> str:
    return _joined("socket", f"id={name}", f"path={_escaped(path)}", "server=on", "wait=off")


def _joined(*parts: str) -> str:
    return ",".join(parts)


def _escaped(value: object) -> str:
    """A value within a list of QEMU's, whose parts end with a comma."""
    return str(value).replace(",", ",,")
