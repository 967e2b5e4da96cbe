"""The master of a simulated cluster: its configuration, and the runner that carries the questions
of :mod:`brine.cluster.moves` to nodes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from brine.cluster.lock_table import Level, LockName, LockTable
from brine.cluster.moves import (
    CANDIDATES,
    Move,
    MoveStep,
    abandoned,
    following_step,
    is_final,
)
from brine.common.operation import (
    AnswerState,
    Operation,
    OperationError,
    OperationState,
    Step,
    StepAnswer,
    StepState,
    lead,
)
from brine.vm.claim import Claim
from lab.move_history import EventKind
from simulator.node import SimNode
from simulator.world import Process, World

_ASK_S = 0.5
_PATIENCE_S = 60.0


class SimMaster:
    """The master. Records and configuration are on its disk; locks are another process's, which
    frees those of a runner that ends."""

    def __init__(self, world: World, nodes: dict[str, SimNode], claims: dict[str, Claim]) -> None:
        self.world, self.nodes = world, nodes
        self.process = Process(world, "master")
        self.configuration = dict(claims)
        self.records: dict[str, Operation] = {}
        self.locks = LockTable()
        self._asked: dict[str, set[str]] = {}  # the candidates that have confirmed a step

    # Users.

    def begin(self, instance: str, to: str, *, cold: bool) -> None:
        """``brine instance migrate``: refused while a move of the instance is pending."""
        claim = self.configuration[instance]
        if not self.process.is_up or self._pending(instance) or to == claim.node:
            return
        identity = f"{int(self.world.now * 1e6):020}-{self.world.number()}"
        move = Move(instance, "", claim.node, to, "", "", claim.serial + 1, cold=cold)
        self.world.tell(EventKind.BEGUN, identity)
        record = Operation(identity, "move", f"instance/{instance}", facts=move.facts())
        record.since = self.world.now
        self._write(record)
        self._lead(identity)

    def edit(self, instance: str) -> None:
        """``brine config apply`` changes the instance, and its node hears of that, perhaps."""
        if self.may_edit(instance):
            node, serial = self.configuration[instance]
            claim = self.configuration[instance] = Claim(node, serial + 1)
            peer = self.nodes[node]
            self.world.send("master", node, peer.define, instance, claim, label="define")

    def may_edit(self, instance: str) -> bool:
        return self.process.is_up and not self._pending(instance)

    def abort(self, instance: str, why: str = "aborted") -> None:
        """``brine operations abort``; not while the target drops its part, which it would keep."""
        record = self._pending(instance)
        is_undoing = record and record.state is OperationState.UNDOING
        if record and self.process.is_up and not is_undoing:
            try:
                answer = abandoned(record, why)
            except OperationError:
                return
            self._answered(record.id, answer)

    def _pending(self, instance: str) -> Operation | None:
        key = f"instance/{instance}"
        return next((one for one in self.records.values() if one.key == key), None)

    # Kills.

    def kill(self) -> None:
        if self.process.is_up:
            self.process.kill()
            for identity in self.records:
                self._unlock(identity)
            self._asked = {}

    def start(self) -> None:
        if not self.process.is_up:
            self.process.start()
            for identity in list(self.records):
                self._lead(identity)

    def _lock(self, identity: str, instance: str) -> None:
        name = LockName(Level.INSTANCE, instance)
        if not any(one.owner == identity for one in self.locks.claims()):
            told = (EventKind.LOCK, str(name), "master", identity)
            self.locks.claim(
                identity, [name], now=self.world.now, settled=lambda: self.world.tell(*told)
            )

    def _unlock(self, identity: str) -> None:
        for claim in [one for one in self.locks.claims() if one.owner == identity]:
            for name in claim.held:
                self.world.tell(EventKind.UNLOCK, str(name), "master", identity)
        self.locks.release(identity, now=self.world.now)

    # The runner.

    def _write(self, record: Operation) -> None:
        self.records[record.id] = _read(record)

    def _lead(self, identity: str) -> None:
        """Do what follows, up to a step that is elsewhere, and ask for that."""
        record = _read(self.records[identity])
        move = Move.of(record.facts)
        self._lock(identity, move.instance)
        step = lead(record, following_step)
        if step is None:
            is_undone = record.state is OperationState.UNDOING
            self.world.tell(EventKind.ENDED, identity, "", "undone" if is_undone else "done")
            self._unlock(identity)
            del self.records[identity]
            return
        self._write(record)
        if step.node:
            self._ask(identity, step.id)
        else:
            self.process.later(0.01, self._follow, identity, step.id, label="follow")

    def _follow(self, identity: str, step_id: str) -> None:
        """The configuration follows; then that is recorded."""
        move = Move.of(self.records[identity].facts)
        self.configuration[move.instance] = Claim(move.target, move.serial)
        answer = StepAnswer(step_id, MoveStep.FOLLOW, AnswerState.DONE)
        self.process.later(0.01, self._answered, identity, answer, label="followed")

    def _ask(self, identity: str, step_id: str) -> None:
        """Ask for a step again and again, until its answer is final."""
        record = self.records.get(identity)
        step = record.steps[-1] if record else None
        if record is None or step is None or step.id != step_id:
            return
        is_begun = record.state is OperationState.BEGUN
        if is_begun and self.world.now - record.since > _PATIENCE_S:
            answer = abandoned(record, "it takes too long")
            self._answered(identity, answer)
            return
        if step.node == CANDIDATES:
            self._publish(identity, step)
        else:
            asked, facts = self.nodes[step.node].asked, step.facts
            self._to_node(
                step.node,
                identity,
                lambda reply: asked(identity, step.id, step.name, facts, reply),
                step.name,
            )
        self.process.later(_ASK_S, self._ask, identity, step_id)

    def _to_node(
        self,
        node: str,
        identity: str,
        ask: Callable[[Callable[[StepAnswer], object]], object],
        label: str,
    ) -> None:
        def reply(answer: StepAnswer) -> None:
            data = answer.facts()
            self.world.send(node, "master", self._hear, identity, data, label=f"answer: {label}")

        self.world.send("master", node, ask, reply, label=label)

    def _hear(self, identity: str, data: object) -> None:
        self._answered(identity, StepAnswer.of(data))

    def _answered(self, identity: str, answer: StepAnswer) -> None:
        record = self.records.get(identity)
        step = record.steps[-1] if record else None
        if record and step and step.state is StepState.WAITING and is_final(step, answer):
            record = _read(record)
            step = record.steps[-1]
            step.answer, step.state = answer.facts(), StepState.DONE
            self._write(record)
            self._lead(identity)

    def _publish(self, identity: str, step: Step) -> None:
        """Give all candidates the configuration; those that confirm it answer the new node."""
        confirmed = self._asked.setdefault(step.id, set())
        for name in self.nodes.keys() - confirmed:
            known = dict(self.configuration)
            self.world.send("master", name, self._give_to, name, known, step.id, label="publish")
        if confirmed == self.nodes.keys():
            answer = StepAnswer(step.id, step.name, AnswerState.DONE)
            self.process.later(0.01, self._answered, identity, answer)

    def _give_to(self, name: str, known: dict[str, Claim], step_id: str) -> None:
        seen = self.nodes[name].disk.configuration
        for instance, claim in known.items():
            if claim.serial >= seen.get(instance, claim).serial:
                seen[instance] = claim
        self.world.send(name, "master", self._confirmed, name, step_id, label="published")

    def _confirmed(self, name: str, step_id: str) -> None:
        if step_id in self._asked:
            self._asked[step_id].add(name)


def _read(record: Operation) -> Operation:
    """A record as it is on the disk: what changes in this copy changes nothing there."""
    found: Operation = pickle.loads(pickle.dumps(record))
    return found
