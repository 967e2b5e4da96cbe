"""The filter of forged source addresses of routed taps.

Each tap has an nf_tables table of its own, of the family ``netdev``. Its chain is the first to see
the guest's packets. ``nft list ruleset`` shows this for a NIC with one address of each kind::

    table netdev brine-vm-web1-6zt2qk {
        chain sources {
            type filter hook ingress device "vm-web1-6zt2qk" priority -500; policy drop;
            ip saddr 192.0.2.10 accept
            arp saddr ip 192.0.2.10 accept
            arp saddr ip 0.0.0.0 accept
            ip saddr 0.0.0.0 ip daddr 255.255.255.255 ip protocol udp accept
            ip6 saddr 2001:db8::10 accept
            ip6 saddr fe80::/10 accept
            ip6 saddr :: ip6 daddr ff02::/16 accept
        }
    }

nft gets JSON: a name of an interface may have characters that no word of its own language has.
Source: :manpage:`nft(8)`, :manpage:`libnftables-json(5)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from brine.common.errors import BrineError, install_hint
from brine.common.process import run_bounded
from brine.hotplug.net.scripts import SEARCH_PATH
from brine.vm.connection import Address

_COMMAND = ("nft", "-j", "-f", "-")
TIMEOUT_S = 20.0
"""How long nft may take."""

_BEFORE_ALL = -500
_CHAIN = "sources"
_PREFIX = "brine-"

_Json = dict[str, Any]


class SourceFilterError(BrineError):
    """nft is missing, or refuses."""


def allow_sources(tap: str, addresses: Iterable[Address]) -> None:
    """Let a tap's guest send from these addresses only; this replaces an earlier filter.

    The kernel replaces it in one step, so the guest is never without a filter.

    :raises SourceFilterError: if that can't be done.
    """
    table = _table(tap)
    within = {"family": "netdev", "table": table["table"]["name"]}
    hook = {"type": "filter", "hook": "ingress", "dev": tap, "prio": _BEFORE_ALL, "policy": "drop"}
    commands = [
        *_without(tap),
        {"add": table},
        {"add": {"chain": within | {"name": _CHAIN} | hook}},
    ]
    for matches in _rules(addresses):
        rule = within | {"chain": _CHAIN, "expr": [*matches, {"accept": None}]}
        commands.append({"add": {"rule": rule}})
    _ask(f"{tap}: packets can't be filtered by their source", *commands)


def forget_sources(tap: str) -> None:
    """Remove a tap's filter; succeeds if there is none.

    :raises SourceFilterError: if that can't be done.
    """
    _ask(f"{tap}: the filter of its packets can't be removed", *_without(tap))


def filtered_taps() -> set[str]:
    """The names of taps with a filter: ``nft flush ruleset`` removes it with all others.

    :raises SourceFilterError: if they can't be listed.
    """
    said = _ask("filters of packets can't be listed", {"list": {"chains": {"family": "netdev"}}})
    try:
        chains = [one["chain"] for one in json.loads(said)["nftables"] if "chain" in one]
        tables = {chain["table"] for chain in chains if chain["name"] == _CHAIN}
    except (ValueError, LookupError, TypeError) as error:
        raise SourceFilterError(f"nft's answer can't be used: {error!r}") from error
    return {table.removeprefix(_PREFIX) for table in tables if table.startswith(_PREFIX)}


def _rules(addresses: Iterable[Address]) -> Iterator[list[_Json]]:
    """The conditions of each rule that accepts packets."""
    versions = set()
    for address in addresses:
        versions.add(address.version)
        if address.version == 4:
            yield [_match("ip", "saddr", str(address))]
            yield [_match("arp", "saddr ip", str(address))]
        else:
            yield [_match("ip6", "saddr", str(address))]
    if 4 in versions:
        # ARP probes for a free address, and DHCP requests, have no source address.
        yield [_match("arp", "saddr ip", "0.0.0.0")]
        to_all, udp = _match("ip", "daddr", "255.255.255.255"), _match("ip", "protocol", "udp")
        yield [_match("ip", "saddr", "0.0.0.0"), to_all, udp]
    if 6 in versions:
        # Neighbour discovery uses link-local addresses, which no router forwards.
        yield [_match("ip6", "saddr", {"prefix": {"addr": "fe80::", "len": 10}})]
        multicast = {"prefix": {"addr": "ff02::", "len": 16}}
        yield [_match("ip6", "saddr", "::"), _match("ip6", "daddr", multicast)]


def _match(protocol: str, field: str, value: str | _Json) -> _Json:
    payload = {"payload": {"protocol": protocol, "field": field}}
    return {"match": {"op": "==", "left": payload, "right": value}}


def _table(tap: str) -> _Json:
    return {"table": {"family": "netdev", "name": f"{_PREFIX}{tap}"}}


def _without(tap: str) -> list[_Json]:
    """What removes a tap's table, also if there is none."""
    return [{"add": _table(tap)}, {"delete": _table(tap)}]


def _ask(fault: str, *commands: _Json) -> str:
    """nft's answer to commands, which are done all at once or not at all."""
    asked = json.dumps({"nftables": commands}, ensure_ascii=False)
    try:
        environment = {"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8"}
        done = run_bounded(_COMMAND, timeout_s=TIMEOUT_S, environment=environment, asked=asked)
    except FileNotFoundError:
        hint = f"{install_hint(apt='nftables', dnf='nftables')}; or use another mode"
        raise SourceFilterError(f"{fault}: the command nft is not there", hint=hint) from None
    except TimeoutError:
        text = f"{fault}: nft does not end within {TIMEOUT_S:g} s"
        raise SourceFilterError(text, hint="see nft list tables netdev") from None
    if done.returncode == 0:
        return done.stdout
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    reason = lines[0].rpartition("Error: ")[2]
    hint = "a routed NIC needs root with CAP_NET_ADMIN, and nf_tables: modprobe nf_tables"
    raise SourceFilterError(f"{fault}: nft: {reason}", hint=hint)
