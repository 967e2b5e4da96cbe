"""Adding and changing NICs of a locked VM, with their taps; removing their backends.

A tap's descriptors go to QEMU through the monitor, then its two devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from brine.common.errors import BrineError
from brine.common.qmp.wire import QmpClosedError, QmpError
from brine.hotplug.device_arguments import nic_device, nic_netdev
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.known_devices import Device, DeviceChange, differences
from brine.hotplug.locked_vm import Vm
from brine.hotplug.net.wiring import check_wiring, open_own_tap, remove_unheld, unwire, wire
from brine.hotplug.qemu import Machine, unplug_device
from brine.hotplug.timeouts import UNPLUG_TIMEOUT_S
from brine.hotplug.transaction import Pending, PendingAction, Undo
from brine.vm.address import DeviceKind, new_mac, uuid_of_mac
from brine.vm.connection import parse_vlans
from brine.vm.slots import Slot
from brine.vm.values import MODELS, RESERVED_SLOTS
from brine.vm.vif import Vif

_QUEUE, _VHOST = "q", "v"  # in the names of descriptors


def plug_nic_in(
    vm: Vm, nic: Vif, *, reserved: int = RESERVED_SLOTS, request: dict[str, Any] | None = None
) -> DeviceChange:
    """Make a tap, connect it, and plug it in as a NIC; record the NIC in the runtime file, if any.

    If the same NIC is already plugged in, only a missing record is added.

    :param nic: a NIC without a MAC gets a new one. Unset values that only scripts read are no
        difference.
    :param reserved: slots of ``pci.0`` that stay free.
    :param request: identifies this request, if it is repeated after a kill.
    """
    if device := _existing(vm, nic):
        if device.tap:
            vm.record_again(device, device.uuid, nic_of(device).recorded)
        return device.change(changed=False)
    nic = replace(nic, mac=nic.mac or new_mac())
    slot = vm.machine.free_slot(reserved=reserved)
    change = _change(nic, slot)
    if vm.dry_run:
        check_wiring(nic)
        return change
    known = {"request": request or {}, "device": nic.recorded(slot)}
    with vm.doing(PendingAction.ADD, change, nic.identities(), **known) as undo:
        put_in(vm, undo, nic, slot)
    return change


def replace_nic(
    vm: Vm, device: Device, nic: Vif, *, request: dict[str, Any] | None = None
) -> DeviceChange:
    """Change a NIC: unplug it, and plug it in again in the same slot, with the same UUID.

    :param request: identifies this request, if it is repeated after a kill.
    :raises brine.common.errors.BrineError: what failed; then the NIC is as it was.
    """
    before = nic_of(device)
    if before == nic:
        vm.refuse_leaving(device)
        return device.change(changed=False)
    identities = list(nic.identities()) if nic.mac != before.mac else []
    if identities:
        _refuse_taken_mac(vm, nic.mac)
    check_wiring(nic)
    slot = vm.machine.slot_of(device.device_id, device.name)
    change = _change(nic, slot)._replace(device_id=device.device_id)
    if vm.dry_run:
        return change
    known: dict[str, Any] = {"request": request or {}, "device": nic.recorded(slot)}
    known |= {"before": before.recorded(), "slot": slot._asdict()}
    with vm.doing(PendingAction.MODIFY, change, identities, **known) as doing:
        take_out(vm, device)
        doing.by(partial(put_back, vm, before, slot), asks_qemu=True)
        doing.note(is_out=True)
        vm.tell(device.change(changed=True), plugged=False)
        put_in(vm, doing, nic, slot)
    return change


def nic_of(device: Device) -> Vif:
    """The present settings of a plugged NIC."""
    if device.tap is None:
        raise HotplugError(
            f"{device.device_id}: nothing is known of its tap, so it can't be changed",
            hint="remove it, and add another",
        )
    model = next((name for name, kind in MODELS.items() if kind == device.type), device.type)
    return replace(device.tap.nic, uuid=device.uuid, mac=device.value, model=model)


# NICs that a VM already has. A UUID identifies a NIC, and so does a MAC address.


def _existing(vm: Vm, nic: Vif) -> Device | None:
    """The requested NIC, if it is already plugged in."""
    devices = vm.devices(DeviceKind.NIC)
    device = next((one for one in devices if one.is_of(nic.uuid)), None)
    if device is None and nic.mac and nic.uuid == uuid_of_mac(nic.mac):
        device = next((one for one in devices if one.value == nic.mac), None)
    if device is None:
        if nic.mac:
            _refuse_taken_mac(vm, nic.mac, hint="choose another --mac, or leave out --uuid")
        return None
    if device.tap is None:
        # Brine knows nothing about a tap that it did not make.
        unlike = [f"MAC {device.value}"] if nic.mac not in ("", device.value) else []
    else:
        there = nic_of(device)
        unlike = differences(there, _filled(nic, there))
    hint = f"{vm.command('nic modify', device.device_id)} changes it"
    vm.refuse_otherwise(device, unlike, hint)
    return device


def _refuse_taken_mac(vm: Vm, mac: str, *, hint: str = "choose another --mac") -> None:
    for device in vm.devices(DeviceKind.NIC):
        if device.value == mac:
            text = f"{mac} is the MAC address of {device.device_id} already"
            raise HotplugError(text, hint=hint)
    if vm.machine.was_started_with(DeviceKind.NIC, mac):
        text = f"{mac} is the MAC address of a NIC that was there when the VM started"
        raise HotplugError(text, hint="choose another --mac")


def _filled(nic: Vif, there: Vif) -> Vif:
    """The request, completed with the present values of the keys that it leaves open.

    The start of an instance sets a NIC's index and tags. A request need not repeat these, nor write
    VLANs the same way.
    """
    return replace(
        nic,
        uuid=there.uuid,
        vlan=there.vlan if parse_vlans(nic.vlan) == parse_vlans(there.vlan) else nic.vlan,
        ips=there.ips if nic.addresses() == there.addresses() else nic.ips,
        mac=nic.mac or there.mac,
        index=there.index if nic.index is None else nic.index,
        tags=nic.tags or there.tags,
        network=nic.network or there.network,
    )


def _change(nic: Vif, slot: Slot) -> DeviceChange:
    device_id = slot.device_id(DeviceKind.NIC, nic.uuid)
    return DeviceChange(DeviceKind.NIC, device_id, nic.uuid, nic.mac, slot.number, nic.tap_name())


# Steps, each of which can be undone.


def put_in(vm: Vm, undo: Undo, nic: Vif, slot: Slot) -> None:
    """Make a tap, connect it, and plug it in.

    :param undo: collects what undoes each step.
    """
    machine, device_id = vm.machine, slot.device_id(DeviceKind.NIC, nic.uuid)
    # The tap outlives this block only if QEMU has opened it.
    with open_own_tap(nic) as tap:
        undo.by(partial(unwire, tap.name))
        mtu = wire(tap, nic).mtu
        back_end = partial(_remove_back_end, machine, device_id, nic.queues, vhost=nic.vhost)
        undo.by(back_end, asks_qemu=True)
        queues = _hand_over(machine, f"{device_id}-{_QUEUE}", tap.queues)
        vhost = _hand_over(machine, f"{device_id}-{_VHOST}", tap.vhost)
        machine.qmp.execute("netdev_add", nic_netdev(device_id, queues, vhost))
        undo.by(partial(unplug_device, machine, device_id, timeout_s=vm.timeout_s), asks_qemu=True)
        machine.qmp.execute("device_add", nic_device(device_id, nic, len(queues), slot, mtu))


def put_back(vm: Vm, nic: Vif, slot: Slot) -> None:
    """Plug a former NIC in again.

    :raises brine.common.errors.BrineError: what failed; then the VM has no such NIC.
    """
    undo = Undo(vm.is_gone)
    try:
        put_in(replace(vm, timeout_s=UNPLUG_TIMEOUT_S), undo, nic, slot)
    except BaseException as error:
        undo.all()
        if not isinstance(error, BrineError) or isinstance(error, QmpError | RefusedByGuestError):
            raise
        raise HotplugError(
            f"the NIC with the MAC {nic.mac} is out, and can't be plugged in again: {error}",
            hint=f"remove the cause; then the next brine nic command of {vm.name} plugs it in",
        ) from error


def take_out(vm: Vm, device: Device) -> None:
    """Remove a NIC from the guest, then its wiring, then its tap."""
    tap = device.tap
    try:
        unplug_device(vm.machine, device.device_id, timeout_s=vm.timeout_s)
    except QmpClosedError:
        if tap and vm.is_gone():
            unwire(tap.name)
            remove_unheld(tap.nic, tap.name)
        raise
    if tap:
        unwire(tap.name)
    _remove_back_end(vm.machine, device.device_id)
    if tap:
        remove_unheld(tap.nic, tap.name)


def remove_rest(vm: Vm, pending: Pending) -> None:
    """Remove what interrupted work has left of a NIC."""
    nic = pending.device
    queues, vhost = (nic["queues"], nic["vhost"]) if nic else (0, False)
    _remove_back_end(vm.machine, pending.device_id, queues, vhost=vhost)
    if pending.tap:
        unwire(pending.tap)
        remove_unheld(Vif(instance=vm.name, uuid=pending.uuid), pending.tap)


def _remove_back_end(
    machine: Machine, device_id: str, queues: int = 0, *, vhost: bool = False
) -> None:
    """Have QEMU close a tap, unless it already has, and so many descriptors of queues.

    Until a ``netdev_add`` takes descriptors, they belong to the monitor, and they outlive the
    connection that brought them.
    """
    machine.remove("netdev_del", {"id": device_id})
    for kind in (_QUEUE, _VHOST) if vhost else (_QUEUE,):
        for number in range(queues):
            machine.remove("closefd", {"fdname": f"{device_id}-{kind}{number}"})


def _hand_over(machine: Machine, prefix: str, descriptors: Sequence[int]) -> list[str]:
    """Give QEMU copies of descriptors; returns their names in QEMU."""
    names = [f"{prefix}{number}" for number in range(len(descriptors))]
    for name, descriptor in zip(names, descriptors, strict=True):
        machine.qmp.execute("getfd", {"fdname": name}, descriptors=[descriptor])
    return names
