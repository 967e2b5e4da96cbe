"""NICs as the options of a command line describe them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from brine.common.errors import UsageError
from brine.hotplug.choices import Mode
from brine.hotplug.nic import Nic, Wiring, Wish, parse_address, usual_wiring


def changed_wiring(arguments: argparse.Namespace, old: Wiring) -> Wiring:
    """A wiring with what the options want otherwise. Another mode takes no link and VLAN along."""
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


def with_options(arguments: argparse.Namespace, old: Wish) -> Wish:
    """A NIC with what the command line wants otherwise."""
    wiring = changed_wiring(arguments, old.wiring)
    nic = replace(old.nic, mac=wiring.mac, model=arguments.model or old.nic.model)
    queues = old.queues if arguments.queues is None else arguments.queues
    vhost = old.vhost if arguments.vhost is None else arguments.vhost
    return _checked(Wish(nic, wiring, queues, vhost))


def wish_from(arguments: argparse.Namespace, instance: str, nic_uuid: str) -> Wish:
    """The NIC that the options want."""
    wiring = wiring_of(arguments, instance, nic_uuid)
    nic = Nic(nic_uuid, arguments.mac, arguments.model)
    return _checked(Wish(nic, wiring, queues=arguments.queues, vhost=arguments.vhost))


def _checked(wish: Wish) -> Wish:
    wish.wiring.check()
    if wish.nic.model != "virtio" and (wish.queues > 1 or wish.vhost):
        what = "vhost" if wish.vhost else "several queues"
        raise UsageError(f"{wish.nic.model} has no {what}", hint="--model virtio has")
    return wish


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
