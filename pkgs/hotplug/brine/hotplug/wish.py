"""A NIC as somebody wants it: what the guest sees, and what it is connected to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from brine.hotplug.choices import MODELS, Mode
from brine.hotplug.device_names import Bus, DeviceName, Kind
from brine.hotplug.nic import Nic
from brine.hotplug.slots import Slot
from brine.hotplug.wanted import Wiring


@dataclass(frozen=True, slots=True)
class Wish:
    """A NIC that somebody wants.

    :param queues: how many the tap has.
    :param vhost: whether the kernel moves the frames, not QEMU.
    """

    nic: Nic
    wiring: Wiring
    queues: int = 1
    vhost: bool = False

    def with_mac(self, mac: str) -> Wish:
        """The same with a MAC address."""
        nic, wiring = replace(self.nic, mac=mac), replace(self.wiring, mac=mac)
        return replace(self, nic=nic, wiring=wiring)

    def to_json(self) -> dict[str, Any]:
        """The NIC as a runtime file has it: Ganeti's keys, and our own beside them."""
        wiring = self.wiring
        return {
            **asdict(self.nic),
            "ip": wiring.ips[0] if wiring.ips else None,
            "nicparams": {"mode": str(wiring.mode), "link": wiring.link, "vlan": wiring.vlan},
            "ips": list(wiring.ips),
            "mtu": wiring.mtu,
            "queues": self.queues,
            "vhost": self.vhost,
            "tap": wiring.tap_name(),
            "instance": wiring.instance,
            "index": wiring.index,
            "tags": list(wiring.tags),
            "network_variables": dict(wiring.network),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Wish:
        """The NIC that :meth:`to_json` wrote.

        :raises ValueError: or KeyError or TypeError, if it did not.
        """
        params = data["nicparams"]
        wiring = Wiring(
            instance=data["instance"],
            nic=data["uuid"],
            mode=Mode(params["mode"]),
            link=params["link"],
            vlan=params["vlan"],
            ips=tuple(data["ips"]),
            mac=data["mac"],
            mtu=data["mtu"],
            index=data["index"],
            tags=tuple(data["tags"]),
            network=data["network_variables"],
        )
        nic = Nic(data["uuid"], data["mac"], data["model"])
        return cls(nic, wiring, queues=data["queues"], vhost=data["vhost"])


def recorded_nic(wish: Wish, slot: Slot | None = None) -> dict[str, Any]:
    """A NIC as a runtime file has it, with its place if it has one."""
    if slot is None:
        return wish.to_json()
    device_id = str(DeviceName.of(Kind.NIC, wish.nic.uuid, Bus.PCI, slot.number))
    return {**wish.to_json(), **slot.recorded(MODELS[wish.nic.model], device_id)}
