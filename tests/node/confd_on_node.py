"""A cluster with configuration daemons on nodes, and what tests ask about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.node import Node
from lab.repository import publish
from lab.waiting import wait_for

SERVICE = "brine-confd.service"
CONFIG = "/var/lib/brine/config.data"
KEY_FILE = "/etc/brine/hmac.key"
PREVIOUS_KEY_FILE = "/etc/brine/hmac.key.previous"

KEY = "6b6579206f6e65\n"
OTHER_KEY = "6b65792074776f\n"

NODES = {"node1": "192.0.2.1", "node2": "192.0.2.2", "node3": "192.0.2.3"}
WEB1, DB1 = "198.51.100.7", "198.51.100.8"


def declared(**instances: str) -> dict[str, Any]:
    """Three nodes, the first two of them candidates, and two instances. They are down, and so may
    move.

    `instances` are the nodes that instances are on, where that is not node1.
    """
    homes = {"web1": "node1", "db1": "node2", **instances}
    return {
        "cluster": {"name": "lab.example.com", "master": "node1.example.com"},
        "nodes": {
            f"{name}.example.com": {"primary_ip": ip, "master_candidate": name != "node3"}
            for name, ip in NODES.items()
        },
        "instances": {
            f"{name}.example.com": {
                "primary_node": f"{homes[name]}.example.com",
                "admin_state": "down",
                "nics": [nic],
            }
            for name, nic in {"web1": {"ip": WEB1}, "db1": {"ip": DB1}}.items()
        },
    }


def install_confd(node: Node, packages: Sequence[Path]) -> None:
    """Have apt install the daemon."""
    publish(node, packages)
    upgrade_confd(node)


def upgrade_confd(node: Node) -> None:
    """Have apt install the daemon's newest version that it knows."""
    apt = ["apt-get", "--yes", "--quiet=2", "install", "brine-common", "brine-confd"]
    node.run(["env", "DEBIAN_FRONTEND=noninteractive", *apt])


def apply(node: Node, what: Mapping[str, Any]) -> None:
    """Have the node's configuration be as declared, and its values for every node written."""
    node.run(["brine", "config", "apply", "-"], stdin=json.dumps(what))
    node.run(["brine", "config", "export-ssconf", "/var/lib/brine/ssconf"])


def start_confd(node: Node, key: str = KEY) -> None:
    """Start the daemon, or start it anew, with a key."""
    node.write(KEY_FILE, key, mode=0o600)
    node.path(PREVIOUS_KEY_FILE).unlink(missing_ok=True)
    node.run(["systemctl", "restart", SERVICE])


def wait_serial(node: Node, serial: int | None = None) -> None:
    """Wait until the daemon answers from the configuration that the node has now."""
    serial = serial or json.loads(node.read(CONFIG))["cluster"]["serial_no"]
    wait_for(f"serial {serial}", lambda: f"serial {serial}:" in status(node))


def status(node: Node) -> str:
    """The daemon's line in systemctl status."""
    return _show(node, "StatusText")


def confd_pid(node: Node) -> int:
    """The main process, as the node numbers it; 0 while there is none."""
    return int(_show(node, "MainPID"))


def wait_another(node: Node, pid: int) -> None:
    """Wait until a main process other than this one answers."""

    def answers() -> bool:
        return confd_pid(node) not in (0, pid) and _show(node, "ActiveState") == "active"

    wait_for("another daemon", answers, timeout_s=60)


def workers(node: Node) -> set[int]:
    """The processes that answer."""
    listed = node.run(["pgrep", "--parent", str(confd_pid(node))], check=False).stdout
    return {int(pid) for pid in listed.split()}


def _show(node: Node, what: str) -> str:
    command = ["systemctl", "show", f"--property={what}", "--value", SERVICE]
    return node.run(command).stdout.strip()


def ask(node: Node, *arguments: str) -> dict[str, Any]:
    """The output of `brine confd query ... --json` on a node, with its exit status as `exit`."""
    done = node.run(["brine", "confd", "query", *arguments, "--json"], check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "exit": done.returncode}


def home_of(node: Node, instance_ip: str, *arguments: str) -> Any:
    """On which node an instance is, by `brine confd query` on a node."""
    return ask(node, "node-ip-of-instance-ip", instance_ip, *arguments)["answer"]
