"""Nodes with hotplug installed, for the stories that component tests tell of the source tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from component.hotplug_vm import give_network
from lab.node import Node, boot_node
from lab.repository import publish


@contextmanager
def node_with_hotplug(release: str, packages: Iterable[Path], images: Path) -> Iterator[Node]:
    """A node that has brine-hotplug, two bridges, and the host's folder `images`."""
    with boot_node(release, bind=[images]) as node:
        publish(node, packages)
        node.run(["apt-get", "install", "--yes", "--quiet=2", "brine-hotplug"], timeout_s=120)
        # Each story says itself when leftovers are looked for.
        node.run(["systemctl", "stop", "brine-tap-gc.timer"])
        give_network(node)
        yield node
