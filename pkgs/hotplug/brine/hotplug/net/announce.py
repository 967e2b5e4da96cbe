"""Announcements of a routed NIC's addresses: the neighbours of a node learn at once that they reach
a guest there which another node had before.

Source: RFC 5227, section 3 (an ARP announcement), and RFC 4861, section 7.2.6 (an unsolicited
neighbour advertisement).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from ipaddress import IPv6Address, ip_address

from brine.hotplug.net import records
from brine.hotplug.net.netlink import Netlink, Proxy

TIMES = 3
PAUSE_S = 0.1

_ARP, _IPV6 = 0x0806, 0x86DD
_ARP_HEAD = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1)  # Ethernet, IPv4, and a request
_TO_ALL = b"\xff" * 6
_TO_ALL_NODES = bytes.fromhex("333300000001")
_ALL_NODES = IPv6Address("ff02::1")
_ICMPV6, _ADVERTISEMENT, _LINK_ADDRESS = 58, 136, 2
_ROUTER, _OVERRIDE = 0x8000_0000, 0x2000_0000
_MOST_HOPS = 255


def announce(tap: str, *, times: int = TIMES, pause_s: float = PAUSE_S) -> int:
    """Announce the addresses of a wired tap at the interfaces by which other hosts reach them;
    returns how many there are.

    :param times: an announcement may be lost.
    :raises OSError: if one can't be sent.
    """
    record = records.load(tap)
    proxies = record.proxies if record else ()
    with Netlink() as netlink, contextlib.ExitStack() as stack:
        frames = []
        for proxy in proxies:
            mac = bytes.fromhex(netlink.get(proxy.link).mac.replace(":", ""))
            sender = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
            sender.bind((proxy.link, 0))
            frames.append((sender, frame_of(proxy, mac)))
        for number in range(times if frames else 0):
            if number:
                time.sleep(pause_s)
            for sender, frame in frames:
                sender.send(frame)
    return len(proxies)


def frame_of(proxy: Proxy, mac: bytes) -> bytes:
    """The Ethernet frame that announces an address at an interface with that MAC address."""
    address = ip_address(proxy.address)
    if isinstance(address, IPv6Address):
        return _TO_ALL_NODES + mac + _IPV6.to_bytes(2, "big") + _advertisement(address, mac)
    own = address.packed
    request = _ARP_HEAD + mac + own + bytes(6) + own
    return _TO_ALL + mac + _ARP.to_bytes(2, "big") + request


def _advertisement(address: IPv6Address, mac: bytes) -> bytes:
    """The packet of an unsolicited neighbour advertisement. It comes from the address itself: the
    interface may have none of its own."""
    flags = _ROUTER | _OVERRIDE
    body = struct.pack("!II", _ADVERTISEMENT << 24, flags) + address.packed
    body += bytes([_LINK_ADDRESS, 1]) + mac
    ends = address.packed + _ALL_NODES.packed
    checksum = _checksum(ends + struct.pack("!II", len(body), _ICMPV6) + body)
    body = body[:2] + checksum.to_bytes(2, "big") + body[4:]
    return struct.pack("!IHBB", 6 << 28, len(body), _ICMPV6, _MOST_HOPS) + ends + body


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(~total & 0xFFFF)
