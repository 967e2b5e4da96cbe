"""NICs: their settings, as QEMU, the node's network, files and command options have them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from brine.common import paths
from brine.common.errors import UsageError
from brine.hotplug.net.tap import tap_name
from brine.vm.address import DeviceKind
from brine.vm.conflicts import Claim, claims_of
from brine.vm.connection import Address, check_connection, parse_address
from brine.vm.slots import Slot
from brine.vm.values import LARGEST_MTU, MODELS, SMALLEST_MTU, USUAL_MTU, Mode

if TYPE_CHECKING:
    import argparse

_ALIAS = re.compile(r"brine instance=(\S+) nic=(\S+)")
_LONGEST_ALIAS_BYTES = 255
# The characters of host names and UUIDs: most names need no escape.
_PLAIN = "-._~:@+,/"
_SAME_IN_JSON = ("instance", "uuid", "mac", "mtu", "index", "model", "queues", "vhost")


def usual_wiring(mode: str | None, link: str | None) -> tuple[str, str]:
    """The mode and the link of a NIC, completed from the cluster's ``nicparams``.

    A link belongs to a mode: a NIC with another mode does not get the cluster's link.

    :param mode: the NIC's own; None or empty if it has none. The same holds for *link*.
    :raises UsageError: if Brine does not know the cluster's mode.
    """
    try:
        lines = (paths.SSCONF_DIR / "ssconf_nicparams").read_text(errors="replace").splitlines()
    except OSError:
        lines = []  # no cluster
    of_cluster = dict(line.split("=", 1) for line in lines if "=" in line)
    usual = of_cluster.get("mode") or Mode.BRIDGED.value
    if not mode and usual not in list(Mode):
        text = f"the cluster's NICs are {usual}, which is no mode"
        raise UsageError(text, hint="choose one with --mode")
    mode = mode or usual
    if not link and mode == usual:
        link = of_cluster.get("link", "")
        # The main routing table has no name.
        link = "" if (mode, link) == (Mode.ROUTED.value, "main") else link
    return mode, link or ""


@dataclass(frozen=True)
class Nic:
    """A NIC of an instance: the guest's device, and its connection, in Ganeti's words.

    :param instance: the name of the instance.
    :param uuid: of the NIC, or its index if it has none.
    :param link: the bridge; for a routed NIC the routing table, by number or name, or nothing for
        the main one.
    :param vlan: see :func:`brine.vm.connection.parse_vlans`.
    :param ips: the guest's addresses; a routed NIC has one or more.
    :param mtu: in bytes; None takes the link's.
    :param index: the NIC's place among the instance's, from 0.
    :param tags: the instance's.
    :param network: variables of the network for operators' scripts, such as ``NETWORK_NAME``.
    :param vhost: whether the kernel moves the frames, not QEMU.
    """

    instance: str
    uuid: str
    mode: Mode
    link: str = ""
    vlan: str = ""
    ips: tuple[str, ...] = ()
    mac: str = ""
    mtu: int | None = None
    index: int | None = None
    tags: tuple[str, ...] = ()
    network: Mapping[str, str] = field(default_factory=dict)
    model: str = "virtio"
    queues: int = 1
    vhost: bool = False

    def tap_name(self) -> str:
        """The default name of its tap."""
        return tap_name(self.instance, self.uuid)

    def claims(self) -> Iterator[Claim]:
        """What no other VM may have: its MAC address."""
        return claims_of({"nics": [{"mac": self.mac}]})

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
        if self.mtu is not None and not SMALLEST_MTU <= self.mtu <= LARGEST_MTU:
            raise UsageError(f"the MTU must be {SMALLEST_MTU} to {LARGEST_MTU}, not {self.mtu}")
        if self.model != "virtio" and (self.queues > 1 or self.vhost):
            what = "vhost" if self.vhost else "several queues"
            raise UsageError(f"{self.model} has no {what}", hint="--model virtio has")
        check_connection(self.mode, self.link, self.vlan, self.ips)

    def is_wired_as(self, other: Nic) -> bool:
        """Whether both have the same connection, whatever the guest sees."""
        return other == replace(self, model=other.model, queues=other.queues, vhost=other.vhost)

    def to_json(self) -> dict[str, Any]:
        """The NIC as a runtime file has it: Ganeti's keys, and Brine's."""
        return {
            **{key: getattr(self, key) for key in _SAME_IN_JSON},
            "ip": self.ips[0] if self.ips else None,
            "nicparams": {"mode": str(self.mode), "link": self.link, "vlan": self.vlan},
            "ips": list(self.ips),
            "tap": self.tap_name(),
            "tags": list(self.tags),
            "network_variables": dict(self.network),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Nic:
        """The NIC that :meth:`to_json` wrote.

        :raises ValueError: or KeyError or TypeError, if it is not one.
        """
        params = data["nicparams"]
        return cls(
            **{key: data[key] for key in _SAME_IN_JSON},
            mode=Mode(params["mode"]),
            link=params["link"],
            vlan=params["vlan"],
            ips=tuple(data["ips"]),
            tags=tuple(data["tags"]),
            network=data["network_variables"],
        )


def owner_of(alias: str) -> tuple[str, str] | None:
    """The instance and NIC that an interface's alias names; None if the alias is not Brine's."""
    match = _ALIAS.fullmatch(alias)
    if match is None:
        return None
    instance, nic = (os.fsdecode(unquote_to_bytes(name)) for name in match.groups())
    return instance, nic


# A NIC for QEMU and for a runtime file.


def nic_netdev(device_id: str, queues: Sequence[str], vhost: Sequence[str]) -> dict[str, Any]:
    """The back end of a NIC: the arguments of ``netdev_add``.

    :param queues: names or numbers of the tap's descriptors, as QEMU knows them; so is *vhost*.
    """
    several = len(queues) > 1
    netdev: dict[str, Any] = {
        "type": "tap",
        "id": device_id,
        "fds" if several else "fd": ":".join(queues),
    }
    if vhost:
        netdev["vhost"] = True
        netdev["vhostfds" if several else "vhostfd"] = ":".join(vhost)
    return netdev


def nic_device(device_id: str, nic: Nic, queues: int, slot: Slot, mtu: int) -> dict[str, Any]:
    """The device that the guest sees: the arguments of ``device_add``.

    :param mtu: of the tap, in bytes. The guest learns an MTU other than the usual one, if the model
        can tell it. So a NIC with the usual MTU is the same device as in older versions.
    """
    device: dict[str, Any] = {
        "driver": MODELS[nic.model],
        "id": device_id,
        "netdev": device_id,
        "mac": nic.mac,
        # The VM has booted already, and a chrooted QEMU would not find the file.
        "romfile": "",
        **slot.placement,
    }
    if mtu != USUAL_MTU and nic.model == "virtio":
        device["host_mtu"] = mtu
    if queues > 1 and nic.model == "virtio":
        device["mq"] = True
        device["vectors"] = 2 * queues + 2  # two a queue, control, and configuration
    return device


def recorded_nic(nic: Nic, slot: Slot | None = None) -> dict[str, Any]:
    """A NIC as a runtime file has it, with its slot if it has one."""
    if slot is None:
        return nic.to_json()
    device_id = slot.device_id(DeviceKind.NIC, nic.uuid)
    return {**nic.to_json(), **slot.recorded(MODELS[nic.model], device_id)}


# A NIC from the options of a command.


def nic_from(arguments: argparse.Namespace, instance: str, nic: str) -> Nic:
    """The NIC that the options want.

    :param nic: its UUID or index.
    :raises UsageError: if there can be no such NIC.
    """
    mode, link = usual_wiring(arguments.mode, arguments.link)
    index = int(nic) if nic.isdecimal() else None
    return with_options(arguments, Nic(instance, nic, Mode(mode), index=index), link=link)


def with_options(arguments: argparse.Namespace, old: Nic, *, link: str | None = None) -> Nic:
    """A NIC with the changes that the options want. With another mode, it loses its link and VLAN.

    :param link: in place of that of the options.
    :raises UsageError: if there can be no such NIC.
    """
    given: dict[str, Any] = {
        # ``brine tap`` has no model.
        key: getattr(arguments, key, None)
        for key in ("link", "vlan", "mac", "mtu", "index", "model", "queues", "vhost")
    }
    if link is not None:
        given["link"] = link
    if arguments.mode:
        given["mode"] = Mode(arguments.mode)
    if arguments.ip is not None:
        # In the canonical form.
        given["ips"] = tuple(str(parse_address(ip)) for ip in arguments.ip if ip)
    if arguments.tag is not None:
        given["tags"] = tuple(arguments.tag)
    if arguments.network is not None:
        given["network"] = _network(arguments.network)
    if given.get("mode") not in (None, old.mode):
        old = replace(old, link="", vlan="")
    new = replace(old, **{key: value for key, value in given.items() if value is not None})
    new.check()
    return new


def _network(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            hint = "such as --network NAME=blue --network SUBNET=192.0.2.0/24"
            raise UsageError(f"not KEY=VALUE of a network: {pair!r}", hint=hint)
        found[f"NETWORK_{key.removeprefix('NETWORK_')}"] = value
    return found


def described(nic: Nic) -> str:
    """How a NIC is connected, in words."""
    return connection(nic.mode.value, nic.link, nic.vlan, nic.ips)


def connection(mode: str, link: str, vlan: str, ips: Iterable[str] = ()) -> str:
    """A connection, in words."""
    if mode == Mode.ROUTED:
        to = ", ".join(ips)
        return f"routed {f'to {to} ' if to else ''}by table {link or 'main'}"
    return f"{mode} to {link}" + (f" VLAN {vlan}" if vlan else "")
