"""The signed repository of Brine's packages, as README has apt use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.node import Node, boot_node
from lab.packages import DIST

REPOSITORY = "/srv/brine"
SOURCE = "/etc/apt/sources.list.d/brine.list"
LINE = f"deb [signed-by={REPOSITORY}/brine.asc] file:{REPOSITORY} ./\n"
DEBIANS_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"


@pytest.fixture(scope="module")
def shared_node(release: str, packages: list[Path]) -> Iterator[Node]:
    """A node without packages of Brine's."""
    assert packages
    with boot_node(release) as node:
        yield node


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """A node that has a copy of dist/, and has not read it yet."""
    shared_node.put(DIST, REPOSITORY)
    shared_node.write(SOURCE, LINE)
    yield shared_node
    shared_node.shell(f"rm -r {REPOSITORY} {SOURCE}; apt-get update")


def change_a_byte(node: Node, file: str, at: str) -> None:
    """Change one byte of a file of the repository, after the text `at`."""
    path = node.path(f"{REPOSITORY}/{file}")
    content = bytearray(path.read_bytes())
    content[content.index(at.encode()) + len(at)] ^= 1
    path.write_bytes(content)


def refused(node: Node, *args: str) -> str:
    """apt's output when it refuses."""
    done = node.run(["apt-get", "--yes", *args], check=False)
    assert done.returncode != 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.both_releases
def test_apt_installs_from_it(node: Node) -> None:
    done = node.run(["apt-get", "update"])
    assert "W:" not in done.stdout + done.stderr
    node.run(["apt-get", "install", "--yes", "brine-config"])
    assert "brine config" in node.run(["brine", "config", "--help"]).stdout
    node.run(["apt-get", "purge", "--yes", "brine-common"])


@pytest.mark.both_releases
@pytest.mark.parametrize(
    ("file", "at", "said"),
    [("InRelease", "Label: ", "not signed"), ("Packages", "Architecture: ", "Hash Sum mismatch")],
)
def test_an_index_with_a_changed_byte_is_refused(node: Node, file: str, at: str, said: str) -> None:
    change_a_byte(node, file, at)
    assert said in refused(node, "update")
    assert "Unable to locate package brine-config" in refused(node, "install", "brine-config")


@pytest.mark.both_releases
def test_a_package_with_a_changed_byte_is_refused(node: Node) -> None:
    node.run(["apt-get", "update"])
    (package,) = node.path(REPOSITORY).glob("brine-config_*.deb")
    change_a_byte(node, package.name, "data.tar")
    assert "Hash Sum mismatch" in refused(node, "install", "brine-config")
    assert not node.path("/usr/bin/brine").exists()


@pytest.mark.both_releases
def test_a_repository_with_another_key_is_refused(node: Node) -> None:
    node.write(SOURCE, LINE.replace(f"{REPOSITORY}/brine.asc", DEBIANS_KEY))
    assert "not signed" in refused(node, "update")
