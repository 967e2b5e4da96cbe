"""What people may choose for a disk or a NIC, for who only checks that: it loads nothing else."""

from __future__ import annotations

from enum import StrEnum

FORMATS = ("raw", "qcow2")
CACHE_MODES = {
    # write cache of the device, direct (past the page cache), no flush
    "none": (True, True, False),
    "writeback": (True, False, False),
    "writethrough": (False, False, False),
    "directsync": (False, True, False),
    "unsafe": (True, False, True),
}
AIO_MODES = ("threads", "native", "io_uring")

MODELS = {"virtio": "virtio-net-pci", "e1000": "e1000", "e1000e": "e1000e", "rtl8139": "rtl8139"}
"""What a guest sees of a NIC, by the name that people know."""

MOST_QUEUES = 256
"""What the kernel takes for the queues of one tap."""

SMALLEST_MTU = 68
LARGEST_MTU = 65521
"""What the kernel takes for a tap: 65535, less an Ethernet header."""


class Mode(StrEnum):
    """How a NIC is connected. Ganeti's words."""

    BRIDGED = "bridged"
    ROUTED = "routed"
    OPEN_VSWITCH = "openvswitch"


LONGEST_SERIAL = 20
"""What virtio-blk shows of a disk's serial (VIRTIO_BLK_ID_BYTES)."""

RESERVED_SLOTS = 12
"""Slots of a ``pc`` machine that are reserved for the devices that it starts with, as in Ganeti."""

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0
UNPLUG_TIMEOUT_S = 30.0
"""How long the guest may take to release a device."""
