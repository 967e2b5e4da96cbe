"""Nodes under one Salt master, as an operator's fleet is: the first node is the master's host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.network import bridge, give_addresses
from lab.node import Node, boot_nodes
from lab.repository import publish
from lab.salt import PILLAR, STATES, StateResult, state_results
from lab.tree import TREE
from lab.waiting import wait_for

DOMAIN = "example.com"

_START_TIMEOUT_S = 300.0
_RUN_TIMEOUT_S = 900.0
# After this long the master asks the minions whether they are still at it, and gives them ten
# seconds to say so, which may be too few where the machine is loaded.
_ASK_AGAIN_S = 300
_PUBLISH_PORT = 4505

_UNIT = """\
[Unit]
Description=salt-{0}

[Service]
Type=notify
NotifyAccess=all
# As Salt's own packages have it: a job outlives a restart of its minion.
KillMode={1}
LimitNOFILE=100000
TimeoutStartSec=300
ExecStart=/usr/local/bin/salt-{0}

[Install]
WantedBy=multi-user.target
"""

_NETWORK = """\
[Service]
Type=oneshot
ExecStart=/bin/ip address replace {address}/24 dev host0
ExecStart=/bin/ip link set host0 up

[Install]
WantedBy=multi-user.target
"""


def address_of(node: Node) -> str:
    """The address of a fleet's node, by its name."""
    return f"192.0.2.{node.name.removeprefix('node')}"


class Fleet:
    """A Salt master and its minions.

    A minion's id is its node's whole name, such as ``node1.example.com``.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.master = self.nodes[0]

    def id_of(self, node: Node) -> str:
        """The minion id of a node."""
        return f"{node.name}.{DOMAIN}"

    def pillar(self, pillar: Mapping[str, Any] | None = None, /, **of: Mapping[str, Any]) -> None:
        """Replace the pillar: what all minions have, and besides that what single nodes have, by
        their short names. Where two have the same key, they are merged."""
        parts = {"*": pillar or {}, **{f"{name}.{DOMAIN}": each for name, each in of.items()}}
        top: dict[str, list[str]] = {}
        for number, (target, part) in enumerate(parts.items()):
            # JSON is YAML.
            self.master.write(f"{PILLAR}/part{number}.sls", json.dumps(part, indent=2), mode=0o600)
            top[target] = [f"part{number}"]
        self.master.write(f"{PILLAR}/top.sls", json.dumps({"base": top}, indent=2))
        self.call("saltutil.refresh_pillar", "wait=True", "timeout=120")

    def apply(
        self, state: str = "brine", *, nodes: Sequence[Node] | None = None, test: bool = False
    ) -> dict[str, list[StateResult]]:
        """Apply a state on some nodes, else on all, by the master; the results in order, by minion
        id. A node that is just applying states, as a redistribution has it do, is waited for.

        Raises LabError when a state fails, or a minion does not answer.
        """
        said: dict[str, Any] = {}
        left = [*(self.nodes if nodes is None else nodes)]
        ids = [self.id_of(node) for node in left]

        def all_have() -> bool:
            said.update(self.call("state.apply", state, f"test={test}", nodes=left))
            left[:] = [node for node in left if is_busy(said[self.id_of(node)])]
            return not left

        def is_busy(answer: Any) -> bool:
            return isinstance(answer, list) and "is running as PID" in str(answer)

        wait_for(f"{state} to be applied", all_have, timeout_s=_RUN_TIMEOUT_S, interval_s=1)
        return {minion: state_results(said[minion], minion, state) for minion in ids}

    def call(
        self, function: str, *arguments: str, nodes: Sequence[Node] | None = None
    ) -> dict[str, Any]:
        """Call a function of Salt on some nodes, else on all; returns the results by minion id.

        Raises LabError when a minion does not answer.
        """
        ids = [self.id_of(node) for node in (self.nodes if nodes is None else nodes)]
        command = ["salt", "--out=json", "--static", "--log-level=warning"]
        command += [f"--timeout={_ASK_AGAIN_S}", "--list", ",".join(ids), function, *arguments]
        # Salt's exit status is not 0 where a state failed, and then its output says more.
        done = self.master.run(command, check=False, timeout_s=_RUN_TIMEOUT_S)
        try:
            said = json.loads(done.stdout)
        except ValueError:
            said = {}
        if silent := [minion for minion in ids if minion not in said]:
            output = f"{done.stdout}{done.stderr}"
            raise LabError(f"salt {function}: no answer from {', '.join(silent)}\n{output}")
        return {minion: said[minion] for minion in ids}

    def run(self, function: str, *arguments: str, check: bool = True) -> Any:
        """`salt-run FUNCTION ...` on the master: what it returned."""
        command = ["salt-run", "--out=json", "--log-level=warning", function, *arguments]
        done = self.master.run(command, check=check, timeout_s=_RUN_TIMEOUT_S)
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise LabError(
                f"salt-run {function} printed no JSON\n{done.stdout}{done.stderr}"
            ) from None

    def wait_answering(self, nodes: Iterable[Node] | None = None) -> None:
        """Wait until the minions of nodes, else of all, answer their master."""
        wanted = {self.id_of(node): address_of(node) for node in nodes or self.nodes}

        def all_answer() -> bool:
            # A minion that has not subscribed misses the question, and the answer is waited for.
            if not {*wanted.values()} <= self._subscribers():
                return False
            command = ["salt", "--out=json", "--static", "--timeout=5"]
            command += ["--list", ",".join(wanted), "test.ping"]
            done = self.master.run(command, check=False, timeout_s=_START_TIMEOUT_S)
            said: dict[str, Any] = json.loads(done.stdout or "{}")
            return wanted.keys() <= {minion for minion, answer in said.items() if answer is True}

        wait_for("the minions to answer", all_answer, timeout_s=_START_TIMEOUT_S, interval_s=0.1)

    @contextmanager
    def silent(self, node: Node) -> Iterator[None]:
        """Have a node's minion be away meanwhile, as one is that was killed."""
        # Asked to stop, it waits for five seconds whether it has something left to send.
        node.run(["systemctl", "kill", "--signal=KILL", "salt-minion"])
        node.run(["systemctl", "stop", "salt-minion"])
        try:
            yield
        finally:
            node.run(["systemctl", "start", "salt-minion"], timeout_s=_START_TIMEOUT_S)
        self.wait_answering([node])

    def _subscribers(self) -> set[str]:
        """The addresses of those that hear what the master publishes."""
        connections = ["ss", "--no-header", "--numeric", "--tcp", "state", "established"]
        lines = self.master.run([*connections, f"sport = :{_PUBLISH_PORT}"]).stdout.splitlines()
        return {line.split()[-1].rpartition(":")[0] for line in lines}


@contextmanager
def boot_fleet(
    release: str, packages: Iterable[Path], *, count: int = 3, keeps_files: bool = False
) -> Iterator[Fleet]:
    """Nodes node1, node2, ... in one network, each with a package repository of its own; Salt's
    master on the first, and a minion on each, all of which answer. Gone with the context.

    The master serves the tree's Salt states as they are now, and has its runner, external pillar
    and reactor. The pillar is empty. With `keeps_files` a node that reboots joins again.
    """
    packages = list(packages)
    names = [f"node{number}" for number in range(1, count + 1)]
    with (
        bridge() as network,
        boot_nodes(release, names, network_bridge=network, keeps_files=keeps_files) as nodes,
    ):
        known = "".join(f"{address_of(one)} {one.name}.{DOMAIN} {one.name}\n" for one in nodes)
        for node in nodes:
            give_addresses(node, f"{address_of(node)}/24")
            unit = _NETWORK.format(address=address_of(node))
            node.write("/etc/systemd/system/lab-network.service", unit)
            node.write("/etc/hosts", f"127.0.0.1 localhost\n{known}")
        fleet = Fleet(nodes)
        _set_up_master(fleet.master)

        def join(node: Node) -> None:
            minion = {"id": fleet.id_of(node), "master": address_of(fleet.master)}
            node.write("/etc/salt/minion.d/lab.conf", json.dumps(minion, indent=2))
            _start(node, "minion", kill_mode="process")
            # While the minion loads.
            publish(node, packages)

        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(join, nodes))
        fleet.wait_answering()
        yield fleet


def _set_up_master(node: Node) -> None:
    """Start a master that serves the tree's states and accepts every minion."""
    states = TREE / "salt/states"
    node.put(states, STATES)
    master: dict[str, Any] = {
        "interface": address_of(node),
        "auto_accept": True,
        "worker_threads": 3,
        "file_roots": {"base": [STATES]},
        "pillar_roots": {"base": [PILLAR]},
        # Runners and external pillars of the tree, without a copy that could be an older one.
        "module_dirs": [STATES],
    }
    if (states / "_pillar/brine.py").exists():
        master["ext_pillar"] = [{"brine": {}}]
    if (states / "brine/reactor").exists():
        reactor = "salt://brine/reactor"
        master["reactor"] = [
            {"salt/beacon/*/brine/": [f"{reactor}/recorded.sls"]},
            {"brine/config/changed": [f"{reactor}/changed.sls"]},
        ]
    node.write("/etc/salt/master.d/lab.conf", json.dumps(master, indent=2))
    node.write(f"{PILLAR}/top.sls", json.dumps({"base": {}}))
    _start(node, "master", kill_mode="mixed")


def _start(node: Node, daemon: str, *, kill_mode: str) -> None:
    units = [f"salt-{daemon}.service", "lab-network.service"]
    node.write(f"/etc/systemd/system/{units[0]}", _UNIT.format(daemon, kill_mode))
    node.run(["systemctl", "daemon-reload"])
    node.run(["systemctl", "enable", *units])
    node.run(["systemctl", "start", units[0]], timeout_s=_START_TIMEOUT_S)
