"""apt on a node."""

from __future__ import annotations

from lab.node import Node


def apt(node: Node, *args: str) -> str:
    """Have apt do something without questions, and return what it said."""
    apt_get = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes", "--quiet=2"]
    done = node.run([*apt_get, *args], timeout_s=300)
    return done.stdout + done.stderr
