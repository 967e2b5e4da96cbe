"""What of a VM's devices was plugged in by us."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brine.common.printable import printable
from brine.common.qmp_errors import QmpCommandError
from brine.hotplug.device_names import DeviceName, Kind
from brine.hotplug.fdsets import disk_sets
from brine.hotplug.inventory import Inventory

if TYPE_CHECKING:
    from brine.hotplug.tap_records import Record


@dataclass(frozen=True, slots=True)
class Plugged:
    """A device that was plugged in by us.

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
    tap: Record | None = None
    path: str | None = None

    def described(self) -> dict[str, Any]:
        """For a list."""
        found: dict[str, Any] = {"device_id": self.device_id, "slot": self.name.slot}
        found[self.key] = self.value
        if self.name.kind is Kind.NIC:
            found["tap"] = self.tap.name if self.tap else None
            found["link"] = self.tap.wiring.link if self.tap else None
        else:
            found["path"] = self.path
        return {**found, "uuid": self.uuid}

    def is_of(self, uuid: str) -> bool:
        """Whether it is the device with that UUID."""
        try:
            return self.name.is_of(uuid) and self.uuid in (self.name.part, uuid.lower())
        except ValueError:
            return False


async def plugged(inventory: Inventory, kind: Kind, vm: str) -> list[Plugged]:
    """The devices that were plugged in by us, by their slot.

    :param vm: what the VM is called.
    """
    there = await inventory.devices()
    names = {device_id: DeviceName.parse(device_id) for device_id in there}
    ours = {key: name for key, name in names.items() if name and name.kind is kind}
    if not ours:
        return []
    if kind is Kind.NIC:
        found = [one async for one in _nics(inventory, ours, there, vm)]
    else:
        found = [one async for one in _disks(inventory, ours, there)]
    return sorted(found, key=lambda one: (one.name.bus, one.name.slot))


async def _nics(
    inventory: Inventory, ours: Mapping[str, DeviceName], types: Mapping[str, str], vm: str
) -> AsyncIterator[Plugged]:
    from brine.hotplug import tap_records  # with all that scripts need

    taps = list(tap_records.load_all(tap_records.PLACES).values())
    for device_id, name in ours.items():
        mac = await _value(inventory, device_id, "mac")
        if mac is None:
            continue
        mac = mac.lower()
        tap = _tap_of(name, mac, vm, taps)
        uuid = tap.wiring.nic if tap else name.part
        yield Plugged(device_id, name, types[device_id], "mac", mac, uuid, tap)


async def _disks(
    inventory: Inventory, ours: Mapping[str, DeviceName], types: Mapping[str, str]
) -> AsyncIterator[Plugged]:
    known = await disk_sets(inventory)
    for device_id, name in ours.items():
        serial = await _value(inventory, device_id, "serial")
        if serial is None:
            continue
        disk = known.get(device_id)
        uuid, path = (disk.uuid, disk.path()) if disk else (name.part, None)
        yield Plugged(device_id, name, types[device_id], "serial", serial, uuid, path=path)


async def _value(inventory: Inventory, device_id: str, key: str) -> str | None:
    """A property of a device; None if the guest has let go of it just now."""
    try:
        return printable(str(await inventory.property(device_id, key)))
    except QmpCommandError as error:
        if error.error_class == "DeviceNotFound":
            return None
        raise


def _tap_of(name: DeviceName, mac: str, vm: str, taps: Sequence[Record]) -> Record | None:
    """The tap of a NIC, if it is ours and this VM's: taps know whose they are, and what a QEMU says
    of its devices must not lead to another VM's."""
    found = [
        one
        for one in taps
        if one.is_here()
        and one.wiring.instance == vm
        and one.wiring.nic.replace("-", "").startswith(name.part)
        and one.wiring.mac.lower() == mac
    ]
    return found[0] if len(found) == 1 else None
