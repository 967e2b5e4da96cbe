"""Which step of a move is asked of which node next: no I/O, no clock, no Salt.

A move is an operation of the master (:mod:`brine.common.operation`). Its record and the answers in
it decide the next step. A node is asked for a step until its answer is final; answers may be late,
lost or doubled, and the master may be away between any two of them::

    prepare     target   makes volumes, starts the QEMU that waits for the guest (-incoming)
    stop        source   a cold move only: ends the guest
    copy        source   unless both nodes have the volumes: mirrors or copies them
    hand over   source   sends the guest, gives the claim away, and tells the target to run it
    follow      master   writes the new node into the configuration
    publish     all candidates answer the new node

    cancel      source   the guest runs on where it is, and the claim is never given away
    drop        target   ends its QEMU, removes what it has made

The claim decides: the source alone gives it away, durably, and says so in the answer to *hand over*
or *cancel*. Until then the move is *begun* and can go back. After that it is *committed* and goes
forward, whatever ends. The target's part is dropped only after the source has refused for good: no
node removes the last copy of a disk. Between *hand over* and its answer no master is needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from brine.common.operation import (
    AnswerState,
    Elsewhere,
    Facts,
    Following,
    Operation,
    OperationError,
    OperationState,
    Step,
    StepAnswer,
    StepState,
)

CANDIDATES = "candidates"
"""Stands for all nodes whose confd answers."""


class MoveStep(StrEnum):
    """The steps of a move, by the names under which nodes are asked for them."""

    PREPARE = "prepare"
    STOP = "stop"
    COPY = "copy"
    HAND_OVER = "hand over"
    FOLLOW = "follow"
    PUBLISH = "publish"
    CANCEL = "cancel"
    DROP = "drop"


_MAY_FAIL = frozenset(
    {MoveStep.PREPARE, MoveStep.STOP, MoveStep.COPY, MoveStep.HAND_OVER, MoveStep.CANCEL}
)


@dataclass(frozen=True, slots=True)
class Move:
    """A move, as its operation's facts have it.

    :param serial: of the claim that the target gets: higher than that of the configuration when
        the move begins. The instance's object must not change in the configuration while the
        operation is pending.
    :param is_live: the guest runs on; otherwise it is off, or stopped for the move.
    :param copies: the nodes have volumes of their own; otherwise both have the same ones.
    """

    instance: str
    source: str
    target: str
    serial: int
    is_live: bool
    copies: bool

    def facts(self) -> Facts:
        """It as an operation's facts."""
        return asdict(self)

    def plan(self) -> list[MoveStep]:
        """Its steps, if all goes well."""
        stop = [] if self.is_live else [MoveStep.STOP]
        copy = [MoveStep.COPY] if self.copies else []
        end = [MoveStep.HAND_OVER, MoveStep.FOLLOW, MoveStep.PUBLISH]
        return [MoveStep.PREPARE, *stop, *copy, *end]


def following_step(record: Operation) -> Following:
    """What follows the answered steps of a move.

    :param record: its operation, of which no step is waiting.
    """
    move = Move(**record.facts)
    if not record.steps:
        return _asked(OperationState.BEGUN, move, MoveStep.PREPARE, {})
    last = record.steps[-1]
    step, has_failed = MoveStep(last.name), last.answer.get("state") == AnswerState.FAILED
    if step is MoveStep.DROP:
        return Following(OperationState.UNDOING, None)
    if step is MoveStep.CANCEL:
        if has_failed:  # the claim was given away before
            return _asked(OperationState.COMMITTED, move, MoveStep.HAND_OVER, _prepared(record))
        return _asked(OperationState.UNDOING, move, MoveStep.DROP, {})
    if has_failed:
        # A source that was asked for nothing has nothing to cancel.
        back = MoveStep.DROP if step is MoveStep.PREPARE else MoveStep.CANCEL
        error = str(last.answer.get("error", ""))
        return _asked(OperationState.UNDOING, move, back, {})._replace(error=error)
    plan = move.plan()
    rest = plan[plan.index(step) + 1 :]
    is_claimed = MoveStep.HAND_OVER not in rest
    state = OperationState.COMMITTED if is_claimed else OperationState.BEGUN
    return _asked(state, move, rest[0], _prepared(record)) if rest else Following(state, None)


def is_final(step: Step, answer: StepAnswer) -> bool:
    """Whether an answer is one to this step, and ends it. What the claim has decided, and what is
    undone, does not fail: it is asked for until it is done."""
    may_fail = MoveStep(step.name) in _MAY_FAIL
    if (answer.id, answer.step) != (step.id, step.name):
        return False
    return answer.state is AnswerState.DONE or (may_fail and answer.state is AnswerState.FAILED)


def abandoned(record: Operation, why: str) -> StepAnswer:
    """The answer that a move's waiting step gets when it is not waited for any longer: a user
    aborts it, or its time is over. Then the source decides: the move goes back, unless the source
    has given the claim away.

    :raises OperationError: if the move goes back already, or can't go back.
    """
    step = next((one for one in record.steps if one.state is StepState.WAITING), None)
    if record.state is not OperationState.BEGUN or step is None:
        word = "goes back" if record.state is OperationState.UNDOING else "goes forward only"
        raise OperationError(f"{record.key}: the move {word}: it can't be aborted")
    return StepAnswer(step.id, step.name, AnswerState.FAILED, error=why)


def _prepared(record: Operation) -> Facts:
    """What the target's preparation has found, for the source."""
    found: Facts = record.steps[0].answer.get("found", {})
    return found


def _asked(state: OperationState, move: Move, step: MoveStep, found: Facts) -> Following:
    facts = {**move.facts(), "prepared": found}
    if step is MoveStep.FOLLOW:
        return Following(state, (step, facts))
    if step is MoveStep.PUBLISH:
        node = CANDIDATES
    else:
        node = move.target if step in (MoveStep.PREPARE, MoveStep.DROP) else move.source
    return Following(state, Elsewhere(step, facts, node))
