"""The operation of a move on the master: its record, and the configuration that follows the claim.

Its steps are decided in :mod:`brine.cluster.moves`. The caller carries questions and answers::

    identity = begin_move("web1", "n2", is_live=True, copies=True)
    while step := awaited_step(identity):
        answer_step(StepAnswer.of(ask(step.node, step.id, step.name, step.facts)))
"""

from __future__ import annotations

from dataclasses import replace

from brine.cluster.moves import Move, abandoned, following_step, is_final
from brine.common import operation, paths
from brine.common.operation import Facts, OperationError, OperationKind, Step, StepAnswer
from brine.config.model import Configuration, Instance
from brine.config.schema import ConfigError
from brine.config.store import ConfigStore, move_key


def begin_move(instance: str, to: str, *, is_live: bool, copies: bool) -> str:
    """Record a move, of which nothing is asked yet; returns the operation's id.

    :param to: the name of the target.
    :param copies: the nodes have volumes of their own.
    :raises ConfigError: if the configuration has no such instance or node, or it is there already.
    :raises OperationError: if a move of the instance is pending.
    """
    store = ConfigStore(paths.CONFIG_FILE)
    with store.writing():  # the serial stays what it is until the record refuses other changes
        configuration = store.read()
        found = _instance(configuration, instance)
        source = configuration.nodes[found.primary_node].name
        if _node(configuration, to) == found.primary_node:
            raise ConfigError(f"{instance} is on {to} already")
        key = move_key(found.name)
        if pending := operation.pending(key):
            raise operation.waiting_error(pending[0])
        serial = found.serial_no + 1
        move = Move(found.name, source, to, serial, is_live=is_live, copies=copies)
        with operation.begin(MOVE, key, facts=move.facts()) as work:
            pass
    return work.record.id


def awaited_step(identity: str) -> Step | None:
    """The step of a move that a node is to be asked for. None if the move has ended, or if the
    configuration can't follow yet: then :func:`brine.common.operation.settle` tries again."""
    record = operation.find(identity)
    return operation.awaited(record) if record else None


def answer_step(answer: StepAnswer) -> None:
    """Take a node's answer: one that does not end the awaited step changes nothing.

    :raises OperationError: why what follows waits.
    """
    step = awaited_step(answer.id.rpartition("-")[0])
    if step and is_final(step, answer):
        operation.answered(step.id, answer.facts())


def abort_move(identity: str, why: str) -> None:
    """Have a move go back, unless its source has given the claim away.

    :raises OperationError: if it goes back already, can't go back, or has ended.
    """
    record = operation.find(identity)
    if record is None:
        raise OperationError(f"{identity}: no such operation is pending")
    answer = abandoned(record, why)
    operation.answered(answer.id, answer.facts())


def _follow(facts: Facts) -> None:
    """Write the target as the instance's primary node; its serial becomes that of the claim."""
    move = Move(**{key: value for key, value in facts.items() if key != "prepared"})
    with ConfigStore(paths.CONFIG_FILE).writing() as writer:
        current = writer.current
        if current is None:
            raise ConfigError(f"{writer.path}: there is no configuration for {move.instance}")
        old, to = _instance(current, move.instance), _node(current, move.target)
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
        new = replace(old, primary_node=to, secondary_nodes=others)
        instances = {**current.instances, new.uuid: new}
        disks = {**current.disks, **disks}
        writer.write(replace(current, instances=instances, disks=disks), moved=old.name)


def _instance(configuration: Configuration, name: str) -> Instance:
    for one in configuration.instances.values():
        if one.name == name:
            return one
    raise ConfigError(f"{name}: the configuration has no such instance")


def _node(configuration: Configuration, name: str) -> str:
    """The UUID of a node."""
    for uuid, one in configuration.nodes.items():
        if one.name == name:
            return uuid
    raise ConfigError(f"{name}: the configuration has no such node")


MOVE = OperationKind("move", {"follow": _follow}, following=following_step)
