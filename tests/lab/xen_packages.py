"""Brine's packages on a Xen node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab.xen_node import XenNode

PARTS = ("common", "kvmd", "hotplug", "instance", "watcher")
"""What instances take; what that needs beside is there."""

_TIMEOUT_S = 900.0


def install(node: XenNode, packages: Iterable[Path]) -> None:
    """Install what instances take. No timer of it runs afterwards."""
    found = {path.name.partition("_")[0]: path for path in packages}
    files = []
    for part in PARTS:
        package = found[f"brine-{part}"]
        node.put(package, f"/srv/packages/{package.name}")
        files.append(f"/srv/packages/{package.name}")
    node.run(["dpkg", "--install", *files], timeout_s=_TIMEOUT_S)
    node.run(["systemctl", "stop", "brine-watcher.timer", "brine-tap-gc.timer"])
