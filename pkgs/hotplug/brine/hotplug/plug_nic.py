"""Adding, changing and removing NICs of a locked VM, with their taps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError
from brine.common.process import begun
from brine.common.qmp.wire import QmpClosedError, QmpError
from brine.hotplug import messages
from brine.hotplug.address import (
    RESERVED_SLOTS,
    Bus,
    DeviceKind,
    DeviceName,
    Slot,
    new_mac,
    uuid_of_mac,
)
from brine.hotplug.choices import MODELS, Mode
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.net.netlink import Netlink
from brine.hotplug.net.tap import Tap, check_devices, open_tap
from brine.hotplug.net.wiring import check_link, unwire, wire
from brine.hotplug.nic import Nic, nic_device, nic_netdev, parse_vlans, recorded_nic
from brine.hotplug.qemu import UNPLUG_TIMEOUT_S, Device, Machine, unplug_device
from brine.hotplug.runtime_file import is_recorded, record
from brine.hotplug.transaction import Pending, PendingAction, Undo
from brine.hotplug.vm import Vm, has_boot_device

# NICs that a VM already has. A UUID identifies a NIC, and so does a MAC address.


def existing_nic(vm: Vm, nic: Nic) -> Device | None:
    """The requested NIC, if it is already plugged in.

    :raises HotplugError: if another NIC has its UUID or MAC, or it has other settings.
    """
    uuid, mac = nic.uuid, nic.mac
    there = vm.devices(DeviceKind.NIC)
    for device in there:
        if device.is_of(uuid):
            _check_same(vm, device, nic)
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
            # The request names no UUID.
            _check_same(vm, device, replace(nic, uuid=device.uuid))
            return device
    _refuse_boot_nic(vm, mac)
    return None


def refuse_taken_mac(vm: Vm, mac: str) -> None:
    """Refuse a MAC address that a NIC of the VM already has.

    :raises HotplugError: if a NIC has it.
    """
    for device in vm.devices(DeviceKind.NIC):
        if device.value == mac:
            raise HotplugError(
                f"{mac} is the MAC address of {device.device_id} already",
                hint="choose another --mac",
            )
    _refuse_boot_nic(vm, mac)


def record_again(vm: Vm, device: Device, runtime: Path | None) -> None:
    """Record a plugged NIC that is missing in the runtime file."""
    device_id = device.device_id
    if device.tap is None or is_recorded(runtime, DeviceKind.NIC, device.uuid, device_id):
        return
    slot = vm.machine.slot_of(device_id, device.name)
    pending = Pending(
        action=PendingAction.ADD,
        kind=DeviceKind.NIC,
        uuid=device.uuid,
        device_id=device_id,
        device=recorded_nic(nic_of(device), slot),
        runtime=str(runtime),
    )
    record(pending, plugged=True)


def nic_of(device: Device) -> Nic:
    """The present settings of a plugged NIC.

    :raises HotplugError: if Brine did not make its tap, so the settings are not known.
    """
    if device.tap is None:
        raise HotplugError(
            f"{device.device_id}: nothing is known of its tap, so it can't be changed",
            hint="remove it, and add another",
        )
    tap = device.tap
    model = next((name for name, kind in MODELS.items() if kind == device.type), device.type)
    return replace(tap.nic, uuid=device.uuid, mac=device.value, model=model)


def _check_same(vm: Vm, device: Device, nic: Nic) -> None:
    # Brine knows nothing about a tap that it did not make.
    if device.tap is None:
        unlike = [f"MAC {device.value}"] if nic.mac not in ("", device.value) else []
    else:
        there = nic_of(device)
        unlike = _differences(there, _filled(nic, there))
    if unlike:
        raise HotplugError(
            f"{device.device_id}: is plugged in already, and otherwise: {', '.join(unlike)}",
            hint=f"{vm.command('nic modify', device.device_id)} changes it",
        )


def _filled(nic: Nic, there: Nic) -> Nic:
    """The request, completed with the present values of what it leaves open.

    The start of an instance sets a NIC's index and tags. A request need not repeat these, nor write
    VLANs the same way.
    """
    return replace(
        nic,
        vlan=there.vlan if parse_vlans(nic.vlan) == parse_vlans(there.vlan) else nic.vlan,
        ips=there.ips if nic.addresses() == there.addresses() else nic.ips,
        mac=nic.mac or there.mac,
        index=there.index if nic.index is None else nic.index,
        tags=nic.tags or there.tags,
        network=nic.network or there.network,
    )


def _differences(there: Nic, wanted: Nic) -> list[str]:
    """The present values of a NIC that differ from the requested ones."""
    old, new = _parts(there), _parts(wanted)
    return [f"{name} {old[name] or 'none'}" for name in old if old[name] != new[name]]


def _parts(nic: Nic) -> dict[str, object]:
    return {
        "instance": nic.instance,
        "MAC": nic.mac.lower(),
        "model": nic.model,
        "mode": str(nic.mode),
        "link": nic.link,
        "VLAN": nic.vlan,
        "addresses": ", ".join(nic.ips),
        "MTU": nic.mtu,
        "queues": nic.queues,
        "vhost": "on" if nic.vhost else "off",
        "index": nic.index,
        "tags": ", ".join(nic.tags),
        "network": ", ".join(f"{key}={value}" for key, value in nic.network.items()),
    }


def _refuse_boot_nic(vm: Vm, mac: str) -> None:
    if has_boot_device(vm.machine, DeviceKind.NIC, mac):
        raise HotplugError(
            f"{mac} is the MAC address of a NIC that was there when the VM started",
            hint="choose another --mac",
        )


# Plugging NICs: a tap's descriptors go to QEMU through the monitor, then its two devices.

_QUEUE, _VHOST = "q", "v"  # in the names of descriptors


@dataclass(frozen=True, slots=True)
class Backend:
    """Descriptors of an open tap; QEMU gets copies of them.

    :param queues: of the tap, one or more.
    :param vhost: of /dev/vhost-net, none or as many.
    """

    queues: Sequence[int]
    vhost: Sequence[int] = ()


def plug_nic(
    machine: Machine, nic: Nic, backend: Backend, slot: Slot, undo: Undo, *, timeout_s: float
) -> str:
    """Plug a NIC in; returns its device id.

    :param undo: collects what undoes each step.
    :param timeout_s: how long the guest may take to release it if a later step fails.
    :raises brine.common.qmp.client.QmpError: what failed.
    """
    device_id = str(DeviceName.of(DeviceKind.NIC, nic.uuid, Bus.PCI, slot.number))
    queues = _hand_over(machine, undo, f"{device_id}-{_QUEUE}", backend.queues)
    vhost = _hand_over(machine, undo, f"{device_id}-{_VHOST}", backend.vhost)
    undo.by_command(machine, "netdev_del", {"id": device_id})
    machine.qmp.execute("netdev_add", nic_netdev(device_id, queues, vhost))
    undo.by(partial(unplug_device, machine, device_id, timeout_s=timeout_s), asks_qemu=True)
    machine.qmp.execute("device_add", nic_device(device_id, nic, len(queues), slot))
    return device_id


def remove_nic_back_end(machine: Machine, device_id: str) -> None:
    """Have QEMU close the tap of a removed NIC, unless it already has."""
    machine.remove("netdev_del", {"id": device_id})


def close_unused(machine: Machine, device_id: str, *, queues: int, vhost: bool) -> None:
    """Have QEMU close the descriptors of a NIC whose plugging failed.

    Until a ``netdev_add`` takes descriptors, they belong to the monitor, and they outlive the
    connection that brought them.

    :param queues: of the tap.
    :param vhost: whether there are as many vhost descriptors.
    """
    kinds = (_QUEUE, _VHOST) if vhost else (_QUEUE,)
    for kind in kinds:
        for number in range(queues):
            machine.remove("closefd", {"fdname": f"{device_id}-{kind}{number}"})


def _hand_over(machine: Machine, undo: Undo, prefix: str, descriptors: Sequence[int]) -> list[str]:
    """Give QEMU copies of descriptors; returns their names in QEMU."""
    names = []
    for number, descriptor in enumerate(descriptors):
        name = f"{prefix}{number}"
        undo.by_command(machine, "closefd", {"fdname": name})
        machine.qmp.execute("getfd", {"fdname": name}, descriptors=[descriptor])
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class NicChange:
    """The result of a change.

    :param tap: the name of the interface on the node; None if Brine did not make it.
    :param changed: False if nothing had to change.
    """

    device_id: str
    uuid: str
    mac: str
    slot: int
    tap: str | None
    changed: bool

    @classmethod
    def of_pending(cls, pending: Pending) -> NicChange:
        """The result of a command that was killed before it could print it."""
        mac, slot = pending.device["mac"], pending.device["pci"]
        return cls(pending.device_id, pending.uuid, mac, slot, pending.tap, changed=True)


def add_nic(
    vm: Vm,
    nic: Nic,
    *,
    reserved: int = RESERVED_SLOTS,
    runtime: Path | None = None,
    request: dict[str, Any] | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> NicChange:
    """Make a tap, connect it, and plug it in as a NIC; record the NIC in the runtime file, if any.

    If the same NIC is already plugged in, only a missing record is added.

    :param nic: a NIC without a MAC gets a new one. Unset values that only scripts read are no
        difference.
    :param reserved: slots of ``pci.0`` that stay free.
    :param request: identifies this request, if it is repeated after a kill.
    :param timeout_s: how long the guest may take to release it if a later step fails.
    :param dry_run: change nothing; return what would be done.
    :raises brine.common.errors.BrineError: what failed; then nothing has changed.
    """
    if device := existing_nic(vm, nic):
        if not dry_run:
            record_again(vm, device, runtime)
        return _done(device, changed=False)
    nic = replace(nic, mac=nic.mac or new_mac())
    slot = vm.machine.free_pci_slot(reserved=reserved)
    device_id = str(DeviceName.of(DeviceKind.NIC, nic.uuid, Bus.PCI, slot.number))
    if dry_run:
        _check_link(nic)
        return _done_as_wanted(device_id, nic, slot.number)
    pending = Pending(
        action=PendingAction.ADD,
        kind=DeviceKind.NIC,
        uuid=nic.uuid,
        device_id=device_id,
        request=request or {},
        device=recorded_nic(nic, slot),
        runtime=str(runtime) if runtime else None,
        tap=nic.tap_name(),
    )
    with vm.doing(pending) as doing:
        _put_in(vm, doing.undo, nic, slot, timeout_s)
        record(pending, plugged=True)
    return _told(vm, _done_as_wanted(device_id, nic, slot.number))


def remove_nic(
    vm: Vm,
    device: Device,
    *,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> NicChange:
    """Remove a NIC: the guest's device, then the wiring, then the tap.

    :param dry_run: change nothing; return what would be done.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps it.
    """
    if dry_run:
        return _done(device, changed=True)
    pending = Pending(
        action=PendingAction.REMOVE,
        kind=DeviceKind.NIC,
        uuid=device.uuid,
        device_id=device.device_id,
        runtime=str(runtime) if runtime else None,
        tap=device.tap.name if device.tap else None,
    )
    with vm.doing(pending):
        _take_out(vm, device, timeout_s)
        record(pending, plugged=False)
    vm.tell_unplugged(device)
    return _done(device, changed=True)


def modify_nic(
    vm: Vm,
    device: Device,
    nic: Nic,
    *,
    runtime: Path | None = None,
    request: dict[str, Any] | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> NicChange:
    """Change a NIC: unplug it, and plug it in again in the same slot, with the same UUID.

    :param request: identifies this request, if it is repeated after a kill.
    :param dry_run: change nothing; return what would be done.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps the old one.
    :raises brine.common.errors.BrineError: what failed; then the NIC is as it was.
    """
    before = nic_of(device)
    if before == nic:
        return _done(device, changed=False)
    _check_link(nic)
    slot = vm.machine.slot_of(device.device_id, device.name)
    if dry_run:
        return _done_as_wanted(device.device_id, nic, slot.number)
    pending = Pending(
        action=PendingAction.MODIFY,
        kind=DeviceKind.NIC,
        uuid=nic.uuid,
        device_id=device.device_id,
        request=request or {},
        device=recorded_nic(nic, slot),
        runtime=str(runtime) if runtime else None,
        tap=nic.tap_name(),
        before=before.to_json(),
        slot=asdict(slot),
    )
    with vm.doing(pending) as doing:
        _take_out(vm, device, timeout_s)
        doing.undo.by(partial(put_back, vm, before, slot), asks_qemu=True)
        doing.device_is_out()
        vm.tell_unplugged(device)
        _put_in(vm, doing.undo, nic, slot, timeout_s)
        record(pending, plugged=True)
    return _told(vm, _done_as_wanted(device.device_id, nic, slot.number))


def put_back(vm: Vm, nic: Nic, slot: Slot) -> None:
    """Plug a former NIC in again.

    :raises brine.common.errors.BrineError: what failed; then the VM has no such NIC.
    """
    undo = Undo(vm.is_gone)
    try:
        _put_in(vm, undo, nic, slot, UNPLUG_TIMEOUT_S)
    except BaseException as error:
        undo.all()
        if not isinstance(error, BrineError) or isinstance(error, QmpError | RefusedByGuestError):
            raise
        raise HotplugError(
            f"the NIC with the MAC {nic.mac} is out, and can't be plugged in again: {error}",
            hint=f"mend that; then the next brine nic command of {vm.name} plugs it in",
        ) from error


def _put_in(vm: Vm, undo: Undo, nic: Nic, slot: Slot, timeout_s: float) -> None:
    # The tap outlives this block only if QEMU has opened it.
    with _open(nic) as tap:
        undo.by(partial(unwire, tap.name))
        wire(tap, nic)
        backend = Backend(tap.queues, tap.vhost)
        plug_nic(vm.machine, nic, backend, slot, undo, timeout_s=timeout_s)


def _take_out(vm: Vm, device: Device, timeout_s: float) -> None:
    tap = device.tap.name if device.tap else None
    # pyroute2 loads while the guest releases the device.
    is_routed = device.tap and device.tap.nic.mode is Mode.ROUTED
    loaded = begun(_load_netlink) if is_routed else None
    try:
        unplug_device(vm.machine, device.device_id, timeout_s=timeout_s)
    except QmpClosedError:
        if tap and vm.is_gone():
            unwire(tap)
        raise
    finally:
        if loaded:
            loaded()
    if tap:
        unwire(tap)
    remove_nic_back_end(vm.machine, device.device_id)


def _load_netlink() -> None:
    """Load the library that unwiring a routed NIC needs."""
    with Netlink() as netlink:
        netlink.load_library()


def _open(nic: Nic) -> Tap:
    return open_tap(nic.tap_name(), queues=nic.queues, vhost=nic.vhost)


def _check_link(nic: Nic) -> None:
    """Refuse a link that would fail, before anything changes."""
    check_link(nic)
    check_devices(nic.tap_name(), vhost=nic.vhost)


def _done(device: Device, *, changed: bool) -> NicChange:
    tap = device.tap.name if device.tap else None
    slot = device.name.slot
    return NicChange(device.device_id, device.uuid, device.value, slot, tap, changed)


def _done_as_wanted(device_id: str, nic: Nic, slot: int) -> NicChange:
    return NicChange(device_id, nic.uuid, nic.mac, slot, nic.tap_name(), changed=True)


def _told(vm: Vm, done: NicChange) -> NicChange:
    messages.tell_plugged(vm.name, DeviceKind.NIC, done.device_id, mac=done.mac, tap=done.tap)
    return done
