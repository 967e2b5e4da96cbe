"""Adding, changing and removing NICs of a VM that one has to oneself, taps included."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common.errors import BrineError
from brine.common.qmp_errors import QmpClosedError, QmpError
from brine.hotplug import messages
from brine.hotplug.choices import Mode
from brine.hotplug.device_names import Bus, DeviceName, Kind, new_mac
from brine.hotplug.errors import HotplugError, RefusedByGuestError
from brine.hotplug.existing_nics import existing_nic, record_again, wish_of
from brine.hotplug.nics import Backend, plug_nic, remove_nic_back_end
from brine.hotplug.pending import Action, Pending
from brine.hotplug.plugged import Plugged
from brine.hotplug.recording import record
from brine.hotplug.slots import RESERVED_SLOTS, Slot
from brine.hotplug.taps import Tap, check_devices, open_tap
from brine.hotplug.undo import Undo
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device
from brine.hotplug.vm import Vm
from brine.hotplug.wish import Wish, recorded_nic

if TYPE_CHECKING:
    from brine.hotplug.tap_records import Record


@dataclass(frozen=True, slots=True)
class Done:
    """What was done.

    :param tap: the name of the interface on the node; None if it is not ours.
    :param changed: False if it was so already.
    """

    device_id: str
    uuid: str
    mac: str
    slot: int
    tap: str | None
    changed: bool

    @classmethod
    def of_pending(cls, pending: Pending) -> Done:
        """What was done by somebody who was killed before he could say so."""
        mac, slot = pending.device["mac"], pending.device["pci"]
        return cls(pending.device_id, pending.uuid, mac, slot, pending.tap, changed=True)


async def add_nic(
    vm: Vm,
    wish: Wish,
    *,
    reserved: int = RESERVED_SLOTS,
    runtime: Path | None = None,
    request: dict[str, Any] | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> Done:
    """Make a tap, connect it, and plug it in as a NIC; note it in the runtime file if there is one.

    If it is plugged in already, as it is wanted, only the runtime file may lack it.

    :param wish: one without a MAC gets a new one; what only scripts are told, and nobody has said,
        is no difference.
    :param reserved: slots of ``pci.0`` that are left alone.
    :param request: what tells this request from others, if it is repeated after a kill.
    :param timeout_s: how long the guest may take to give it up again, if a later step fails.
    :param dry_run: only tell what would be done.
    :raises brine.common.errors.BrineError: what failed; then all is as it was.
    """
    if device := await existing_nic(vm, wish):
        if not dry_run:
            await record_again(vm, device, runtime)
        return _done(device, changed=False)
    wish = wish.with_mac(wish.nic.mac or new_mac())
    slot = await vm.machine.free_pci_slot(reserved=reserved)
    device_id = str(DeviceName.of(Kind.NIC, wish.nic.uuid, Bus.PCI, slot.number))
    if dry_run:
        await asyncio.to_thread(_check_link, wish)
        return _done_as_wished(device_id, wish, slot.number)
    pending = Pending(
        action=Action.ADD,
        kind=Kind.NIC,
        uuid=wish.nic.uuid,
        device_id=device_id,
        request=request or {},
        device=recorded_nic(wish, slot),
        runtime=str(runtime) if runtime else None,
        tap=wish.wiring.tap_name(),
    )
    async with vm.doing(pending) as doing:
        await _put_in(vm, doing.undo, wish, slot, timeout_s)
        record(pending, plugged=True)
    return _told(vm, _done_as_wished(device_id, wish, slot.number))


async def remove_nic(
    vm: Vm,
    device: Plugged,
    *,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> Done:
    """Take a NIC out: the guest's side, its wiring, and at last the tap.

    :param dry_run: only tell what would be done.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps it.
    """
    if dry_run:
        return _done(device, changed=True)
    pending = Pending(
        action=Action.REMOVE,
        kind=Kind.NIC,
        uuid=device.uuid,
        device_id=device.device_id,
        runtime=str(runtime) if runtime else None,
        tap=device.tap.name if device.tap else None,
    )
    async with vm.doing(pending):
        await _take_out(vm, device, timeout_s)
        record(pending, plugged=False)
    vm.tell_unplugged(device)
    return _done(device, changed=True)


async def modify_nic(
    vm: Vm,
    device: Plugged,
    wish: Wish,
    *,
    runtime: Path | None = None,
    request: dict[str, Any] | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
    dry_run: bool = False,
) -> Done:
    """Make another NIC of one: out, and in again in the same slot, with the same UUID.

    :param request: what tells this request from others, if it is repeated after a kill.
    :param dry_run: only tell what would be done.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps the old one.
    :raises brine.common.errors.BrineError: what failed; then the NIC is as it was.
    """
    before = wish_of(device)
    if before == wish:
        return _done(device, changed=False)
    await asyncio.to_thread(_check_link, wish)
    slot = await vm.machine.slot_of(device.device_id, device.name)
    if dry_run:
        return _done_as_wished(device.device_id, wish, slot.number)
    pending = Pending(
        action=Action.MODIFY,
        kind=Kind.NIC,
        uuid=wish.nic.uuid,
        device_id=device.device_id,
        request=request or {},
        device=recorded_nic(wish, slot),
        runtime=str(runtime) if runtime else None,
        tap=wish.wiring.tap_name(),
        before=before.to_json(),
        slot=asdict(slot),
    )
    async with vm.doing(pending) as doing:
        await _take_out(vm, device, timeout_s)
        doing.undo.by(partial(put_back, vm, before, slot), asks_qemu=True)
        doing.device_is_out()
        vm.tell_unplugged(device)
        await _put_in(vm, doing.undo, wish, slot, timeout_s)
        record(pending, plugged=True)
    return _told(vm, _done_as_wished(device.device_id, wish, slot.number))


async def put_back(vm: Vm, wish: Wish, slot: Slot) -> None:
    """Plug a NIC in again that was there before.

    :raises brine.common.errors.BrineError: what failed; then there is none.
    """
    undo = Undo(vm.is_gone)
    try:
        await _put_in(vm, undo, wish, slot, UNPLUG_TIMEOUT_S)
    except BaseException as error:
        await undo.all()
        if not isinstance(error, BrineError) or isinstance(error, QmpError | RefusedByGuestError):
            raise
        raise HotplugError(
            f"the NIC with the MAC {wish.nic.mac} is out, and can't be plugged in again: {error}",
            hint=f"mend that; then the next brine nic command of {vm.name} plugs it in",
        ) from error


def unwire_tap(name: str) -> None:
    """Disconnect a tap; nothing happens if it is not connected."""
    from brine.hotplug.wiring import unwire  # takes long to load

    unwire(name)


async def _put_in(vm: Vm, undo: Undo, wish: Wish, slot: Slot, timeout_s: float) -> None:
    opening = asyncio.create_task(asyncio.to_thread(_open, wish))
    try:
        tap = await asyncio.shield(opening)
    except asyncio.CancelledError:
        with contextlib.suppress(BrineError):
            (await opening).close()
        raise
    # The tap outlives this only if QEMU has it open by then.
    with tap:
        undo.by(partial(asyncio.to_thread, unwire_tap, tap.name))
        await asyncio.to_thread(_wire, tap, wish)
        backend = Backend(tap.queues, tap.vhost)
        await plug_nic(vm.machine, wish.nic, backend, slot, undo, timeout_s=timeout_s)


async def _take_out(vm: Vm, device: Plugged, timeout_s: float) -> None:
    tap = device.tap.name if device.tap else None
    # What takes long to load is loaded while the guest lets go.
    loading = device.tap and asyncio.create_task(asyncio.to_thread(_load_netlink, device.tap))
    try:
        await unplug_device(vm.machine, device.device_id, timeout_s=timeout_s)
    except QmpClosedError:
        if tap and vm.is_gone():
            await asyncio.to_thread(unwire_tap, tap)
        raise
    finally:
        if loading:
            await loading
    if tap:
        await asyncio.to_thread(unwire_tap, tap)
    await remove_nic_back_end(vm.machine, device.device_id)


def _load_netlink(tap: Record) -> None:
    """Load what it takes to unwire a tap."""
    from brine.hotplug import wiring  # noqa: F401
    from brine.hotplug.links import Netlink

    if tap.wiring.mode is Mode.ROUTED:
        with Netlink() as netlink:
            netlink.load_library()


def _open(wish: Wish) -> Tap:
    return open_tap(wish.wiring.tap_name(), queues=wish.queues, vhost=wish.vhost)


def _check_link(wish: Wish) -> None:
    """Refuse what can be known to fail, before anything is done."""
    from brine.hotplug.wiring import check_link

    check_link(wish.wiring)
    check_devices(wish.wiring.tap_name(), vhost=wish.vhost)


def _wire(tap: Tap, wish: Wish) -> None:
    from brine.hotplug.wiring import wire

    wire(tap, wish.wiring)


def _done(device: Plugged, *, changed: bool) -> Done:
    tap = device.tap.name if device.tap else None
    slot = device.name.slot
    return Done(device.device_id, device.uuid, device.value, slot, tap, changed)


def _done_as_wished(device_id: str, wish: Wish, slot: int) -> Done:
    nic = wish.nic
    return Done(device_id, nic.uuid, nic.mac, slot, wish.wiring.tap_name(), changed=True)


def _told(vm: Vm, done: Done) -> Done:
    messages.tell_plugged(vm.name, Kind.NIC, done.device_id, mac=done.mac, tap=done.tap)
    return done
