"""Xen nodes that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.packages import build_packages
from lab.xen_node import XenNode, boot_xen_node
from xen.instances_on_xen import ONE_AT_A_TIME, leave_nothing

_PARTS = ("common", "kvmd", "hotplug", "instance", "watcher")
_INSTALL_TIMEOUT_S = 900.0


@pytest.fixture(scope="session", params=["bookworm", "trixie"])
def release(request: pytest.FixtureRequest) -> str:
    """Each Debian release whose Xen Brine is for."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def xen_node(release: str) -> Iterator[XenNode]:
    """A node for one module, fresh."""
    with boot_xen_node(release) as node:
        yield node


@pytest.fixture
def no_domains(xen_node: XenNode) -> Iterator[None]:
    """Leave no domain behind."""
    yield
    xen_node.shell("xl list | awk 'NR > 1 && $2 > 0 { print $2 }' | xargs -r -n 1 xl destroy")


@pytest.fixture(scope="module")
def brine_node(release: str) -> Iterator[XenNode]:
    """A node with Brine's packages, for one module. No timer of theirs runs."""
    with boot_xen_node(release) as node:
        install(node, build_packages())
        yield node


@pytest.fixture
def no_instances(brine_node: XenNode) -> Iterator[None]:
    """Leave no instance and no domain behind."""
    yield
    leave_nothing(brine_node)


def install(node: XenNode, packages: list[Path]) -> None:
    """Install what instances take; what it needs beside is there."""
    files = []
    for part in _PARTS:
        (package,) = (path for path in packages if path.name.startswith(f"brine-{part}_"))
        node.put(package, f"/srv/packages/{package.name}")
        files.append(f"/srv/packages/{package.name}")
    node.run(["dpkg", "--install", *files], timeout_s=_INSTALL_TIMEOUT_S)
    node.run(["systemctl", "stop", "brine-watcher.timer", "brine-tap-gc.timer"])
    # xl and systemctl give up where several make domains at once on an emulated processor.
    node.write("/etc/brine/instance.toml", "parallel_starts = 1\n")
    node.write("/etc/brine/watcher.toml", ONE_AT_A_TIME)
