"""Two nodes between which a guest moves, by the steps that the master asks for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from brine.cluster.moves import Move, MoveStep, following_step, is_final
from brine.common.operation import Operation, Step, StepAnswer, StepState, lead
from lab.guest_image import guest_image
from lab.machine import Machine
from lab.node import Node, boot_node
from lab.repository import publish
from node.instance_on_node import GUEST

NAME = "web1"
UNIT = "/srv/unit"
UUID = "5e000000-0000-4000-8000-000000000001"
ADDRESSES = {"n1": "10.29.0.1", "n2": "10.29.0.2"}
STEP_S = 300.0
M = TypeVar("M", bound=Machine)
KEY = "the cluster's own secret\n"
_NETWORK_UNIT = "lab-network.service"
_NETWORK = """\
[Unit]
DefaultDependencies=no
Before=network.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/ip link add br0 type bridge
ExecStart=/bin/ip link add br1 type bridge
ExecStart=/bin/ip link set br0 up
ExecStart=/bin/ip link set br1 up
ExecStart=/bin/ip link set host0 master br0 up
ExecStart=/bin/ip address add {address}/24 dev br0
[Install]
WantedBy=network.target multi-user.target
"""


@dataclass
class Pair(Generic[M]):
    """Two nodes with storage, and an address each.

    :param at_poll: is called between two questions to a node.
    :param may_be_off: whether a node may give no answer.
    :param step_s: how long a step may take.
    """

    by_name: dict[str, M]
    at_poll: Callable[[], object] = lambda: None
    may_be_off: bool = False
    step_s: float = STEP_S

    def __getitem__(self, name: str) -> M:
        return self.by_name[name]

    def move(self, source: str, target: str, serial: int, **keys: Any) -> Operation:
        """Move the guest as the master does; returns the ended operation."""
        addresses = (ADDRESSES[source], ADDRESSES[target])
        move = Move(NAME, UUID, source, target, *addresses, serial, **keys)
        identity = f"{time.time_ns():020}-{os.urandom(4).hex()}"
        record = Operation(identity, "move", f"move/{NAME}", facts=move.facts())
        while step := lead(record, following_step):
            answer = StepAnswer(step.id, step.name, StepAnswer.of(_DONE).state)
            if step.name not in (MoveStep.FOLLOW, MoveStep.PUBLISH):
                answer = self.ask(step)
            step.state, step.answer = StepState.DONE, answer.facts()
        return record

    def ask(self, step: Step) -> StepAnswer:
        """Ask a node for a step until its answer is final."""
        asked = json.dumps({"id": step.id, "step": step.name, "facts": step.facts})
        deadline = time.monotonic() + self.step_s
        while True:
            said = self._said(step.node, asked)
            if said and is_final(step, answer := StepAnswer.of(json.loads(said))):
                return answer
            assert time.monotonic() < deadline, (step.name, said, self.journals())
            self.at_poll()
            time.sleep(0.2)

    def _said(self, node: str, asked: str) -> str:
        """The answer of a node; empty if it has none, as one that is about to boot."""
        command = ["brine", "move", "step", "--json"]
        done = self[node].run(command, stdin=asked, check=not self.may_be_off)
        return "" if done.returncode else done.stdout

    def journals(self) -> str:
        units = f"--unit=brine-move@{NAME}.service"
        return "\n".join(
            one.run(["journalctl", "--no-pager", "--output=cat", units], check=False).stdout[-3000:]
            for one in self.by_name.values()
        )


Nodes = Pair[Node]
_DONE = {"id": "", "step": "", "state": "done", "progress": 1.0, "error": "", "found": {}}


@contextmanager
def boot_pair(releases: Iterable[str], packages: list[Path], network: str) -> Iterator[Nodes]:
    """Two nodes on a bridge of the host, on which the bridge of their guests, br0, is, too; br1 is
    a bridge that leads nowhere. They have these after a boot, too."""
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(
                boot_node(release, name=name, network_bridge=network, keeps_files=True)
            )
            for name, release in zip(ADDRESSES, releases, strict=True)
        }
        for name, node in found.items():
            network = _NETWORK.format(address=ADDRESSES[name])
            node.write(f"/etc/systemd/system/{_NETWORK_UNIT}", network)
            node.run(["systemctl", "enable", "--now", "--quiet", _NETWORK_UNIT])
            publish(node, packages)
            parts = ["brine-instance", "brine-kvmd", "brine-moves"]
            node.run(["apt-get", "install", "--yes", "--quiet=2", *parts], timeout_s=300)
            node.put(guest_image().folder, GUEST)
            node.shell(f"mkdir {UNIT}")
            node.run(["brine", "storage", "create", "file", UNIT])
            node.write("/etc/brine/hmac.key", KEY, mode=0o600)
        yield Nodes(found)
