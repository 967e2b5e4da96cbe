"""A running QEMU: its properties and devices, and the commands that change them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from brine.common.errors import printable
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpProtocolError, QmpTimeoutError
from brine.hotplug import address
from brine.hotplug.address import Bus, DeviceKind, DeviceName, RootPort, Slot
from brine.hotplug.errors import HotplugError, RefusedByGuestError

if TYPE_CHECKING:
    from brine.hotplug.net.records import TapRecord

# The properties of a running QEMU.

PERIPHERAL = "/machine/peripheral"
"""The QOM path of the devices with an id."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LONGEST_VALUE = 1024
_CHILD = re.compile(r"child<(?P<type>[^<>]+)>")


class Monitor(Protocol):
    """A client of a QEMU monitor, for questions."""

    path: Path

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Give a command and return QEMU's answer."""


class Inventory:
    """The properties and devices of a VM."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def vm_name(self) -> str:
        """The name of the VM, which is the name of its socket.

        :raises QmpProtocolError: if QEMU's ``-name`` differs, or the name is not valid.
        """
        name = self.monitor.path.stem
        if not _NAME.fullmatch(name):
            raise QmpProtocolError(f"{self.monitor.path}: no VM can be called {printable(name)!r}")
        answer = self.monitor.execute("query-name")
        said = answer.get("name", name) if type(answer) is dict else None
        if said != name:
            raise QmpProtocolError(
                f"{self.monitor.path}: QEMU calls itself {said!r:.80}, and not {name}",
                hint="a QMP socket has its VM's name, with .qmp after it",
            )
        return name

    def devices(self) -> dict[str, str]:
        """The types of the devices with an id, by id."""
        return self.children(PERIPHERAL)

    def children(self, path: str) -> dict[str, str]:
        """The types of an object's children, by name."""
        found = {}
        for item in self.list_of("qom-list", {"path": path}):
            if match := _CHILD.fullmatch(str(item.get("type"))):
                found[str(item.get("name"))] = match["type"]
        return found

    def list_of(self, command: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """The answer of a command that lists objects.

        :raises brine.common.qmp.client.QmpProtocolError: if it answers something else.
        """
        answer = self.monitor.execute(command, arguments)
        if type(answer) is not list or any(type(item) is not dict for item in answer):
            raise QmpProtocolError(f"{self.monitor.path}: no answer to {command}: {answer!r:.60}")
        return answer

    def has_device(self, device_id: str) -> bool:
        """Whether the VM has a device with that id."""
        return device_id in self.devices()

    def property(self, device_id: str, name: str, folder: str = PERIPHERAL) -> Any:
        """A property of a device, such as its serial: a string of some length, or a number.

        :raises QmpProtocolError: if QEMU says it is something else.
        """
        path = f"{folder}/{device_id}"
        value = self.monitor.execute("qom-get", {"path": path, "property": name})
        if type(value) not in (str, int, bool) or len(str(value)) > _LONGEST_VALUE:
            raise QmpProtocolError(f"{self.monitor.path}: no {name} of {device_id}: {value!r:.60}")
        return value


# The sets of descriptors that QEMU was given, with the text of each.


@dataclass(frozen=True, slots=True)
class FdSet:
    """A descriptor of a set, with its text.

    :param disk: as JSON.
    """

    number: int
    device_id: str
    uuid: str
    disk: str

    def path(self) -> str | None:
        """The path of the disk; None if another program gave QEMU the descriptor."""
        try:
            path = json.loads(self.disk)["path"]
        except (ValueError, TypeError, KeyError):
            return None
        return printable(path) if isinstance(path, str) else None


def fdsets(inventory: Inventory) -> list[FdSet]:
    """All descriptors that QEMU has in sets, of Brine and of other programs."""
    try:
        answer = inventory.list_of("query-fdsets")
    except QmpCommandError as error:
        if error.error_class != "CommandNotFound":
            raise
        return []  # this QEMU has none
    found = []
    try:
        for fdset in answer:
            for each in fdset["fds"]:
                device_id, _, rest = str(each.get("opaque", "")).partition(" ")
                uuid, _, text = rest.partition(" ")
                found.append(FdSet(int(fdset["fdset-id"]), device_id, printable(uuid), text))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise QmpProtocolError(f"{inventory.monitor.path}: no answer to query-fdsets") from error
    return found


def disk_sets(inventory: Inventory) -> dict[str, FdSet]:
    """The texts of the disks that Brine plugged in, by device id."""
    return {one.device_id: one for one in fdsets(inventory) if one.uuid}


_NAMELESS = "/machine/peripheral-anon"
_SCSI_CONTROLLERS = frozenset(
    {
        "virtio-scsi-pci",
        "virtio-scsi-pci-transitional",
        "virtio-scsi-pci-non-transitional",
    }
)
_NOT_FOUND = re.compile(r"not found|[Ff]ailed to find|[Cc]annot find")
_LET_GO_S = 5.0
_PAUSE_S = 0.02


class Machine(Inventory):
    """The machine behind a QMP connection."""

    def __init__(self, qmp: QmpClient) -> None:
        super().__init__(qmp)
        self.qmp = qmp

    def free_pci_slot(self, *, reserved: int) -> Slot:
        """A free slot for a PCI device.

        :raises brine.hotplug.address.NoSlotError: if there is none.
        """
        if self._is_express():
            return address.free_root_port(self._root_ports())
        buses = self.list_of("query-pci")
        try:
            return address.free_pci_slot(buses, reserved=reserved)
        except (KeyError, TypeError) as error:
            raise QmpProtocolError(f"{self.qmp.path}: no answer to query-pci") from error

    def slot_of(self, device_id: str, name: DeviceName) -> Slot:
        """The slot of a device.

        :param name: the parts of its id, which have the slot's number.
        """
        bus = self._bus_of(device_id)
        if name.bus is Bus.SCSI:
            return address.lun_slot(bus, name.slot)
        return address.pci_slot(name.slot) if bus == "pci.0" else address.port_slot(bus, name.slot)

    def free_lun(self, controller: str | None) -> Slot:
        """A free LUN for a SCSI disk.

        :param controller: id of a virtio-scsi controller; None is the first.
        :raises HotplugError: if there is no such controller.
        """
        devices = self.devices()
        controllers = [name for name, kind in devices.items() if kind in _SCSI_CONTROLLERS]
        if controller is None and controllers:
            controller = controllers[0]
        if controller not in controllers or controller is None:
            missing = f"there is no virtio-scsi controller {controller or 'with an id'}"
            hint = "start the VM with one: -device virtio-scsi-pci,id=scsi0"
            raise HotplugError(missing, hint=hint)
        bus = f"{controller}.0"
        taken = []
        for folder in (PERIPHERAL, _NAMELESS):
            for name, kind in (self.children(folder)).items():
                if kind.startswith("scsi-") and self._bus_of(name, folder) == bus:
                    taken.append(self._number(self.property(name, "lun", folder)))
        return address.free_lun(bus, taken)

    def _bus_of(self, device_id: str, folder: str = PERIPHERAL) -> str:
        path = str(self.property(device_id, "parent_bus", folder))
        return path.rpartition("/")[2]

    def _is_express(self) -> bool:
        arguments = {"path": "/machine", "property": "type"}
        return "q35" in str(self.qmp.execute("qom-get", arguments))

    def _root_ports(self) -> list[RootPort]:
        """The PCIe root ports with an id; others can't be addressed.

        query-pci shows the device in a port only after the guest's firmware has configured it.
        """
        ports = []
        for name, kind in (self.devices()).items():
            if kind in address.ROOT_PORTS:
                bus = self.list_of("qom-list", {"path": f"{PERIPHERAL}/{name}/{name}"})
                taken = any(str(item.get("name")).startswith("child[") for item in bus)
                place = self.property(name, "addr")
                ports.append(RootPort(name, self._slot_of(place), taken))
        return ports

    def _slot_of(self, address: Any) -> int:
        """The slot in a property ``addr``: a number with slot and function, or a hexadecimal text
        such as ``02.0`` or ``2``."""
        if isinstance(address, int):
            return address >> 3
        return self._number(str(address).split(".")[0], 16)

    def _number(self, value: Any, base: int = 10) -> int:
        try:
            return int(str(value), base)
        except ValueError:
            raise QmpProtocolError(f"{self.qmp.path}: no number: {value!r:.60}") from None

    def remove(self, command: str, arguments: dict[str, Any]) -> None:
        """Give a command that removes something, which may already be gone or just be going.

        :raises brine.common.qmp.client.QmpCommandError: if QEMU keeps it.
        """
        deadline = time.monotonic() + _LET_GO_S
        while True:
            try:
                self.qmp.execute(command, arguments)
                return
            except QmpCommandError as error:
                if error.error_class == "DeviceNotFound" or _NOT_FOUND.search(error.description):
                    return
                if "in use" not in error.description or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def try_execute(self, command: str, arguments: dict[str, Any]) -> str | None:
        """Give a command that undoes something; returns QEMU's refusal, or None."""
        try:
            self.qmp.execute(command, arguments)
        except QmpCommandError as error:
            return error.description
        return None


# Unplugging a device: the guest is asked, and has to agree.

UNPLUG_TIMEOUT_S = 30.0

_ASK_AGAIN_S = (0.5, 1.0, 2.0)  # and so on
_LOOK_S = 0.5
_TRANSIENT = ("busy", "in the process of unplug")


def unplug_device(machine: Machine, device_id: str, *, timeout_s: float = UNPLUG_TIMEOUT_S) -> None:
    """Remove a device, and return when it is gone; at once if there is none.

    QEMU answers ``device_del`` before the guest does. The event of the removal may come before that
    answer, after it, instead of it, or not on this connection at all: it only says when to look. A
    guest that has just got the device may be too busy to see the request, so the request is
    repeated. (QEMU refuses a repetition that the guest would take as a cancellation.)

    :raises RefusedByGuestError: if the guest refused, or did nothing in time. The device is still
        completely plugged in.
    :raises brine.common.qmp.client.QmpError: if QEMU refused, or the connection fails.
    """
    qmp = machine.qmp
    deadline = time.monotonic() + timeout_s
    pauses = itertools.chain(_ASK_AGAIN_S, itertools.repeat(_ASK_AGAIN_S[-1]))
    ask_again = time.monotonic()
    asked: int | None = None
    is_first = True
    while machine.has_device(device_id):
        now = time.monotonic()
        if now >= deadline:
            raise RefusedByGuestError(device_id, _why(machine, timeout_s))
        if asked is not None and _is_answered(qmp, asked):
            asked = None
        if now >= ask_again and asked is None:
            ask_again = now + next(pauses)
            if is_first:
                # Events up to now, with the answer above, belong to earlier requests.
                qmp.drop_events()
                is_first = False
            asked = qmp.begin("device_del", {"id": device_id})
        wait_s = min(_LOOK_S, max(ask_again - now, 0.001), deadline - now)
        _hear(qmp, device_id, wait_s, asked)


def _is_answered(qmp: QmpClient, asked: int) -> bool:
    """Whether QEMU has accepted the request, or refused it for now.

    :raises QmpCommandError: if QEMU refuses it permanently.
    """
    try:
        return qmp.answer(asked, "device_del") is not None
    except QmpCommandError as error:
        is_gone = error.error_class == "DeviceNotFound"
        if not is_gone and not any(text in error.description for text in _TRANSIENT):
            raise
        return True


def _hear(qmp: QmpClient, device_id: str, timeout_s: float, asked: int | None) -> None:
    """Wait for an event of the device, or for QEMU's answer, until the timeout.

    :raises RefusedByGuestError: if the guest refused.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(QmpTimeoutError):
        while event := qmp.next_event(timeout_s=deadline - time.monotonic(), or_answer=asked):
            if event.data.get("device") == device_id:
                if event.name == "DEVICE_UNPLUG_GUEST_ERROR":
                    raise RefusedByGuestError(device_id, "it said no")
                return


def _why(machine: Machine, timeout_s: float) -> str:
    try:
        status = machine.qmp.execute("query-status")
    except QmpCommandError:
        status = {}
    if type(status) is dict and status and not status.get("running"):
        return f"the VM does not run ({printable(str(status.get('status')))})"
    return f"it did nothing within {timeout_s:g} s"


# The devices of a VM that Brine knows.


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a VM that Brine plugged in, or that an instance was started with.

    :param type: QEMU's device type, such as ``virtio-net-pci``.
    :param key: ``mac`` or ``serial``, by which the guest knows it; *value* is its value.
    :param uuid: the whole UUID if it is known, else its beginning.
    :param tap: of a NIC, if Brine made it.
    :param path: of a disk, if it is known.
    """

    device_id: str
    name: DeviceName
    type: str
    key: str
    value: str
    uuid: str
    tap: TapRecord | None = None
    path: str | None = None

    def described(self) -> dict[str, Any]:
        """The columns of a list."""
        found: dict[str, Any] = {"device_id": self.device_id, "slot": self.name.slot}
        found[self.key] = self.value
        if self.name.kind is DeviceKind.NIC:
            found["tap"] = self.tap.name if self.tap else None
            found["link"] = self.tap.nic.link if self.tap else None
        else:
            found["path"] = self.path
        return {**found, "uuid": self.uuid}

    def is_of(self, uuid: str) -> bool:
        """Whether it is the device with that UUID."""
        try:
            return self.name.is_of(uuid) and self.uuid in (self.name.part, uuid.lower())
        except ValueError:
            return False


def devices_of(inventory: Inventory, kind: DeviceKind, vm: str) -> list[Device]:
    """The devices of a VM that Brine knows, by their slot.

    :param vm: the VM's name.
    """
    there = inventory.devices()
    names = {device_id: DeviceName.parse(device_id) for device_id in there}
    ours = {key: name for key, name in names.items() if name and name.kind is kind}
    if not ours:
        return []
    if kind is DeviceKind.NIC:
        found = list(_nics(inventory, ours, there, vm))
    else:
        found = list(_disks(inventory, ours, there))
    return sorted(found, key=lambda one: (one.name.bus, one.name.slot))


def _nics(
    inventory: Inventory, ours: Mapping[str, DeviceName], types: Mapping[str, str], vm: str
) -> Iterator[Device]:
    from brine.hotplug.net import records  # with netlink, of which disks need none

    taps = list(records.load_all(records.PLACES).values())
    for device_id, name in ours.items():
        mac = _value(inventory, device_id, "mac")
        if mac is None:
            continue
        mac = mac.lower()
        tap = _tap_of(name, mac, vm, taps)
        uuid = tap.nic.uuid if tap else name.part
        yield Device(device_id, name, types[device_id], "mac", mac, uuid, tap)


def _disks(
    inventory: Inventory, ours: Mapping[str, DeviceName], types: Mapping[str, str]
) -> Iterator[Device]:
    known = disk_sets(inventory)
    for device_id, name in ours.items():
        serial = _value(inventory, device_id, "serial")
        if serial is None:
            continue
        disk = known.get(device_id)
        uuid, path = (disk.uuid, disk.path()) if disk else (name.part, None)
        yield Device(device_id, name, types[device_id], "serial", serial, uuid, path=path)


def _value(inventory: Inventory, device_id: str, key: str) -> str | None:
    """A property of a device; None if the guest has just released the device."""
    try:
        return printable(str(inventory.property(device_id, key)))
    except QmpCommandError as error:
        if error.error_class == "DeviceNotFound":
            return None
        raise


def _tap_of(name: DeviceName, mac: str, vm: str, taps: Sequence[TapRecord]) -> TapRecord | None:
    """The tap of a NIC, if Brine made it for this VM. A tap's record names its VM, so a QEMU
    that lies about its devices can't lead to the tap of another VM."""
    found = [
        one
        for one in taps
        if one.is_here()
        and one.nic.instance == vm
        and one.nic.uuid.replace("-", "").startswith(name.part)
        and one.nic.mac.lower() == mac
    ]
    return found[0] if len(found) == 1 else None
