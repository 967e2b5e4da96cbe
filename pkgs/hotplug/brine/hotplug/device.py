"""The devices of a VM that Brine plugged in, as QEMU shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brine.common.errors import printable
from brine.common.qmp.wire import QmpCommandError
from brine.hotplug.address import DeviceKind, DeviceName
from brine.hotplug.qemu import Inventory, disk_sets

if TYPE_CHECKING:
    from brine.hotplug.net.records import TapRecord


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a VM that Brine plugged in, or that an instance was started with.

    :param type: QEMU's name of what the guest sees, such as ``virtio-net-pci``.
    :param key: ``mac`` or ``serial``: what the guest knows it by; *value* is that.
    :param uuid: the whole one, where it is known; else its beginning.
    :param tap: of a NIC, where it is ours.
    :param path: of a disk, where it is known.
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
        """For a list."""
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

    :param vm: what the VM is called.
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
    """A property of a device; None if the guest has let go of it just now."""
    try:
        return printable(str(inventory.property(device_id, key)))
    except QmpCommandError as error:
        if error.error_class == "DeviceNotFound":
            return None
        raise


def _tap_of(name: DeviceName, mac: str, vm: str, taps: Sequence[TapRecord]) -> TapRecord | None:
    """The tap of a NIC, if it is ours and this VM's: taps know whose they are, and what a QEMU says
    of its devices must not lead to another VM's."""
    found = [
        one
        for one in taps
        if one.is_here()
        and one.nic.instance == vm
        and one.nic.uuid.replace("-", "").startswith(name.part)
        and one.nic.mac.lower() == mac
    ]
    return found[0] if len(found) == 1 else None
