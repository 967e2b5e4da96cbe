"""The addresses that this host has itself."""

from __future__ import annotations

import ipaddress
import socket

from brine.common.files import text_of


def is_own_address(host: str) -> bool:
    """Whether an IP address is one of this host's now."""
    try:
        address = ipaddress.ip_address(host)
        if address.is_unspecified or address.is_multicast:
            return False
        if text_of(f"/proc/sys/net/ipv{address.version}/ip_nonlocal_bind") == "1":
            return False  # a socket can have any address
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True
