"""Plugging NICs: a tap's descriptors go to QEMU through the monitor, then its two devices.

Source: "NIC Hotplug" and "Hypervisor changes" in the hotplug design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.machine import Machine
from brine.hotplug.nic import Nic, nic_device, nic_netdev
from brine.hotplug.slots import Slot
from brine.hotplug.undo import Undo
from brine.hotplug.unplug import unplug_device

_QUEUE, _VHOST = "q", "v"  # in the names of descriptors


@dataclass(frozen=True, slots=True)
class Backend:
    """Descriptors of an open tap; QEMU gets copies of them.

    :param queues: of the tap, one or more.
    :param vhost: of /dev/vhost-net, none or as many.
    """

    queues: Sequence[int]
    vhost: Sequence[int] = ()


async def plug_nic(
    machine: Machine, nic: Nic, backend: Backend, slot: Slot, undo: Undo, *, timeout_s: float
) -> str:
    """Plug a NIC in; returns its device id.

    :param undo: learns what undoes each step.
    :param timeout_s: how long the guest may take to give it up again, if a later step fails.
    :raises brine.common.qmp.QmpError: what failed.
    """
    device_id = str(DeviceName.of(Kind.NIC, nic.uuid, Bus.PCI, slot.number))
    queues = await _hand_over(machine, undo, f"{device_id}-{_QUEUE}", backend.queues)
    vhost = await _hand_over(machine, undo, f"{device_id}-{_VHOST}", backend.vhost)
    undo.by_command(machine, "netdev_del", {"id": device_id})
    await machine.qmp.execute("netdev_add", nic_netdev(device_id, queues, vhost))
    undo.by(partial(unplug_device, machine, device_id, timeout_s=timeout_s), asks_qemu=True)
    await machine.qmp.execute("device_add", nic_device(device_id, nic, len(queues), slot))
    return device_id


async def remove_nic_back_end(machine: Machine, device_id: str) -> None:
    """Have QEMU close the tap of a NIC that is gone; nothing happens if it has."""
    await machine.remove("netdev_del", {"id": device_id})


async def close_unused(machine: Machine, device_id: str, *, queues: int, vhost: bool) -> None:
    """Have QEMU close what it was given for a NIC that did not come to be.

    Until a ``netdev_add`` takes them, descriptors belong to the monitor, and outlive the connection
    that they came by.

    :param queues: of the tap.
    :param vhost: whether there are as many of those.
    """
    kinds = (_QUEUE, _VHOST) if vhost else (_QUEUE,)
    for kind in kinds:
        for number in range(queues):
            await machine.remove("closefd", {"fdname": f"{device_id}-{kind}{number}"})


async def _hand_over(
    machine: Machine, undo: Undo, prefix: str, descriptors: Sequence[int]
) -> list[str]:
    """Give QEMU copies of descriptors; returns the names that they have there."""
    names = []
    for number, descriptor in enumerate(descriptors):
        name = f"{prefix}{number}"
        undo.by_command(machine, "closefd", {"fdname": name})
        await machine.qmp.execute("getfd", {"fdname": name}, descriptors=[descriptor])
        names.append(name)
    return names
