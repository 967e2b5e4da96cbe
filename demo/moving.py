"""An instance that moves to other nodes while its guest counts."""

from __future__ import annotations

from typing import NamedTuple

from demo.cluster import Cluster, whole_name
from demo.guest import Guest
from demo.report import Score
from demo.terminal import Terminal
from lab.errors import LabError
from lab.fleet import address_of
from lab.node import Node
from lab.progress import step

# Its number is in its memory alone.
_COUNT = "while i=$((i + 1)); do echo $i >/w && mv /w /counted; usleep 100000; done"
_LOOK = "cat /proc/sys/kernel/random/boot_id /counted"
_BOOT_ID = ["cat", "/proc/sys/kernel/random/boot_id"]
_MOVES_S = 900.0


class _Life(NamedTuple):
    """The boot of a guest, and how far it has counted since."""

    boot_id: str
    counted: int

    def goes_on_in(self, later: _Life) -> bool:
        return self.boot_id == later.boot_id and self.counted < later.counted


def begin_count(node: Node, name: str) -> None:
    """Have a guest count from now on."""
    Guest(node, name).run(f"echo 0 >/counted; ({_COUNT}) >/dev/null 2>&1 &")


def reboot(cluster: Cluster, name: str) -> list[Score]:
    """Reboot the node of an instance, whose guest counts; return what is right of that."""
    node = cluster.node_of(name)
    print(flush=True)
    before, boot_id = _look(node, name), node.run(_BOOT_ID).stdout
    command = f"salt-run brine.reboot {node.name}"
    with node.rebooting(timeout_s=_MOVES_S), step(command):
        cluster.operator.type(command, timeout_s=_MOVES_S)
    has_rebooted = node.run(_BOOT_ID).stdout != boot_id
    return [
        Score(int(has_rebooted), 1, "node has rebooted"),
        Score(int(_goes_on(before, node, name)), 1, "guest was elsewhere, and came home"),
    ]


def move(cluster: Cluster, name: str) -> list[Score]:
    """Move an instance, whose guest counts, and ask every node where it lives; return what is right
    of that."""
    source = cluster.node_of(name)
    target = next(one for one in cluster.nodes[1:] if one is not source)
    print(flush=True)
    before = _look(source, name)
    command = f"brine instance migrate {name} --to {target.name}"
    cluster.operator.type(command, timeout_s=_MOVES_S)
    cluster.edit({name: {"primary_node": whole_name(target)}})
    goes_on = _goes_on(before, target, name)
    ip = cluster.instances[name]["nics"][0]["ip"]
    query = f"brine confd query node-ip-of-instance-ip {ip}"
    said = [Terminal(node).type(query, check=False).strip() for node in cluster.nodes]
    return [
        Score(int(goes_on), 1, "guest has moved, and was not restarted"),
        Score(said.count(address_of(target)), len(said), "nodes know where it lives now"),
    ]


def _goes_on(before: _Life, node: Node, name: str) -> bool:
    """Whether a guest is on a node, and counts on."""
    try:
        return before.goes_on_in(_look(node, name))
    except LabError as error:
        print(error, flush=True)
        return False


def _look(node: Node, name: str) -> _Life:
    """Show a guest's boot and count."""
    boot_id, count = Guest(node, name).run(_LOOK).split()
    print(f"{name} on {node.name} has counted to {count} since its boot {boot_id}", flush=True)
    return _Life(boot_id, int(count))
