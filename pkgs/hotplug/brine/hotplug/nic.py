"""NICs: their settings, as QEMU, the node's network, files and command options have them."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from brine.common import paths
from brine.common.errors import UsageError
from brine.hotplug.address import Bus, DeviceKind, DeviceName, Slot
from brine.hotplug.choices import LARGEST_MTU, MODELS, SMALLEST_MTU, Mode
from brine.hotplug.net.tap import NAME_BYTES, tap_name

if TYPE_CHECKING:
    import argparse

# The VLANs of a NIC, in Ganeti's notation.

_HIGHEST = 4094


@dataclass(frozen=True)
class Vlans:
    """The VLANs of a port.

    :param untagged: the VLAN of frames without a tag; None if there is none.
    :param tagged: the VLANs whose tagged frames pass.
    """

    untagged: int | None
    tagged: frozenset[int]

    def ids(self) -> frozenset[int]:
        """All VLANs."""
        return self.tagged | ({self.untagged} if self.untagged is not None else set())


def parse_vlans(text: str) -> Vlans | None:
    """The VLANs of a text; None if it is empty: the port has what the link gives it.

    ``100`` and ``.100`` are one VLAN, whose frames have no tag for the guest. ``:100:200`` are
    tagged VLANs. ``.100:200:300`` is both.

    :raises UsageError: if the text has none of these forms.
    """
    text = text.strip()
    if not text:
        return None
    first, *tagged = text.split(":")
    if not first and not tagged:
        raise _mistake(text)
    untagged = _number(first.removeprefix("."), text) if first else None
    many = [_number(one, text) for one in tagged]
    if len(set(many)) < len(many) or untagged in many:
        raise UsageError(f"VLANs {text!r}: one is there twice")
    return Vlans(untagged, frozenset(many))


def _number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 0 < int(text) <= _HIGHEST):
        raise _mistake(whole)
    return int(text)


def _mistake(text: str) -> UsageError:
    return UsageError(
        f"not VLANs: {text!r}",
        hint=f"100 (untagged), :100:200 (tagged) or .100:200 (both), each 1 to {_HIGHEST}",
    )


# The connection of a NIC to the node's network.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_ALIAS = re.compile(r"brine instance=(\S+) nic=(\S+)")
_LONGEST_ALIAS_BYTES = 255
# The characters of host names and UUIDs: most names need no escape.
_PLAIN = "-._~:@+,/"


def usual_wiring(mode: str | None, link: str | None) -> tuple[str, str]:
    """The mode and the link of a NIC, completed from the cluster's ``nicparams``.

    A link belongs to a mode: a NIC with another mode does not get the cluster's link.

    :param mode: the NIC's own; None or empty if it has none. The same holds for *link*.
    :raises UsageError: if Brine does not know the cluster's mode.
    """
    of_cluster = _nicparams_of_cluster()
    usual = of_cluster.get("mode") or Mode.BRIDGED.value
    if not mode and usual not in list(Mode):
        raise UsageError(
            f"the cluster's NICs are {usual}, which is no mode", hint="choose one with --mode"
        )
    mode = mode or usual
    if not link and mode == usual:
        link = of_cluster.get("link", "")
        # The main routing table has no name.
        link = "" if (mode, link) == (Mode.ROUTED.value, "main") else link
    return mode, link or ""


def _nicparams_of_cluster() -> dict[str, str]:
    """The cluster's ``nicparams`` on this node; empty without a cluster."""
    try:
        text = (paths.SSCONF_DIR / "ssconf_nicparams").read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, equals, value in pairs if equals}


@dataclass(frozen=True)
class Nic:
    """A NIC of an instance: the guest's device, and its connection.

    Names and values of the connection are Ganeti's.

    :param instance: the name of the instance.
    :param uuid: of the NIC, or its index if it has none.
    :param link: the bridge; for a routed NIC the routing table, by number or name, or nothing for
        the main one.
    :param vlan: see :func:`brine.hotplug.nic.parse_vlans`.
    :param ips: the guest's addresses; a routed NIC has one or more.
    :param mac: the guest's, as in ``52:54:00:12:34:56``.
    :param mtu: in bytes; None takes the link's.
    :param index: the NIC's place among the instance's, from 0.
    :param tags: the instance's.
    :param network: variables of the network for operators' scripts, such as ``NETWORK_NAME``.
    :param model: of :data:`brine.hotplug.choices.MODELS`.
    :param queues: how many the tap has.
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

    def alias(self) -> str:
        """The alias of its tap, which names the instance and the NIC."""
        return f"brine instance={_quoted(self.instance)} nic={_quoted(self.uuid)}"

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
        for name in (self.instance, self.uuid, self.link):
            _check_encoding(name)
        if len(self.alias().encode()) > _LONGEST_ALIAS_BYTES:
            raise UsageError(f"the instance's name is too long: {self.instance}")
        if self.mtu is not None and not SMALLEST_MTU <= self.mtu <= LARGEST_MTU:
            raise UsageError(f"the MTU must be {SMALLEST_MTU} to {LARGEST_MTU}, not {self.mtu}")
        vlans = parse_vlans(self.vlan)
        addresses = self.addresses()
        if self.mode == Mode.ROUTED:
            self._check_routed(addresses)
            if vlans:
                raise UsageError("a routed NIC has no VLAN", hint="choose a table with its link")
        else:
            _check_bridge_name(self.link, self.mode)

    def _check_routed(self, addresses: tuple[Address, ...]) -> None:
        if not addresses:
            raise UsageError("a routed NIC needs its address", hint="give --ip ADDRESS")
        if len(set(addresses)) < len(addresses):
            raise UsageError(f"an address is there twice: {', '.join(self.ips)}")
        for address in addresses:
            if address.is_unspecified or address.is_loopback or address.is_multicast:
                raise UsageError(f"{address} can't be a guest's address")
            if address.is_link_local:
                raise UsageError(
                    f"{address} is of one link only, and can't be routed",
                    hint="give an address that others reach",
                )

    def is_wired_as(self, other: Nic) -> bool:
        """Whether both have the same connection, whatever the guest sees."""
        return replace(self, model="", queues=0, vhost=False) == replace(
            other, model="", queues=0, vhost=False
        )

    def to_json(self) -> dict[str, Any]:
        """The NIC as a runtime file has it: Ganeti's keys, and Brine's."""
        return {
            "uuid": self.uuid,
            "mac": self.mac,
            "model": self.model,
            "ip": self.ips[0] if self.ips else None,
            "nicparams": {"mode": str(self.mode), "link": self.link, "vlan": self.vlan},
            "ips": list(self.ips),
            "mtu": self.mtu,
            "queues": self.queues,
            "vhost": self.vhost,
            "tap": self.tap_name(),
            "instance": self.instance,
            "index": self.index,
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
            instance=data["instance"],
            uuid=data["uuid"],
            mode=Mode(params["mode"]),
            link=params["link"],
            vlan=params["vlan"],
            ips=tuple(data["ips"]),
            mac=data["mac"],
            mtu=data["mtu"],
            index=data["index"],
            tags=tuple(data["tags"]),
            network=data["network_variables"],
            model=data["model"],
            queues=data["queues"],
            vhost=data["vhost"],
        )


def owner_of(alias: str) -> tuple[str, str] | None:
    """The instance and NIC that an interface's alias names; None if the alias is not Brine's."""
    match = _ALIAS.fullmatch(alias)
    return (_unquoted(match[1]), _unquoted(match[2])) if match else None


def parse_address(text: str) -> Address:
    """An IPv4 or IPv6 address, without a prefix length.

    :raises UsageError: if it is not an address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        hint = "an address alone, such as 192.0.2.10 or 2001:db8::10, without /LENGTH"
        raise UsageError(f"not an address: {text!r}", hint=hint) from None
    if address.version == 6 and address.scope_id:
        raise UsageError(f"not an address of a guest: {text!r}", hint="leave out %INTERFACE")
    return address


def _quoted(name: str) -> str:
    # A VM may be named after its socket, and names of files may have any bytes.
    return quote(os.fsencode(name), _PLAIN)


def _unquoted(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))


def _check_encoding(name: str) -> None:
    """Refuse a name that no file and no interface can have; QEMU accepts such names."""
    try:
        is_odd = b"\0" in os.fsencode(name)
    except UnicodeEncodeError:
        is_odd = True
    if is_odd:
        raise UsageError(f"not a name that can be used: {name!r}", hint="give another one")


def _check_bridge_name(name: str, mode: Mode) -> None:
    if not name:
        raise UsageError(f"a NIC that is {mode} needs its bridge", hint="give --link BRIDGE")
    # pyroute2 accepts text only.
    is_text = not any("\ud800" <= character <= "\udfff" for character in name)
    if len(os.fsencode(name)) > NAME_BYTES or "/" in name or not is_text:
        raise UsageError(f"{name!a} can't be the name of a bridge")


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


def nic_device(device_id: str, nic: Nic, queues: int, slot: Slot) -> dict[str, Any]:
    """The device that the guest sees: the arguments of ``device_add``."""
    device: dict[str, Any] = {
        "driver": MODELS[nic.model],
        "id": device_id,
        "netdev": device_id,
        "mac": nic.mac,
        # The VM has booted already, and a chrooted QEMU would not find the file.
        "romfile": "",
        **slot.placement,
    }
    if queues > 1 and nic.model == "virtio":
        device["mq"] = True
        device["vectors"] = 2 * queues + 2  # two a queue, control, and configuration
    return device


def recorded_nic(nic: Nic, slot: Slot | None = None) -> dict[str, Any]:
    """A NIC as a runtime file has it, with its slot if it has one."""
    if slot is None:
        return nic.to_json()
    device_id = str(DeviceName.of(DeviceKind.NIC, nic.uuid, Bus.PCI, slot.number))
    return {**nic.to_json(), **slot.recorded(MODELS[nic.model], device_id)}


# A NIC from the options of a command.


def changed_connection(arguments: argparse.Namespace, old: Nic) -> Nic:
    """A NIC with the connection of the options. With another mode, it loses its link and VLAN."""
    given: dict[str, Any] = {
        "mode": arguments.mode and Mode(arguments.mode),
        "link": arguments.link,
        "vlan": arguments.vlan,
        "ips": None if arguments.ip is None else _addresses(ip for ip in arguments.ip if ip),
        "mac": arguments.mac,
        "mtu": arguments.mtu,
        "index": arguments.index,
        "tags": None if arguments.tag is None else tuple(arguments.tag),
        "network": None if arguments.network is None else _network(arguments.network),
    }
    if given["mode"] not in (None, old.mode):
        old = replace(old, link="", vlan="")
    return replace(old, **{key: value for key, value in given.items() if value is not None})


def connected_nic(arguments: argparse.Namespace, instance: str, nic: str) -> Nic:
    """A new NIC with the connection of the options."""
    mode, link = usual_wiring(arguments.mode, arguments.link)
    index = arguments.index
    if index is None and nic.isdigit():
        index = int(nic)
    return Nic(
        instance=instance,
        uuid=nic,
        mode=Mode(mode),
        link=link,
        vlan=arguments.vlan,
        ips=_addresses(arguments.ip),
        mac=arguments.mac,
        mtu=arguments.mtu,
        index=index,
        tags=tuple(arguments.tag),
        network=_network(arguments.network),
    )


def described(nic: Nic) -> str:
    """How a NIC is connected, in words."""
    return connection(nic.mode.value, nic.link, nic.vlan, nic.ips)


def connection(mode: str, link: str, vlan: str, ips: Iterable[str]) -> str:
    """A connection, in words."""
    if mode == "routed":
        return f"routed to {', '.join(ips)} by table {link or 'main'}"
    return f"{mode} to {link}" + (f" VLAN {vlan}" if vlan else "")


def with_options(arguments: argparse.Namespace, old: Nic) -> Nic:
    """A NIC with the changes that the options want."""
    nic = changed_connection(arguments, old)
    return _checked(
        replace(
            nic,
            model=arguments.model or nic.model,
            queues=nic.queues if arguments.queues is None else arguments.queues,
            vhost=nic.vhost if arguments.vhost is None else arguments.vhost,
        )
    )


def nic_from(arguments: argparse.Namespace, instance: str, nic_uuid: str) -> Nic:
    """The NIC that the options want."""
    nic = connected_nic(arguments, instance, nic_uuid)
    return _checked(
        replace(nic, model=arguments.model, queues=arguments.queues, vhost=arguments.vhost)
    )


def _checked(nic: Nic) -> Nic:
    nic.check()
    if nic.model != "virtio" and (nic.queues > 1 or nic.vhost):
        what = "vhost" if nic.vhost else "several queues"
        raise UsageError(f"{nic.model} has no {what}", hint="--model virtio has")
    return nic


def _addresses(texts: Iterable[str]) -> tuple[str, ...]:
    """Addresses in their canonical form."""
    return tuple(str(parse_address(text)) for text in texts)


def _network(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            hint = "such as --network NAME=blue --network SUBNET=192.0.2.0/24"
            raise UsageError(f"not KEY=VALUE of a network: {pair!r}", hint=hint)
        found[f"NETWORK_{key.removeprefix('NETWORK_')}"] = value
    return found
