"""qcow2 images without qemu-img, which is in a package that nothing else here needs."""

from __future__ import annotations

import struct
from pathlib import Path

_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS


_FEATURES = 0x6803F857
"""The type of the header extension that names features."""


def make_hostile_qcow2(file: Path, feature: bytes) -> None:
    """An image, version 3, that needs a feature of which QEMU knows only what the image calls it;
    QEMU says that name, of at most 46 bytes, when it refuses the image."""
    bit = 60
    table = struct.pack(">BB46s", 0, bit, feature)
    header = struct.pack(
        ">4sIQIIQIIQQIIQ", b"QFI\xfb", 3, 0, 0, _CLUSTER_BITS, 1 << 20, 0, 1, 0, _CLUSTER, 1, 0, 0
    )
    header += struct.pack(">QQQII", 1 << bit, 0, 0, 4, 104)
    header += struct.pack(">II", _FEATURES, len(table)) + table + struct.pack(">II", 0, 0)
    file.write_bytes(header.ljust(4 * _CLUSTER, b"\0"))


def make_qcow2(file: Path, size_bytes: int, *, backing: str = "") -> None:
    """An empty image, version 2; see QEMU's docs/interop/qcow2.txt.

    :param size_bytes: that a guest sees, at most 512 MiB.
    :param backing: the name of a file that it stands on.
    """
    header, refcounts, block, level1 = range(4)  # a cluster each
    assert size_bytes <= _CLUSTER * (_CLUSTER // 8)  # one entry of the first level
    fields = struct.pack(
        ">4sIQIIQIIQQIIQ",
        b"QFI\xfb",
        2,
        72 if backing else 0,
        len(backing),
        _CLUSTER_BITS,
        size_bytes,
        0,  # not encrypted
        1,
        level1 * _CLUSTER,
        refcounts * _CLUSTER,
        1,
        0,  # no snapshots
        0,
    )
    clusters = [bytearray(_CLUSTER) for _ in range(4)]
    clusters[header][:72] = fields
    clusters[header][72 : 72 + len(backing)] = backing.encode()
    clusters[refcounts][:8] = struct.pack(">Q", block * _CLUSTER)
    clusters[block][:8] = struct.pack(">4H", 1, 1, 1, 1)
    file.write_bytes(b"".join(clusters))
