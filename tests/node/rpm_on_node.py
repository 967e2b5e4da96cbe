"""Nodes with rpm and dnf, and what tests ask of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.command import CommandError
from lab.fedora import dnf_image
from lab.node import Node, boot_node
from lab.rpm_packages import publish_rpms


@contextmanager
def node_with_rpms(release: str, rpms: Path) -> Iterator[Node]:
    """A node that knows a repository of RPMs, and has nothing of it."""
    with boot_node(release, image=dnf_image) as node:
        publish_rpms(node, rpms)
        yield node


def dnf(node: Node, *args: str) -> str:
    """Have dnf do something without questions, and return what it said."""
    done = node.run(["dnf", "--assumeyes", *args], timeout_s=300)
    return done.stdout + done.stderr


def refused(node: Node, *args: str) -> str:
    """dnf's output when it refuses to do something."""
    with pytest.raises(CommandError) as failed:
        dnf(node, *args)
    return failed.value.stdout + failed.value.stderr


def installed(node: Node) -> dict[str, str]:
    """The packages of Brine that a node has, by name, and the release of each."""
    query = ["rpm", "--query", "--all", "--queryformat", "%{NAME} %{RELEASE}\n", "brine*"]
    return dict(line.split() for line in sorted(node.run(query).stdout.splitlines()))
