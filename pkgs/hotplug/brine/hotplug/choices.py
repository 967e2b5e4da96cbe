"""The values that keys of disks and NICs may have. This module loads nothing else."""

from __future__ import annotations

from enum import StrEnum

FORMATS = ("raw", "qcow2")
MODELS = {"virtio": "virtio-net-pci", "e1000": "e1000", "e1000e": "e1000e", "rtl8139": "rtl8139"}
"""QEMU's models of NICs, by the names that people know."""

USUAL_MTU = 1500
"""The MTU that a guest's Ethernet has unless something else is said, in bytes, as the others."""
SMALLEST_MTU = 68
LARGEST_MTU = 65521
"""The largest MTU that the kernel allows for a tap: 65535, less an Ethernet header."""


class Mode(StrEnum):
    """How a NIC is connected. Ganeti's words."""

    BRIDGED = "bridged"
    ROUTED = "routed"
    OPEN_VSWITCH = "openvswitch"


LONGEST_SERIAL = 20
"""The characters of a disk's serial that virtio-blk shows (VIRTIO_BLK_ID_BYTES)."""

LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0
UNPLUG_TIMEOUT_S = 30.0
"""How long the guest may take to release a device."""
