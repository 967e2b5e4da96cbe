"""What the master asks of the source of a move, and how the node answers.

A step is recorded, and done by the process of the move (:mod:`brine.moves.source_service`). The
decisions are those of :mod:`brine.moves.source`.
"""

from __future__ import annotations

from typing import Any

from brine.common.errors import BrineError
from brine.common.operation import AnswerState, StepAnswer
from brine.instance import store
from brine.instance.claims import has_seen
from brine.instance.messages import tell
from brine.instance.observe import Observed, look
from brine.instance.store import is_here
from brine.moves import messages, records, source
from brine.moves.cluster_keys import key_of_move
from brine.moves.migration import MoveError
from brine.moves.prepared import Prepared
from brine.moves.present import copied_disks, device_ids, present_spec, state_of
from brine.moves.records import AskedStep
from brine.moves.source import (
    FirstAct,
    SourceAct,
    SourceGuest,
    SourceMove,
    SourceStep,
    SourceView,
)
from brine.vm.run import Run


def answer(asked: AskedStep) -> StepAnswer:
    """Record what the master asks for, and answer it as far as that is known."""
    step = SourceStep(asked.step)
    record = records.find(asked.instance)
    is_other = record is not None and record.move.id != asked.move_id
    if record is not None and records.is_over(record, asked.move_id):
        records.end(record)  # it came here, and its source never came back to say that it is over
    if record is None or is_other:
        return _first_answer(asked, step)
    move = record.as_source()
    if move.asked_for(step) != move:
        record = records.change(record, lambda move: move.asked_for(step))
        move = record.as_source()
    status = records.read_status(record.name, move.id)
    is_current = status is not None and status.asked == move.asked and status.error == move.error
    act = SourceAct[status.act] if status and is_current and status.act else SourceAct.WAIT
    view = SourceView(SourceGuest.RUNS, is_given=records.is_given(record))
    found = source.source_answer(step, move, view, act)
    return asked.answer(found.state, found.error, progress=1.0 if act is SourceAct.NOTHING else 0.0)


def _first_answer(asked: AskedStep, step: SourceStep) -> StepAnswer:
    name, uuid = asked.instance, asked.uuid
    act, found = source.source_without_record(
        step,
        is_given=has_seen(name, uuid, asked.serial),
        is_ended=records.has_ended(uuid, asked.move_id),
    )
    if act is FirstAct.END:
        records.note_without_record(uuid, name, asked.move_id)
    if act is not FirstAct.BEGIN:
        return asked.answer(found.state, found.error, progress=1.0)
    try:
        _begin(asked, step)
    except BrineError as error:
        if not records.is_begun(name, asked.move_id):  # by a question that was asked twice
            return asked.answer(AnswerState.FAILED, str(error))
    return asked.answer(AnswerState.RUNNING)


def _begin(asked: AskedStep, step: SourceStep) -> None:
    name, facts = asked.instance, asked.facts
    with store.alone(name):
        spec, seen = store.load(name), look(name)
        if spec.uuid != asked.uuid:
            raise MoveError(f"{name}: is another instance here, with the UUID {spec.uuid}")
        if not is_here(spec):
            raise MoveError(f"{name}: is {spec.node}'s, and not this node's to give")
        if spec.claim_serial >= asked.serial:
            text = f"its claim has serial {spec.claim_serial}, and {asked.serial} is no later"
            raise MoveError(f"{name}: {text}")
        if Run.last(name).id != facts["run"]:
            raise MoveError(f"{name}: was started again since it was offered")
        if facts.get("state", "") not in ("", state_of(seen)):
            raise MoveError(f"{name}: has changed since it was offered")
        move = SourceMove(
            asked.move_id,
            name,
            str(facts["target"]),
            asked.serial,
            is_live=bool(facts["is_live"]),
            copies=bool(facts["copies"]),
            run=str(facts["run"]),
            runs=bool(facts["runs"]),
            asked=step,
        )
        keeps_out = f"is being moved to {move.target}"
        known = {**facts, "copied": _to_copy(seen, move, facts.get("prepared"))}
        if told := facts.get("prepared"):
            agreement = Prepared.of(told, is_live=move.is_live).agreement
            known["key"] = key_of_move(agreement, asked).text
        records.begin(move, spec.uuid, known, keeps_out=keeps_out)
    how = "while it runs" if move.is_live else "cold"
    tell(messages.MOVE_BEGUN, name, node=move.target, how=how)


def _to_copy(seen: Observed, move: SourceMove, prepared: Any) -> dict[str, str]:
    """The units of the disks that are copied, by UUID: those that are removed here at the end. A
    file system may be mounted now that was not when it was offered, or the other way around.

    :raises MoveError: if the target has prepared itself for others.
    """
    spec = present_spec(seen)
    copied = {one.uuid: one.unit for one in copied_disks(spec)}
    ids = device_ids(spec) if move.is_live and copied else {}
    names = sorted(ids.get(one) or one for one in copied)
    if move.copies != bool(copied) or (
        prepared and names != Prepared.of(prepared, is_live=move.is_live).copied()
    ):
        text = "other disks have to be copied than when it was offered"
        raise MoveError(f"{move.instance}: {text}", hint="move it again")
    return copied
