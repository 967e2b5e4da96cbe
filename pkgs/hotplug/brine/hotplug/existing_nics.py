"""NICs that a VM has already, ours and others': a UUID and a MAC address stand for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from brine.hotplug.boot_devices import has_boot_device
from brine.hotplug.choices import MODELS
from brine.hotplug.device_names import Kind, uuid_of_mac
from brine.hotplug.errors import HotplugError
from brine.hotplug.nic import Nic
from brine.hotplug.pending import Action, Pending
from brine.hotplug.plugged import Plugged
from brine.hotplug.recording import is_recorded, record
from brine.hotplug.vm import Vm
from brine.hotplug.wish import Wish, recorded_nic


async def existing_nic(vm: Vm, wish: Wish) -> Plugged | None:
    """The NIC that is wanted, if it is plugged in already.

    :raises HotplugError: if its UUID or its MAC is another one's, or it is there otherwise.
    """
    uuid, mac = wish.nic.uuid, wish.nic.mac
    there = await vm.devices(Kind.NIC)
    for device in there:
        if device.is_of(uuid):
            _check_same(device, wish)
            return device
    for device in there:
        if device.value == mac:
            if uuid != uuid_of_mac(mac):
                raise HotplugError(
                    f"{mac} is the MAC address of {device.device_id} already",
                    hint="choose another --mac, or leave out --uuid",
                )
            # Nobody has said which UUID it is to have.
            wiring = replace(wish.wiring, nic=device.uuid)
            _check_same(
                device, replace(wish, nic=replace(wish.nic, uuid=device.uuid), wiring=wiring)
            )
            return device
    await _refuse_boot_nic(vm, mac)
    return None


async def refuse_taken_mac(vm: Vm, mac: str) -> None:
    """Refuse a MAC address that a NIC of the VM has.

    :raises HotplugError: if one has.
    """
    for device in await vm.devices(Kind.NIC):
        if device.value == mac:
            raise HotplugError(
                f"{mac} is the MAC address of {device.device_id} already",
                hint="choose another --mac",
            )
    await _refuse_boot_nic(vm, mac)


async def record_again(vm: Vm, device: Plugged, runtime: Path | None) -> None:
    """Enter a NIC that is plugged in into a runtime file that does not know of it."""
    device_id = device.device_id
    if device.tap is None or is_recorded(runtime, Kind.NIC, device.uuid, device_id):
        return
    slot = await vm.machine.slot_of(device_id, device.name)
    pending = Pending(
        action=Action.ADD,
        kind=Kind.NIC,
        uuid=device.uuid,
        device_id=device_id,
        device=recorded_nic(wish_of(device), slot),
        runtime=str(runtime),
    )
    record(pending, plugged=True)


def wish_of(device: Plugged) -> Wish:
    """A NIC as it is.

    :raises HotplugError: if its tap is none of ours, so that nobody knows.
    """
    if device.tap is None:
        raise HotplugError(
            f"{device.device_id}: nothing is known of its tap, so it can't be changed",
            hint="remove it, and add another",
        )
    tap = device.tap
    model = next((name for name, kind in MODELS.items() if kind == device.type), device.type)
    return Wish(Nic(device.uuid, device.value, model), tap.wiring, tap.queues, tap.vhost)


def _check_same(device: Plugged, wish: Wish) -> None:
    # Of a tap that is none of ours nothing is known.
    is_same = wish_of(device) == wish if device.tap else device.value == wish.nic.mac
    if not is_same:
        raise HotplugError(
            f"{device.device_id}: is plugged in already, and otherwise",
            hint=f"brine nic modify {device.device_id} changes it",
        )


async def _refuse_boot_nic(vm: Vm, mac: str) -> None:
    if await has_boot_device(vm.machine, Kind.NIC, mac):
        raise HotplugError(
            f"{mac} is the MAC address of a NIC that was there when the VM started",
            hint="choose another --mac",
        )
