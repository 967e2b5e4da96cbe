"""The cluster that the demo declares, and what its configuration daemon says of it."""

from __future__ import annotations

import secrets
from typing import Any

from demo.endings import ENDINGS
from demo.report import Score
from demo.terminal import Terminal
from lab.guest_image import guest_image
from lab.node import Node

NODE_IP = "192.0.2.1"
INSTANCE_IPS = {
    one.instance: f"198.51.100.{number}" for number, one in enumerate(ENDINGS, start=11)
}
BRIDGE = "br0"
MEMORY_MIB = 128

_GUEST = "/srv/guest"
# A kernel and an initial RAM disk, without a disk; no node of the lab has KVM for sure.
_PARAMETERS = {
    "kvm_flag": "disabled",
    "kernel_path": f"{_GUEST}/kernel",
    "initrd_path": f"{_GUEST}/initramfs",
    "root_path": "",
    "kernel_args": "panic=-1 quiet",
}


def pillar() -> dict[str, Any]:
    """What Salt is told of the node: a key, and a cluster of this node and the demo's instances."""
    return {
        "confd": {"key": secrets.token_hex(32)},
        "config": {"apply": True},
        "instance": {"enabled": True},
        "lifecycle": {"enabled": True},
        # It would bring back what the demo wants to show first.
        "watcher": {"timer": False},
        "cluster": {
            "name": "demo.example.com",
            "master": "node1.example.com",
            "enabled_hypervisors": ["kvm"],
            "hvparams": {"kvm": _PARAMETERS},
            "beparams": {"minmem": MEMORY_MIB, "maxmem": MEMORY_MIB},
            "nicparams": {"mode": "bridged", "link": BRIDGE},
        },
        "nodes": {"node1.example.com": {"primary_ip": NODE_IP}},
        "instances": {
            name: {"primary_node": "node1.example.com", "nics": [{"ip": ip}]}
            for name, ip in INSTANCE_IPS.items()
        },
    }


def furnish(node: Node) -> None:
    """Give a node what its operator would: its address, a bridge, and something to boot."""
    # The node has no network but its own.
    node.run(["ip", "address", "add", f"{NODE_IP}/32", "dev", "lo"])
    node.run(["ip", "link", "add", BRIDGE, "up", "type", "bridge"])
    node.put(guest_image().folder, _GUEST)


def ask(terminal: Terminal) -> Score:
    """Ask the daemon on which node each instance is, over the network that it would be asked by."""
    addresses = " ".join(INSTANCE_IPS.values())
    said = terminal.type(f"brine confd query node-ip-of-instance-ip {addresses}", check=False)
    lines = [line.split() for line in said.splitlines()]
    right = sum([ip, NODE_IP] in lines for ip in INSTANCE_IPS.values())
    return Score(right, len(INSTANCE_IPS), "answers to where an instance lives are right")
