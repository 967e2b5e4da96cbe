"""What people call a device that they mean: QEMU's id, a UUID, a MAC address, a serial, a path."""

from __future__ import annotations

import re

from brine.hotplug.device_names import DeviceName, Kind

# A MAC, or at least the beginning of a UUID, which is what serials are made from.
_LIKE_OURS = re.compile(r"(?i)[0-9a-f]{8}(-|$)|([0-9a-f]{2}:){5}[0-9a-f]{2}$")


def is_path(reference: str) -> bool:
    """Whether it may be the path of a disk."""
    return "/" in reference


def is_like_ours(kind: Kind, reference: str) -> bool:
    """Whether we could have given it to a device, or it is the path of a disk.

    One that could be, and is not there, was taken out before: there is nothing to do. Any other is
    a mistake.
    """
    if kind is Kind.DISK and is_path(reference):
        return True
    return bool(DeviceName.parse(reference) or _LIKE_OURS.match(reference))
