"""The throw-away nodes of benchmarks, with Brine's packages, and with libvirt beside them."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import libvirt
from lab import peer_packages
from lab.debian import host_release
from lab.guest_image import guest_image
from lab.images import node_image
from lab.node import Node, boot_node
from lab.packages import build_packages
from lab.progress import step
from lab.repository import publish


class Wanted(NamedTuple):
    """What a node gets: packages by their names, and archives in which they are."""

    archives: Sequence[Path]
    packages: Sequence[str]
    with_libvirt: bool


def wanted(packages: Sequence[str], *, needs: Sequence[str] = (), with_libvirt: bool) -> Wanted:
    """Build packages of Brine's, and fetch Debian's with this machine's own apt: a node has no
    network.

    :param needs: of Debian's, beside those.
    :param with_libvirt: and what guests of both boot.
    """
    archives, names = build_packages(), [*packages]
    tree = node_image(host_release())
    status = tree / "var/lib/dpkg/status"
    for others in (libvirt.PACKAGES if with_libvirt else (), needs):
        if others:
            archives += peer_packages.archives(others, status, tree.parent.name)
            names += others
    return Wanted(archives, names, with_libvirt)


def install(node: Node, wanted: Wanted) -> None:
    """Install in a node."""
    with step(f"installing {', '.join(wanted.packages)} in {node.name}"):
        publish(node, wanted.archives)
        command = ["apt-get", "install", "--yes", "--quiet=2", *wanted.packages]
        node.run(command, timeout_s=300)
        if wanted.with_libvirt:
            node.put(guest_image().folder, libvirt.GUEST)


@contextlib.contextmanager
def node_with(
    packages: Sequence[str], *, needs: Sequence[str] = (), with_libvirt: bool
) -> Iterator[Node]:
    """A throw-away node with packages; see :func:`wanted`."""
    found = wanted(packages, needs=needs, with_libvirt=with_libvirt)
    with boot_node(host_release(), name="bench") as node:
        install(node, found)
        yield node
