"""The steps of a move: which node is asked for what, and when a move goes back."""

from __future__ import annotations

import pytest

from brine.cluster.moves import Move, MoveStep, abandoned, following_step, is_final
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
from brine.moves.source import SourceGuest, SourceMove, SourceStep, source_guest
from brine.moves.target import TargetStep
from lab.move_history import EventKind, HistoryEvent, faults_of, history_line, read_history

FOUND = {"port": 4096}


class _Story:
    """A move, and the steps that were asked."""

    def __init__(self, *, is_live: bool = True, copies: bool = True) -> None:
        move = Move("web1", "n1", "n2", 8, is_live=is_live, copies=copies)
        self.record = Operation("1", "move", "instance/web1", facts=move.facts())
        self.asked: list[str] = []
        self.step = self._lead()

    def _lead(self) -> Step | None:
        step = lead(self.record, following_step)
        if step:
            self.asked.append(f"{step.name} {step.node}".strip())
        return step

    def answer(self, state: AnswerState, error: str = "") -> None:
        assert self.step
        found = FOUND if self.step.name == MoveStep.PREPARE else {}
        answer = StepAnswer(self.step.id, self.step.name, state, error=error, found=found)
        assert is_final(self.step, answer)
        self._take(answer)

    def abandon(self) -> None:
        self._take(abandoned(self.record, "aborted"))

    def _take(self, answer: StepAnswer) -> None:
        assert self.step
        self.step.answer, self.step.state = answer.facts(), StepState.DONE
        self.step = self._lead()

    def answer_until(self, step: MoveStep) -> _Story:
        """All goes well until a step is asked."""
        while self.step and self.step.name != step:
            self.answer(AnswerState.DONE)
        return self


@pytest.mark.parametrize(
    ("is_live", "copies", "steps"),
    [
        (True, True, ["copy n1"]),
        (True, False, []),
        (False, True, ["stop n1", "copy n1"]),
        (False, False, ["stop n1"]),
    ],
)
def test_a_move_that_goes_well(is_live: bool, copies: bool, steps: list[str]) -> None:
    story = _Story(is_live=is_live, copies=copies)
    states = {}
    while story.step:
        states[story.step.name] = story.record.state
        if story.step.name == MoveStep.HAND_OVER:
            assert story.step.facts["prepared"] == FOUND
        story.answer(AnswerState.DONE)
    end = ["hand over n1", "follow", "publish candidates"]
    assert story.asked == ["prepare n2", *steps, *end]
    assert states[MoveStep.HAND_OVER] == OperationState.BEGUN
    assert states[MoveStep.FOLLOW] == OperationState.COMMITTED


@pytest.mark.parametrize("step", [MoveStep.COPY, MoveStep.HAND_OVER])
@pytest.mark.parametrize("is_aborted", [False, True], ids=["failed", "aborted"])
def test_the_source_is_asked_before_the_target_drops_anything(
    step: MoveStep, is_aborted: bool
) -> None:
    story = _Story().answer_until(step)
    if is_aborted:
        story.abandon()
    else:
        story.answer(AnswerState.FAILED, "aborted")
    assert (story.record.state, story.record.error) == (OperationState.UNDOING, "aborted")
    story.answer(AnswerState.DONE)
    assert story.asked[-2:] == ["cancel n1", "drop n2"]
    story.answer(AnswerState.DONE)
    assert (story.step, story.record.state) == (None, OperationState.UNDOING)


def test_a_source_that_was_asked_for_nothing_has_nothing_to_cancel() -> None:
    story = _Story()
    story.answer(AnswerState.FAILED, "no space")
    assert story.asked == ["prepare n2", "drop n2"]


def test_a_claim_that_was_given_away_before_the_abort_goes_forward() -> None:
    story = _Story().answer_until(MoveStep.HAND_OVER)
    story.abandon()
    story.answer(AnswerState.FAILED, "the claim was given to n2")
    assert (story.asked[-1], story.record.state) == ("hand over n1", OperationState.COMMITTED)
    with pytest.raises(OperationError, match="forward"):
        story.abandon()
    story.answer_until(MoveStep.PUBLISH)
    story.answer(AnswerState.DONE)
    assert (story.step, story.record.state) == (None, OperationState.COMMITTED)


def test_a_move_that_goes_back_is_not_aborted_again() -> None:
    story = _Story().answer_until(MoveStep.COPY)
    story.abandon()
    with pytest.raises(OperationError, match="back"):
        story.abandon()


def test_which_answers_end_a_step() -> None:
    story = _Story().answer_until(MoveStep.HAND_OVER)
    step = story.step
    assert step
    done = StepAnswer(step.id, step.name, AnswerState.DONE)
    assert is_final(step, done)
    assert is_final(step, StepAnswer(step.id, step.name, AnswerState.FAILED))
    assert not is_final(step, StepAnswer(step.id, step.name, AnswerState.RUNNING))
    assert not is_final(step, StepAnswer(step.id, "copy", AnswerState.DONE))
    assert not is_final(step, StepAnswer("1-0", step.name, AnswerState.DONE))
    story.answer_until(MoveStep.PUBLISH)
    assert story.step
    failed = StepAnswer(story.step.id, story.step.name, AnswerState.FAILED)
    assert not is_final(story.step, failed)


def test_master_and_nodes_have_the_same_names_of_steps() -> None:
    here = {MoveStep.FOLLOW, MoveStep.PUBLISH}
    assert {*SourceStep, *TargetStep} == {str(step) for step in set(MoveStep) - here}


@pytest.mark.parametrize(
    ("run", "status", "migration", "guest"),
    [
        ("a", "running", "", SourceGuest.RUNS),
        ("a", "running", "active", SourceGuest.SENDING),
        ("a", "finish-migrate", "pre-switchover", SourceGuest.SWITCHING),
        ("a", "finish-migrate", "device", SourceGuest.FINISHING),
        ("a", "finish-migrate", "completed", SourceGuest.FINISHING),
        ("a", "postmigrate", "completed", SourceGuest.SENT),
        ("a", "running", "failed", SourceGuest.RUNS_ON),
        ("a", "running", "completed", SourceGuest.RUNS_ON),
        ("a", "", "", SourceGuest.OFF),
        ("b", "running", "", SourceGuest.OTHER_RUN),
        ("b", "", "", SourceGuest.OTHER_RUN),
    ],
)
def test_the_guest_as_the_source_sees_it(
    run: str, status: str, migration: str, guest: SourceGuest
) -> None:
    move = SourceMove(
        "1", "web1", "n2", 8, True, True, "a", True, SourceStep.HAND_OVER, has_sent=True
    )
    assert source_guest(move, run=run, status=status, migration=migration) is guest


def test_the_migration_of_an_earlier_move_is_not_taken_for_this_ones() -> None:
    move = SourceMove("2", "web1", "n2", 9, True, True, "a", True, SourceStep.COPY)
    for left in ("failed", "cancelled", "completed"):
        guest = source_guest(move, run="a", status="running", migration=left)
        assert guest is SourceGuest.RUNS


# The checker of histories.


def _history(text: str) -> list[HistoryEvent]:
    """Events out of lines such as ``1 resume web1 n1``."""
    events = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        kind, subject, *more = line.split()
        events.append(HistoryEvent(float(number), EventKind(kind), subject, *more))
    return events


WELL = """
    lock instance/web1 master 1
    begun 1
    resume web1 n1
    write web1 n1 a
    stop web1 n1
    resume web1 n2
    write web1 n2 b
    resume web2 n1
    ended 1 n1 done
    unlock instance/web1 master 1
    found web1 n2 a
    found web1 n2 b
"""


def test_a_history_without_a_fault() -> None:
    history = _history(WELL)
    assert faults_of(history) == []
    assert list(read_history(map(history_line, history))) == history


@pytest.mark.parametrize(
    ("line", "instead", "fault"),
    [
        ("stop web1 n1", "stop web2 n1", "web1 runs twice: on n1 and n2"),
        ("resume web2 n1", "resume web1 n2", "web1 runs twice: on n2 and n2"),
        ("found web1 n2 a", "found web2 n2 a", "web1 has lost the write a"),
        ("unlock instance/web1 master 1", "", "the lock instance/web1 is held"),
        ("ended 1 n1 done", "", "the operation 1 is begun 1 times, ended 0 times"),
        ("ended 1 n1 done", "ended 1 n1 given-up", "the operation 1 ended as 'given-up'"),
    ],
)
def test_a_fault_of_a_history(line: str, instead: str, fault: str) -> None:
    (found,) = faults_of(_history(WELL.replace(line, instead)))
    assert fault in found


def test_a_node_that_is_lost_ends_its_runs_and_clocks_may_differ() -> None:
    assert faults_of(_history("resume web1 n1\nlost n1\nresume web1 n2")) == []
    late = _history("resume web1 n1\nresume web1 n2\nstop web1 n1")
    assert faults_of(late, skew_s=0.5)
    assert faults_of(late, skew_s=1.5) == []
