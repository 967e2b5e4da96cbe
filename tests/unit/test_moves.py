"""The steps of a move: which node is asked for what, and when a move goes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brine.cluster.moves import Move, MoveStep, abandoned, following_step, is_final
from brine.common.operation import (
    AnswerState,
    Facts,
    Operation,
    OperationError,
    OperationState,
    Step,
    StepAnswer,
    StepState,
    lead,
)
from brine.moves.source import (
    FirstAct,
    SourceAct,
    SourceGuest,
    SourceMove,
    SourceStep,
    SourceView,
    TargetWord,
    source_act,
    source_guest,
    source_without_record,
)
from brine.moves.target import (
    TargetAct,
    TargetGuest,
    TargetMove,
    TargetStep,
    TargetView,
    drop_act,
    go_act,
    hold_act,
    prepare_act,
)
from lab.move_history import (
    EventKind,
    HistoryEvent,
    faults_of,
    history_line,
    history_of_journal,
    intervals,
    read_history,
)

FOUND: Facts = {"port": 4096}


class _Story:
    """A move, and the steps that were asked."""

    def __init__(self, *, is_live: bool = True, copies: bool = True) -> None:
        move = Move("web1", "u", "n1", "n2", "192.0.2.1", "192.0.2.2", 8, cold=not is_live)
        self.offer: Facts = {
            "runs": True,
            "live": is_live,
            "copies": copies,
            "run": "r1",
            "key": "x",
        }
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
        known = {"prepare": FOUND, "offer": self.offer}
        found: Facts = known.get(self.step.name, {})
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
        facts = story.step.facts
        assert ("offered" in facts) == (story.step.name == MoveStep.PREPARE)
        assert ("prepared" in facts) == (story.step.name in list(SourceStep))
        if "prepared" in facts:
            assert facts["prepared"] == FOUND
            assert (facts["is_live"], facts["copies"], facts["run"]) == (is_live, copies, "r1")
        story.answer(AnswerState.DONE)
    end = ["hand over n1", "follow", "publish candidates"]
    assert story.asked == ["offer n1", "prepare n2", *steps, *end]
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
    story = _Story().answer_until(MoveStep.PREPARE)
    story.answer(AnswerState.FAILED, "no space")
    assert story.asked == ["offer n1", "prepare n2", "drop n2"]


def test_a_move_that_is_not_offered_ends_at_once() -> None:
    failed, aborted = _Story(), _Story()
    failed.answer(AnswerState.FAILED, "it has snapshots")
    aborted.abandon()
    for story, error in ((failed, "it has snapshots"), (aborted, "aborted")):
        assert (story.step, story.asked) == (None, ["offer n1"])
        assert (story.record.state, story.record.error) == (OperationState.UNDOING, error)


@pytest.mark.parametrize(
    "change",
    [{"live": None}, {"copies": 1}, {"runs": False}, {"live": False}, {"run": 5}],
    ids=str,
)
def test_an_offer_that_contradicts_itself_begins_nothing(change: dict[str, object]) -> None:
    story = _Story()
    story.offer |= change
    story.answer(AnswerState.DONE)
    assert (story.step, story.asked) == (None, ["offer n1"])
    assert story.record.state == OperationState.UNDOING
    assert "no offer" in story.record.error


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
    without_record = {MoveStep.OFFER, MoveStep.FOLLOW, MoveStep.PUBLISH}
    assert {*SourceStep, *TargetStep} == {str(step) for step in set(MoveStep) - without_record}


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


# Messages that come late, twice, or from a liar.

HERE = TargetMove("1", "web1", "n1", 8, True, True, runs=True, is_prepared=True)


@pytest.mark.parametrize("guest", TargetGuest)
def test_a_go_that_is_repeated_after_the_end_starts_nothing(guest: TargetGuest) -> None:
    view = TargetView(guest, is_taken=True, is_ended=True)
    assert go_act(None, view).act is TargetAct.ANSWER_RUNS


@pytest.mark.parametrize("guest", TargetGuest)
def test_a_target_takes_no_claim_of_a_move_that_it_does_not_know(guest: TargetGuest) -> None:
    for view in (TargetView(guest), TargetView(guest, is_ended=True)):
        assert go_act(None, view).act is TargetAct.REFUSE
        assert hold_act(None, view).act is TargetAct.REFUSE


@pytest.mark.parametrize("guest", TargetGuest)
def test_a_target_runs_a_guest_only_with_its_claim(guest: TargetGuest) -> None:
    runs = {TargetAct.CONTINUE, TargetAct.START}
    view = TargetView(guest, is_open=False, is_whole=True)
    acts = {decide(HERE, view).act for decide in (prepare_act, hold_act, drop_act, go_act)}
    assert not acts & runs
    assert go_act(HERE, view).act is TargetAct.TAKE


def test_a_target_that_has_taken_the_claim_drops_nothing() -> None:
    view = TargetView(TargetGuest.RUNS, is_taken=True)
    assert drop_act(HERE, view).act is TargetAct.REFUSE
    # Another move has taken it: of this one, nothing is here.
    assert drop_act(None, view).act is TargetAct.ANSWER_DONE


GOING = SourceMove("1", "web1", "n2", 8, True, True, "a", True, SourceStep.HAND_OVER, True)


@pytest.mark.parametrize("guest", SourceGuest)
@pytest.mark.parametrize("word", TargetWord)
@pytest.mark.parametrize("step", SourceStep)
@pytest.mark.parametrize("is_live", [True, False])
def test_what_a_source_never_does(
    guest: SourceGuest, word: TargetWord, step: SourceStep, is_live: bool
) -> None:
    """Whatever a target says: it runs no guest whose claim it gave away, and gives no claim away
    while its guest may run, after an error, or before it is asked to hand over."""
    move = replace(GOING, asked=step, is_live=is_live)
    given = source_act(move, SourceView(guest, is_given=True, word=word)).act
    assert given in (SourceAct.GO, SourceAct.CLEAR)
    act = source_act(move, SourceView(guest, is_copied=True, word=word)).act
    assert act not in (SourceAct.GO, SourceAct.CLEAR, SourceAct.RESUME)
    if act is SourceAct.GIVE:
        down = SourceGuest.SENT if is_live else SourceGuest.OFF
        assert (guest, word, step) == (down, TargetWord.HELD, SourceStep.HAND_OVER)
    failed = source_act(replace(move, error="it failed"), SourceView(guest, word=word)).act
    assert failed in (SourceAct.RESUME, SourceAct.WAIT, SourceAct.NOTHING, SourceAct.END)


def test_a_guest_that_was_sent_by_others_is_not_continued() -> None:
    """Such as by a user, to a QEMU elsewhere that may run it."""
    view = SourceView(SourceGuest.SENT)
    move = replace(GOING, asked=SourceStep.COPY, has_sent=False)
    decision = source_act(move, view)
    assert decision.act is SourceAct.FAIL
    failed = replace(move, error=decision.error)
    assert source_act(failed, view).act is SourceAct.NOTHING
    sent = replace(failed, has_sent=True)
    assert source_act(sent, view).act is SourceAct.RESUME


def test_steps_that_come_after_the_end_of_a_move_begin_nothing() -> None:
    for step in SourceStep:
        for is_given, is_ended in ((True, True), (True, False), (False, True)):
            act, answer = source_without_record(step, is_given=is_given, is_ended=is_ended)
            assert act is FirstAct.ANSWER
            is_done = step is (SourceStep.HAND_OVER if is_given else SourceStep.CANCEL)
            assert answer.state is (AnswerState.DONE if is_done else AnswerState.FAILED)
    late = GOING.asked_for(SourceStep.CANCEL).asked_for(SourceStep.COPY)
    assert late.asked is SourceStep.CANCEL


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


def test_a_history_of_journals() -> None:
    """As QEMU's events have it, which brine-kvmd logs, and the start of a guest."""

    def event(name: str, usec: int) -> dict[str, str]:
        fields = {"BRINE_INSTANCE": "web1", "BRINE_QMP_EVENT": name}
        return {**fields, "BRINE_EVENT_TIME_USEC": str(usec), "__REALTIME_TIMESTAMP": "99000000"}

    started = {"BRINE_EVENT": "started", "BRINE_INSTANCE": "web1"}
    n1 = [{**started, "__REALTIME_TIMESTAMP": "1000000"}]
    n1 += [event("STOP", 2_000_000), event("SHUTDOWN", 4_000_000), event("RESET", 5_000_000)]
    n2 = [{"MESSAGE": "of another"}, event("RESUME", 2_500_000)]
    history = [*history_of_journal("n1", n1), *history_of_journal("n2", n2)]
    assert [(one.node, one.begin, one.end) for one in intervals(history)] == [
        ("n1", 1.0, 2.0),
        ("n2", 2.5, float("inf")),
    ]
    assert faults_of(history) == []
    early = [*history_of_journal("n1", n1), *history_of_journal("n2", [event("RESUME", 1_900_000)])]
    assert ["runs twice" in fault for fault in faults_of(early)] == [True]


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
