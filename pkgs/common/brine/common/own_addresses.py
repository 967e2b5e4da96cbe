"""The addresses that this host has itself."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path


def is_own_address(host: str) -> bool:
    """Whether an IP address is one of this host's now."""
    try:
        address = ipaddress.ip_address(host)
        if address.is_unspecified or address.is_multicast:
            return False
        if _binds_any(address.version):
            return False  # a socket can have any address
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


def _binds_any(version: int) -> bool:
    try:
        setting = Path(f"/proc/sys/net/ipv{version}/ip_nonlocal_bind").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return False
    return setting.strip() == "1"
