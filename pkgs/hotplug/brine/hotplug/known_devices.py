"""The devices of a VM that Brine knows, and how they change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from brine.common.errors import printable
from brine.common.qmp.wire import QmpCommandError
from brine.hotplug.block_graph import recorded_sets
from brine.hotplug.qemu import Machine
from brine.vm import address
from brine.vm.address import DeviceKind, DeviceName

if TYPE_CHECKING:
    from brine.hotplug.net.records import TapRecord

_WORDS = {"mac": "MAC", "vlan": "VLAN", "ips": "addresses", "mtu": "MTU", "read_only": "read-only"}


class DeviceChange(NamedTuple):
    """A command's change of a device, which it made or would make.

    :param value: the NIC's MAC, or the disk's serial.
    """

    kind: DeviceKind
    device_id: str
    uuid: str
    value: str
    slot: int
    tap: str | None = None
    changed: bool = True

    def to_json(self) -> dict[str, Any]:
        """It as ``--json`` shows it."""
        found: dict[str, Any] = {"device_id": self.device_id, "uuid": self.uuid}
        found |= {self.kind.key: self.value, "slot": self.slot}
        if self.kind is DeviceKind.NIC:
            found["tap"] = self.tap
        return {**found, "changed": self.changed}


class Device(NamedTuple):
    """A device of a VM that Brine plugged in, or that an instance was started with.

    :param type: QEMU's device type, such as ``virtio-net-pci``.
    :param value: the MAC or serial, by which the guest knows it.
    :param uuid: the whole UUID if it is known, else its beginning.
    :param tap: of a NIC, if Brine made it.
    """

    device_id: str
    name: DeviceName
    type: str
    value: str
    uuid: str
    tap: TapRecord | None = None
    path: str | None = None

    def tap_name(self) -> str | None:
        """The interface of a NIC, if Brine made it."""
        return self.tap.name if self.tap else None

    def change(self, *, changed: bool) -> DeviceChange:
        """The change that a command made to this device."""
        kind, slot, tap = self.name.kind, self.name.slot, self.tap_name()
        return DeviceChange(kind, self.device_id, self.uuid, self.value, slot, tap, changed)

    def described(self) -> dict[str, Any]:
        """The columns of a list, fit for a terminal: most are QEMU's words."""
        found: dict[str, Any] = {"device_id": self.device_id, "slot": self.name.slot}
        found[self.name.kind.key] = self.value
        if self.name.kind is DeviceKind.NIC:
            found["tap"] = self.tap_name()
            found["link"] = self.tap.nic.link if self.tap else None
        else:
            found["path"] = self.path
        found["uuid"] = self.uuid
        return {key: printable(one) if type(one) is str else one for key, one in found.items()}

    def is_of(self, uuid: str) -> bool:
        """Whether it is the device with that UUID."""
        try:
            is_alike = address.default_serial(uuid).startswith(self.name.part)
        except ValueError:
            return False
        return is_alike and self.uuid in (self.name.part, uuid.lower())


def differences(there: Any, wanted: Any, but: Collection[str] = ()) -> list[str]:
    """The present settings of a NIC or a disk that differ from the requested ones, in words.

    :param but: the names of settings that are not compared.
    """
    names = [one.name for one in fields(there) if one.name not in but]
    unlike = [name for name in names if getattr(there, name) != getattr(wanted, name)]
    return [f"{_WORDS.get(name, name)} {_shown(getattr(there, name))}" for name in unlike]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{key}={one}" for key, one in value.items()]
    if isinstance(value, tuple | list):
        value = ", ".join(map(str, value))
    return str(value or "none")


def devices_of(machine: Machine, kind: DeviceKind, vm: str) -> list[Device]:
    """The devices of a VM with that name that Brine knows, by their slot."""
    types = machine.devices()
    names = {device_id: DeviceName.parse(device_id) for device_id in types}
    ours = {key: name for key, name in names.items() if name and name.kind is kind}
    if not ours:
        return []
    taps, disks = [], {}
    if kind is DeviceKind.NIC:
        from brine.hotplug.net import records  # with netlink, of which disks need none

        taps = [one for one in records.load_all().values() if one.is_here()]
    else:
        disks = recorded_sets(machine)
    found = []
    for device_id, name in ours.items():
        try:
            value = printable(str(machine.property(device_id, kind.key)))
        except QmpCommandError as error:
            if error.error_class != "DeviceNotFound":
                raise
            continue  # the guest has just released it
        device = Device(device_id, name, types[device_id], value, name.part)
        if kind is DeviceKind.NIC:
            device = device._replace(value=value.lower())
        if disk := disks.get(device_id):
            device = device._replace(uuid=disk.uuid, path=disk.path())
        if tap := _tap_of(device, vm, taps):
            device = device._replace(uuid=tap.nic.uuid, tap=tap)
        found.append(device)
    return sorted(found, key=lambda one: (one.name.bus, one.name.slot))


def _tap_of(device: Device, vm: str, taps: Sequence[TapRecord]) -> TapRecord | None:
    """The tap of a NIC, if Brine made it for this VM. A tap's record names its VM, so a QEMU
    that lies about its devices can't lead to the tap of another VM."""
    found = [
        one
        for one in taps
        if one.nic.instance == vm
        and one.nic.uuid.replace("-", "").startswith(device.name.part)
        and one.nic.mac.lower() == device.value
    ]
    return found[0] if len(found) == 1 else None
