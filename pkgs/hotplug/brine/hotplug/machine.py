"""A running QEMU, as somebody sees it who plugs devices into it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from brine.common.qmp import QmpClient
from brine.common.qmp_errors import QmpCommandError, QmpProtocolError
from brine.hotplug import slots
from brine.hotplug.device_names import Bus, DeviceName
from brine.hotplug.errors import HotplugError
from brine.hotplug.inventory import PERIPHERAL, Inventory
from brine.hotplug.slots import RootPort, Slot

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

    async def free_pci_slot(self, *, reserved: int) -> Slot:
        """Where the next PCI device can go.

        :raises brine.hotplug.slots.NoSlotError: if there is no place.
        """
        if await self._is_express():
            return slots.free_root_port(await self._root_ports())
        buses = await self.list_of("query-pci")
        try:
            return slots.free_pci_slot(buses, reserved=reserved)
        except (KeyError, TypeError) as error:
            raise QmpProtocolError(f"{self.qmp.path}: no answer to query-pci") from error

    async def slot_of(self, device_id: str, name: DeviceName) -> Slot:
        """The place that a device has.

        :param name: the parts of its id, which have the slot's number.
        """
        bus = await self._bus_of(device_id)
        if name.bus is Bus.SCSI:
            return slots.lun_slot(bus, name.slot)
        return slots.pci_slot(name.slot) if bus == "pci.0" else slots.port_slot(bus, name.slot)

    async def free_lun(self, controller: str | None) -> Slot:
        """Where the next SCSI disk can go.

        :param controller: id of a virtio-scsi controller; None is the first.
        :raises HotplugError: if there is no such controller.
        """
        devices = await self.devices()
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
            for name, kind in (await self.children(folder)).items():
                if kind.startswith("scsi-") and await self._bus_of(name, folder) == bus:
                    taken.append(self._number(await self.property(name, "lun", folder)))
        return slots.free_lun(bus, taken)

    async def _bus_of(self, device_id: str, folder: str = PERIPHERAL) -> str:
        path = str(await self.property(device_id, "parent_bus", folder))
        return path.rpartition("/")[2]

    async def _is_express(self) -> bool:
        arguments = {"path": "/machine", "property": "type"}
        return "q35" in str(await self.qmp.execute("qom-get", arguments))

    async def _root_ports(self) -> list[RootPort]:
        """Ports that have an id: others can't be named.

        query-pci shows what is in a port only when the guest's firmware has been there.
        """
        ports = []
        for name, kind in (await self.devices()).items():
            if kind in slots.ROOT_PORTS:
                bus = await self.list_of("qom-list", {"path": f"{PERIPHERAL}/{name}/{name}"})
                taken = any(str(item.get("name")).startswith("child[") for item in bus)
                place = await self.property(name, "addr")
                ports.append(RootPort(name, self._slot_of(place), taken))
        return ports

    def _slot_of(self, address: Any) -> int:
        """The slot in a property ``addr``: of a device that is there a number, its slot and
        function; in a text ``02.0``, or ``2``, hexadecimal."""
        if isinstance(address, int):
            return address >> 3
        return self._number(str(address).split(".")[0], 16)

    def _number(self, value: Any, base: int = 10) -> int:
        try:
            return int(str(value), base)
        except ValueError:
            raise QmpProtocolError(f"{self.qmp.path}: no number: {value!r:.60}") from None

    async def remove(self, command: str, arguments: dict[str, Any]) -> None:
        """Give a command that removes something that may be gone, or may be let go of just now.

        :raises brine.common.qmp.QmpCommandError: if QEMU keeps it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LET_GO_S
        while True:
            try:
                await self.qmp.execute(command, arguments)
                return
            except QmpCommandError as error:
                if error.error_class == "DeviceNotFound" or _NOT_FOUND.search(error.description):
                    return
                if "in use" not in error.description or loop.time() > deadline:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def try_execute(self, command: str, arguments: dict[str, Any]) -> str | None:
        """Give a command that undoes something; what QEMU says against it, or None."""
        try:
            await self.qmp.execute(command, arguments)
        except QmpCommandError as error:
            return error.description
        return None
