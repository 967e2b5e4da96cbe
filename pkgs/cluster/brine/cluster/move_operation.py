"""The operation of a move on the master: its record, and the configuration that follows the claim.

Its steps are decided in :mod:`brine.cluster.moves`. The caller carries questions and answers::

    status = move_status(begin_move("web1", "n2"))
    while step := status.step:
        status = answer_step(StepAnswer.of(ask(step.node, step.id, step.name, step.facts)))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from brine.cluster.draining import fault_of_target, without_home
from brine.cluster.moves import KEEPS_HOME, Move, MoveStep, abandoned, following_step, is_final
from brine.common import operation, paths
from brine.common.operation import (
    AnswerState,
    Facts,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    Step,
    StepAnswer,
)
from brine.config.model import MOVED_TAG
from brine.config.privileges import fault_of_offer
from brine.config.schema import ConfigError
from brine.config.store import ConfigStore, move_key

_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class MoveStatus:
    """How far a move is.

    :param state: of the operation while it is pending: ``begun``, ``undoing``, ``committed``. Then
        ``done`` or ``undone``; ``ended`` if it ended before, and that is not known any more.
    :param target: the name of the node that it is to go to.
    :param error: why it is undone.
    :param waits_for: why it has no step, though it has not ended.
    :param step: that a node is to be asked for.
    """

    id: str
    instance: str = ""
    target: str = ""
    state: str = "ended"
    error: str = ""
    waits_for: str = ""
    step: Step | None = None

    def to_json(self) -> Facts:
        """It for programs."""
        known = {key: getattr(self, key) for key in ("id", "instance", "target", "state", "error")}
        step = self.step and {key: getattr(self.step, key) for key in ("id", "node", "facts")}
        named = step and self.step and {**step, "step": self.step.name}
        return {**known, "waits_for": self.waits_for, "step": named}


def begin_move(
    instance: str,
    to: str,
    *,
    cold: bool = False,
    wishes: Facts | None = None,
    keeps_home: bool = False,
) -> str:
    """Record a move, of which nothing is asked yet; returns the operation's id. One to the same
    node that is pending goes on.

    :param instance: its name, short name or UUID, and *to* is that of the target.
    :param cold: a guest that runs is stopped for the move.
    :param wishes: see :class:`brine.cluster.moves.Move`.
    :param keeps_home: a later fill brings it home, if a drain has moved it away; otherwise its new
        node is its home.
    :raises ConfigError: if the configuration has no such instance or node, if it is there already,
        or if the node takes none.
    :raises OperationError: if another move of the instance is pending.
    """
    store = ConfigStore(paths.CONFIG_FILE)
    with store.writing():  # the serial stays what it is until the record refuses other changes
        configuration = store.read()
        found, target = configuration.instance(instance), configuration.node(to)
        source = configuration.nodes[found.primary_node]
        for pending in operation.pending(move_key(found.name)):
            return _continued(pending, found.name, target.name)
        if target.uuid == source.uuid:
            raise ConfigError(f"{found.name} is on {target.name} already")
        if fault := fault_of_target(target):
            hint = f"brine node undrain {target.name}" if target.drained else None
            raise ConfigError(f"{target.name} takes no instances: {fault}", hint=hint)
        move = Move(
            found.name,
            found.uuid,
            source.name,
            target.name,
            source.secondary_ip or source.primary_ip,
            target.secondary_ip or target.primary_ip,
            found.serial_no + 1,
            cold,
            wishes or {},
        )
        facts = move.facts() | {KEEPS_HOME: keeps_home}
        with operation.begin(MOVE, move_key(found.name), facts=facts) as work:
            pass
    return work.record.id


def move_status(identity: str) -> MoveStatus:
    """How far a move is. What waits for no node is done before.

    :raises OperationError: if the operation is no move.
    """
    record = _record(identity)
    if record and not operation.awaited(record):
        try:
            operation.settle_one(record)
        except OperationError as error:
            return replace(_status(record), waits_for=str(error))
        record = _record(identity)
    return _status(record) if record else MoveStatus(identity)


def answer_step(answer: StepAnswer) -> MoveStatus:
    """Take a node's answer: one that does not end the awaited step changes nothing. Returns how far
    the move is after that.

    :raises OperationError: if the operation is no move.
    """
    identity = answer.id.rpartition("-")[0]
    record = _record(identity)
    step = operation.awaited(record) if record else None
    if record and step and is_final(step, answer):
        return _answered(_compared(record, step, answer))
    if step and (answer.id, answer.step) == (step.id, step.name):
        text = str(answer.error or answer.found.get("text") or answer.state)[:_LONGEST_TEXT]
        share = max(0.0, min(1.0, answer.progress))
        operation.progressed(step.id, share, f"{step.name} on {step.node}: {text}")
    return move_status(identity)


def _compared(record: Operation, step: Step, answer: StepAnswer) -> StepAnswer:
    """An answer; an offer that the configuration contradicts has failed."""
    if step.name != MoveStep.OFFER or answer.state is not AnswerState.DONE:
        return answer
    fault = fault_of_offer(
        ConfigStore(paths.CONFIG_FILE).read(), Move.of(record.facts).instance, answer.found
    )
    return replace(answer, state=AnswerState.FAILED, error=fault, found={}) if fault else answer


def abort_move(identity: str, why: str) -> MoveStatus:
    """Have a move go back, unless its source has given the claim away. One that waits for nothing
    but its target to drop its part ends without that.

    :raises OperationError: if it goes back already, can't go back, or has ended.
    """
    record = _record(identity)
    if record is None:
        raise OperationError(f"{identity}: no such operation is pending")
    return _answered(abandoned(record, why))


def _answered(answer: StepAnswer) -> MoveStatus:
    identity = answer.id.rpartition("-")[0]
    try:
        record = operation.answered(answer.id, answer.facts())
    except OperationError:
        return move_status(identity)  # which says why it waits
    return _status(record) if record else MoveStatus(identity)


def _record(identity: str) -> Operation | None:
    record = operation.find(identity)
    if record and record.state is OperationState.UNKNOWN:
        raise operation.waiting_error(record)
    if record and record.kind != MOVE.name:
        raise OperationError(f"{identity}: is a {record.kind} of {record.key}, and no move")
    return record


def _status(record: Operation) -> MoveStatus:
    step, state = operation.awaited(record), str(record.state)
    if step is None and operation.find(record.id) is None:
        state = "undone" if record.state is OperationState.UNDOING else "done"
    move, waits_for = Move.of(record.facts), "" if step else record.waits_for
    return MoveStatus(record.id, move.instance, move.target, state, record.error, waits_for, step)


def _continued(record: Operation, instance: str, to: str) -> str:
    """A move that is pending.

    :raises OperationError: unless it is to this node.
    """
    if record.state is OperationState.UNKNOWN:
        raise operation.waiting_error(record)
    target = record.facts.get("target")
    if target == to:
        return record.id
    hint = f"brine operations resume {record.id} goes on with it; abort has it go back"
    text = f"{instance} moves to {target} already (operation {record.id})"
    raise OperationError(text, hint=hint)


def _follow(facts: Facts) -> None:
    """Write the target as the instance's primary node; its serial becomes that of the claim."""
    move = Move.of(facts)
    with ConfigStore(paths.CONFIG_FILE).writing() as writer:
        current = writer.current
        if current is None:
            raise ConfigError(f"{writer.path}: there is no configuration for {move.instance}")
        old, to = current.instance(move.instance), current.node(move.target).uuid
        if old.primary_node == to:
            return
        if old.serial_no + 1 != move.serial:
            text = f"{move.instance} has serial {old.serial_no}, not {move.serial - 1}"
            raise ConfigError(f"{text}: it changed in the configuration during its move")
        disks = {
            uuid: replace(disk, nodes=[to])
            for uuid, disk in current.disks.items()
            if uuid in old.disks and disk.nodes == [old.primary_node]
        }
        others = [old.primary_node if one == to else one for one in old.secondary_nodes]
        tags = [one for one in old.tags if one != f"{MOVED_TAG}{move.target}"]
        tags = [*dict.fromkeys([*tags, f"{MOVED_TAG}{move.source}"])]
        new = replace(old, primary_node=to, secondary_nodes=others, tags=tags)
        instances = {**current.instances, new.uuid: new}
        disks = {**current.disks, **disks}
        followed = replace(current, instances=instances, disks=disks)
        if not facts.get(KEEPS_HOME):
            followed = without_home(followed, new.uuid)
        writer.write(followed, moved=old.name)


MOVE = OperationKind("move", {"follow": _follow}, following=following_step)
