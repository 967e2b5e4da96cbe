"""The options of a command line that say how a NIC is connected."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brine.common.errors import UsageError
from brine.common.option_types import whole_number

if TYPE_CHECKING:
    from brine.hotplug.wanted import Wiring

_MODES = ("bridged", "routed", "openvswitch")


def add_wiring(parser: argparse.ArgumentParser, *, changes: bool = False) -> None:
    """The options for what the tap is connected to.

    :param changes: something there is to be changed: what is not given stays as it is.
    """
    wiring = parser.add_argument_group("wiring")
    wiring.add_argument(
        "--mode",
        choices=_MODES,
        default=None,
        help=_unless(changes, "default: the cluster's, or bridged"),
    )
    wiring.add_argument(
        "--link",
        default=None if changes else "",
        help="the bridge; or, routed, the table, by number or name; "
        + _unless(changes, "default: the cluster's, or the main table"),
    )
    wiring.add_argument(
        "--vlan",
        default=None if changes else "",
        metavar="VLANS",
        help="100 untagged, :100:200 tagged, .100:200 both",
    )
    wiring.add_argument(
        "--ip",
        action="append",
        default=None if changes else [],
        metavar="ADDRESS",
        help="the guest's address; may be repeated; routed needs one",
    )
    wiring.add_argument(
        "--mtu",
        type=whole_number(68, 65521),
        metavar="BYTES",
        help=_unless(changes, "default: the link's"),
    )


def add_told(
    parser: argparse.ArgumentParser, *, mac: Callable[[str], str] = str, changes: bool = False
) -> None:
    """The options for what operators' scripts are told.

    :param mac: checks a MAC address, where more than scripts are told of it.
    :param changes: as in :func:`add_wiring`.
    """
    several: list[str] | None = None if changes else []
    told = parser.add_argument_group("what operators' scripts are told, see brine-nic.d(5)")
    told.add_argument(
        "--mac", default=None if changes else "", type=mac, help="the guest's MAC address"
    )
    told.add_argument("--index", type=whole_number(0, 999), metavar="N", help="the NIC's index")
    told.add_argument(
        "--tag", action="append", default=several, help="of the instance; may be repeated"
    )
    told.add_argument(
        "--network",
        action="append",
        default=several,
        metavar="KEY=VALUE",
        help="as NETWORK_KEY; may be repeated",
    )


def changed_wiring(arguments: argparse.Namespace, old: Wiring) -> Wiring:
    """A wiring with what the options want otherwise. Another mode takes no link and VLAN along."""
    from brine.hotplug.choices import Mode

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


def wiring_of(arguments: argparse.Namespace, instance: str, nic: str) -> Wiring:
    """What the options want for that NIC."""
    from brine.hotplug.choices import Mode
    from brine.hotplug.wanted import Wiring, usual_wiring

    mode, link = usual_wiring(arguments.mode, arguments.link)
    index = arguments.index
    if index is None and nic.isdigit():
        index = int(nic)
    return Wiring(
        instance=instance,
        nic=nic,
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


def described(wiring: Wiring) -> str:
    """A wiring in words."""
    return connection(wiring.mode.value, wiring.link, wiring.vlan, wiring.ips)


def connection(mode: str, link: str, vlan: str, ips: Iterable[str]) -> str:
    """The same from its parts."""
    if mode == "routed":
        return f"routed to {', '.join(ips)} by table {link or 'main'}"
    return f"{mode} to {link}" + (f" VLAN {vlan}" if vlan else "")


def _unless(changes: bool, text: str) -> str:
    return "default: as it is" if changes else text


def _addresses(texts: Iterable[str]) -> tuple[str, ...]:
    """Addresses, each written in the one way that all are written."""
    from brine.hotplug.wanted import parse_address

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
