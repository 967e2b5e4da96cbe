"""Nodes that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.node import Node, boot_node
from lab.packages import build_packages
from lab.salt import wire

RELEASES = ["bookworm", "trixie"]


@pytest.fixture(scope="session")
def packages() -> list[Path]:
    """Brine's Debian packages, built from this tree."""
    return build_packages()


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each Debian release that Brine is for."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def wired_node(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node on which Salt has installed Brine and set it up, with all defaults."""
    with boot_node(release) as node:
        wire(node, packages)
        yield node
