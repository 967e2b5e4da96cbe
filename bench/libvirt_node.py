"""A node with libvirt, Brine's packages, and files that a guest boots from.

libvirt's packages are fetched with the machine's own apt; they are installed in the node alone.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import packages
from bench.measuring import CODE, measure
from lab.debian import host_release
from lab.guest_image import guest_image
from lab.images import node_image
from lab.machine import Machine
from lab.node import boot_node
from lab.packages import build_packages
from lab.progress import step
from lab.tree import TREE

BRIDGE = "br0"
IMAGES = "/var/lib/bench"
"""A folder for images of disks."""
GUEST = "/run/brine-lab"
"""Where the kernel and the initramfs are."""

_PEER = "libvirt-daemon-system"
_PEERS = (_PEER, "libvirt-daemon-driver-qemu", "libvirt-clients")
_DEBS = "/srv/packages"

_PREPARE = f"""
dpkg --force-unsafe-io --install {_DEBS}/*.deb
systemctl start libvirtd.service
install --directory {IMAGES}
ip link add {BRIDGE} type bridge
ip link set {BRIDGE} up
"""


@dataclass(frozen=True)
class Versions:
    """What the node has."""

    libvirt: str
    qemu: str
    system: str
    python: str


@dataclass(frozen=True)
class LibvirtNode:
    """The node, and what it has."""

    node: Machine
    versions: Versions

    def measure(self, module: str, plan: Any) -> dict[str, Any]:
        """Run a module of the bench in the node; returns what it writes, which is JSON.

        :param plan: a dataclass; the module's one argument, as JSON.
        :raises BenchError: if it fails.
        """
        return measure(self.node, module, plan)


@contextlib.contextmanager
def libvirt_node(ours: Sequence[str]) -> Iterator[LibvirtNode]:
    """The node, in which libvirt's daemon runs; gone when the block ends.

    :param ours: the packages of Brine's that it has.
    """
    release = host_release()
    debs = [path for path in build_packages() if path.name.partition("_")[0] in ours]
    tree = node_image(release)
    peers = packages.archives(_PEERS, tree / "var/lib/dpkg/status", tree.parent.name)
    image = guest_image()
    with boot_node(release, name="bench") as node:
        with step("installing libvirt and Brine in a node"):
            for archive in [*debs, *peers]:
                node.put(archive, f"{_DEBS}/{archive.name}")
            node.put(image.folder, GUEST)
            node.put(TREE / "bench", f"{CODE}/bench")
            node.shell(_PREPARE, timeout_s=300)
        versions = Versions(
            libvirt=f"libvirt {packages.version(_PEER)}",
            qemu=f"QEMU {_version(node, 'qemu-system-x86')}",
            system=_said(node, '. /etc/os-release; echo "$PRETTY_NAME"'),
            python=_said(node, "/usr/bin/python3 --version"),
        )
        yield LibvirtNode(node, versions)


def _version(node: Machine, package: str) -> str:
    return _said(node, f"dpkg-query --show --showformat='${{Version}}' {package}")


def _said(node: Machine, script: str) -> str:
    return node.shell(script).strip()
