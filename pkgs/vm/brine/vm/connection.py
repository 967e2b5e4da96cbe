"""How the NIC of a VM is connected: VLANs, addresses, and what goes together."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from brine.common.errors import UsageError
from brine.vm.values import is_interface_name

HIGHEST_VLAN = 4094

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Vlans:
    """The VLANs of a port.

    :param untagged: the VLAN of frames without a tag; None if there is none.
    :param tagged: the VLANs whose tagged frames pass.
    """

    untagged: int | None
    tagged: frozenset[int]


def parse_vlans(text: str) -> Vlans | None:
    """The VLANs of a text in Ganeti's notation; None if it is empty: the link's default.

    ``100`` and ``.100`` are one VLAN, whose frames have no tag for the guest. ``:100:200`` are
    tagged VLANs. ``.100:200:300`` is both.

    :raises UsageError: if the text has none of these forms.
    """
    text = text.strip()
    if not text:
        return None
    first, *tagged = text.split(":")
    numbers = [first.removeprefix("."), *tagged] if first else tagged
    if not numbers or not all(map(_is_vlan, numbers)):
        hint = f"100 (untagged), :100:200 (tagged) or .100:200 (both), each 1 to {HIGHEST_VLAN}"
        raise UsageError(f"not VLANs: {text!r}", hint=hint)
    ids = list(map(int, numbers))
    if len(set(ids)) < len(ids):
        raise UsageError(f"VLANs {text!r}: one is there twice")
    return Vlans(ids[0], frozenset(ids[1:])) if first else Vlans(None, frozenset(ids))


def _is_vlan(text: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,4}", text)) and 0 < int(text) <= HIGHEST_VLAN


def vlan_fault(text: str) -> str | None:
    """Why *text* names no VLANs; None if it does, or is empty."""
    try:
        parse_vlans(text)
    except UsageError as error:
        return f"{error}; {error.hint}" if error.hint else str(error)
    return None


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


def check_connection(
    mode: str, link: str, vlan: str, ips: Sequence[str], *, is_filtered: bool = False
) -> None:
    """Refuse a connection of a NIC that no node could make.

    :param mode: ``bridged``, ``routed`` or ``openvswitch``.
    :raises UsageError: what is wrong, and what would be right.
    """
    vlans, addresses = parse_vlans(vlan), tuple(map(parse_address, ips))
    if mode == "routed":
        _check_routed(addresses)
        if vlans:
            raise UsageError("a routed NIC has no VLAN", hint="choose a table with its link")
    elif not link:
        raise UsageError(f"a NIC that is {mode} needs its bridge", hint="give --link BRIDGE")
    elif not is_interface_name(link):
        raise UsageError(f"{link!a} can't be the name of a bridge")
    elif is_filtered and mode == "openvswitch":
        hint = "leave it out, or set it to false where the cluster has it; see ovs-ofctl(8)"
        raise UsageError("a NIC of Open vSwitch has no filter of Brine's", hint=hint)


def _check_routed(addresses: tuple[Address, ...]) -> None:
    if not addresses:
        raise UsageError("a routed NIC needs its address", hint="give --ip ADDRESS")
    if len(set(addresses)) < len(addresses):
        raise UsageError(f"an address is there twice: {', '.join(map(str, addresses))}")
    for address in addresses:
        if address.is_unspecified or address.is_loopback or address.is_multicast:
            raise UsageError(f"{address} can't be a guest's address")
        if address.is_link_local:
            text = f"{address} is of one link only, and can't be routed"
            raise UsageError(text, hint="give an address that others reach")
