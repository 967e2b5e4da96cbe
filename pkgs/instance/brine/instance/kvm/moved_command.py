"""The command line of the QEMU that takes a moving guest, made from that of the QEMU it leaves.

The guest must find the same devices in the same slots. So the command of its start is taken from
its runtime file, whichever version of Brine has made it, and gets the descriptors, the sockets and
the user of this node. Devices that were unplugged since are left out, and those that were plugged
come last: QEMU gives slots in the command's order to devices that name none.

QEMU opens files as root before it becomes another user, and the other node may be in bad hands. So
only options, devices and properties that Brine's own commands have are taken over.

Source: "The runtime file starts an identical QEMU" in the hotplug design.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from brine.common.errors import printable
from brine.hotplug.device_arguments import disk_device, nic_device
from brine.instance.kvm.command_line import (
    FLASH,
    DiskFiles,
    Resources,
    agent_back_end,
    confinement,
    device_args,
    disk_back_end,
    flash_back_end,
    medium_back_end,
    monitors,
    nic_back_end,
    serial_back_end,
)
from brine.instance.kvm.layout import cdrom_id
from brine.instance.store import InstanceError
from brine.vm.address import DeviceKind
from brine.vm.disk import DRIVERS, Disk, Interface
from brine.vm.nic import Nic
from brine.vm.runtime_file import Runtime, qemu_id
from brine.vm.slots import Slot
from brine.vm.spec import Spec
from brine.vm.values import MODELS

Device = TypeVar("Device", Disk, Nic)

WAITING = ("-incoming", "defer", "-S")
"""QEMU listens to no one until it is told to, and does not run the guest by itself."""

_FLAGS = ("-nodefaults", "-no-user-config", "-mem-prealloc", "-S")
_OF_THIS_NODE = ("-add-fd", "-chroot", "-runas", "-run-with", "-sandbox", "-incoming", "-S")
"""Options that come with others here; the last two are of a guest that has moved before."""
_AS_IT_WAS = frozenset(
    {
        *("-action", "-append", "-cpu", "-m", "-mem-prealloc", "-name", "-no-user-config"),
        *("-nodefaults", "-overcommit", "-rtc", "-smp", "-uuid", "-vnc"),
    }
)
_ONE_VALUE = {"-boot": "strict=on", "-display": "none", "-serial": "chardev:serial"}
_OF_MACHINE = frozenset({"accel", "acpi", "pflash0", "pflash1"})
_DRIVERS = frozenset(
    {
        *("VGA", "ide-cd", "ide-hd", "pcie-root-port", "pvpanic", "qemu-xhci", "usb-tablet"),
        *("virtio-scsi-pci", "virtio-serial-pci", "virtserialport"),
        *DRIVERS.values(),
        *MODELS.values(),
    }
)
_OPEN_FILES = frozenset({"romfile", "logfile", "host", "sysfsdev", "filename", "path"})
"""Properties by which a device opens a file of the node; an empty one opens none."""
_BOOT_FILES = {"-bios": "firmware", "-kernel": "kernel", "-initrd": "initrd"}
_NO_PLACE = ("driver", "id")
_ID = re.compile(r"\bid=([^,]+)")


class _Option(NamedTuple):
    name: str
    value: str | None

    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]

    def properties(self) -> dict[str, Any]:
        """What an option of JSON says; nothing of one of another form."""
        found = json.loads(self.value) if self.value and self.value.startswith("{") else {}
        return found if isinstance(found, dict) else {}

    def listed(self, first: str) -> dict[str, Any]:
        """What an option of the form ``VALUE,KEY=VALUE...`` says.

        :param first: the key of its first value, if that names none.
        """
        words = (self.value or "").split(",")
        rows = [(first, "=", words[0]) if "=" not in words[0] else words[0].partition("=")]
        return {key: value for key, _, value in [*rows, *(one.partition("=") for one in words[1:])]}


def moved_command(runtime: Runtime, spec: Spec, given: Resources) -> list[str]:
    """The command line of the QEMU that takes an instance, the program first.

    :param runtime: of the QEMU that has it.
    :param spec: the instance as it is on this node: with the disks and NICs that it has now, each
        with its path, or its link, here.
    :param given: the resources of this node, for all of them.
    :raises InstanceError: if the command of the start is not known, or can't be made again.
    """
    started = runtime.started_with() or {}
    command = runtime.command()
    if not command or not started:
        text = "the command of its start is not known: another program than Brine started it"
        raise InstanceError(spec.name, text, hint="restart it, or move it while it is stopped")
    if started.get("extra_arguments"):
        text = "can't be moved while it runs: extra_arguments may mean things of this node"
        raise InstanceError(spec.name, text, hint="move it while it is stopped")
    try:
        made = _Command(runtime, started, spec, given)
        words = [word for one in _options(command[1:]) for word in made.rewritten(one)]
        return [spec.qemu, *words, *made.plugged(), *confinement(given), *WAITING]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        text = f"{runtime.file}: the command of its start can't be read: {error!r}"
        raise InstanceError(spec.name, text) from error


def _options(words: Sequence[str]) -> Iterator[_Option]:
    at = iter(words)
    for name in at:
        yield _Option(name, None if name in _FLAGS else next(at, ""))


class _Command:
    """A command of a start, while it is being rewritten."""

    def __init__(
        self, runtime: Runtime, started: Mapping[str, Any], spec: Spec, given: Resources
    ) -> None:
        self._spec = spec
        self._given = given
        self._has_monitors = False
        self._disks = _by_id(runtime, DeviceKind.DISK, spec.disks)
        self._nics = _by_id(runtime, DeviceKind.NIC, spec.nics)
        self._slots = {
            device_id: row
            for kind in DeviceKind
            for row in runtime.devices[kind]
            if (device_id := qemu_id(row))
        }
        by_uuid = {one.uuid: one for one in spec.disks}
        for number, row in enumerate(started["disks"]):
            if row.get("interface") == Interface.IDE and row["uuid"] in by_uuid:
                self._disks[f"ide{number}"] = by_uuid[row["uuid"]]
        self._media: dict[str, DiskFiles | None] = {
            cdrom_id(number): files for number, files in enumerate(given.cdroms)
        }
        self._were_there: set[str] = set()

    def rewritten(self, option: _Option) -> Iterator[str]:
        """What takes an option's place."""
        match option.name:
            case "-qmp":
                if not self._has_monitors:
                    self._has_monitors = True
                    yield from monitors(self._spec.name)
            case "-chardev":
                yield from self._chardev(option)
            case "-blockdev":
                yield from self._flash(option)
            case "-netdev":
                if nic := self._nics.get(option.properties()["id"]):
                    files = self._given.nics[nic.uuid]
                    yield from nic_back_end(option.properties()["id"], files)
            case "-device":
                yield from self._device(option)
            case name if name in _BOOT_FILES:
                number = self._given.boot[_BOOT_FILES[name]]
                yield from (name, f"/proc/self/fd/{number}")
            case name if name not in _OF_THIS_NODE:
                self._check(option)
                yield from option.words()

    def _check(self, option: _Option) -> None:
        """Refuse what no start by Brine has said."""
        name, value = option.name, option.value or ""
        is_known = name in _AS_IT_WAS
        if name in _ONE_VALUE:
            is_known = value == _ONE_VALUE[name]
        elif name == "-mem-path":
            is_known = value == self._spec.huge_pages
        elif name == "-machine":
            machine, *properties = value.split(",")
            keys = {one.partition("=")[0] for one in properties}
            is_known = "=" not in machine and keys <= _OF_MACHINE
        if not is_known:
            raise self._foreign(option)

    def _foreign(self, option: _Option) -> InstanceError:
        text = printable(f"{' '.join(option.words())}: no start by Brine says that")
        return InstanceError(self._spec.name, text, hint="move it while it is stopped")

    def plugged(self) -> Iterator[str]:
        """The devices that were plugged since the start."""
        for device_id, disk in self._disks.items():
            if device_id not in self._were_there:
                yield from disk_back_end(device_id, disk, self._given.disks[disk.uuid])
                yield from device_args(disk_device(device_id, disk, self._slot(device_id)))
        for device_id, nic in self._nics.items():
            if device_id not in self._were_there:
                files = self._given.nics[nic.uuid]
                yield from nic_back_end(device_id, files)
                slot, queues = self._slot(device_id), len(files.queues)
                yield from device_args(nic_device(device_id, nic, queues, slot, files.mtu))

    def _slot(self, device_id: str) -> Slot:
        row = self._slots[device_id]
        placement = {key: row["hvinfo"][key] for key in row["hvinfo"] if key not in _NO_PLACE}
        return Slot(row["bus"], row["pci"], placement)

    def _chardev(self, option: _Option) -> Iterator[str]:
        known = _ID.search(option.value or "")
        if known and known[1] == "serial":
            yield from serial_back_end(self._spec.name, self._given.console_log)
        elif known and known[1] == "agent":
            yield from agent_back_end(self._spec.name)
        else:
            raise self._foreign(option)

    def _flash(self, option: _Option) -> Iterator[str]:
        """The firmware; the nodes of other devices come with these."""
        name = option.properties()["node-name"]
        if name in FLASH and self._given.uefi:
            number = FLASH.index(name)
            yield from flash_back_end(number, self._given.uefi[number])

    def _device(self, option: _Option) -> Iterator[str]:
        device = option.properties() or option.listed("driver")
        if device["driver"] not in _DRIVERS or any(map(device.get, _OPEN_FILES)):
            raise self._foreign(option)
        device_id = device.get("id", "")
        self._were_there.add(device_id)
        if device_id in self._media:
            device.pop("drive", None)
            if files := self._media[device_id]:
                yield from medium_back_end(device_id, files)
                index = {"bootindex": device.pop("bootindex")} if "bootindex" in device else {}
                device |= {"drive": device_id, **index}
            yield from device_args(device)
        elif disk := self._disks.get(device_id):
            yield from disk_back_end(device_id, disk, self._given.disks[disk.uuid])
            yield from option.words()
        elif not ({"drive", "netdev"} & device.keys()) or device_id in self._nics:
            yield from option.words()


def _by_id(runtime: Runtime, kind: DeviceKind, devices: Sequence[Device]) -> dict[str, Device]:
    """Devices by QEMU's ids, as far as QEMU has them."""
    ids = {row["uuid"]: qemu_id(row) for row in runtime.devices[kind]}
    return {device_id: one for one in devices if (device_id := ids.get(one.uuid))}
