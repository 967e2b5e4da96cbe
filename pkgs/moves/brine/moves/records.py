"""What a node keeps of the moves of its instances: of each an operation (``brine operations list``)
while it is pending, and afterwards a note of which one ended last, and how many have.

An operation of the kind ``move-out`` or ``move-in`` is recorded before the node's first act, and
keeps out others, who would change the instance meanwhile. The process that does the acts,
``brine-move@NAME.service``, and the command that the master's steps come by change it in turn. How
far that process is, which no reboot survives, is in its status file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from brine.common import operation, paths
from brine.common.errors import BrineError
from brine.common.files import read_json, sync_folder, write_whole
from brine.common.locks import node_lock
from brine.common.operation import (
    Elsewhere,
    Following,
    Operation,
    OperationError,
    OperationKind,
    StepAnswer,
)
from brine.instance import store
from brine.instance.claims import has_seen
from brine.instance.store import is_here, operation_key
from brine.moves.source import SourceMove, SourceStep
from brine.moves.target import Fate, TargetMove

Move = SourceMove | TargetMove
M = TypeVar("M", SourceMove, TargetMove)

_NOTE_MODE = 0o600
_NOTES = "ended-moves"
_NOTES_S = 30.0


def unit_name(name: str) -> str:
    """The unit of the process that moves an instance."""
    return f"brine-move@{name}.service"


def _following(record: Operation) -> Following:
    name = record.key.rpartition("/")[2]
    return Following(record.state, Elsewhere("move", {}, unit_name(name)))


MOVE_OUT = OperationKind("move-out", {}, following=_following)
MOVE_IN = OperationKind("move-in", {}, following=_following)


class AskedStep(NamedTuple):
    """A step that the master asks this node for, as ``brine move step`` gets it.

    :param id: of the step; it begins with that of the move.
    :param facts: those that all steps have; see :mod:`brine.cluster.moves`.
    """

    id: str
    step: str
    facts: Mapping[str, Any]

    @property
    def move_id(self) -> str:
        """The id of the master's operation."""
        return self.id.rpartition("-")[0]

    @property
    def instance(self) -> str:
        return str(self.facts["instance"])

    @property
    def uuid(self) -> str:
        """Of the instance."""
        return str(self.facts["uuid"])

    @property
    def serial(self) -> int:
        """Of the claim that the target gets."""
        return int(self.facts["serial"])

    @classmethod
    def of(cls, data: Any) -> AskedStep:
        """:raises BrineError: if it is none."""
        try:
            found = cls(str(data["id"]), str(data["step"]), dict(data["facts"]))
            if not (found.move_id and found.instance and found.uuid and found.serial):
                raise ValueError("an empty word")
        except (LookupError, TypeError, ValueError) as error:
            raise BrineError(f"no step of a move: {error!r:.100}") from None
        return found

    def answer(self, state: Any, error: str = "", **more: Any) -> StepAnswer:
        """An answer to it; *more* are fields of :class:`StepAnswer`."""
        return StepAnswer(self.id, self.step, state, error=error, **more)


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """The record of a pending move.

    :param operation: its id on this node.
    :param facts: what the node was told by the master, as it is in all steps, and what this node
        has added. The key of the move is in it.
    """

    operation: str
    uuid: str
    move: Move
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the instance."""
        return self.move.instance

    def as_source(self) -> SourceMove:
        """:raises BrineError: if the instance moves to this node."""
        if isinstance(self.move, SourceMove):
            return self.move
        raise BrineError(f"{self.name}: moves to this node, and not away from it")

    def as_target(self) -> TargetMove:
        """:raises BrineError: if the instance moves away from this node."""
        if isinstance(self.move, TargetMove):
            return self.move
        raise BrineError(f"{self.name}: moves away from this node, and not to it")


def begin(move: Move, uuid: str, facts: Mapping[str, Any], *, keeps_out: str) -> MoveRecord:
    """Record a move, before anything is done for it.

    :param keeps_out: why others leave the instance alone meanwhile; it follows the name.
    :raises BrineError: if other work on the instance is pending here, or it can't be recorded. A
        disk that is being moved to another unit has a job in QEMU, as one that moves along has.
    """
    for known in operation.pending(operation_key(move.instance)):
        text = f"{move.instance}: other work is pending here: {known.kind}, {known.id}"
        raise BrineError(text, hint="brine operations list shows how far that is")
    kind = MOVE_OUT if isinstance(move, SourceMove) else MOVE_IN
    known_facts = {
        "move": asdict(move),
        "uuid": uuid,
        "told": dict(facts),
        "keeps_out": keeps_out,
    }
    with operation.begin(kind, operation_key(move.instance), facts=known_facts) as work:
        pass
    return MoveRecord(work.record.id, uuid, move, dict(facts))


def find(name: str) -> MoveRecord | None:
    """The pending move of an instance; None if there is none.

    :raises OperationError: if its record can't be read.
    """
    for record in operation.pending(operation_key(name)):
        if record.kind in (MOVE_OUT.name, MOVE_IN.name):
            return _read(record)
    return None


def is_begun(name: str, move_id: str) -> bool:
    """Whether that move of an instance is recorded here."""
    record = find(name)
    return record is not None and record.move.id == move_id


def pending() -> Iterator[MoveRecord]:
    """All pending moves of this node that can be read."""
    for record in operation.pending():
        if record.kind in (MOVE_OUT.name, MOVE_IN.name):
            with suppress(OperationError):
                yield _read(record)


def change(
    record: MoveRecord,
    how: Callable[[Any], Any] = lambda move: move,
    *,
    keeps_out: str | None = None,
    **facts: Any,
) -> MoveRecord:
    """Change what is recorded, durably, whichever process has changed it last.

    :param how: makes the new move of the recorded one.
    :param keeps_out: as in :func:`begin`; empty lets others in again.
    :param facts: are added to what the node was told.
    """
    with operation.changing(record.operation) as found:
        now = _read(found)
        changed = replace(now, move=how(now.move), facts={**now.facts, **facts})
        found.facts |= {"move": asdict(changed.move), "told": dict(changed.facts)}
        if keeps_out is not None:
            found.facts["keeps_out"] = keeps_out
    return changed


def decided(record: MoveRecord, fate: Fate) -> Fate:
    """The fate of a move to this node, durably: this one, if there was none."""
    if known := record.facts.get("fate"):
        return Fate(known)
    with operation.changing(record.operation) as found:
        told = found.facts["told"]
        return Fate(told.setdefault("fate", fate.value))


def is_given(record: MoveRecord) -> bool:
    """Whether the claim of an instance that moves away is another node's by now."""
    spec = store.load_sound(record.name)
    if spec and spec.uuid == record.uuid:
        return not is_here(spec) and spec.claim_serial >= record.move.serial
    return has_seen(record.name, record.uuid, record.move.serial)


def end(record: MoveRecord) -> None:
    """Remove a record, after the note that its move has ended here. Both are durable."""
    note_end(record)
    operation.end(record.operation)
    remove_status(record.name)


def is_over(record: MoveRecord, later: str) -> bool:
    """Whether an instance has come to this node, and all that is missing is its source's word that
    it has cleared: a later move of the instance does not wait for that.

    :param later: the id of the move that is asked for.
    """
    has_arrived = isinstance(record.move, TargetMove) and bool(record.facts.get("arrived"))
    return has_arrived and record.move.id < later


def working_for(record: MoveRecord) -> AbstractContextManager[None]:
    """What this process does with the instance in the block belongs to the move."""
    return operation.working_for(record.operation)


def _read(record: Operation) -> MoveRecord:
    kinds: dict[str, type[Move]] = {MOVE_OUT.name: SourceMove, MOVE_IN.name: TargetMove}
    try:
        kind, data = kinds[record.kind], record.facts["move"]
        known: dict[str, Any] = {
            one.name: data[one.name] for one in fields(kind) if one.name in data
        }
        if kind is SourceMove:
            known["asked"] = SourceStep(known["asked"])
        move = kind(**known)
        return MoveRecord(record.id, str(record.facts["uuid"]), move, dict(record.facts["told"]))
    except (LookupError, TypeError, ValueError) as error:
        raise OperationError(
            f"the record of a move, {record.id}, can't be read: {error!r}"
        ) from None


# The moves of each instance that have ended.


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """The moves that have ended on a node, of those that it has had a record of.

    :param measured: the guests that have left while they ran, and whose downtime is known.
    :param downtime_ms: for how long these stood still, all together.
    """

    out_done: int = 0
    out_failed: int = 0
    in_done: int = 0
    in_failed: int = 0
    measured: int = 0
    downtime_ms: int = 0

    def __add__(self, other: MoveCounts) -> MoveCounts:
        both = zip(astuple(self), astuple(other), strict=True)
        return MoveCounts(*(one + another for one, another in both))

    @classmethod
    def of(cls, data: Any) -> MoveCounts:
        """Those of a note; what can't be read counts as 0."""
        found = data if isinstance(data, dict) else {}
        names = [one.name for one in fields(cls)]
        return cls(**{name: found[name] for name in names if type(found.get(name)) is int})

    @classmethod
    def of_end(cls, record: MoveRecord, downtime_ms: int) -> MoveCounts:
        """The one move that ends now."""
        if isinstance(record.move, TargetMove):
            return cls(in_done=1) if record.facts.get("arrived") else cls(in_failed=1)
        if record.move.error:
            return cls(out_failed=1)
        return cls(out_done=1, measured=int(downtime_ms > 0), downtime_ms=downtime_ms)


def note_end(record: MoveRecord, downtime_ms: int = 0) -> None:
    """Note durably that a move has ended here, and count it; done twice, it counts once.

    :param downtime_ms: for how long the guest stood still when it left; 0 if that is not known.
    """
    _note(record.uuid, record.name, record.move.id, MoveCounts.of_end(record, downtime_ms))


def note_without_record(uuid: str, name: str, move_id: str) -> None:
    """Note durably that a move has ended which has not begun here."""
    _note(uuid, name, move_id, None)


def _note(uuid: str, name: str, move_id: str, more: MoveCounts | None) -> None:
    with node_lock(_NOTES, timeout_s=_NOTES_S):  # a step and the move's process may write at once
        _note_alone(uuid, name, move_id, more)


def _note_alone(uuid: str, name: str, move_id: str, more: MoveCounts | None) -> None:
    known = _noted(uuid)
    last, counted = (str(known.get(key) or "") for key in ("id", "counted"))
    counts = MoveCounts.of(known.get("counts"))
    if more and counted < move_id:
        counted, counts = move_id, counts + more
    elif last >= move_id:
        return
    note = {
        "name": name,
        "id": max(last, move_id),
        "counted": counted,
        "counts": asdict(counts),
    }
    data = json.dumps(note).encode() + b"\n"
    try:
        if not paths.MOVES_DIR.is_dir():
            paths.MOVES_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(paths.MOVES_DIR.parent)
        write_whole(paths.MOVES_DIR / f"{uuid}.json", data, mode=_NOTE_MODE, alone=True)
    except OSError as error:
        raise BrineError(f"{error.filename or paths.MOVES_DIR}: {error.strerror}") from error


def counts() -> MoveCounts:
    """The moves of all instances that have ended here since this was first counted."""
    try:
        notes = [one for one in os.listdir(paths.MOVES_DIR) if one.endswith(".json")]
    except FileNotFoundError:
        notes = []
    found = [_noted(note.removesuffix(".json")).get("counts") for note in notes]
    return sum(map(MoveCounts.of, found), MoveCounts())


def has_ended(uuid: str, move_id: str) -> bool:
    """Whether a move, or a later one of the same instance, has ended here."""
    return last_ended(uuid) >= move_id


def last_ended(uuid: str) -> str:
    """The id of the last move of an instance that has ended here; empty if none has."""
    found = _noted(uuid).get("id")
    return found if isinstance(found, str) else ""


def _noted(uuid: str) -> Mapping[str, Any]:
    """The note of an instance's ended moves; empty if there is none."""
    if "/" in uuid:
        raise BrineError(f"no UUID: {uuid}")
    data = read_json(paths.MOVES_DIR / f"{uuid}.json")
    return data if isinstance(data, dict) else {}


# How far the process is.


class MoverStatus(NamedTuple):
    """How far the process that moves an instance is: as far as the node knows, for the master.

    :param id: of the move, and *asked* is the step that the rest is about.
    :param act: the next act by its name.
    :param progress: from 0 to 1, and *text* is the same for people.
    :param fault: why it can't go on for the moment; it tries again.
    """

    id: str
    asked: str = ""
    act: str = ""
    progress: float = 0.0
    text: str = ""
    fault: str = ""
    error: str = ""


def write_status(name: str, status: MoverStatus) -> None:
    """Tell how far a move is; one that can't be told goes on."""
    with suppress(OSError):
        paths.MOVES_STATUS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
        data = json.dumps(status._asdict()).encode() + b"\n"
        file = paths.MOVES_STATUS_DIR / f"{name}.json"
        write_whole(file, data, mode=0o600, alone=True, durable=False)


def read_status(name: str, move_id: str) -> MoverStatus | None:
    """How far a move is; None if that is not known."""
    data = read_json(paths.MOVES_STATUS_DIR / f"{name}.json")
    if not isinstance(data, dict) or data.get("id") != move_id:
        return None
    with suppress(TypeError):
        return MoverStatus(**data)
    return None


def remove_status(name: str) -> None:
    """Remove the status of a move that has ended, or whose process begins."""
    with suppress(OSError):
        (paths.MOVES_STATUS_DIR / f"{name}.json").unlink(missing_ok=True)
