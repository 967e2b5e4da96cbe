"""Xen nodes that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.packages import build_packages
from lab.xen_node import XenNode, boot_xen_node
from lab.xen_packages import install
from xen.instances_on_xen import SLOW_NODE, leave_nothing


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
def node(release: str) -> Iterator[XenNode]:
    """A node with Brine's packages, for one module. No timer of theirs runs."""
    with boot_xen_node(release) as node:
        install(node, release, build_packages())
        # xl and systemctl give up where several make domains at once on an emulated processor.
        node.write("/etc/brine/instance.toml", "parallel_starts = 1\n")
        node.write("/etc/brine/watcher.toml", SLOW_NODE)
        yield node


@pytest.fixture
def no_instances(node: XenNode) -> Iterator[None]:
    """Leave no instance and no domain behind."""
    yield
    leave_nothing(node)
