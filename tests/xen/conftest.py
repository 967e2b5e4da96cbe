"""Xen nodes that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.xen_node import XenNode, boot_xen_node


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
