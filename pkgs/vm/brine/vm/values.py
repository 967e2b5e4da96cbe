"""What the values of a VM may be: names, limits and choices.

A spec is checked by these, and so is the cluster's configuration, of which specs are made: no node
refuses what the cluster has accepted. Rules between values are in :mod:`brine.vm.rules` and
:mod:`brine.vm.connection`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

BOOT_DEVICES = ("disk", "cdrom", "network")
CACHE_MODES = {
    # write cache of the device, direct (past the page cache), no flush
    "none": (True, True, False),
    "writeback": (True, False, False),
    "writethrough": (False, False, False),
    "directsync": (False, True, False),
    "unsafe": (True, False, True),
}
FORMATS = ("raw", "qcow2")
MODELS = {"virtio": "virtio-net-pci", "e1000": "e1000", "e1000e": "e1000e", "rtl8139": "rtl8139"}
"""QEMU's models of NICs, by the names that people know."""

USUAL_MTU = 1500
"""The MTU that a guest's Ethernet has unless something else is said, in bytes, as the others."""
SMALLEST_MTU = 68
LARGEST_MTU = 65521
"""The largest MTU that the kernel allows for a tap: 65535, less an Ethernet header."""


LONGEST_SERIAL = 20
"""The characters of a disk's serial that virtio-blk shows (VIRTIO_BLK_ID_BYTES)."""

RESERVED_SLOTS = 12
"""Slots of a ``pc`` machine that are reserved for the devices that it starts with, as in Ganeti."""

AIO_MODES = ("threads", "native", "io_uring")
REBOOTS = ("reboot", "exit")
SECURITY_MODELS = ("none", "user", "pool")

MOST_VCPUS = 1024
MOST_MEMORY_MIB = 1 << 32  # all that an x86-64 processor can address: 52 bits
MOST_CPU_PERCENT = 8192 * 100  # Linux has 8192 processors
LARGEST_WEIGHT = 10_000
MOST_QUEUES = 256
"""The most queues that the kernel allows for one tap."""
SMALLEST_VNC_PORT = 5900
LARGEST_PORT = 65535

_LONGEST_NAME = 63
# It becomes part of the names of a unit, of sockets and of files: no character of it needs an
# escape there. (A dash would, where systemd reads a unit's instance as a path; %i does not.)
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_GROUP = r"[A-Za-z0-9_+.][A-Za-z0-9_+.-]{0,126}"  # lvm(8), "Valid names"
UUID = r"(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""A pattern of UUIDs as they are written."""
_MAC = r"(?i)[0-9a-f]{2}(:[0-9a-f]{2}){5}"
SOCKET_BYTES = 107
"""The longest path of a socket (:manpage:`unix(7)`, less its end)."""
NAME_BYTES = 15
"""The longest name of a network interface (IFNAMSIZ, less its end)."""


class Mode(StrEnum):
    """How a NIC is connected. Ganeti's words."""

    BRIDGED = "bridged"
    ROUTED = "routed"
    OPEN_VSWITCH = "openvswitch"


def is_folder_unit(name: str) -> bool:
    """Whether a storage unit is a folder, which its path names. Others are LVM's volume groups."""
    return name.startswith("/")


def unit_fault(text: str) -> str | None:
    """Why a text names no storage unit that volumes can be in; None if it may."""
    if is_folder_unit(text):
        return "has .. in it" if ".." in text.split("/") else None
    if re.fullmatch(f"{_GROUP}/{_GROUP}", text):
        text = (
            "is no unit: it is the name of a volume group, such as vg1, or the absolute path of a"
        )
        return f"{text} folder; Brine uses no thin pools (VG/POOL), as a full one loses data"
    if not re.fullmatch(_GROUP, text) or text in (".", ".."):
        return "is neither the name of a volume group nor the absolute path of a folder"
    return None


def vm_name_fault(text: str) -> str | None:
    """Why *text* cannot be the name of an instance; None if it can."""
    if len(text) > _LONGEST_NAME:
        return f"a name has at most {_LONGEST_NAME} characters"
    if not re.fullmatch(_NAME, text):
        return "a name begins with a letter or digit, and has letters, digits, '.', '_' and '-'"
    return None


def new_name_fault(text: str) -> str | None:
    """Why *text* cannot be the name of a new instance; None if it can.

    Commands take a name or a UUID: a name in the form of a UUID would hide the instance that has
    that UUID. An instance that has such a name from before keeps it.
    """
    is_uuid = re.fullmatch(UUID, text)
    return "a name does not have the form of a UUID" if is_uuid else vm_name_fault(text)


def line_fault(text: str) -> str | None:
    """Why *text* is not one line of characters that can be printed; None if it is."""
    return None if text.isprintable() else f"has characters that can't be printed: {text[:60]!r}"


def vm_mac_fault(text: str) -> str | None:
    """Why a guest's NIC can't have the MAC address *text*; None if it can."""
    if not re.fullmatch(_MAC, text):
        return "is no MAC address, such as 52:54:00:12:34:56"
    if int(text[:2], 16) & 1:
        return "is the MAC address of a group, which no NIC can have"
    return None if text.strip("0:") else "is what QEMU takes for none"


def address_fault(text: str) -> str | None:
    """Why *text* is no IP address; None if it is one."""
    import ipaddress  # most specs have none

    address, slash, _ = text.partition("/")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return "is no IP address"
    return f"is an address with a length, and is to be without: {address}" if slash else None


def listener_fault(text: str) -> str | None:
    """Why VNC can't listen on *text*; None if it can."""
    if text.startswith("/"):
        length = len(os.fsencode(tidy_path(text)))
        fault = f"has {length} bytes, and the path of a socket has at most {SOCKET_BYTES}"
        return fault if length > SOCKET_BYTES else None
    return address_fault(text) and "is neither an IP address nor an absolute path"


def machine_fault(text: str) -> str | None:
    """Why *text* is no name of a machine type; None if it can be one."""
    if re.fullmatch(_NAME, text):
        return None
    return "is no machine type, such as pc or q35; its options go into extra_arguments"


def path_fault(text: str) -> str | None:
    """Why *text* is no absolute path; None if it is one."""
    return None if text.startswith("/") else "must be an absolute path"


def like(pattern: str, fault: str) -> Callable[[str], str | None]:
    """A check of a string by a pattern of all of it."""
    return lambda text: None if re.fullmatch(pattern, text) else fault


def line(check: Callable[[str], str | None] | None = None) -> Callable[[str], str | None]:
    """A check of a string that must be one line, and pass *check* if there is one."""

    def fault(text: str) -> str | None:
        return line_fault(text) or (check(text) if check else None)

    return fault


def link_fault(text: str) -> str | None:
    """Why *text* names neither a bridge nor a routing table; None if it may."""
    if re.fullmatch(r"[^\s/:%]+", text) and text not in (".", ".."):
        return None
    return f"can't be the name of a bridge or a routing table: {text[:60]!a}"


def volume_group_fault(text: str) -> str | None:
    """Why LVM has no volume group of the name *text*; None if it may."""
    if re.fullmatch(r"[A-Za-z0-9+_.][A-Za-z0-9+_.-]{0,126}", text) and text not in (".", ".."):
        return None
    return f"can't be the name of a volume group: {text[:60]!a}"


def tidy_path(text: str) -> str:
    """An absolute path without what means nothing in it, ``//`` and ``/./``; all else as it is.
    ``..`` stays: links may lead it elsewhere."""
    if not text.startswith("/"):
        return text
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def is_interface_name(name: str) -> bool:
    """Whether an interface can have that name, and it is not a pattern for the kernel."""
    is_plain = name.isprintable() and re.fullmatch(r"[^\s/:%]+", name) and name not in (".", "..")
    return bool(is_plain) and len(name.encode(errors="surrogateescape")) <= NAME_BYTES


WHOLE: dict[str, dict[str, Any]] = {
    "vcpus": {"minimum": 1, "maximum": MOST_VCPUS},
    "topology": {"minimum": 0, "maximum": MOST_VCPUS},
    "memory_mib": {"minimum": 1, "maximum": MOST_MEMORY_MIB},
    "queues": {"minimum": 1, "maximum": MOST_QUEUES},
    "cpu_limit_percent": {"minimum": 0, "maximum": MOST_CPU_PERCENT},
    "weight": {"minimum": 0, "maximum": LARGEST_WEIGHT},
    "port": {"minimum": 0, "maximum": LARGEST_PORT},
}
"""The limits of whole numbers."""
