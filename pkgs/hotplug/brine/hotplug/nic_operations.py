"""Adding, changing and removing NICs of a VM that one has to oneself, taps included."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.nics import Backend, Nic, plug_nic, remove_nic_back_end
from brine.hotplug.pending import Action, Pending
from brine.hotplug.slots import RESERVED_SLOTS, Slot
from brine.hotplug.taps import Tap, open_tap
from brine.hotplug.unplug import UNPLUG_TIMEOUT_S, unplug_device
from brine.hotplug.vm import Vm, record
from brine.hotplug.wanted import Wiring


@dataclass(frozen=True, slots=True)
class Done:
    """What was done.

    :param tap: the name of the interface on the node.
    :param changed: False if it was so already.
    """

    device_id: str
    uuid: str
    slot: int
    tap: str
    changed: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """A NIC as somebody wants it: what the guest sees, and what it is connected to.

    :param queues: how many the tap has.
    :param vhost: whether the kernel moves the frames, not QEMU.
    """

    nic: Nic
    wiring: Wiring
    queues: int = 1
    vhost: bool = False


async def add_nic(
    vm: Vm,
    wish: Wish,
    *,
    slot: Slot | None = None,
    reserved: int = RESERVED_SLOTS,
    runtime: Path | None = None,
) -> Done:
    """Make a tap, connect it, and plug it in as a NIC; note it in the runtime file if there is one.

    :param slot: None is the first that is free.
    :param reserved: slots of ``pci.0`` that are left alone.
    :raises brine.common.errors.BrineError: what failed; then all is as it was.
    """
    nic, tap_name = wish.nic, wish.wiring.tap_name()
    device_id = await vm.plugged(Kind.NIC, nic.uuid)
    if device_id:
        return _done(device_id, nic.uuid, tap_name, changed=False)
    slot = slot or await vm.machine.free_pci_slot(reserved=reserved)
    device_id = str(DeviceName.of(Kind.NIC, nic.uuid, Bus.PCI, slot.number))
    pending = Pending(
        action=Action.ADD,
        kind=Kind.NIC,
        uuid=nic.uuid,
        device_id=device_id,
        device={**recorded_nic(wish), "pci": slot.number, "bus": slot.bus},
        runtime=str(runtime) if runtime else None,
        tap=tap_name,
    )
    async with vm.doing(pending), AsyncExitStack() as undo:
        # The tap outlives this block only if QEMU has it open by then.
        tap = await asyncio.to_thread(_open, wish)
        undo.callback(tap.close)
        async with AsyncExitStack() as unwiring:
            await asyncio.to_thread(_wire, tap, wish.wiring)
            unwiring.push_async_callback(asyncio.to_thread, _unwire, tap_name)
            backend = Backend(tap.queues, tap.vhost)
            await plug_nic(vm.machine, nic, backend, slot)
            record(pending, plugged=True)
            unwiring.pop_all()
    return _done(device_id, nic.uuid, tap_name, changed=True)


async def remove_nic(
    vm: Vm,
    device_id: str,
    nic_uuid: str,
    *,
    tap: str | None,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
) -> Done:
    """Take a NIC out: the guest's side, its wiring, and at last the tap.

    :param nic_uuid: as the runtime file has it.
    :param tap: the interface's name; None if it is not ours.
    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps it.
    """
    pending = Pending(
        action=Action.REMOVE,
        kind=Kind.NIC,
        uuid=nic_uuid,
        device_id=device_id,
        runtime=str(runtime) if runtime else None,
        tap=tap,
    )
    async with vm.doing(pending):
        await unplug_device(vm.machine, device_id, timeout_s=timeout_s)
        if tap:
            await asyncio.to_thread(_unwire, tap)
        await remove_nic_back_end(vm.machine, device_id)
        record(pending, plugged=False)
    return _done(device_id, nic_uuid, tap or "", changed=True)


async def modify_nic(
    vm: Vm,
    device_id: str,
    wish: Wish,
    *,
    tap: str | None,
    runtime: Path | None = None,
    timeout_s: float = UNPLUG_TIMEOUT_S,
) -> Done:
    """Make another NIC of one: out, and in again in the same slot, with the same UUID.

    :raises brine.hotplug.errors.RefusedByGuestError: if the guest keeps the old one.
    """
    name = DeviceName.parse(device_id)
    assert name
    slot = await vm.machine.pci_slot(name.slot)
    await remove_nic(vm, device_id, wish.nic.uuid, tap=tap, runtime=runtime, timeout_s=timeout_s)
    return await add_nic(vm, wish, slot=slot, runtime=runtime)


def _open(wish: Wish) -> Tap:
    return open_tap(wish.wiring.tap_name(), queues=wish.queues, vhost=wish.vhost)


def _wire(tap: Tap, wiring: Wiring) -> None:
    from brine.hotplug.wiring import wire  # with netlink, which takes long to load

    wire(tap, wiring)


def _unwire(tap: str) -> None:
    from brine.hotplug.wiring import unwire

    unwire(tap)


def recorded_nic(wish: Wish) -> dict[str, Any]:
    """A NIC as a runtime file has it: Ganeti's keys, and our own beside them."""
    wiring = wish.wiring
    return {
        **asdict(wish.nic),
        "ip": wiring.ips[0] if wiring.ips else None,
        "nicparams": {"mode": str(wiring.mode), "link": wiring.link, "vlan": wiring.vlan},
        "ips": list(wiring.ips),
        "mtu": wiring.mtu,
        "queues": wish.queues,
        "vhost": wish.vhost,
        "tap": wiring.tap_name(),
    }


def _done(device_id: str, nic_uuid: str, tap: str, *, changed: bool) -> Done:
    name = DeviceName.parse(device_id)
    return Done(device_id, nic_uuid, name.slot if name else -1, tap, changed)
