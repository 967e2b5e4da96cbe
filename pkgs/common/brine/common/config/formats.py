"""What names and addresses look like."""

from __future__ import annotations

import ipaddress
import re
import uuid

from brine.common.config.shape import shown

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,238}[A-Za-z0-9_])?")
_LONGEST_LABEL = 128
_MAC = re.compile(r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}")
_MAC_PREFIX = re.compile(r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){2}")


def name_fault(name: str) -> str | None:
    """What is wrong with the name of a node or an instance, which also names files."""
    if _HOST.fullmatch(name) and ".." not in name:
        return None
    return f"{shown(name)} is no name: letters, digits and inner dots and dashes, up to 240"


def label_fault(name: str) -> str | None:
    """What is wrong with the name of a cluster, a node group or a network, which names nothing
    but itself: Ganeti takes any."""
    if name and name == name.strip() and name.isprintable() and len(name) <= _LONGEST_LABEL:
        return None
    return f"{shown(name)} is no name: one line of up to {_LONGEST_LABEL} characters"


def is_uuid(text: str) -> bool:
    """Whether *text* is a UUID in its usual form, in either case."""
    try:
        return len(text) == 36 and str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def canonical_uuid(text: str) -> str:
    """A UUID in the one spelling that is stored; anything else as it is."""
    return text.lower() if is_uuid(text) else text


def mac_fault(mac: str) -> str | None:
    """What is wrong with a MAC address."""
    if not _MAC.fullmatch(mac):
        return f"{shown(mac)} is no MAC address, such as aa:00:00:12:34:56"
    if int(mac[1], 16) & 1:
        return f"{mac} is a multicast address, which no NIC can have"
    return None


def mac_prefix_fault(prefix: str) -> str | None:
    """What is wrong with the first half of a MAC address."""
    if not _MAC_PREFIX.fullmatch(prefix):
        return f"{shown(prefix)} is no MAC prefix, such as aa:00:00"
    if int(prefix[1], 16) & 1:
        return f"{prefix} begins multicast addresses, which no NIC can have"
    return None


def ip_fault(ip: str) -> str | None:
    """What is wrong with an IP address, of either family."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return f"{shown(ip)} is no IP address"
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return f"{shown(ip)} has a scope, which means nothing on another node"
    return None


def ip_network_fault(network: str) -> str | None:
    """What is wrong with an IP network, ``ADDRESS/LENGTH``."""
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        return f"{shown(network)} is no IP network: {error}"
    return None


def canonical_ip(text: str) -> str:
    """An IP address in the one spelling that is stored; what is none as it is."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text
