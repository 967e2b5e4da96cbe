"""``brine node plan``, ``mark`` and ``reboot-step``: nodes that are emptied, filled and rebooted.

They are for Salt's runner ``brine``, which carries questions and answers: it asks the nodes, and
these commands of the master decide. All read JSON from standard input, and print JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from brine.cluster.draining import (
    DEFAULT_JOBS,
    Plan,
    begun_moves,
    drain_plan,
    expect_members,
    fault_of_target,
    fill_plan,
    with_drained,
    with_home,
    with_undrained,
    without_mark,
)
from brine.cluster.move_operation import MOVE
from brine.cluster.moves import Move
from brine.cluster.rebooting import (
    REBOOT,
    REBOOT_KEY,
    BootState,
    Reboot,
    chosen,
    doubt_of,
    expect_found,
    faults_after,
    reboot_act,
    rest_of,
)
from brine.common import operation, paths
from brine.common.cli import print_json
from brine.common.errors import UsageError
from brine.common.operation import AnswerState, Operation, OperationError, StepAnswer
from brine.common.schema import key, parse
from brine.config.model import Configuration
from brine.config.schema import ConfigError, read_input
from brine.config.store import ConfigStore

_LONGEST_INPUT = 256 * 1024 * 1024  # bytes; the facts of a node have a hundred thousand
_HINT = "see brine-node(1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What ``brine node plan`` reads.

    :param verb: ``batch`` asks for the next nodes to be rebooted, and for the plan of their drain.
    :param rows: by node, what ``brine instance list --json`` has printed there, or a text that says
        why that is not known; *facts* likewise of ``brine node facts --json``.
    :param barred: see :data:`brine.cluster.draining.Barred`.
    """

    verb: str = key(choices=("drain", "fill", "batch"))
    nodes: tuple[str, ...]
    to: str = ""
    jobs: int = key(DEFAULT_JOBS, minimum=1)
    batch: int = key(1, minimum=1)
    rows: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    barred: dict[str, dict[str, str]] = field(default_factory=dict)


def print_plan(_: argparse.Namespace) -> int:
    """``brine node plan``."""
    question = parse(PlanQuestion, read_input("-", _HINT, most=_LONGEST_INPUT))
    configuration = ConfigStore(paths.CONFIG_FILE).read()
    nodes = expect_members(configuration, question.nodes)
    if question.verb == "fill":
        found = fill_plan(
            configuration,
            nodes,
            question.rows,
            question.facts,
            jobs=question.jobs,
            barred=question.barred,
        )
        pending = _pending(configuration, nodes, fills=True)
        print_json({"nodes": nodes, **found.to_json(), "pending": pending})
        return 0
    if question.verb == "batch":
        counts = range(1, min(question.batch, len(nodes)) + 1)
        plans = {count: _drained(configuration, nodes[:count], question) for count in counts}
        batch = chosen(plans, nodes, len(plans))
        print_json({"nodes": batch, **plans[max(len(batch), 1)].to_json()})
        return 0
    found = _drained(configuration, nodes, question)
    pending = _pending(configuration, nodes, fills=False)
    master = configuration.nodes[configuration.cluster.master_node].name
    unmarked = [name for name in nodes if name == master]
    print_json({"nodes": nodes, **found.to_json(), "pending": pending, "unmarked": unmarked})
    return 0


def _pending_moves() -> dict[str, Move]:
    """By the ids of their operations."""
    return {one.id: Move.of(one.facts) for one in operation.pending() if one.kind == MOVE.name}


def _pending(
    configuration: Configuration, nodes: list[str], *, fills: bool
) -> list[dict[str, str]]:
    """The moves that go on before anything else."""
    known = _pending_moves()
    begun = begun_moves(configuration, nodes, [*known.values()], fills=fills)
    return [
        {"operation": identity, "instance": one.instance, "target": one.target}
        for identity, one in known.items()
        if one in begun
    ]


def _drained(configuration: Configuration, nodes: list[str], question: PlanQuestion) -> Plan:
    rows = {name: question.rows.get(name, "it has not answered") for name in nodes}
    return drain_plan(
        configuration,
        rows,
        question.facts,
        others={name: one for name, one in question.rows.items() if name not in nodes},
        to=question.to,
        jobs=question.jobs,
        barred=question.barred,
    )


_MARKS: dict[str, Callable[[Configuration, str, list[str]], Configuration]] = {
    "drained": with_drained,
    "undrained": lambda old, node, _: with_undrained(old, node),
    "filling": lambda old, node, _: without_mark(old, node),
    "home": lambda old, node, _: with_home(
        old, node, {one.uuid for one in _pending_moves().values()}
    ),
}


def mark(arguments: argparse.Namespace) -> int:
    """``brine node mark``: write what becomes of nodes into the configuration."""
    uuids = parse(_Marked, read_input("-", _HINT, most=_LONGEST_INPUT)).nodes
    with ConfigStore(paths.CONFIG_FILE).writing() as writer:
        if writer.current is None:
            raise ConfigError(f"{writer.path}: there is no configuration")
        new = writer.current
        for node, leaving in uuids.items():
            if arguments.mark == "drained" and new.node(node).offline:
                raise ConfigError(f"{node} is offline in the configuration: nothing runs there")
            new = _MARKS[arguments.mark](new, node, [*leaving])
        written = writer.write(new)
    marked = {name: fault_of_target(written.node(name)) for name in uuids}
    print_json({"serial": written.cluster.serial_no, "nodes": marked})
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """:param nodes: by name, the UUIDs of the instances that leave it."""

    nodes: dict[str, tuple[str, ...]]


# The operation that reboots.


def step_reboot(arguments: argparse.Namespace) -> int:
    """``brine node reboot-step``: begin or answer, and tell what follows."""
    given = read_input("-", _HINT, most=_LONGEST_INPUT)
    if not isinstance(given, dict):
        raise UsageError("standard input: must be an object", hint=_HINT)
    if arguments.what == "begin":
        record = _begun(Reboot.of(given))
    elif arguments.what == "abort":
        record = None
        for one in operation.pending(REBOOT_KEY):
            operation.forget(one)
    elif arguments.what == "look":
        print_json(_looked(parse(_Looked, given)))
        return 0
    else:
        if arguments.what == "answer":
            _answer(StepAnswer.of(given))
        record = next(iter(operation.pending(REBOOT_KEY)), None)
    print_json(_told(record))
    return 0


def _begun(wanted: Reboot) -> Operation:
    """A new operation that does what is wanted.

    :raises OperationError: if one is pending.
    """
    configuration = ConfigStore(paths.CONFIG_FILE).read()
    nodes = expect_members(configuration, wanted.nodes)
    for name in nodes:
        if configuration.node(name).uuid == configuration.cluster.master_node:
            text = f"{name} is the master, which has the others rebooted"
            raise ConfigError(text, hint="leave it out; then drain it and reboot it by hand")
        if configuration.node(name).offline:
            raise ConfigError(f"{name} is offline in the configuration")
    for pending in operation.pending(REBOOT_KEY):
        text = f"a reboot of {', '.join(pending.facts['nodes'])} is pending"
        raise OperationError(text, hint="salt-run brine.reboot goes on with it")
    wanted = Reboot(
        nodes=tuple(nodes),
        batch=wanted.batch,
        upgrade=wanted.upgrade,
        cold=wanted.cold,
        jobs=wanted.jobs,
    )
    with operation.begin(REBOOT, REBOOT_KEY, facts=wanted.facts()) as work:
        pass
    return work.record


def _answer(answer: StepAnswer) -> None:
    """Take an answer that ends its step.

    :raises OperationError: if what follows could not be decided by it.
    """
    record = operation.find(answer.id.rpartition("-")[0])
    step = operation.awaited(record) if record else None
    if step is None or step.id != answer.id or answer.state is AnswerState.RUNNING:
        return
    if answer.state is AnswerState.DONE:
        expect_found(step, answer.found)
    operation.answered(answer.id, answer.facts())


def _told(record: Operation | None) -> dict[str, Any]:
    """How far it is: *step* is what is to be done; without one it has ended."""
    step = operation.awaited(record) if record else None
    if record is None or step is None:
        return {"id": record.id if record else None, "step": None, "left": []}
    return {
        "id": record.id,
        "step": {"id": step.id, "step": step.name, "facts": step.facts},
        "doubt": doubt_of(record),
        "wanted": record.facts,
        "left": rest_of(record),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """Nodes that reboot, as they answer.

    :param before: by node, what ``brine node state --json`` has printed before; *now* likewise.
    :param running: by node, the names of the instances that run there.
    :param check: whether the nodes should be well again.
    """

    before: dict[str, Any]
    now: dict[str, Any]
    running: dict[str, tuple[str, ...]] = field(default_factory=dict)
    check: bool = False


def _looked(given: _Looked) -> dict[str, Any]:
    """What the nodes that reboot are asked for, or what is wrong with them."""
    found: dict[str, Any] = {}
    for node, state in given.before.items():
        before, answer = BootState.of(state), given.now.get(node)
        now = BootState.of(answer) if isinstance(answer, dict) else None
        if given.check:
            found[node] = {"faults": faults_after(before, now)}
        else:
            verdict = reboot_act(before, now, given.running.get(node))
            found[node] = {"act": verdict.act, "why": verdict.why}
    return found
