"""The target's real side of moves: what the master asks for, and the process that does it."""

from __future__ import annotations

from brine.common.operation import AnswerState, StepAnswer
from brine.moves.records import AskedStep, MoveRecord


def answer(asked: AskedStep) -> StepAnswer:
    """Record what the master asks for, and answer it as far as that is known; see
    :func:`brine.moves.target.prepare_act` and :func:`brine.moves.target.drop_act`. The process of
    the move is started for an answer that is not final."""
    return asked.answer(AnswerState.FAILED, "this node takes no instances yet")


def work(record: MoveRecord) -> None:
    """Do what follows, until the record has ended: the process of the move, whose ``READY=1`` was
    not sent yet."""
