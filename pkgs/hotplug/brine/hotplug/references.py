"""What people call a device that they mean: QEMU's id, a UUID, a MAC address, a serial."""

from __future__ import annotations

import re

from brine.hotplug.device_names import DeviceName

# A MAC, or at least the beginning of a UUID, which is what serials are made from.
_LIKE_OURS = re.compile(r"(?i)[0-9a-f]{8}(-|$)|([0-9a-f]{2}:){5}[0-9a-f]{2}$")


def is_like_ours(reference: str) -> bool:
    """Whether we could have given it to a device.

    One that could be, and is not there, was taken out before: there is nothing to do. Any other is
    a mistake.
    """
    return bool(DeviceName.parse(reference) or _LIKE_OURS.match(reference))
