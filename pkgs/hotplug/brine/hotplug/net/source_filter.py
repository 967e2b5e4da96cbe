"""The filter of forged source addresses of routed taps.

Each tap has an nf_tables table of its own, of the family ``netdev``. Its chain is the first to see
the guest's packets. ``nft list ruleset`` shows this for a NIC with one address of each kind::

    table netdev brine-vm-web1-6zt2qk {
        chain sources {
            type filter hook ingress device "vm-web1-6zt2qk" priority -500; policy drop;
            meta protocol ip ip saddr 192.0.2.10 accept
            meta protocol arp arp saddr ip 192.0.2.10 accept
            meta protocol arp arp saddr ip 0.0.0.0 accept
            meta protocol ip ip saddr 0.0.0.0 ip daddr 255.255.255.255 ip protocol udp accept
            meta protocol ip6 ip6 saddr 2001:db8::10 accept
            meta protocol ip6 ip6 saddr fe80::/10 accept
            meta protocol ip6 ip6 saddr :: ip6 daddr ff02::/16 accept
        }
    }

The command ``nft`` need not be installed. Source: ``nf_tables.h`` and ``nfnetlink.h`` of Linux,
:manpage:`nft(8)`.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from brine.common.errors import BrineError
from brine.hotplug.net.netlink import ACK, APPEND, CREATE, NetlinkSocket, attribute
from brine.vm.connection import Address

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_FAMILY = 5  # NFPROTO_NETDEV
_INGRESS, _BEFORE_ALL = 0, -500
_CHAIN = "sources"
_NESTED = 0x8000
_BATCH_BEGIN, _BATCH_END = ((kind, 0, struct.pack(">BBH", 0, 0, _SUBSYSTEM)) for kind in (16, 17))
_NEW_TABLE, _GET_TABLE, _DELETE_TABLE, _NEW_CHAIN, _GET_CHAIN, _NEW_RULE = 0, 1, 2, 3, 4, 6

_IP, _ARP, _IP6 = 0x0800, 0x0806, 0x86DD
_UDP = 17
_DROP, _ACCEPT = 0, 1
_NETWORK_HEADER = 1
_META_PROTOCOL = 1


@dataclass(frozen=True)
class _Match:
    """A condition: these bits of the network header have this value."""

    offset: int
    value: bytes
    mask: bytes = b""


def allow_sources(tap: str, addresses: Iterable[Address]) -> None:
    """Let a tap's guest send from these addresses only; this replaces an earlier filter.

    The kernel replaces it in one step, so the guest is never without a filter.

    :raises BrineError: if the kernel refuses.
    """
    hook = attribute(1, _big(_INGRESS)), attribute(2, _big(_BEFORE_ALL)), attribute(3, tap)
    chain = attribute(4 | _NESTED, *hook), attribute(5, _big(_DROP)), attribute(7, "filter")
    new_rule = partial(_request, tap, _NEW_RULE, CREATE | APPEND, attribute(2, _CHAIN))
    _ask(
        tap,
        _BATCH_BEGIN,
        _request(tap, _NEW_TABLE, CREATE),
        _request(tap, _DELETE_TABLE, 0),
        _request(tap, _NEW_TABLE, CREATE),
        _request(tap, _NEW_CHAIN, CREATE, attribute(3, _CHAIN), *chain),
        *map(new_rule, _rules(addresses)),
        _BATCH_END,
    )


def forget_sources(tap: str) -> None:
    """Remove a tap's filter; succeeds if there is none.

    :raises BrineError: if the kernel refuses.
    """
    if _ask(tap, _request(tap, _GET_TABLE, 0), only_look=True):
        _ask(tap, _BATCH_BEGIN, _request(tap, _DELETE_TABLE, 0), _BATCH_END)


def is_filtered(tap: str) -> bool:
    """Whether a tap has its filter: ``nft flush ruleset`` removes it with all others.

    :raises BrineError: if the kernel refuses.
    """
    return _ask(tap, _request(tap, _GET_CHAIN, 0, attribute(3, _CHAIN)), only_look=True)


def _rules(addresses: Iterable[Address]) -> Iterator[bytes]:
    """Rules that accept packets."""
    versions = set()
    for address in addresses:
        versions.add(address.version)
        if address.version == 4:
            yield _rule(_IP, _Match(12, address.packed))
            yield _rule(_ARP, _Match(14, address.packed))
        else:
            yield _rule(_IP6, _Match(8, address.packed))
    if 4 in versions:
        # ARP probes for a free address, and DHCP requests, have no source address.
        yield _rule(_ARP, _Match(14, bytes(4)))
        everybody, udp = _Match(16, b"\xff" * 4), _Match(9, bytes([_UDP]))
        yield _rule(_IP, _Match(12, bytes(4)), everybody, udp)
    if 6 in versions:
        # Neighbour discovery uses link-local addresses, which no router forwards.
        yield _rule(_IP6, _Match(8, b"\xfe\x80", mask=b"\xff\xc0"))
        yield _rule(_IP6, _Match(8, bytes(16)), _Match(24, b"\xff\x02"))


def _rule(protocol: int, *matches: _Match) -> bytes:
    """A rule that accepts packets of an Ethernet protocol for which all conditions are true."""
    # Each value is loaded into register 1, and compared there.
    parts = [_expression("meta", 1, _META_PROTOCOL), _compare(struct.pack(">H", protocol))]
    for match in matches:
        size = len(match.value)
        parts.append(_expression("payload", 1, _NETWORK_HEADER, match.offset, size))
        if match.mask:
            mask, nothing = attribute(1, match.mask), attribute(1, bytes(size))
            parts.append(_expression("bitwise", 1, 1, size, mask, nothing))
        parts.append(_compare(match.value))
    verdict = attribute(2 | _NESTED, attribute(1, _big(_ACCEPT)))
    return attribute(4 | _NESTED, *parts, _expression("immediate", 0, verdict))


def _compare(value: bytes) -> bytes:
    return _expression("cmp", 1, 0, attribute(1, value))


def _expression(name: str, *fields: int | bytes) -> bytes:
    """An expression, whose fields have numbers from 1 on."""
    packed = [
        attribute(number, _big(field))
        if isinstance(field, int)
        else attribute(number | _NESTED, field)
        for number, field in enumerate(fields, 1)
    ]
    return attribute(1 | _NESTED, attribute(1, name), attribute(2 | _NESTED, *packed))


def _big(value: int) -> bytes:
    return struct.pack(">i", value)


def _request(tap: str, kind: int, flags: int, *attributes: bytes) -> tuple[int, int, bytes]:
    """A request about a tap's table, or about its content."""
    body = struct.pack(">BBH", _FAMILY, 0, 0) + attribute(1, f"brine-{tap}") + b"".join(attributes)
    return _SUBSYSTEM << 8 | kind, flags | ACK, body


def _ask(tap: str, *requests: tuple[int, int, bytes], only_look: bool = False) -> bool:
    """Make requests, of which a batch is one change.

    :param only_look: return False if there is no such object.
    """
    try:
        with NetlinkSocket(_NETLINK_NETFILTER) as kernel:
            kernel.ask(*requests)
    except OSError as error:
        if only_look and error.errno == errno.ENOENT:
            return False
        hint = None
        if error.errno == errno.EPERM:
            hint = "be root; it takes CAP_NET_ADMIN"
        elif error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EINVAL):
            hint = "a routed NIC needs nf_tables: modprobe nf_tables"
        text = f"{tap}: packets can't be filtered by their source: {error.strerror or error}"
        raise BrineError(text, hint=hint) from error
    return True
