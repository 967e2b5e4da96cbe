"""The verbs of ``brine move`` on a node: how the master asks for steps, how a node goes on,
and how an administrator ends a move whose master is lost."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from brine.common import operation, paths
from brine.common.cli import print_json
from brine.common.entry_points import EntryPoint
from brine.common.errors import BrineError, root_hint, tell_error, warn
from brine.common.operation import AnswerState, StepAnswer
from brine.common.process import run_bounded
from brine.common.tables import print_table
from brine.instance.messages import log_to_journal
from brine.moves import records
from brine.moves.records import AskedStep, MoveRecord, unit_name
from brine.moves.source import SourceMove, SourceStep
from brine.moves.target import TargetStep

_LARGEST = 16 * 1024 * 1024
_START_S = 90.0
_LOOK_S = 0.5
_WATCH_S = 0.02
_AGAIN_S = 2.0

_ANSWERS: dict[str, str] = {
    "offer": "brine.moves.offer:answer",
    **dict.fromkeys(SourceStep, "brine.moves.source_steps:answer"),
    **dict.fromkeys(TargetStep, "brine.moves.target_steps:answer"),
}
"""What answers each step. It takes long to load, and a process answers one step only."""


def step(arguments: argparse.Namespace) -> int:
    """``brine move step``: 0 whenever there is an answer."""
    log_to_journal("brine")
    asked = AskedStep.of(_input())
    try:
        answer = _awaited_answer(asked, arguments.wait)
    except (BrineError, OSError) as error:
        # Whether it was done is not known, so the master asks again.
        fault = f"{error}; {hint}" if (hint := getattr(error, "hint", None)) else str(error)
        answer = asked.answer(AnswerState.RUNNING, fault)
    print(json.dumps(answer.facts()))
    return 0


def _awaited_answer(asked: AskedStep, wait_s: float) -> StepAnswer:
    """The answer to a step, final if it comes in time. It is asked for again when what is known of
    moves here has changed, or else after a while: a process that was killed is started again."""
    until, seen = time.monotonic() + wait_s, _changes()
    answer = _answer(asked)
    while answer.state is AnswerState.RUNNING and time.monotonic() < until:
        again_at = time.monotonic() + _AGAIN_S
        time.sleep(_WATCH_S)
        while _changes() == seen and time.monotonic() < min(until, again_at):
            time.sleep(_WATCH_S)
        is_late, seen = time.monotonic() >= again_at, _changes()
        answer = _answer(asked, begins=is_late)
    return answer


def _changes() -> tuple[int, ...]:
    """What is another number after each change of what is known of moves here."""
    found = []
    for folder in (paths.OPERATIONS_DIR, paths.MOVES_DIR, paths.MOVES_STATUS_DIR):
        try:
            found.append(folder.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


def _input() -> Any:
    try:
        return json.loads(sys.stdin.buffer.read(_LARGEST))
    except (ValueError, RecursionError) as error:
        raise BrineError(f"no step of a move: {error}") from None


def _answer(asked: AskedStep, *, begins: bool = True) -> StepAnswer:
    """:param begins: an answer that is not final has the process of the move run."""
    answers = _ANSWERS.get(asked.step)
    if answers is None:
        return asked.answer(AnswerState.FAILED, f"this node knows no step {asked.step}")
    answer: StepAnswer = EntryPoint(asked.step, answers).load()(asked)
    if answer.state is AnswerState.RUNNING and (record := records.find(asked.instance)):
        if begins:
            begin_unit(record.name)
        answer = _with_status(answer, record)
    return answer


def _with_status(answer: StepAnswer, record: MoveRecord) -> StepAnswer:
    """The answer with how far the process of the move is."""
    if status := records.read_status(record.name, record.move.id):
        found = {"text": status.text, "fault": status.fault}
        return StepAnswer(
            answer.id, answer.step, answer.state, status.progress, answer.error, found
        )
    return answer


def begin_unit(name: str, *, is_awaited: bool = False) -> None:
    """Have the process of a move run; it may run already.

    :raises BrineError: if systemd refuses it.
    """
    wait = [] if is_awaited else ["--no-block"]
    command = ["systemctl", "--no-ask-password", *wait, "start", "--", unit_name(name)]
    try:
        done = run_bounded(command, timeout_s=_START_S, environment=os.environ)
    except (OSError, TimeoutError) as error:
        raise BrineError(f"{unit_name(name)}: can't be started: {error}") from error
    if done.returncode:
        raise BrineError(f"{unit_name(name)}: can't be started: {done.stderr.strip()}")


def list_moves(arguments: argparse.Namespace) -> int:
    """``brine move list``."""
    rows = [_row(record) for record in records.pending()]
    if arguments.json:
        print_json(rows)
        return 0
    cells = [tuple(str(one) if one else "-" for one in row.values()) for row in rows]
    heading = ("ID", "INSTANCE", "WAY", "NODE", "KIND", "SERIAL", "STEP", "PROGRESS", "FAULT")
    print_table(heading, cells, none="no move is pending here")
    return 0


def _row(record: MoveRecord) -> dict[str, Any]:
    move, is_out = record.move, isinstance(record.move, SourceMove)
    status = records.read_status(record.name, move.id) or records.MoverStatus(move.id)
    error = getattr(move, "error", "")
    return {
        "id": move.id,
        "instance": move.instance,
        "way": "out" if is_out else "in",
        "node": record.as_source().target if is_out else record.as_target().source,
        "kind": "live" if move.is_live else "cold",
        "serial": move.serial,
        "step": status.act,
        "progress": status.text,
        "fault": error or status.fault,
    }


def show_counts(arguments: argparse.Namespace) -> int:
    """``brine move status``."""
    try:
        found = records.counts()
    except OSError as error:
        raise BrineError(f"{error.filename}: {error.strerror}", hint=root_hint(error)) from error
    if arguments.json:
        told = {
            "out": {"done": found.out_done, "failed": found.out_failed},
            "in": {"done": found.in_done, "failed": found.in_failed},
            "downtime": {"count": found.measured, "milliseconds": found.downtime_ms},
        }
        print_json(told)
        return 0
    mean = f"{found.downtime_ms / found.measured:.0f} ms" if found.measured else "-"
    rows = [
        ("out", str(found.out_done), str(found.out_failed), mean),
        ("in", str(found.in_done), str(found.in_failed), "-"),
    ]
    print_table(("WAY", "DONE", "FAILED", "MEAN DOWNTIME"), rows, none="")
    return 0


def resume(arguments: argparse.Namespace) -> int:
    """``brine move resume``: have the processes of all pending moves run. 1 if one does not."""
    log_to_journal("brine")
    done = []
    for record in records.pending():
        try:
            begin_unit(record.name, is_awaited=True)
            done.append({"instance": record.name, "error": None})
        except BrineError as error:
            done.append({"instance": record.name, "error": str(error)})
            if not arguments.json:
                tell_error(error)
    if arguments.json:
        print_json(done)
    operation.remove_unfinished()
    return 1 if any(one["error"] for one in done) else 0


def cancel(arguments: argparse.Namespace) -> int:
    """``brine move cancel``."""
    record = _pending(arguments.name)
    record.as_source()
    return _done_here(record, SourceStep.CANCEL, json_wanted=arguments.json)


def drop(arguments: argparse.Namespace) -> int:
    """``brine move drop``."""
    record = _pending(arguments.name)
    source = record.as_target().source
    if not arguments.source_ended:
        # This node may hold the guest, and its source be about to give the claim away.
        text = f"{record.name}: the move must have ended on {source} before"
        hint = f"on {source}: brine move cancel {record.name}; then here, with --source-ended"
        raise BrineError(text, hint=hint)
    return _done_here(record, TargetStep.DROP, json_wanted=arguments.json)


def _pending(name: str) -> MoveRecord:
    if record := records.find(name):
        return record
    raise BrineError(f"{name}: no move of it is pending here", hint="brine move list shows all")


def _done_here(record: MoveRecord, step: SourceStep | TargetStep, *, json_wanted: bool) -> int:
    """Do a step that the master would ask for, and wait for its end.

    :raises BrineError: if it can't be done any more.
    """
    log_to_journal("brine")
    facts = {"instance": record.name, "uuid": record.uuid, "serial": record.move.serial}
    asked, told = AskedStep(f"{record.move.id}-0", step.value, facts), ""
    while (answer := _answer(asked)).state is AnswerState.RUNNING:
        fault = str(answer.found.get("fault") or "")
        if fault and fault != told:
            warn(f"{record.name}: {fault}")
            told = fault
        time.sleep(_LOOK_S)
    if answer.state is AnswerState.FAILED:
        raise BrineError(f"{record.name}: its move goes on: {answer.error}")
    if json_wanted:
        print_json({"instance": record.name, "id": record.move.id})
    else:
        print(f"{record.name}: its move has ended on this node")
    return 0
