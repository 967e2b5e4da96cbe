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
from brine.hotplug.vlans import parse_vlans
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
            _check_same(vm, device, wish)
            return device
    if not mac:
        return None
    for device in there:
        if device.value == mac:
            if uuid != uuid_of_mac(mac):
                raise HotplugError(
                    f"{mac} is the MAC address of {device.device_id} already",
                    hint="choose another --mac, or leave out --uuid",
                )
            # Nobody has said which UUID it is to have.
            wiring = replace(wish.wiring, nic=device.uuid)
            nic = replace(wish.nic, uuid=device.uuid)
            _check_same(vm, device, replace(wish, nic=nic, wiring=wiring))
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


def _check_same(vm: Vm, device: Plugged, wish: Wish) -> None:
    # Of a tap that is none of ours nothing is known.
    if device.tap is None:
        unlike = [f"MAC {device.value}"] if wish.nic.mac not in ("", device.value) else []
    else:
        there = wish_of(device)
        unlike = _differences(there, _filled(wish, there))
    if unlike:
        raise HotplugError(
            f"{device.device_id}: is plugged in already, and otherwise: {', '.join(unlike)}",
            hint=f"{vm.command('nic modify', device.device_id)} changes it",
        )


def _filled(wish: Wish, there: Wish) -> Wish:
    """What is wanted, and what nobody has said as it is there. An instance's NIC has an index and
    tags by its start, which need not be said again; nor does it matter how VLANs are written."""
    wanted, known = wish.wiring, there.wiring
    wiring = replace(
        wanted,
        vlan=known.vlan if parse_vlans(wanted.vlan) == parse_vlans(known.vlan) else wanted.vlan,
        ips=known.ips if wanted.addresses() == known.addresses() else wanted.ips,
        index=known.index if wanted.index is None else wanted.index,
        tags=wanted.tags or known.tags,
        network=wanted.network or known.network,
    )
    return replace(wish, wiring=wiring).with_mac(wish.nic.mac or there.nic.mac)


def _differences(there: Wish, wanted: Wish) -> list[str]:
    """What of a NIC is otherwise than it is wanted, as it is."""
    old, new = _parts(there), _parts(wanted)
    return [f"{name} {old[name] or 'none'}" for name in old if old[name] != new[name]]


def _parts(wish: Wish) -> dict[str, object]:
    wiring = wish.wiring
    return {
        "instance": wiring.instance,
        "MAC": wish.nic.mac.lower(),
        "model": wish.nic.model,
        "mode": str(wiring.mode),
        "link": wiring.link,
        "VLAN": wiring.vlan,
        "addresses": ", ".join(wiring.ips),
        "MTU": wiring.mtu,
        "queues": wish.queues,
        "vhost": "on" if wish.vhost else "off",
        "index": wiring.index,
        "tags": ", ".join(wiring.tags),
        "network": ", ".join(f"{key}={value}" for key, value in wiring.network.items()),
    }


async def _refuse_boot_nic(vm: Vm, mac: str) -> None:
    if await has_boot_device(vm.machine, Kind.NIC, mac):
        raise HotplugError(
            f"{mac} is the MAC address of a NIC that was there when the VM started",
            hint="choose another --mac",
        )
