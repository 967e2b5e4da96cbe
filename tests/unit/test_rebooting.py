"""Nodes that are rebooted one after another: the real decisions, on simulated nodes and clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from brine.cluster.draining import Room, Tenant, plan
from brine.cluster.rebooting import (
    REBOOT,
    REBOOT_KEY,
    BootState,
    Reboot,
    RebootAct,
    RebootStep,
    chosen,
    doubt_of,
    faults_after,
    following_reboot,
    reboot_act,
)
from brine.common import operation
from brine.common.operation import AnswerState, Operation, Step, StepAnswer, StepState

_PATIENCE_S = 900
_FAULTS = ("stuck", "kernel", "daemon", "deaf", "guest", "start")


@dataclass
class SimNode:
    """A node, and what is wrong with it.

    :ivar back_at: when it answers again.
    :ivar fault: one of ``_FAULTS``: it never comes back; boots the old kernel; lacks a daemon; does
        not hear of its reboot; a guest of it can't move.
    """

    name: str
    memory_mib: int
    fault: str = ""
    boots: int = 0
    back_at: float = 0.0
    is_drained: bool = False
    guests: dict[str, int] = field(default_factory=dict)
    home: list[str] = field(default_factory=list)
    newest: str = "k1"
    kernel: str = "k1"


class KilledError(Exception):
    """The master, in the middle of its work."""


class SimCluster:
    """Nodes, a clock, and what carries questions and answers: Salt and its runner, which may be
    killed before each thing that it does.

    :ivar wrong: what must never be, and was.
    """

    def __init__(
        self, nodes: int, guests: int, seed: int = 0, *, batch: int = 1, kill_rate: float = 0.0
    ) -> None:
        self.random, self.batch = random.Random(seed), batch
        self.now, self.kill_rate = 0.0, kill_rate
        self.nodes = {f"n{one}": SimNode(f"n{one}", 10_000) for one in range(1, nodes + 1)}
        self.wrong: list[str] = []
        for number in range(guests):
            node = self.nodes[f"n{number % nodes + 1}"]
            node.guests[f"g{number}"] = self.random.choice((500, 1000, 2000))
        self.began = {name: sorted(one.guests) for name, one in self.nodes.items()}

    def record(self, **wanted: Any) -> Operation:
        facts = Reboot(nodes=tuple(self.nodes), **wanted).facts()
        return Operation("1-a", REBOOT.name, REBOOT_KEY, facts=facts)

    def run(self, record: Operation) -> str:
        """Go on with the operation, as a call of the runner does, until it ends or is in doubt."""
        while step := operation.lead(record, following_reboot):
            assert len(record.steps) < 500
            try:
                self._carry(step)
            except KilledError:
                return "killed"  # the answer is lost, and the step is done again
            if doubt := doubt_of(record):
                return doubt
        return "done"

    def _carry(self, step: Step) -> None:
        try:
            found = getattr(self, step.name)(step.facts)
            answer = StepAnswer(step.id, step.name, AnswerState.DONE, found=found)
        except LookupError as doubt:
            error = str(doubt.args[0])
            answer = StepAnswer(step.id, step.name, AnswerState.FAILED, error=error)
        self._may_be_killed()
        step.state, step.answer = StepState.DONE, answer.facts()

    def _may_be_killed(self) -> None:
        if self.random.random() < self.kill_rate:
            raise KilledError

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        self._may_be_killed()

    def _answers(self, node: SimNode) -> bool:
        return self.now >= node.back_at

    def _state(self, node: SimNode) -> BootState | None:
        if not self._answers(node):
            return None
        daemons = () if node.fault == "daemon" and node.boots else ("brine-kvmd.service",)
        boot_id = f"{node.name}-{node.boots}"
        return BootState(boot_id=boot_id, kernel=node.kernel, newest=node.newest, daemons=daemons)

    def _free_mib(self, node: SimNode) -> int:
        own = (Tenant(name="", uuid="", node="", memory_mib=one) for one in node.guests.values())
        return node.memory_mib - sum(one.needed_mib() for one in own)

    def _plan(self, names: list[str]) -> Any:
        guests = [
            Tenant(name=guest, uuid=guest, node=name, memory_mib=memory_mib)
            for name in names
            for guest, memory_mib in self.nodes[name].guests.items()
        ]
        places = [
            Room(node=one.name, memory_mib=self._free_mib(one))
            for one in self.nodes.values()
            if one.name not in names and not one.is_drained and self._answers(one)
        ]
        return plan(guests, places)

    # The steps, as the runner carries them.

    def choose(self, facts: Any) -> Any:
        counts = range(1, facts["batch"] + 1)
        plans = {count: self._plan(facts["nodes"][:count]) for count in counts}
        if not (found := chosen(plans, facts["nodes"], facts["batch"])):
            raise LookupError(f"the guests of {facts['nodes'][0]} have no place")
        return {"nodes": found}

    def drain(self, facts: Any) -> Any:
        for name in facts["nodes"]:
            node = self.nodes[name]
            node.is_drained = True
            node.home = sorted({*node.home, *node.guests})
        found = self._plan(facts["nodes"])
        stuck = [one.instance for one in found.stays]
        for move in found.moves:
            self._wait(10)
            node = self.nodes[move.source]
            if node.fault == "guest":
                stuck.append(move.instance)
                continue
            self.nodes[move.target].guests[move.instance] = node.guests.pop(move.instance)
            self._look()
        if stuck:
            raise LookupError(f"can't move: {', '.join(stuck)}")
        return {}

    def upgrade(self, facts: Any) -> Any:
        before = {}
        for name in facts["nodes"]:
            self._wait(60)
            node = self.nodes[name]
            node.newest = "k2"
            if node.fault == "start":
                node.guests["another"] = 100
            state = self._state(node)
            assert state
            before[name] = state.facts()
        return {"before": before}

    def reboot(self, facts: Any) -> Any:
        until = self.now + _PATIENCE_S
        left = {name: BootState.of(one) for name, one in facts["before"].items()}
        while left:
            for name in [*left]:
                node = self.nodes[name]
                verdict = reboot_act(left[name], self._state(node), node.guests)
                if verdict.act is RebootAct.DONE:
                    del left[name]
                elif verdict.act is RebootAct.DOUBT:
                    raise LookupError(f"{name}: {verdict.why}")
                elif verdict.act is RebootAct.REBOOT and node.fault != "deaf":
                    self._boot(node)
            if left and self.now > until:
                raise LookupError(f"{', '.join(left)}: not back")
            self._wait(5)
        return {}

    def _boot(self, node: SimNode) -> None:
        if node.guests:
            self.wrong.append(f"{node.name} rebooted with guests")
        node.boots += 1
        node.back_at = self.now + (1e9 if node.fault == "stuck" else self.random.uniform(5, 300))
        node.kernel = node.kernel if node.fault == "kernel" else node.newest
        self._look()

    def check(self, facts: Any) -> Any:
        until = self.now + 120
        while True:
            faults = [
                f"{name}: {fault}"
                for name, before in facts["before"].items()
                for fault in faults_after(BootState.of(before), self._state(self.nodes[name]))
            ]
            if not faults:
                return {}
            if self.now > until:
                raise LookupError("; ".join(faults))
            self._wait(5)

    def fill(self, facts: Any) -> Any:
        for name in facts["nodes"]:
            home = self.nodes[name]
            home.is_drained = False
            for guest in home.home:
                at = next(one for one in self.nodes.values() if guest in one.guests)
                self._wait(10)
                home.guests[guest] = at.guests.pop(guest)
                self._look()
            home.home = []
        return {}

    def _look(self) -> None:
        """Note what must never be."""
        for node in self.nodes.values():
            if self._free_mib(node) < 0:
                self.wrong.append(f"{node.name} has too little memory")
        away = [one.name for one in self.nodes.values() if one.is_drained]
        if len(away) > self.batch:
            self.wrong.append(f"drained at once: {away}")

    def mend(self) -> None:
        for node in self.nodes.values():
            if node.fault:
                node.fault, node.back_at = "", min(node.back_at, self.now)
                node.kernel = node.newest
                node.guests.pop("another", None)

    def is_home(self) -> bool:
        return self.began == {name: sorted(one.guests) for name, one in self.nodes.items()}


def settled(cluster: SimCluster, record: Operation) -> Iterator[str]:
    """Runs it until it is done or in doubt, whatever kills the master meanwhile."""
    while (told := cluster.run(record)) == "killed":
        yield told
    yield told


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_all_nodes_are_rebooted_and_all_guests_come_home(batch: int) -> None:
    cluster = SimCluster(4, 6, batch=batch)
    assert cluster.run(cluster.record(batch=batch)) == "done"
    assert cluster.wrong == []
    assert cluster.is_home()
    assert [one.boots for one in cluster.nodes.values()] == [1, 1, 1, 1]
    assert {one.kernel for one in cluster.nodes.values()} == {"k2"}


def test_a_batch_is_no_larger_than_the_others_can_hold() -> None:
    cluster = SimCluster(3, 12)
    for node in cluster.nodes.values():
        node.memory_mib = 7800
    record = cluster.record(batch=2)
    assert cluster.run(record) == "done"
    batches = [one.facts["nodes"] for one in record.steps if one.name == RebootStep.DRAIN]
    assert batches == [["n1"], ["n2"], ["n3"]]
    assert cluster.wrong == []


def test_nothing_begins_where_the_guests_of_one_node_have_no_place() -> None:
    cluster = SimCluster(2, 12)
    for node in cluster.nodes.values():
        node.memory_mib = 8000
    record = cluster.record()
    assert "n1" in cluster.run(record)
    assert [one.name for one in record.steps] == [RebootStep.CHOOSE]
    assert not any(one.boots or one.is_drained for one in cluster.nodes.values())


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_doubt_stops_it_and_it_goes_on_when_that_is_mended(fault: str) -> None:
    cluster = SimCluster(3, 6)
    cluster.nodes["n2"].fault = fault
    record = cluster.record()
    for _ in range(2):  # another call tries the same once more
        told = cluster.run(record)
        assert told not in ("done", "")
        assert told in record.steps[-1].node or record.steps[-1].answer
        assert cluster.nodes["n3"].boots == 0
        assert cluster.nodes["n2"].is_drained
        assert not cluster.nodes["n1"].is_drained
    cluster.mend()
    assert cluster.run(record) == "done"
    assert cluster.wrong == []
    assert cluster.is_home()
    assert all(one.boots for one in cluster.nodes.values())


def history(seed: int) -> list[str]:
    """What is wrong with a random cluster whose nodes fail and whose master is killed."""
    chance = random.Random(seed)
    batch = chance.randint(1, 3)
    size = chance.randint(2, 6), chance.randint(0, 9)
    cluster = SimCluster(*size, seed, batch=batch, kill_rate=0.03)
    record = cluster.record(batch=batch)
    for node in cluster.nodes.values():
        node.fault, node.memory_mib = chance.choice((*_FAULTS, *[""] * 8)), 20_000
    for _ in range(30):
        *_, told = settled(cluster, record)
        if told == "done":
            break
        cluster.mend()
    wrong = [*cluster.wrong] + ([] if told == "done" else [f"not done: {told}"])
    wrong += [] if cluster.is_home() else ["guests are not at home"]
    return wrong + [one.name for one in cluster.nodes.values() if not one.boots or one.is_drained]


def test_random_histories_with_faults_and_a_master_that_is_killed() -> None:
    assert {seed: wrong for seed in range(150) if (wrong := history(seed))} == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"daemons": ("a",)}, "b"),
        ({"failed": ("x", "z")}, "z"),
        ({"kernel": "6.1"}, "6.2"),
        ({"boot_id": "one"}, "not rebooted"),
    ],
)
def test_what_is_wrong_after_a_reboot(change: dict[str, Any], fault: str) -> None:
    before = BootState(
        boot_id="one", kernel="6.1", newest="6.2", daemons=("a", "b"), failed=("x", "y")
    )
    now = replace(before, boot_id="two", kernel="6.2", failed=("x",))
    told = faults_after(before, replace(now, **change))
    assert len(told) == bool(fault)
    assert fault in "".join(told)
    assert BootState.of(asdict(now) | {"later": 1}) == now


def test_a_guest_that_runs_again_keeps_its_node_from_its_reboot() -> None:
    state = BootState(boot_id="one")
    assert reboot_act(state, state, ["web1"]).act is RebootAct.DOUBT
    assert reboot_act(state, state, None).act is RebootAct.WAIT
    assert reboot_act(state, state, []).act is RebootAct.REBOOT
    assert reboot_act(state, None, []).act is RebootAct.WAIT
    assert reboot_act(state, BootState(boot_id="two"), None).act is RebootAct.DONE
