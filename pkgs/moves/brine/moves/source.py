"""What the node does that a guest moves away from: decisions only, no I/O.

The node keeps a :class:`SourceMove`, durable before the first act, and looks at its QEMU and at
what the target has said: a :class:`SourceView`. Out of both, :func:`source_act` makes the next act,
again and again, until there is none left. An act may be done twice, and the process may be killed
before or after each: what follows depends only on what there is to see.

Three facts decide, and each is durable before anything rests on it:

- the claim that is given away: from then on only forward, and the guest never runs here again;
- the move's error: from then on only back, and the claim is never given away;
- neither: the guest is where its QEMU says. Nothing continues a QEMU that has sent its guest unless
  the error is recorded before. The claim is given away only while the run with which the move began
  is paused and sent, or off since, and only when the target holds all: the memory, and volumes that
  survive a loss of power.

An act that fails for good is an error of the move, too, as long as the claim is not given away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import NamedTuple

from brine.common.operation import AnswerState


class SourceStep(StrEnum):
    """The steps that the master asks of the source, in their order."""

    STOP = "stop"
    COPY = "copy"
    HAND_OVER = "hand over"
    CANCEL = "cancel"


_ORDER = list(SourceStep)


class SourceGuest(Enum):
    """The guest here, as its QEMU tells."""

    RUNS = auto()  # as before the move
    SENDING = auto()  # it runs, and its memory is sent
    SWITCHING = auto()  # pre-switchover: it is paused, its disks are not ended yet
    FINISHING = auto()  # device: what becomes of it is not decided yet
    SENT = auto()  # postmigrate: it is paused, and its QEMU no longer has the images
    RUNS_ON = auto()  # as QEMU's migration has failed, or was cancelled
    OFF = auto()
    OTHER_RUN = auto()  # it has ended, and was started again


def source_guest(move: SourceMove, *, run: str, status: str, migration: str) -> SourceGuest:
    """The guest as its QEMU tells.

    :param run: identifies the instance's last run on this node, which may have ended.
    :param status: of ``query-status``; empty if there is no QEMU.
    :param migration: the status of ``query-migrate``; empty if there was none. A migration of an
        earlier move may have left it.
    """
    if run != move.run:
        return SourceGuest.OTHER_RUN
    if not status:
        return SourceGuest.OFF
    if status == "postmigrate":
        return SourceGuest.SENT
    if status == "finish-migrate" and migration != "pre-switchover":
        return SourceGuest.FINISHING
    known = _MIGRATION.get(migration)
    return known or (SourceGuest.RUNS_ON if move.has_sent and migration else SourceGuest.RUNS)


_MIGRATION = {
    "setup": SourceGuest.SENDING,
    "active": SourceGuest.SENDING,
    "pre-switchover": SourceGuest.SWITCHING,
    "device": SourceGuest.FINISHING,
    "cancelling": SourceGuest.FINISHING,
}


_UNDERWAY = {
    SourceGuest.SENDING,
    SourceGuest.SWITCHING,
    SourceGuest.FINISHING,
    SourceGuest.SENT,
}


class TargetWord(Enum):
    """The target's last word about this move, to this process."""

    NONE = auto()
    WAIT = auto()
    HELD = auto()
    REFUSED = auto()
    RUNS = auto()


class SourceAct(Enum):
    """What the node does next."""

    STOP = auto()  # the guest, for the move
    COPY = auto()  # begin to mirror or copy the volumes, or wait for that
    SEND = auto()  # record that it was begun; begin QEMU's migration, with pause-before-switchover
    SWITCH = auto()  # end the mirrors, and let the migration complete
    WAIT = auto()
    ASK = auto()  # the target whether it holds all
    GIVE = auto()  # the claim away, durably
    GO = auto()  # tell the target to take the claim and to run the guest
    CLEAR = auto()  # end the QEMU, remove the volumes, end the record
    FAIL = auto()  # record the error, durably
    RESUME = auto()  # cancel mirrors and migration; have the guest run on, or start it again
    NOTHING = auto()  # the step has its answer
    END = auto()  # end the record: the move is undone here


@dataclass(frozen=True, slots=True)
class SourceMove:
    """What the node keeps of a move, durably, from the master's first step to the end.

    :param id: of the master's operation. Later moves have higher ones.
    :param serial: of the claim that the target gets.
    :param run: identifies the instance's last run on this node when the move began.
    :param runs: it was running then.
    :param asked: the last step that the master has asked for.
    :param has_sent: recorded before QEMU's migration is begun.
    :param error: why the move has failed; empty while it can go on.
    """

    id: str
    instance: str
    target: str
    serial: int
    is_live: bool
    copies: bool
    run: str
    runs: bool
    asked: SourceStep
    has_sent: bool = False
    error: str = ""

    def asked_for(self, step: SourceStep) -> SourceMove:
        """It after the master asks for a step; an earlier one, that comes late, changes nothing."""
        return replace(self, asked=max(self.asked, step, key=_ORDER.index))

    def keeps_off(self) -> bool:
        """Whether the watcher and the node's boot leave the instance off: it is stopped for this
        move. That is a courtesy: a start that passes this by makes the move fail."""
        return not (self.is_live or self.error)


@dataclass(frozen=True, slots=True)
class SourceView:
    """What the node sees.

    :param is_given: the claim names another node.
    :param is_copied: the mirrors are ready; of a cold move, the copies are whole and compared.
    :param has_mirrors: QEMU has jobs or nodes of this move.
    :param is_late: the guest has been down for longer than the target may take to answer.
    """

    guest: SourceGuest
    is_given: bool = False
    is_copied: bool = False
    has_mirrors: bool = False
    word: TargetWord = TargetWord.NONE
    is_late: bool = False


class SourceDecision(NamedTuple):
    """The next act; *error* is what :attr:`SourceAct.FAIL` records."""

    act: SourceAct
    error: str = ""


def source_act(move: SourceMove, view: SourceView) -> SourceDecision:
    """What the source does next."""
    if view.is_given:
        return SourceDecision(SourceAct.CLEAR if view.word is TargetWord.RUNS else SourceAct.GO)
    if move.error:
        return SourceDecision(_back(move, view))
    if error := _fault(move, view):
        return SourceDecision(SourceAct.FAIL, error)
    return SourceDecision(_live(move, view) if move.is_live else _cold(move, view))


def _fault(move: SourceMove, view: SourceView) -> str:
    """Why the move can't go on; empty if it can."""
    guest, hands_over = view.guest, move.asked is SourceStep.HAND_OVER
    is_down = guest is (SourceGuest.SENT if move.is_live else SourceGuest.OFF)
    if move.asked is SourceStep.CANCEL:
        return "the move was cancelled"
    if guest is SourceGuest.OTHER_RUN:
        return "the instance was started again during the move"
    if guest is SourceGuest.RUNS_ON:
        return "QEMU's migration failed"
    if move.is_live and guest is SourceGuest.OFF:
        return "the guest ended during the move"
    if not move.is_live and guest is not SourceGuest.OFF and move.asked is not SourceStep.STOP:
        return "the guest is not off"
    if guest in _UNDERWAY and not (hands_over and move.has_sent):
        return "QEMU sends the guest, and not for this move"
    is_mirrored = guest in (SourceGuest.RUNS, SourceGuest.SWITCHING)
    if hands_over and move.copies and is_mirrored and not view.is_copied:
        return "the mirrors of its volumes ended"
    if hands_over and is_down and view.word is TargetWord.REFUSED:
        return f"{move.target} no longer holds what it was sent"
    if hands_over and is_down and view.is_late and view.word is not TargetWord.HELD:
        return f"{move.target} does not answer"
    return ""


def _live(move: SourceMove, view: SourceView) -> SourceAct:
    if view.guest is SourceGuest.RUNS:
        if move.asked is SourceStep.HAND_OVER:
            return SourceAct.SEND
        return SourceAct.NOTHING if view.is_copied else SourceAct.COPY
    if view.guest is SourceGuest.SWITCHING:
        return SourceAct.SWITCH
    return _held(view) if view.guest is SourceGuest.SENT else SourceAct.WAIT


def _cold(move: SourceMove, view: SourceView) -> SourceAct:
    if move.asked is SourceStep.STOP:
        return SourceAct.NOTHING if view.guest is SourceGuest.OFF else SourceAct.STOP
    if move.asked is SourceStep.COPY:
        return SourceAct.NOTHING if view.is_copied else SourceAct.COPY
    return _held(view)


def _held(view: SourceView) -> SourceAct:
    return SourceAct.GIVE if view.word is TargetWord.HELD else SourceAct.ASK


def _back(move: SourceMove, view: SourceView) -> SourceAct:
    """The guest runs on here, if it did before the move and has not ended."""
    is_sent = move.has_sent and view.guest in _UNDERWAY  # what others have sent is theirs
    if is_sent and view.guest is SourceGuest.FINISHING:
        return SourceAct.WAIT
    was_stopped = view.guest is SourceGuest.OFF and not move.is_live and move.runs
    if was_stopped or is_sent or view.has_mirrors:
        return SourceAct.RESUME
    # The master hears of the error before the record goes.
    return SourceAct.END if move.asked is SourceStep.CANCEL else SourceAct.NOTHING


class SourceAnswer(NamedTuple):
    """The state and the error of the answer to a step; see ``StepAnswer``."""

    state: AnswerState
    error: str = ""


def source_answer(
    step: SourceStep, move: SourceMove, view: SourceView, act: SourceAct
) -> SourceAnswer:
    """The answer to a step while the node has a record of the move.

    :param act: the next one, by :func:`source_act`.
    """
    if view.is_given and step is not SourceStep.HAND_OVER:
        return SourceAnswer(AnswerState.FAILED, f"the claim was given to {move.target}")
    # The record of a move that was cancelled ends before that is answered.
    if act is SourceAct.NOTHING and step is move.asked and step is not SourceStep.CANCEL:
        return SourceAnswer(AnswerState.FAILED if move.error else AnswerState.DONE, move.error)
    return SourceAnswer(AnswerState.RUNNING)


class FirstAct(Enum):
    """What a node does that is asked for a step, and has no record of the move."""

    BEGIN = auto()  # make a record
    END = auto()  # record that the move has ended, durably, and answer *done*
    ANSWER = auto()  # the answer is there


def source_without_record(
    step: SourceStep, *, is_given: bool, is_ended: bool
) -> tuple[FirstAct, SourceAnswer]:
    """The act and the answer of a node that has no record of the move.

    :param is_given: the node has seen the claim that the target gets, or a newer one.
    :param is_ended: this move, or a later one of the instance, has ended here.
    """
    done = SourceAnswer(AnswerState.DONE)
    if is_given:
        if step is SourceStep.HAND_OVER:
            return FirstAct.ANSWER, done
        return FirstAct.ANSWER, SourceAnswer(AnswerState.FAILED, "the claim was given away")
    if step is SourceStep.CANCEL:
        return FirstAct.ANSWER if is_ended else FirstAct.END, done
    if is_ended:
        return FirstAct.ANSWER, SourceAnswer(AnswerState.FAILED, "the move has ended here")
    return FirstAct.BEGIN, SourceAnswer(AnswerState.RUNNING)
