"""What follows when a cluster's nodes are rebooted one after another: no I/O, no clock, no Salt.

It is one operation of the master (:mod:`brine.common.operation`). Its record decides what is asked
for next, and so it goes on after the master's death. For each batch of nodes::

    choose    which nodes are next: as many as the others can hold the guests of
    drain     their guests go elsewhere; then their state is looked at: what is well there
    upgrade   if that is wanted, their packages; the kernel that they boot next is looked at
    reboot    until each has another boot id; never while a guest runs there
    check     daemons, kernel and configuration are as they should be
    fill      their guests come home

The caller carries each of these, and may do it twice. An answer that is a doubt stops it: the step
is asked for again, by the next call, and the record says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from brine.cluster.draining import Plan
from brine.common.errors import printable
from brine.common.operation import (
    AnswerState,
    Elsewhere,
    Facts,
    Following,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    Step,
)
from brine.common.schema import key, parse

REBOOT_KEY = "cluster/reboot"
"""The key of the one operation: the cluster has one at a time."""


class RebootStep(StrEnum):
    """The steps of a batch."""

    CHOOSE = "choose"
    DRAIN = "drain"
    UPGRADE = "upgrade"
    REBOOT = "reboot"
    CHECK = "check"
    FILL = "fill"


_ORDER = [*RebootStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot:
    """What is wanted, as the operation's facts have it.

    :param nodes: their names, in the order in which they are rebooted.
    :param batch: how many at a time, at most.
    :param cold: instances that can't move live are stopped for their move.
    :param jobs: how many instances move at a time.
    """

    nodes: tuple[str, ...]
    batch: int = key(1, minimum=1)
    upgrade: bool = False
    cold: bool = False
    jobs: int = key(4, minimum=1)

    @classmethod
    def of(cls, facts: Facts) -> Reboot:
        """:raises SchemaError: if the facts are none of a reboot."""
        return parse(cls, facts)

    def facts(self) -> Facts:
        return {**asdict(self), "nodes": [*self.nodes]}


def following_reboot(record: Operation) -> Following:
    """What follows the answered steps of a reboot.

    :param record: its operation, of which no step is waiting.
    """
    reboot = Reboot.of(record.facts)
    last = record.steps[-1] if record.steps else None
    step = RebootStep(last.name) if last else RebootStep.FILL
    if last and (doubt := doubt_of(record)):
        return _asked(step, last.facts, doubt)
    if last is None or step is RebootStep.FILL:
        if remaining := rest_of(record):
            batch = min(reboot.batch, len(remaining))
            return _asked(RebootStep.CHOOSE, {"nodes": remaining, "batch": batch})
        return Following(OperationState.COMMITTED, None)
    found = last.answer.get("found") or {}
    facts: Facts = dict(last.facts)
    if step is RebootStep.CHOOSE:
        facts = {"nodes": [str(one) for one in found["nodes"]]}
    elif step is RebootStep.DRAIN and "before" in found:
        facts["before"] = found["before"]
    elif step is RebootStep.UPGRADE:
        former = facts.get("before", {})  # its drain was answered to an earlier version without
        facts["before"] = {
            node: BootState.of(state).after_upgrade_of(former.get(node)).facts()
            for node, state in found["before"].items()
        }
    return _asked(_ORDER[_ORDER.index(step) + 1], facts)


def _asked(step: RebootStep, facts: Facts, doubt: str = "") -> Following:
    words = ", ".join(facts["nodes"]) + (f"; in doubt: {doubt}" if doubt else "")
    return Following(OperationState.BEGUN, Elsewhere(step, facts, words))


def doubt_of(record: Operation) -> str:
    """Why the last answer has stopped it; empty if it has not."""
    answered = [one for one in record.steps if one.answer]
    if not answered or answered[-1].answer.get("state") != AnswerState.FAILED:
        return ""
    return printable(str(answered[-1].answer.get("error") or "its step has failed"))


def rest_of(record: Operation) -> list[str]:
    """The names of the nodes that are not rebooted and filled yet."""
    done = {
        name
        for step in record.steps
        if step.name == RebootStep.FILL and step.answer.get("state") == AnswerState.DONE
        for name in step.facts["nodes"]
    }
    return [name for name in Reboot.of(record.facts).nodes if name not in done]


def chosen(plans: Mapping[int, Plan], nodes: Collection[str], batch: int) -> list[str]:
    """The nodes of the next batch: the first ones, as many as can be emptied at once.

    :param plans: for each number of nodes up to *batch*, the plan that empties the first so many.
    """
    for count in range(batch, 0, -1):
        if plans[count].is_whole():
            return [*nodes][:count]
    return []


def expect_found(step: Step, found: Facts) -> None:
    """Refuse an answer that does not have what the next steps need.

    :raises OperationError: what is missing.
    """
    nodes, before = found.get("nodes"), found.get("before")
    is_some = isinstance(nodes, list) and nodes and {*map(str, nodes)} <= {*step.facts["nodes"]}
    if step.name == RebootStep.CHOOSE and not is_some:
        raise OperationError(f"no nodes of the step: {nodes!r:.200}")
    if step.name == RebootStep.UPGRADE or (step.name == RebootStep.DRAIN and found):
        if not isinstance(before, dict) or {*before} != {*step.facts["nodes"]}:
            raise OperationError(f"no states of the step's nodes: {before!r:.200}")
        for state in before.values():
            BootState.of(state)


# One node.


@dataclass(frozen=True, slots=True, kw_only=True)
class BootState:
    """A node as it is: ``brine node state --json``.

    :param boot_id: the kernel's, another one after each boot.
    :param kernel: the release that runs, and *newest* the one that the next boot takes; empty if
        that is not known.
    :param daemons: the names of the units of Brine's that wait for work.
    :param failed: the names of all units that have failed.
    """

    boot_id: str
    kernel: str = ""
    newest: str = ""
    daemons: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: Any) -> BootState:
        """It by a node's answer, which a newer version may have printed.

        :raises OperationError: if that is none.
        """
        try:
            texts = {name: str(answer[name]) for name in ("boot_id", "kernel", "newest")}
            names = {name: tuple(map(str, answer[name])) for name in ("daemons", "failed")}
        except (LookupError, TypeError) as error:
            raise OperationError(f"no state of a node: {error!r:.200}") from None
        if not texts["boot_id"]:
            raise OperationError("no state of a node: its boot id is not known")
        return cls(
            boot_id=texts["boot_id"], kernel=texts["kernel"], newest=texts["newest"], **names
        )

    def after_upgrade_of(self, former: Any) -> BootState:
        """It, with the units as they were before an upgrade, which may have broken some.

        :param former: the node's answer of that time; None if there is none.
        """
        if former is None:
            return self
        before = BootState.of(former)
        return replace(self, daemons=before.daemons, failed=before.failed)

    def facts(self) -> Facts:
        return {**asdict(self), "daemons": [*self.daemons], "failed": [*self.failed]}


class RebootAct(StrEnum):
    """What a node that reboots is to be asked for."""

    REBOOT = "reboot"
    WAIT = "wait"
    DONE = "done"
    DOUBT = "doubt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootDecision:
    """What the caller does about a node now, and why."""

    act: RebootAct
    why: str = field(default="")


def reboot_act(
    before: BootState, now: BootState | None, running: Collection[str] | None
) -> RebootDecision:
    """What a node that reboots is asked for.

    :param now: None if it does not answer.
    :param running: the instances that run there; None if that is not known.
    """
    if now is None:
        return RebootDecision(act=RebootAct.WAIT, why="it does not answer")
    if now.boot_id != before.boot_id:
        return RebootDecision(act=RebootAct.DONE)
    if running is None:
        return RebootDecision(act=RebootAct.WAIT, why="its instances are not known")
    if running:
        names = ", ".join(sorted(running))
        return RebootDecision(
            act=RebootAct.DOUBT, why=printable(f"instances run there again: {names}")
        )
    return RebootDecision(act=RebootAct.REBOOT, why="it has not rebooted yet")


def faults_after(before: BootState, now: BootState | None) -> list[str]:
    """What is wrong with a node that has rebooted; it may be right a moment later."""
    if now is None:
        return ["it does not answer"]
    faults = []
    if now.boot_id == before.boot_id:
        faults.append("it has not rebooted")
    if before.newest and now.kernel != before.newest:
        faults.append(f"its kernel is {now.kernel or 'not known'}, and should be {before.newest}")
    if missing := sorted({*before.daemons} - {*now.daemons}):
        faults.append(f"no longer active: {', '.join(missing)}")
    if failed := sorted({*now.failed} - {*before.failed}):
        faults.append(f"failed: {', '.join(failed)}")
    return [printable(one) for one in faults]


REBOOT = OperationKind("reboot", {}, following=following_reboot)
