"""What strings of a spec may be."""

from __future__ import annotations

import re

LONGEST_NAME = 63
UEFI = "uefi"
"""The firmware that the node has for a machine, and no image by its path."""

# It becomes part of the names of a unit, of sockets and of files: no character of it needs an
# escape there. (A dash would, where systemd reads a unit's instance as a path; %i does not.)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,253}[A-Za-z0-9])?")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")
_LONGEST_SERIAL = 20


def name_fault(text: str) -> str | None:
    """What keeps *text* from being the name of an instance."""
    if len(text) > LONGEST_NAME:
        return f"a name has at most {LONGEST_NAME} characters"
    if not _NAME.fullmatch(text):
        return "a name begins with a letter or digit, and has letters, digits, '.', '_' and '-'"
    return None


def node_fault(text: str) -> str | None:
    """What keeps *text* from being the name of a node."""
    return None if _NODE.fullmatch(text) else "is no name of a node, such as node1.example.com"


def uuid_fault(text: str) -> str | None:
    """What keeps *text* from being a UUID as it is usually written."""
    return None if _UUID.fullmatch(text.lower()) else "is no UUID"


def machine_fault(text: str) -> str | None:
    """What keeps *text* from being a machine type of QEMU's."""
    if not _NAME.fullmatch(text):
        return "is no machine type, such as pc or q35; its options go into extra_arguments"
    return None


def mac_fault(text: str) -> str | None:
    """What keeps *text* from being the MAC address of a NIC."""
    if not _MAC.fullmatch(text):
        return "is no MAC address, such as 52:54:00:12:34:56"
    if int(text[:2], 16) & 1:
        return "is the MAC address of a group, which no NIC can have"
    if not text.strip("0:"):
        return "is what QEMU takes for none"
    return None


def address_fault(text: str) -> str | None:
    """What keeps *text* from being an IP address."""
    import ipaddress  # most specs have none

    try:
        ipaddress.ip_address(text)
    except ValueError:
        address, slash, _ = text.partition("/")
        if slash and not address_fault(address):
            return f"is an address with a length, and is to be without: {address}"
        return "is no IP address"
    return None


def path_fault(text: str) -> str | None:
    """What keeps *text* from being the path of a file."""
    return None if text.startswith("/") else "must be an absolute path"


def medium_fault(text: str) -> str | None:
    """What keeps *text* from being what is in a CD-ROM drive; empty is nothing."""
    return path_fault(text) if text else None


def tidy_path(text: str) -> str:
    """An absolute path without what means nothing in it, ``//`` and ``/./``; all else as it is.
    ``..`` stays: links may lead it elsewhere."""
    if not text.startswith("/"):
        return text
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def firmware_fault(text: str) -> str | None:
    """What keeps *text* from being a firmware: ``uefi``, or the path of an image."""
    if text == UEFI or text.startswith("/"):
        return None
    return f"is neither {UEFI} nor an absolute path"


def address_or_path_fault(text: str) -> str | None:
    """What keeps *text* from being an address to listen on, or the path of a socket."""
    if text.startswith("/"):
        return None
    return "is neither an IP address nor an absolute path" if address_fault(text) else None


def serial_fault(text: str) -> str | None:
    """What keeps *text* from being a disk's serial."""
    if len(text) > _LONGEST_SERIAL or not text.isascii():
        return f"a serial has at most {_LONGEST_SERIAL} characters of ASCII"
    return None
