"""The cluster that the demo declares, and how its operator has Salt make the nodes so."""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from demo.report import Score, highstate
from demo.terminal import Terminal
from lab.fleet import DOMAIN, address_of, boot_fleet
from lab.guest_image import KERNEL_OPTIONS, guest_image
from lab.node import Node, boot_node
from lab.progress import step
from lab.repository import publish
from lab.salt import PILLAR, StateResult, apply_state, give_states

INSTANCES = ("web1", "web2", "db1", "mail1")
BRIDGE, SECOND_BRIDGE = "br0", "br1"
SECOND_BRIDGE_IP = "203.0.113.1"
DECLARED = f"{PILLAR}/instances.sls"
UNIT = "/srv/vms"
"""Where disks are made, on each node."""

_BRIDGES = "bridges.service"
_BRIDGES_UNIT = f"""\
[Unit]
Before=network.target

[Service]
Type=oneshot
ExecStart=/bin/ip link add {BRIDGE} up type bridge
ExecStart=/bin/ip link add {SECOND_BRIDGE} up type bridge
ExecStart=/bin/ip address add {SECOND_BRIDGE_IP}/24 dev {SECOND_BRIDGE}

[Install]
WantedBy=multi-user.target
"""
_MEMORY_MIB = 128
_GUEST = "/srv/guest"
# A kernel and an initial RAM disk, without a disk; no node of the lab has KVM for sure.
_PARAMETERS = {
    "kvm_flag": "disabled",
    "kernel_path": f"{_GUEST}/kernel",
    "initrd_path": f"{_GUEST}/initramfs",
    "root_path": "",
    "kernel_args": KERNEL_OPTIONS,
}


@dataclass(frozen=True)
class Cluster:
    """Nodes, of which the first has the pillar and writes the configuration.

    `command` applies the states on all of them, and `apply` does that. `spread` is the command that
    gives the other nodes what the first one's configuration has for them; '' if there are none.
    """

    nodes: Sequence[Node]
    command: str
    apply: Callable[[], Mapping[str, Sequence[StateResult]]]
    spread: str = ""
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def operator(self) -> Terminal:
        """Where its operator types."""
        return Terminal(self.nodes[0])

    def node_of(self, instance: str) -> Node:
        """The node that is to run an instance, as pillar says."""
        home = self.instances[instance]["primary_node"]
        return next(node for node in self.nodes if whole_name(node) == home)

    def declare(self) -> None:
        """Write the pillar: what all nodes have, and the cluster for the one that writes it."""
        writer = self.nodes[0]
        top = {"*": ["brine"], f"{writer.name}*": ["cluster", "instances"]}
        everywhere = {
            "confd": {"key": secrets.token_hex(32)},
            "instance": {"enabled": True},
            "lifecycle": {"enabled": True},
            "moves": {"enabled": True},
            "storage": {"directories": [UNIT], "default_unit": UNIT},
        }
        cluster = {
            "config": {"apply": True},
            "cluster": {
                "name": f"demo.{DOMAIN}",
                "master": whole_name(writer),
                "enabled_hypervisors": ["kvm"],
                "hvparams": {"kvm": _PARAMETERS},
                "beparams": {"minmem": _MEMORY_MIB, "maxmem": _MEMORY_MIB},
                "nicparams": {"mode": "bridged", "link": BRIDGE},
            },
            "nodes": {whole_name(node): {"primary_ip": address_of(node)} for node in self.nodes},
        }
        for name, brine in (("brine", everywhere), ("cluster", cluster)):
            # JSON is YAML.
            writer.write(f"{PILLAR}/{name}.sls", json.dumps({"brine": brine}), mode=0o600)
        writer.write(f"{PILLAR}/top.sls", json.dumps({"base": top}))
        homes = cycle(self.nodes[1:] or self.nodes)
        for number, (name, node) in enumerate(zip(INSTANCES, homes, strict=False), start=11):
            nics = [{"ip": f"198.51.100.{number}"}]
            self.instances[name] = {"primary_node": whole_name(node), "nics": nics}
        writer.write(DECLARED, self._text())
        self.operator.type(f"cat {DECLARED}")

    def edit(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Change what the pillar says of instances, and show the difference."""
        before = self._text()
        for name, keys in changed.items():
            self.instances[name].update(keys)
        self.operator.node.write(DECLARED, self._text())
        self.operator.show(f"vi {DECLARED}")
        lines = difflib.unified_diff(before.splitlines(), self._text().splitlines(), n=0)
        print(*(line for line in lines if line[:3] not in ("---", "+++", "@@ ")), sep="\n")

    def highstate(self) -> Mapping[str, Sequence[StateResult]]:
        """Apply all states on all nodes, and show how many changed something."""
        self.operator.show(self.command)
        with step(self.command):
            answers = self.apply()
        print(highstate(answers), flush=True)
        return answers

    def bring_about(self) -> None:
        """Have the nodes be as a pillar that has changed says."""
        if not self.spread:
            self.highstate()
            return
        with step(self.spread):
            self.operator.type(self.spread, timeout_s=900)

    def ask(self) -> Score:
        """Ask on which node each instance runs; the question comes from the last node."""
        expected = {
            one["nics"][0]["ip"]: address_of(self.node_of(name))
            for name, one in self.instances.items()
        }
        query = f"brine confd query node-ip-of-instance-ip {' '.join(expected)}"
        said = Terminal(self.nodes[-1]).type(query, check=False)
        lines = [line.split() for line in said.splitlines()]
        right = sum([ip, node] in lines for ip, node in expected.items())
        return Score(right, len(expected), "answers to where an instance lives are right")

    def _text(self) -> str:
        lines = [f"    {name}: {_yaml(one)}\n" for name, one in self.instances.items()]
        return "".join(["brine:\n  instances:\n", *lines])


@contextmanager
def fleet(release: str, packages: Sequence[Path]) -> Iterator[Cluster]:
    """Three nodes under a Salt master, whose host is the first of them."""
    with ExitStack() as stack:
        with step("three nodes boot, with a Salt master on node1 and a minion on each"):
            booted = stack.enter_context(boot_fleet(release, packages, keeps_files=True))
        yield Cluster(
            booted.nodes, "salt '*' state.apply brine", booted.apply, "salt-run brine.redistribute"
        )


@contextmanager
def one_node(release: str, packages: Sequence[Path]) -> Iterator[Cluster]:
    """A node without a master."""
    with boot_node(release, name="node1") as node:
        publish(node, packages)
        give_states(node)
        node.run(["ip", "address", "add", f"{address_of(node)}/32", "dev", "lo"])
        apply = partial(apply_state, node)
        yield Cluster([node], "salt-call --local state.apply brine", lambda: {node.name: apply()})


def furnish(node: Node) -> None:
    """Give a node what its operator would: two bridges and a journal, which outlast a boot, and
    something to boot."""
    node.write(f"/etc/systemd/system/{_BRIDGES}", _BRIDGES_UNIT)
    node.run(["systemctl", "enable", "--now", _BRIDGES])
    node.shell("mkdir --parents /var/log/journal; journalctl --flush")
    node.put(guest_image().folder, _GUEST)


def whole_name(node: Node) -> str:
    """The name of a node in the configuration, which is its minion's id."""
    return f"{node.name}.{DOMAIN}"


def _yaml(value: Any) -> str:
    """YAML on one line, for people."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)
