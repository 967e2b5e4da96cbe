"""NICs as the options of a command line describe them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from brine.common.errors import UsageError
from brine.hotplug.choices import Mode
from brine.hotplug.nic import Nic, parse_address, usual_wiring


def changed_connection(arguments: argparse.Namespace, old: Nic) -> Nic:
    """A NIC, connected as the options say. Another mode takes no link and VLAN along."""
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
    """A NIC, connected as the options say."""
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
    """The same from its parts."""
    if mode == "routed":
        return f"routed to {', '.join(ips)} by table {link or 'main'}"
    return f"{mode} to {link}" + (f" VLAN {vlan}" if vlan else "")


def with_options(arguments: argparse.Namespace, old: Nic) -> Nic:
    """A NIC with what the command line wants otherwise."""
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
    """Addresses, each written in the one way that all are written."""
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
