"""The NIC of an instance: with the names of its tap, and as runtime files record it."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from brine.common.digest import sha256
from brine.common.errors import UsageError
from brine.vm.address import DeviceKind
from brine.vm.connection import Address, check_connection, parse_address
from brine.vm.identities import Identity, identities_of
from brine.vm.nic import Nic
from brine.vm.slots import Slot
from brine.vm.values import LARGEST_MTU, MODELS, SMALLEST_MTU, Mode

if TYPE_CHECKING:
    from brine.vm.spec import Spec

PREFIX = "vm-"
"""The prefix of the names of Brine's taps, for patterns of a firewall and a network manager."""

_READABLE_CHARACTERS, _HASH_CHARACTERS = 5, 6
_ALIAS = re.compile(r"brine instance=(\S+) nic=(\S+)")
_LONGEST_ALIAS_BYTES = 255
# The characters of host names and UUIDs: most names need no escape.
_PLAIN = "-._~:@+,/"
_SAME_IN_JSON = ("instance", "uuid", "mac", "index", "model", "queues", "vhost")
_OF_SPEC = tuple(one.name for one in fields(Nic) if one.name not in ("slot", "by_hand"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vif(Nic):
    """A NIC of an instance: the guest's device, and its connection. Its *slot* is not used, as QEMU
    knows it, and neither is *by_hand*.

    :param instance: the name of the instance.
    :param uuid: of the NIC, or its index if it has none.
    :param index: the NIC's place among the instance's, from 0.
    :param tags: the instance's.
    :param network: variables of the network for operators' scripts, such as ``NETWORK_NAME``.
    """

    instance: str
    index: int | None = None
    tags: tuple[str, ...] = ()
    network: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, nic: Nic) -> Vif:
        """A NIC of a spec."""
        own = {name: getattr(nic, name) for name in _OF_SPEC}
        return cls(**own, instance=spec.name, index=spec.nics.index(nic), tags=spec.tags)

    def as_nic(self, slot: int) -> Nic:
        """The NIC as a spec has it, in a slot; -1 is none."""
        return Nic(**{name: getattr(self, name) for name in _OF_SPEC}, slot=slot)

    def tap_name(self) -> str:
        """The default name of its tap."""
        return tap_name(self.instance, self.uuid)

    def identities(self) -> Iterator[Identity]:
        """What no other VM may have: its MAC address."""
        return identities_of({"nics": [{"mac": self.mac}]})

    def alias(self) -> str:
        """The alias of its tap, which names the instance and the NIC."""
        # A VM may be named after its socket, and names of files may have any bytes.
        instance, nic = (quote(os.fsencode(name), _PLAIN) for name in (self.instance, self.uuid))
        return f"brine instance={instance} nic={nic}"

    def addresses(self) -> tuple[Address, ...]:
        """The guest's addresses.

        :raises UsageError: if one is not an address.
        """
        return tuple(map(parse_address, self.ips))

    def check(self) -> None:
        """Refuse settings that no node could have.

        :raises UsageError: what is wrong, and what would be right.
        """
        if not self.instance or not self.uuid:
            raise UsageError("a NIC needs the name of its instance, and a UUID or an index")
        if len(self.alias()) > _LONGEST_ALIAS_BYTES:
            raise UsageError(f"the instance's name is too long: {self.instance}")
        if self.mtu and not SMALLEST_MTU <= self.mtu <= LARGEST_MTU:
            raise UsageError(f"the MTU must be {SMALLEST_MTU} to {LARGEST_MTU}, not {self.mtu}")
        if self.model != "virtio" and (self.queues > 1 or self.vhost):
            what = "vhost" if self.vhost else "several queues"
            raise UsageError(f"{self.model} has no {what}", hint="--model virtio has")
        check_connection(self.mode, self.link, self.vlan, self.ips, is_filtered=self.filter)

    def is_wired_as(self, other: Vif) -> bool:
        """Whether both have the same connection, whatever the guest sees."""
        return other == replace(self, model=other.model, queues=other.queues, vhost=other.vhost)

    def described(self) -> str:
        """How it is connected, in words."""
        return connection(self.mode, self.link, self.vlan, self.ips)

    def recorded(self, slot: Slot | None = None) -> dict[str, Any]:
        """The NIC as a runtime file has it, with its slot if it has one: Ganeti's keys, and
        Brine's."""
        found = {
            "instance": self.instance,
            "uuid": self.uuid,
            "mac": self.mac,
            "mtu": self.mtu or None,
            "index": self.index,
            "model": self.model,
            "queues": self.queues,
            "vhost": self.vhost,
            "ip": self.ips[0] if self.ips else None,
            "nicparams": {"mode": str(self.mode), "link": self.link, "vlan": self.vlan},
            "ips": list(self.ips),
            "filter": self.filter,
            "tap": self.tap_name(),
            "tags": list(self.tags),
            "network_variables": dict(self.network),
        }
        if slot:
            device_id = slot.device_id(DeviceKind.NIC, self.uuid)
            found |= slot.recorded(MODELS[self.model], device_id)
        return found

    @classmethod
    def from_recorded(cls, data: Mapping[str, Any]) -> Vif:
        """The NIC that :meth:`recorded` wrote. Its values are not checked.

        :raises ValueError: or KeyError or TypeError, if it is not one.
        """
        params = data["nicparams"]
        return cls(
            **{name: data[name] for name in _SAME_IN_JSON},
            mtu=data["mtu"] or 0,
            mode=Mode(params["mode"]).value,
            link=params["link"],
            vlan=params["vlan"],
            ips=tuple(data["ips"]),
            filter=data.get("filter", False),  # Brine 0.2.0 had none
            tags=tuple(data["tags"]),
            network=data["network_variables"],
        )


def tap_name(instance: str, nic: str) -> str:
    """The name of an instance's tap, always the same for the same NIC, such as ``vm-web1-6zt2qk``.

    It is made of ``vm-``, the beginning of the instance's name, and a hash of instance and NIC. The
    interface's alias names both. It has no dots, because a ``sysctl`` key could not contain it.

    :param nic: the NIC's UUID, or its index if it has none.
    """
    readable = re.sub(r"[^A-Za-z0-9]", "", instance.partition(".")[0])[:_READABLE_CHARACTERS]
    digest = sha256(f"{instance}\0{nic}".encode(errors="surrogateescape"))
    hashed = base64.b32encode(digest).decode().lower()[:_HASH_CHARACTERS]
    return f"{PREFIX}{readable}-{hashed}" if readable else f"{PREFIX}{hashed}"


def owner_of(alias: str) -> tuple[str, str] | None:
    """The instance and NIC that an interface's alias names; None if the alias is not Brine's."""
    match = _ALIAS.fullmatch(alias)
    if match is None:
        return None
    instance, nic = (os.fsdecode(unquote_to_bytes(name)) for name in match.groups())
    return instance, nic


def connection(mode: str, link: str, vlan: str, ips: Iterable[str] = ()) -> str:
    """A connection, in words."""
    if mode == Mode.ROUTED:
        to = ", ".join(ips)
        return f"routed {f'to {to} ' if to else ''}by table {link or 'main'}"
    return f"{mode} to {link}" + (f" VLAN {vlan}" if vlan else "")
