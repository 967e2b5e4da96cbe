"""Two nodes between which a guest moves, by the steps that the master asks for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brine.cluster.moves import Move, MoveStep, following_step, is_final
from brine.common.operation import Operation, Step, StepAnswer, StepState, lead
from lab.guest_image import guest_image
from lab.node import Node, boot_node
from lab.repository import publish
from node.instance_on_node import GUEST

NAME = "web1"
UNIT = "/srv/unit"
UUID = "5e000000-0000-4000-8000-000000000001"
ADDRESSES = {"n1": "10.29.0.1", "n2": "10.29.0.2"}
STEP_S = 300.0
KEY = "the cluster's own secret\n"


@dataclass
class Nodes:
    """Two nodes with storage, bridges for guests, and an address each.

    :param at_poll: is called between two questions to a node.
    """

    by_name: dict[str, Node]
    at_poll: Callable[[], object] = lambda: None

    def __getitem__(self, name: str) -> Node:
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
        deadline = time.monotonic() + STEP_S
        while True:
            said = self[step.node].run(["brine", "move", "step", "--json"], stdin=asked).stdout
            answer = StepAnswer.of(json.loads(said))
            if is_final(step, answer):
                return answer
            assert time.monotonic() < deadline, (step.name, said, self.journals())
            self.at_poll()
            time.sleep(0.2)

    def journals(self) -> str:
        units = f"--unit=brine-move@{NAME}.service"
        return "\n".join(
            one.run(["journalctl", "--no-pager", "--output=cat", units], check=False).stdout[-3000:]
            for one in self.by_name.values()
        )


_DONE = {"id": "", "step": "", "state": "done", "progress": 1.0, "error": "", "found": {}}


@contextmanager
def boot_pair(releases: Iterable[str], packages: list[Path], network: str) -> Iterator[Nodes]:
    """Two nodes on a bridge of the host, on which the bridge of their guests, br0, is, too; br1 is
    a bridge that leads nowhere."""
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(
                boot_node(release, name=name, network_bridge=network, keeps_files=True)
            )
            for name, release in zip(ADDRESSES, releases, strict=True)
        }
        for name, node in found.items():
            node.shell("ip link add br0 up type bridge; ip link add br1 up type bridge")
            node.run(["ip", "link", "set", "host0", "master", "br0", "up"])
            node.run(["ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "br0"])
            publish(node, packages)
            parts = ["brine-instance", "brine-kvmd", "brine-moves"]
            node.run(["apt-get", "install", "--yes", "--quiet=2", *parts], timeout_s=300)
            node.put(guest_image().folder, GUEST)
            node.shell(f"mkdir {UNIT}")
            node.run(["brine", "storage", "create", "file", UNIT])
            node.write("/etc/brine/hmac.key", KEY, mode=0o600)
        yield Nodes(found)
