"""A fleet under a Salt master, which the tests of a file share.

A file that wants it has ``from node.fleet_on_node import fleet as fleet``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.fleet import Fleet, boot_fleet
from lab.guest_image import guest_image
from node.instance_on_node import DISKS, GUEST


@pytest.fixture(scope="module")
def fleet(release: str, packages: list[Path]) -> Iterator[Fleet]:
    """Three nodes that know where the packages are, and have none; the first is the master's host.

    Each has a guest to boot, a bridge and a folder for disks.
    """
    with boot_fleet(release, packages) as fleet:
        for node in fleet.nodes:
            node.put(guest_image().folder, GUEST)
            node.shell(f"mkdir {DISKS}; ip link add br0 type bridge; ip link set br0 up")
        yield fleet
