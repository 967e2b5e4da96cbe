"""What the master asks of the target of a move, and how the node answers.

A step is recorded, and done by the process of the move (:mod:`brine.moves.target_service`). The
decisions are those of :mod:`brine.moves.target`.
"""

from __future__ import annotations

from brine.common.errors import BrineError
from brine.common.operation import AnswerState, StepAnswer
from brine.instance import store
from brine.instance.claims import has_seen
from brine.instance.messages import tell
from brine.instance.store import is_this_node
from brine.moves import messages, records, target
from brine.moves.cluster_keys import key_of_move
from brine.moves.incoming import guest_here
from brine.moves.migration import MoveError
from brine.moves.offered import ReceivedOffer, recorded_part
from brine.moves.records import AskedStep, MoveRecord
from brine.moves.target import Fate, TargetAct, TargetGuest, TargetMove, TargetStep, TargetView


def answer(asked: AskedStep) -> StepAnswer:
    """Record what the master asks for, and answer it as far as that is known. The process of the
    move is started for an answer that is not final."""
    record = records.find(asked.instance)
    is_other = record is not None and record.move.id != asked.move_id
    if record is not None and records.is_over(record, asked.move_id):
        records.end(record)  # its source never came back to say so
        record, is_other = None, False
    if TargetStep(asked.step) is TargetStep.DROP:
        return _dropped(asked, None if is_other else record)
    if record is not None and is_other:
        if _is_left_over(record, asked):
            return asked.answer(AnswerState.RUNNING, f"an earlier move of {record.name} is dropped")
        text = f"another move of {record.name} is pending here: {record.move.id}"
        return asked.answer(AnswerState.FAILED, text)
    return _prepared(asked, record)


def _is_left_over(record: MoveRecord, asked: AskedStep) -> bool:
    """Whether the record is of a move that the master has ended without this node, as it asks for a
    later one. It is dropped then, unless this node is taking its claim."""
    is_earlier = isinstance(record.move, TargetMove) and record.move.id < asked.move_id
    return is_earlier and records.decided(record, Fate.DROP) is Fate.DROP


def _prepared(asked: AskedStep, record: MoveRecord | None) -> StepAnswer:
    name, uuid = asked.instance, asked.uuid
    move = record.as_target() if record else None
    status = records.read_status(name, asked.move_id) if record else None
    if record and status and status.error:
        return asked.answer(AnswerState.FAILED, status.error)
    view = TargetView(
        guest_here(name) if move and move.is_prepared else TargetGuest.NONE,
        is_taken=has_seen(name, uuid, asked.serial),
        is_ended=records.has_ended(uuid, asked.move_id),
    )
    act, error = target.prepare_act(move, view)
    if act is TargetAct.REFUSE:
        return asked.answer(AnswerState.FAILED, error)
    if record and act is TargetAct.ANSWER_DONE:
        return asked.answer(AnswerState.DONE, progress=1.0, found=record.facts["prepared"])
    if record is None:
        try:
            _begin(asked)
        except BrineError as fault:
            if records.is_begun(name, asked.move_id):  # by a question that was asked twice
                return asked.answer(AnswerState.RUNNING)
            hint = f"; {fault.hint}" if fault.hint else ""
            return asked.answer(AnswerState.FAILED, f"{fault}{hint}")
    return asked.answer(AnswerState.RUNNING)


def _begin(asked: AskedStep) -> None:
    """Record a move that this node can take part in, with all that it will make for it."""
    name, facts = asked.instance, asked.facts
    offer = ReceivedOffer(facts.get("offered"))
    if (offer.name, offer.spec.uuid) != (name, asked.uuid):
        raise MoveError(f"{name}: the offer is of another instance")
    if not is_this_node(str(facts["target"])):  # the claim could never be taken here
        raise MoveError(f"{name}: moves to {facts['target']}, which is not this node")
    with store.alone(name):
        if reasons := [one.why for one in offer.obstacles()]:
            raise MoveError(f"{name}: can't come to this node: {'; '.join(reasons)}")
        move = TargetMove(
            asked.move_id,
            name,
            str(facts["source"]),
            asked.serial,
            is_live=offer.is_live,
            copies=bool(offer.copied()),
            runs=offer.runs,
        )
        agreement = offer.agree()
        known = {
            **facts,
            "offered": recorded_part(facts["offered"]),
            "units": offer.units(),
            "agreement": agreement._asdict(),
            "key": key_of_move(agreement, asked).text,
            "makes_password": offer.lacks_password(),
        }
        keeps_out = f"is being moved to this node from {move.source}"
        records.begin(move, asked.uuid, known, keeps_out=keeps_out)
    how = "while it runs" if move.is_live else "cold"
    tell(messages.MOVE_AWAITED, name, node=move.source, how=how)


def _dropped(asked: AskedStep, record: MoveRecord | None) -> StepAnswer:
    view = TargetView(
        TargetGuest.NONE,
        is_taken=has_seen(asked.instance, asked.uuid, asked.serial),
        is_ended=records.has_ended(asked.uuid, asked.move_id),
    )
    move = record.as_target() if record else None
    act, error = target.drop_act(move, view)
    if act is TargetAct.REFUSE:
        return asked.answer(AnswerState.FAILED, error)
    if record is None:
        records.note_without_record(asked.uuid, asked.instance, asked.move_id)
        return asked.answer(AnswerState.DONE, progress=1.0)
    if records.decided(record, Fate.DROP) is not Fate.DROP:
        return asked.answer(AnswerState.FAILED, "this node is taking the claim")
    return asked.answer(AnswerState.RUNNING)
