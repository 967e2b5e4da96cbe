"""Nodes that tests share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.command import run_command
from lab.node import Node, boot_node
from lab.packages import build, build_packages
from lab.repository import publish
from lab.salt import wire
from lab.tree import clone

RELEASES = ["bookworm", "trixie"]


@pytest.fixture(scope="session")
def packages() -> list[Path]:
    """Brine's Debian packages, built from this tree."""
    return build_packages()


@pytest.fixture(scope="session")
def release_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a build as for a release: of the whole tree, with the source package.

    It is another time zone, language and umask than that of `packages`, and a longer path.
    """
    folder = tmp_path_factory.mktemp("a-folder-with-quite-another-name")
    umask = os.umask(0o027)
    try:
        elsewhere = {"LANG": "C", "LC_ALL": "POSIX", "TZ": "Pacific/Kiritimati"}
        build(clone(), folder, with_source=True, environment=elsewhere)
    finally:
        os.umask(umask)
    return folder


@pytest.fixture(scope="session")
def next_packages(packages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same packages with a higher version, as the next release would have."""
    return [_with_next_version(package, tmp_path_factory.mktemp("next")) for package in packages]


def _with_next_version(package: Path, folder: Path) -> Path:
    tree = folder / "tree"
    run_command(["dpkg-deb", "--raw-extract", package, tree])
    control = tree / "DEBIAN/control"
    version = run_command(["dpkg-deb", "--field", package, "Version"]).stdout.strip()
    control.write_text(re.sub(rf"\b{re.escape(version)}\b", f"{version}+next", control.read_text()))
    built = run_command(["dpkg-deb", "--root-owner-group", "--build", tree, folder]).stdout
    assert "+next" in built
    return next(folder.glob("*.deb"))


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each Debian release that Brine is for."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def node(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node that knows where the packages are, and has none."""
    with boot_node(release) as node:
        publish(node, packages)
        yield node


@pytest.fixture(scope="module")
def wired_node(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node on which Salt has installed Brine and set it up, with all defaults."""
    with boot_node(release) as node:
        wire(node, packages)
        yield node
