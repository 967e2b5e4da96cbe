"""The Salt states on a node that has no minion, by salt-ssh from another host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lab.debian import host_release
from lab.images import node_image
from lab.network import bridge, give_addresses
from lab.node import Node, boot_node
from lab.peer_packages import archives
from lab.repository import publish
from lab.salt import PILLAR, STATES, state_results
from lab.tree import TREE
from node.instance_on_node import IDLE, info

KEY = "/srv/ssh/id_ed25519"
NODE = "node2.example.com"
ROSTER = {NODE: {"host": "192.0.2.2", "user": "root", "priv": KEY}}
MASTER = {"file_roots": {"base": [STATES]}, "pillar_roots": {"base": [PILLAR]}}
WEB1 = {"accel": "tcg", "memory_mib": 64, "admin_state": "up", "nics": [{"link": "br0"}], **IDLE}


@pytest.fixture(scope="module")
def nodes(packages: list[Path]) -> Iterator[tuple[Node, Node]]:
    """A host with salt-ssh, and a node that it may log in to. Both know where the packages are."""
    release = host_release()
    tree = node_image(release)
    # Fetched with this machine's own apt; the nodes have no way to a mirror.
    ssh = archives(
        ["openssh-server", "openssh-client"], tree / "var/lib/dpkg/status", tree.parent.name
    )
    with ExitStack() as stack:
        network = stack.enter_context(bridge())
        host, node = (
            stack.enter_context(boot_node(release, name=name, network_bridge=network))
            for name in ("node1", "node2")
        )
        for each, number, wanted in ((host, 1, "openssh-client"), (node, 2, "openssh-server")):
            give_addresses(each, f"192.0.2.{number}/24")
            publish(each, [*ssh, *packages])
            each.run(["apt-get", "install", "--yes", "--quiet=2", wanted], timeout_s=300)
        host.shell(f"install -d -m 700 $(dirname {KEY}); ssh-keygen -q -t ed25519 -N '' -f {KEY}")
        authorize = "umask 077; mkdir -p ~/.ssh; cat >~/.ssh/authorized_keys"
        node.run(["sh", "-c", authorize], stdin=host.read(f"{KEY}.pub"))
        node.shell("ip link add br0 type bridge; ip link set br0 up")
        host.put(TREE / "salt/states", STATES)
        # JSON is YAML.
        host.write("/etc/salt/master", json.dumps(MASTER))
        host.write("/etc/salt/roster", json.dumps(ROSTER))
        host.write(f"{PILLAR}/top.sls", json.dumps({"base": {"*": ["brine"]}}))
        yield host, node


def changes(host: Node, instances: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Apply the states to the node with these instances in pillar, and return what changed."""
    brine = {"instance": {"instances": instances}}
    host.write(f"{PILLAR}/brine.sls", json.dumps({"brine": brine}))
    command = ["salt-ssh", "--ignore-host-keys", "--out=json", "--log-level=error"]
    done = host.run([*command, NODE, "state.apply", "brine"], check=False, timeout_s=1800)
    try:
        answer = json.loads(done.stdout)[NODE]
    except (ValueError, KeyError):
        answer = [done.stdout, done.stderr]
    return {one.name: one.changes for one in state_results(answer, NODE, "brine") if one.changes}


@pytest.mark.long
def test_the_first_run_starts_an_instance_and_the_second_changes_nothing(
    nodes: tuple[Node, Node],
) -> None:
    host, node = nodes
    done = changes(host, {"web1": WEB1})
    assert done["web1"]["web1"]["new"] == "running"
    assert info(node, "web1")["status"] == "running"
    assert changes(host, {"web1": WEB1}) == {}
