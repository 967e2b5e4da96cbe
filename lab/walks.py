"""The walks of two commands, measured on a throw-away node with the packages installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.debian import host_release
from lab.node import Node, boot_node
from lab.packages import build_packages
from lab.repository import publish

_WALK = Path(__file__).with_name("walk.py")
_SPEC = {"name": "web1", "accel": "tcg", "memory_mib": 128, "extra_arguments": ["-S"]}
_COMMANDS = (("instance", "start", "web1"), ("nic", "add", "web1", "--link", "br0"))


def walks() -> dict[str, dict[str, Any]]:
    """The walks of a start and of a plug, each as :mod:`lab.walk` has it, by command."""
    with boot_node(host_release()) as node:
        publish(node, build_packages())
        node.run(["apt-get", "install", "--yes", "--quiet=2", "brine-instance"], timeout_s=300)
        node.shell("ip link add br0 type bridge; ip link set br0 up")
        node.run(["brine", "instance", "define", "-"], stdin=json.dumps(_SPEC))
        return {" ".join(words): walk(node, *words) for words in _COMMANDS}


def walk(node: Node, *arguments: str) -> dict[str, Any]:
    """Run a command of Brine's on a node, and return its walk."""
    done = node.run(["python3", "-", *arguments], stdin=_WALK.read_text())
    facts: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return facts
