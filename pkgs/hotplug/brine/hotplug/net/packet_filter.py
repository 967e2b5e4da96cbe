"""The filter of what a guest may send: routed taps have one always, bridged taps on request.

Each tap has an nf_tables table of its own, of the family ``netdev``. Its chain is the first to see
the guest's packets, before a bridge learns a MAC address from them. ``nft list ruleset`` shows this
for a routed NIC with one address of each kind::

    table netdev brine-vm-web1-6zt2qk {
        chain drops {
            counter packets 0 bytes 0 drop
        }
        chain sources {
            type filter hook ingress device "vm-web1-6zt2qk" priority -500; policy drop;
            ip saddr 192.0.2.10 accept
            arp saddr ip 192.0.2.10 accept
            arp saddr ip 0.0.0.0 accept
            ip saddr 0.0.0.0 ip daddr 255.255.255.255 ip protocol udp accept
            ip6 saddr 2001:db8::10 accept
            ip6 saddr fe80::/10 accept
            ip6 saddr :: ip6 daddr ff02::/16 accept
            goto drops
        }
    }

That of a bridged NIC also has the guest's MAC address in Ethernet, ARP and neighbour discovery, and
nothing of a server of DHCP or of a router. Where the NIC declares no addresses, it accepts IP
packets from any. :func:`_of_bridge` has the rules. Frames of other protocols are dropped, and so
are those with a second VLAN tag; the kernel has removed the first one.

nft gets JSON: a name of an interface may have characters that no word of its own language has.
Source: :manpage:`nft(8)`, :manpage:`libnftables-json(5)`; RFC 826, RFC 903 and RFC 4861 for the
messages; Proxmox VE's and Incus's filters for what operators expect of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address
from typing import Any

from brine.common.errors import BrineError, UsageError, install_hint
from brine.common.process import run_bounded
from brine.hotplug.net.scripts import SEARCH_PATH
from brine.vm.connection import Address
from brine.vm.values import Mode
from brine.vm.vif import Vif

_COMMAND = ("nft", "-j", "-f", "-")
TIMEOUT_S = 20.0
"""How long nft may take."""

_BEFORE_ALL = -500
_CHAIN, _NEIGHBOURS, _TARGETS, _DROPS = "sources", "neighbours", "targets", "drops"
_PREFIX = "brine-"

_DHCP_CLIENT, _DHCPV6_CLIENT = 68, 546
_RARP, _RARP_REQUEST = 0x8035, 3
_ROUTER_SOLICITATION, _SOLICITATION, _ADVERTISEMENT = 133, 135, 136
_DISCOVERY = {"range": [133, 137]}  # with the router's advertisement, and its redirect
_SOURCE_OPTION, _TARGET_OPTION, _NONCE_OPTION = 1, 2, 14
_OPTION_BYTES = 8

_Json = dict[str, Any]
_Rule = list[_Json]


class PacketFilterError(BrineError):
    """nft is missing, or refuses."""


def is_filtered(nic: Vif) -> bool:
    """Whether the tap of a NIC has a filter."""
    return nic.mode == Mode.ROUTED or nic.filter


def set_filter(tap: str, nic: Vif) -> None:
    """Give a tap the filter of its NIC; this replaces an earlier one.

    The kernel replaces it in one step, so the guest is never without a filter.

    :raises UsageError: if the NIC has no MAC address to go by.
    :raises PacketFilterError: if that can't be done.
    """
    table = _table(tap)
    within = {"family": "netdev", "table": table["table"]["name"]}
    hook = {"type": "filter", "hook": "ingress", "dev": tap, "prio": _BEFORE_ALL, "policy": "drop"}
    chains = {_CHAIN: [*_of_routes(nic.addresses())]}
    if nic.mode != Mode.ROUTED:
        if not nic.mac:
            hint = "give --mac ADDRESS, the MAC address of the guest's NIC"
            raise UsageError("a filter needs the guest's MAC address", hint=hint)
        chains = _of_bridge(nic.mac, nic.addresses())
    chains = {chain: [*rules, _DROP] for chain, rules in chains.items()}
    chains[_DROPS] = [[{"counter": None}, {"drop": None}]]
    commands: list[_Json] = [*_without(tap), {"add": table}]
    for chain in chains:
        base = hook if chain == _CHAIN else {}
        commands.append({"add": {"chain": within | {"name": chain} | base}})
    for chain, rules in chains.items():
        for expressions in rules:
            rule = within | {"chain": chain, "expr": expressions}
            commands.append({"add": {"rule": rule}})
    _ask(f"{tap}: packets can't be filtered", *commands)


def remove_filter(tap: str) -> None:
    """Remove a tap's filter; succeeds if there is none.

    :raises PacketFilterError: if that can't be done.
    """
    _ask(f"{tap}: the filter of its packets can't be removed", *_without(tap))


def filtered_taps() -> set[str]:
    """The names of taps with a filter: ``nft flush ruleset`` removes it with all others.

    :raises PacketFilterError: if they can't be listed.
    """
    found = _listed("chains", "chain")
    return {tap for tap, chain in found if chain["name"] == _CHAIN}


def dropped_packets() -> dict[str, int]:
    """How many packets of each tap with a filter have been dropped since it was set.

    :raises PacketFilterError: if they can't be listed.
    """
    rules = [(tap, rule) for tap, rule in _listed("ruleset", "rule") if rule["chain"] == _DROPS]
    with _understanding():
        return {tap: rule["expr"][0]["counter"]["packets"] for tap, rule in rules}


def _listed(asked: str, kind: str) -> list[tuple[str, _Json]]:
    """The chains or rules of Brine's tables, with their taps."""
    command = {"list": {asked: {"family": "netdev"}}}
    said = _ask("filters of packets can't be listed", command)
    with _understanding():
        every = [one[kind] for one in json.loads(said)["nftables"] if kind in one]
        names = "name" if kind == "chain" else "chain"
        ours = [one for one in every if one["table"].startswith(_PREFIX) and one[names]]
        return [(one["table"].removeprefix(_PREFIX), one) for one in ours]


@contextmanager
def _understanding() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PacketFilterError(f"nft's answer can't be used: {error!r}") from error


# Rules. Each chain's last one drops what no other has decided on.


def _of_routes(addresses: Iterable[Address]) -> Iterator[_Rule]:
    """The rules of a routed tap."""
    versions = set()
    for address in addresses:
        versions.add(address.version)
        if address.version == 4:
            yield [_match("ip", "saddr", str(address)), _ACCEPT]
            yield [_match("arp", "saddr ip", str(address)), _ACCEPT]
        else:
            yield [_match("ip6", "saddr", str(address)), _ACCEPT]
    if 4 in versions:
        # ARP probes for a free address have no source address.
        yield [_match("arp", "saddr ip", "0.0.0.0"), _ACCEPT]
        yield _DHCP_REQUEST
    if 6 in versions:
        # Neighbour discovery uses link-local addresses, which no router forwards.
        yield [_match("ip6", "saddr", {"prefix": {"addr": "fe80::", "len": 10}}), _ACCEPT]
        yield _WITHOUT_ADDRESS


_EXTENSIONS = [0, 43, 44, 51, 60]
"""The headers of IPv6 that are followed by further ones."""


def _match_extension(name: str, field: str, values: list[int]) -> _Json:
    left = {"exthdr": {"name": name, "field": field}}
    return {"match": {"op": "==", "left": left, "right": {"set": values}}}


def _of_bridge(mac: str, addresses: tuple[Address, ...]) -> dict[str, list[_Rule]]:
    """The chains of the tap of a bridge, and their rules; the first is that of the hook."""
    of_4 = [str(address) for address in addresses if address.version == 4]
    of_6 = [str(address) for address in addresses if address.version == 6]
    if of_6 and not any(address.is_link_local for address in addresses if address.version == 6):
        of_6.append(str(_link_local(mac)))
    is_arp = _match("arp", "saddr ether", mac)
    is_question = _match("arp", "operation", {"set": ["request", "reply"]})
    first: list[_Rule] = [
        [_match("ether", "saddr", mac, "!="), *_DROP],
        # In the first fragment, what follows a header of an extension is not to be seen.
        [_match_extension("frag", "nexthdr", _EXTENSIONS), *_DROP],
        [_match("udp", "dport", {"set": [_DHCP_CLIENT, _DHCPV6_CLIENT]}), *_DROP],
        [_match("icmpv6", "type", _DISCOVERY), {"jump": {"target": _NEIGHBOURS}}],
        # QEMU announces a guest that has moved so.
        [
            _meta("protocol", f"{_RARP:#x}"),
            _bits("nh", 48, 16, _RARP_REQUEST),
            _is_own("nh", 64, mac),
            _ACCEPT,
        ],
    ]
    chains = {_CHAIN: first, _NEIGHBOURS: list(_discovery(mac, has_targets=bool(addresses)))}
    if not addresses:
        first.append([is_arp, is_question, _ACCEPT])
        first += [[_meta("protocol", "ip"), _ACCEPT], [_meta("protocol", "ip6"), _ACCEPT]]
        return chains
    for address in of_4:
        first.append([is_arp, is_question, _match("arp", "saddr ip", address), _ACCEPT])
        # A probe for a free address has no source address.
        probe = [_match("arp", "saddr ip", "0.0.0.0"), _match("arp", "daddr ip", address)]
        first.append([is_arp, is_question, *probe, _ACCEPT])
    first += [[_match("ip", "saddr", address), _ACCEPT] for address in of_4]
    first += [[_match("ip6", "saddr", address), _ACCEPT] for address in of_6]
    first += [_DHCP_REQUEST] if of_4 else []
    first += [_WITHOUT_ADDRESS] if of_6 else []
    chains[_TARGETS] = [
        [_bits("th", 64, 128, int(IPv6Address(address))), {"return": None}] for address in of_6
    ]
    return chains


def _discovery(mac: str, *, has_targets: bool) -> Iterator[_Rule]:
    """Messages of neighbour discovery that a host sends, with its own MAC address or none.

    They have one option at most, and no header of an extension: no option hides behind another.
    """
    is_advertisement = _match("icmpv6", "type", _ADVERTISEMENT)
    if has_targets:
        jump = {"jump": {"target": _TARGETS}}
        yield [is_advertisement, jump]
        # A probe for a free address has no source address.
        yield [_match("icmpv6", "type", _SOLICITATION), _match("ip6", "saddr", "::"), jump]
    for kind, size, option in (
        (_ROUTER_SOLICITATION, 8, _SOURCE_OPTION),
        (_SOLICITATION, 24, _SOURCE_OPTION),
        (_ADVERTISEMENT, 24, _TARGET_OPTION),
    ):
        is_of_kind = _match("icmpv6", "type", kind)
        yield [is_of_kind, _match("ip6", "length", size), {"return": None}]
        has_option = _match("ip6", "length", size + _OPTION_BYTES)
        is_own = [_bits("th", 8 * size, 16, option << 8 | 1), _is_own("th", 8 * size + 16, mac)]
        yield [is_of_kind, has_option, *is_own, {"return": None}]
        if kind == _SOLICITATION:
            # RFC 7527: by a nonce, a host knows its own probe for a free address.
            nonce = _bits("th", 8 * size, 16, _NONCE_OPTION << 8 | 1)
            yield [is_of_kind, has_option, nonce, {"return": None}]


def _link_local(mac: str) -> IPv6Address:
    """The link-local address that is made of a MAC address (RFC 4291, appendix A)."""
    own = bytes.fromhex(mac.replace(":", ""))
    interface = bytes([own[0] ^ 2]) + own[1:3] + b"\xff\xfe" + own[3:]
    return IPv6Address(b"\xfe\x80" + bytes(6) + interface)


def _match(protocol: str, field: str, value: str | int | _Json, operator: str = "==") -> _Json:
    payload = {"payload": {"protocol": protocol, "field": field}}
    return {"match": {"op": operator, "left": payload, "right": value}}


def _meta(key: str, value: str) -> _Json:
    return {"match": {"op": "==", "left": {"meta": {"key": key}}, "right": value}}


def _bits(base: str, offset: int, length: int, value: int) -> _Json:
    """Bits of a packet from the beginning of a header. JSON has no numbers of 128 bits."""
    payload = {"payload": {"base": base, "offset": offset, "len": length}}
    return {"match": {"op": "==", "left": payload, "right": str(value)}}


def _is_own(base: str, offset: int, mac: str) -> _Json:
    return _bits(base, offset, 48, int(mac.replace(":", ""), 16))


_ACCEPT: _Json = {"accept": None}
_DROP: _Rule = [{"goto": {"target": _DROPS}}]
_DHCP_REQUEST: _Rule = [
    _match("ip", "saddr", "0.0.0.0"),
    _match("ip", "daddr", "255.255.255.255"),
    _match("ip", "protocol", "udp"),
    _ACCEPT,
]
_WITHOUT_ADDRESS: _Rule = [
    _match("ip6", "saddr", "::"),
    _match("ip6", "daddr", {"prefix": {"addr": "ff02::", "len": 16}}),
    _ACCEPT,
]


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
        hint = install_hint(apt="nftables", dnf="nftables")
        hint += "; or use a bridged NIC without a filter"
        raise PacketFilterError(f"{fault}: the command nft is not there", hint=hint) from None
    except TimeoutError:
        text = f"{fault}: nft does not end within {TIMEOUT_S:g} s"
        raise PacketFilterError(text, hint="see nft list tables netdev") from None
    if done.returncode == 0:
        return done.stdout
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    reason = lines[0].rpartition("Error: ")[2]
    hint = "a filter needs root with CAP_NET_ADMIN, and nf_tables: modprobe nf_tables"
    raise PacketFilterError(f"{fault}: nft: {reason}", hint=hint)
