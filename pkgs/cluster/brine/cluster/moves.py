"""Which step of a move is asked of which node next: no I/O, no clock, no Salt.

A move is an operation of the master (:mod:`brine.common.operation`). Its record and the answers in
it decide the next step. A node is asked for a step until its answer is final; answers may be late,
lost or doubled, and the master may be away between any two of them::

    offer       source   tells what would move, or why it can't; begins nothing
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

The facts of each step are those of :class:`Move`. From the offer on, they also have what
:class:`Offer` has; *prepare* has the whole offer as ``offered``, and the source's steps after it
have what the target has found as ``prepared``. There is no secret in them: Salt carries them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
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
from brine.common.schema import key

KEEPS_HOME = "keeps_home"
"""A fact of a move's operation: a drain or a fill has it, and its instance's home stays."""

CANDIDATES = "candidates"
"""Stands for all nodes whose confd answers."""


class MoveStep(StrEnum):
    """The steps of a move, by the names under which nodes are asked for them."""

    OFFER = "offer"
    PREPARE = "prepare"
    STOP = "stop"
    COPY = "copy"
    HAND_OVER = "hand over"
    FOLLOW = "follow"
    PUBLISH = "publish"
    CANCEL = "cancel"
    DROP = "drop"


_MAY_FAIL = frozenset(set(MoveStep) - {MoveStep.FOLLOW, MoveStep.PUBLISH, MoveStep.DROP})


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user wishes of a live move; None leaves it to the nodes' settings."""

    auto_converge: bool = False
    """Slow a guest down that changes its memory faster than it can be sent."""

    max_downtime_ms: int | None = key(None, minimum=1, maximum=2_000_000)
    """How long the guest may stand still, in milliseconds."""

    rate: int | None = key(None, minimum=1, maximum=2**53)
    """How much is sent at most, in bytes a second."""

    plaintext: bool = False
    """Send memory and disks without encryption."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move, as its operation's facts have it.

    :param source: the name of the node that has the instance; *target* is where it goes.
    :param source_address: the IP address for the traffic between nodes; *target_address* likewise.
    :param serial: of the claim that the target gets: higher than that of the configuration when
        the move begins. The instance's object must not change in the configuration while the
        operation is pending.
    :param cold: a guest that runs is stopped for the move, and started after it.
    :param wishes: :class:`Wishes` as JSON.
    """

    instance: str
    uuid: str
    source: str
    target: str
    source_address: str
    target_address: str
    serial: int
    cold: bool = False
    wishes: Facts = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Facts) -> Move:
        """It out of the facts of its operation, or of one of its steps."""
        return cls(**{one.name: facts[one.name] for one in fields(cls)})

    def facts(self) -> Facts:
        """It as an operation's facts."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Offer:
    """What the source's offer decides about the steps.

    :param is_live: the guest runs on; otherwise it is off, or stopped for the move.
    :param runs: the guest runs when the move begins.
    :param copies: the nodes have volumes of their own; otherwise both have the same ones.
    :param run: identifies the run of the guest, and *state* what was offered: if either is another
        one when the source begins, as the guest has restarted or got a device, the move fails.
    """

    is_live: bool
    runs: bool
    copies: bool
    run: str = ""
    state: str = ""

    @classmethod
    def of(cls, found: Facts, *, cold: bool) -> Offer:
        """:raises OperationError: if this is no offer."""
        flags = {key: found.get(key) for key in ("live", "runs", "copies")}
        run, state = found.get("run", ""), found.get("state", "")
        has_words = isinstance(run, str) and isinstance(state, str)
        if not (has_words and all(isinstance(one, bool) for one in flags.values())):
            raise OperationError(f"this is no offer: {[*found]!r:.200}")
        if flags["live"] != (flags["runs"] and not cold):
            raise OperationError(f"this is no offer: {flags}, cold {cold}")
        return cls(bool(flags["live"]), bool(flags["runs"]), bool(flags["copies"]), run, state)

    def plan(self) -> list[MoveStep]:
        """The steps of a move that goes well, after the offer."""
        stop = [] if self.is_live else [MoveStep.STOP]
        copy = [MoveStep.COPY] if self.copies else []
        end = [MoveStep.HAND_OVER, MoveStep.FOLLOW, MoveStep.PUBLISH]
        return [MoveStep.PREPARE, *stop, *copy, *end]


def following_step(record: Operation) -> Following:
    """What follows the answered steps of a move.

    :param record: its operation, of which no step is waiting.
    """
    move = Move.of(record.facts)
    if not record.steps:
        asked = Elsewhere(MoveStep.OFFER, move.facts(), move.source)
        return Following(OperationState.BEGUN, asked)
    last = record.steps[-1]
    step, has_failed = MoveStep(last.name), last.answer.get("state") == AnswerState.FAILED
    error = str(last.answer.get("error", "")) if has_failed else ""
    # A failed offer has begun nothing. A drop leaves nothing.
    if step is MoveStep.DROP or (step is MoveStep.OFFER and has_failed):
        return Following(OperationState.UNDOING, None, error)
    try:
        plan = Offer.of(_found(record, MoveStep.OFFER), cold=move.cold).plan()
    except OperationError as fault:
        return Following(OperationState.UNDOING, None, f"{move.source}: {fault}")
    if step is MoveStep.CANCEL:
        if has_failed:  # the claim was given away before
            return _asked(OperationState.COMMITTED, record, MoveStep.HAND_OVER)
        return _asked(OperationState.UNDOING, record, MoveStep.DROP)
    if has_failed:
        # A source that was asked for nothing but an offer has nothing to cancel.
        back = MoveStep.DROP if step is MoveStep.PREPARE else MoveStep.CANCEL
        return _asked(OperationState.UNDOING, record, back)._replace(error=error)
    rest = plan if step is MoveStep.OFFER else plan[plan.index(step) + 1 :]
    is_claimed = MoveStep.HAND_OVER not in rest
    state = OperationState.COMMITTED if is_claimed else OperationState.BEGUN
    return _asked(state, record, rest[0]) if rest else Following(state, None)


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
    has given the claim away. A target that is asked to drop its part is asked only after that, or
    before the source was asked for anything but its offer: it may be left with what it has made.

    :raises OperationError: if the move goes back already, or can't go back.
    """
    step = next((one for one in record.steps if one.state is StepState.WAITING), None)
    if step and record.state is OperationState.UNDOING and step.name == MoveStep.DROP:
        return StepAnswer(step.id, step.name, AnswerState.DONE)
    if record.state is not OperationState.BEGUN or step is None:
        word = "goes back" if record.state is OperationState.UNDOING else "goes forward only"
        raise OperationError(f"{record.key}: the move {word}: it can't be aborted")
    return StepAnswer(step.id, step.name, AnswerState.FAILED, error=why)


def _found(record: Operation, step: MoveStep) -> Facts:
    """What a node has found in a step; empty if it was not asked for that."""
    answers = [one.answer for one in record.steps if one.name == step]
    found: Facts = answers[0].get("found", {}) if answers else {}
    return found


def _asked(state: OperationState, record: Operation, step: MoveStep) -> Following:
    """A step after the offer, with its facts."""
    move, offered = Move.of(record.facts), _found(record, MoveStep.OFFER)
    if step is MoveStep.FOLLOW:
        keeps_home = {KEEPS_HOME: bool(record.facts.get(KEEPS_HOME))}
        return Following(state, (step, move.facts() | keeps_home))
    if step is MoveStep.PUBLISH:
        return Following(state, Elsewhere(step, move.facts(), CANDIDATES))
    facts = {**move.facts(), **asdict(Offer.of(offered, cold=move.cold))}
    if step in (MoveStep.PREPARE, MoveStep.DROP):
        more = {"offered": offered} if step is MoveStep.PREPARE else {}
        return Following(state, Elsewhere(step, facts | more, move.target))
    facts["prepared"] = _found(record, MoveStep.PREPARE)
    return Following(state, Elsewhere(step, facts, move.source))
