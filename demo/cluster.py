"""The cluster that the demo declares, and what its configuration daemon says of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from demo.endings import ENDINGS
from lab.node import Node

NODE_IP = "192.0.2.1"
INSTANCE_IPS = {
    one.instance: f"198.51.100.{number}" for number, one in enumerate(ENDINGS, start=11)
}


@dataclass(frozen=True)
class Answers:
    """What was asked, what was said, and whether all of it is right."""

    command: str
    said: str

    @property
    def right(self) -> int:
        """How many instances were found on the node that they are on."""
        said = [line.split() for line in self.said.splitlines()]
        return sum([ip, NODE_IP] in said for ip in INSTANCE_IPS.values())


def pillar() -> dict[str, Any]:
    """What Salt is told of the node: a key, and a cluster of this node and the demo's instances."""
    return {
        "confd": {"key": secrets.token_hex(32)},
        "config": {"apply": True},
        "cluster": {"name": "demo.example.com", "master": "node1.example.com"},
        "nodes": {"node1.example.com": {"primary_ip": NODE_IP}},
        "instances": {
            name: {"primary_node": "node1.example.com", "nics": [{"ip": ip}]}
            for name, ip in INSTANCE_IPS.items()
        },
    }


def ask(node: Node) -> Answers:
    """Ask the daemon on which node each instance is, over the network that it would be asked by."""
    # The node has no network but its own.
    node.run(["ip", "address", "add", f"{NODE_IP}/32", "dev", "lo"])
    command = ["brine", "confd", "query", "node-ip-of-instance-ip", *INSTANCE_IPS.values()]
    done = node.run(command, check=False)
    return Answers(" ".join(command), done.stdout + done.stderr)
