"""Work of several steps that survives a kill: recorded before it begins, completed or undone later.

A part names the functions that undo or finish its steps in an :class:`OperationKind`. An entry
point of the group ``brine.operations`` provides it under the kind's name::

    def remove(facts: Facts) -> None:
        Path(facts["path"]).unlink(missing_ok=True)

    COPY = OperationKind("copy", {"remove": remove})

    with begin(COPY, "instance/web2") as work:
        work.step("copy the disk", undo=("remove", {"path": "/srv/web2"}))
        shutil.copy("/srv/web1", "/srv/web2")
        work.commit(("remove", {"path": "/srv/web1"}))

An operation is *begun* until it is *committed*; an error before that makes it *undoing*. The undo
of a step is recorded before the step is done, so it may find nothing to undo. Undos run in reverse
order, and stop at the first that fails. Steps after a commit only go forward. All these
functions may run twice, as a process may be killed in each.

The record of an operation goes with its end. Its process holds the record's lock: a record whose
lock is free was interrupted, and :func:`settle` completes (committed) or undoes (else) it: by the
next command on the same key, by ``brine-operations.service`` at boot, or by ``brine operations
settle``. An operation that can't be settled yet stays recorded, with the reason. A unit that may
not write to storage names in ``$BRINE_SETTLED_BY`` the service that settles in its place.

A step after the commit may be other nodes' (:class:`Elsewhere`). The operation is pending, though
no process works on it, until :func:`answered` records their answer, and then goes on. A kind whose
steps are all elsewhere, and depend on the answers, decides each of them by a function of the record
(:attr:`OperationKind.following`), and its state too: such an operation has no undos, but steps that
go back.

Work on a key may go on beside an operation that has its locks only for moments. One that must not
be disturbed until its end says so in its fact ``keeps_out``; see :func:`obstacle`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from brine.common import paths
from brine.common.entry_points import entry_points
from brine.common.errors import BrineError, warn
from brine.common.files import read_regular, sync_folder, unfinished, write_whole
from brine.common.locks import LockedError, node_lock
from brine.common.process import run_bounded

VERSION = 1
_GROUP = "brine.operations"
_VOLATILE = "run-"  # the ids of operations that end with the node begin so
_SETTLED_BY = "BRINE_SETTLED_BY"
_SETTLE_TIMEOUT_S = 10.0
_SERVICE_TIMEOUT_S = 60.0
_PROGRESS_S = 1.0

SECRETS = frozenset({"offered", "prepared", "found", "key"})
"""Facts that are never shown, at any depth: only the record, which is root's, has them."""

Facts = dict[str, Any]
Call = tuple[str, Facts]
"""A function of a kind by its name, and its facts, which are JSON."""


class Elsewhere(NamedTuple):
    """A step that is done on other nodes: what follows waits for :func:`answered`.

    :param node: its name, or words for several.
    """

    name: str
    facts: Facts
    node: str


class Following(NamedTuple):
    """What follows the steps that an operation has done.

    :param state: of the operation from now on.
    :param next: the next step; None ends the operation.
    :param error: why it is undone.
    """

    state: OperationState
    next: Call | Elsewhere | None
    error: str = ""


class AnswerState(StrEnum):
    """How far a node is with a step that it was asked for."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What a node answers about a step that it was asked for. It is asked again and again until the
    answer is final, so the same step may be asked for twice.

    Example::

        StepAnswer("01760000000000000000-6f0c21aa-1", "copy", AnswerState.RUNNING, 0.5).facts()

    :param id: of the step, and *step* is its name.
    :param progress: from 0 to 1.
    :param error: why it failed.
    :param found: what later steps need of this node.
    """

    id: str
    step: str
    state: AnswerState
    progress: float = 0.0
    error: str = ""
    found: Facts = field(default_factory=dict)

    @classmethod
    def of(cls, data: object) -> StepAnswer:
        """:raises OperationError: if it is no answer to a step."""
        try:
            known = {one.name: data[one.name] for one in fields(cls)}  # type: ignore[index]
            answer = cls(**known | {"state": AnswerState(known["state"])})
            _check_types(known, asdict(cls("", "", AnswerState.DONE)))
        except (LookupError, TypeError, ValueError) as error:
            raise OperationError(f"no answer to a step: {error!r:.200}") from None
        return answer

    def facts(self) -> Facts:
        """It as JSON."""
        return asdict(self)


class OperationError(BrineError):
    """An operation that can't be recorded, undone or completed now. Its record says why."""


class AwaitedError(OperationError):
    """Another party must act before an operation can be undone or completed."""


class OperationState(StrEnum):
    BEGUN = "begun"
    UNDOING = "undoing"
    COMMITTED = "committed"
    UNKNOWN = "unknown"  # of a record that this version can't read


class StepState(StrEnum):
    BEGUN = "begun"
    DONE = "done"
    UNDONE = "undone"
    WAITING = "waiting"  # it follows the commit


@dataclass(frozen=True, slots=True)
class OperationKind:
    """How operations of a kind are undone and completed.

    :param functions: by their names; each takes the facts that were recorded with it, and raises a
        BrineError or an OSError if it can't be done now.
    :param alone: holds the locks that work on such keys needs, while an interrupted operation is
        settled. None if the functions take them. It may yield the kind that is used meanwhile, if
        the functions need more than their facts.
    :param is_volatile: the node's end ends such operations: no record survives a reboot, and none
        is synced.
    :param following: decides from the record alone what follows; see :func:`lead`. None if the
        steps are those that a process adds.
    """

    name: str
    functions: Mapping[str, Callable[[Facts], object]]
    alone: Callable[[Sequence[str]], AbstractContextManager[OperationKind | None]] | None = None
    is_volatile: bool = False
    following: Callable[[Operation], Following] | None = None


@dataclass(slots=True)
class Step:
    """A step of an operation, whose id is unique on all nodes.

    :param node: the node that does it; empty is this one.
    :param answer: of the node.
    """

    id: str
    name: str
    state: StepState = StepState.BEGUN
    facts: Facts = field(default_factory=dict)
    node: str = ""
    answer: Facts = field(default_factory=dict)
    undo: Call | None = None


@dataclass(slots=True)
class Operation:
    """The record of an operation.

    It is *begun*, then *committed* or *undoing*, and gone when it has ended.

    Example::

        for record in pending("instance/web2"):
            if record.is_interrupted():
                print(record.kind, record.state, record.since, record.waits_for)

    :param key: what it works on, such as ``instance/web1``, and *also* lists further keys.
    :param since: its beginning; *deadline* is when it may begin no further step. Both in seconds
        since 1970; a deadline of 0 is none.
    :param waits_for: why it is neither completed nor undone, in words; *error* is why it is undone.
    :param progress: of the step that takes longest: ``done`` from 0 to 1, and ``text``.
    :param decided_by: tells whether it is committed; see :meth:`Work.committing`.
    :param lock: the name of the lock that the process holds which works on it: its own, or that of
        what it works on.
    """

    id: str
    kind: str
    key: str
    version: int = VERSION
    also: list[str] = field(default_factory=list)
    state: OperationState = OperationState.BEGUN
    since: float = 0.0
    deadline: float = 0.0
    waits_for: str = ""
    error: str = ""
    progress: Facts = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    lock: str = ""
    decided_by: Call | None = None

    def __post_init__(self) -> None:
        self.lock = self.lock or _lock_name(self.id)

    @property
    def keys(self) -> list[str]:
        return [self.key, *self.also]

    @property
    def keeps_out(self) -> str:
        """Why others leave alone what it works on until it has ended, in words; empty if they need
        not."""
        return str(self.facts.get("keeps_out", ""))

    def is_interrupted(self) -> bool:
        """Whether no process works on it."""
        # A shared lock: processes that only look do not take each other for its process.
        try:
            lock = os.open(_lock_file(self.lock), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True


class Work:
    """An operation that this process works on, whose lock it holds; :func:`begin` makes one.

    Example::

        with begin(MOVE, "instance/web1") as work:
            work.step("copy", undo=("remove", {"path": target}), node="node2")
            for copied in copy(source, target):
                work.progress(copied, "copying the disk")
            work.commit(("remove", {"path": source}))
    """

    def __init__(self, kind: OperationKind, record: Operation) -> None:
        self.record = record
        self._kind = kind
        self._told = 0.0
        self._written = b""
        self._is_over = self._is_postponed = False

    def step(
        self,
        name: str,
        *,
        undo: Call | None = None,
        node: str = "",
        facts: Facts | None = None,
        decided_by: Call | None = None,
        rest: Sequence[Call] = (),
    ) -> Step:
        """Record a step that is about to begin, and what undoes it. The step before is done.

        :param decided_by: of a last step: returns whether it was done, which decides after a kill
            whether the operation is committed; *rest* completes it then.
        """
        record = self.record
        if record.deadline and time.time() > record.deadline:
            raise OperationError(f"{record.kind} of {record.key}: its time is over")
        self._done()
        count = len(record.steps)
        step = self._added(name, node=node, facts=facts or {}, undo=undo)
        for call, known in rest:
            self._added(call, facts=known, state=StepState.WAITING)
        record.decided_by = decided_by
        try:
            self._write()
        except BaseException:
            del record.steps[count:]  # it does not begin
            record.decided_by = None
            raise
        return step

    def note(self) -> None:
        """Record what has changed in the facts of steps."""
        self._write()

    def over(self) -> None:
        """Have no later step follow, and nothing undone: the process has done either itself."""
        self._is_over, self._is_postponed = True, False

    @property
    def is_left(self) -> bool:
        """Whether the end of the block has nothing to do or to undo."""
        return self._is_over or self._is_postponed

    def postpone(self, waits_for: str) -> None:
        """Leave it recorded at the end of the block, for a later :func:`settle`."""
        self.record.waits_for, self._is_postponed = waits_for, True
        self._try_to_write()

    def answer(self, step: Step, answer: Facts) -> None:
        """Record what the node of a step has answered."""
        step.answer = answer
        self._write()

    def progress(self, done: float, text: str = "") -> None:
        """Have others see how far it is; this is recorded once a second at most.

        :param done: from 0 to 1.
        """
        self.record.progress = {"done": round(done, 3), "text": text}
        if time.monotonic() - self._told >= _PROGRESS_S:
            self._told = time.monotonic()
            self._try_to_write()

    def commit(self, *rest: Call | Elsewhere) -> None:
        """Record that nothing is undone from now on. At the end of the block, *rest* is done.

        :raises OperationError: if that can't be recorded; then it is not so.
        """
        self._done()
        count = len(self.record.steps)
        for name, facts, *node in rest:
            self._added(name, facts=facts, state=StepState.WAITING, node="".join(node))
        self.record.state = OperationState.COMMITTED
        try:
            self._write()
        except BaseException as error:
            there = find(self.record.id)
            is_recorded = there is not None and there.state is OperationState.COMMITTED
            if not is_recorded:  # what a later process reads says that the steps are undone
                self.record.state = OperationState.BEGUN
                del self.record.steps[count:]
            if not (is_recorded and isinstance(error, OperationError)):
                raise

    @contextlib.contextmanager
    def committing(self, decided_by: Call, *rest: Call) -> Iterator[None]:
        """Commit by the one step of the block, whose effect others see at once; *rest* follows.

        :param decided_by: returns whether the step was done: it decides after a kill or an error,
            also when *rest* is done in part.
        """
        self._done()
        for name, facts in rest:
            self._added(name, facts=facts, state=StepState.WAITING)
        self.record.decided_by = decided_by
        self._write()
        yield
        self.record.state = OperationState.COMMITTED
        self._try_to_write()

    def end(self) -> bool:
        """Complete a committed operation, or undo another, and remove its record.

        :returns: False if other nodes have to answer before, or it is postponed: then it stays
            recorded.
        :raises OperationError: why it waits; it stays recorded.
        """
        record = self.record
        if self._is_postponed:
            return False
        if self._is_over:
            _remove(record.id)
            return True
        if self._kind.following:
            return self._follow(self._kind.following)
        if record.state is OperationState.BEGUN:
            is_decided = record.decided_by and self._call(*record.decided_by)
            record.state = OperationState.COMMITTED if is_decided else OperationState.UNDOING
        is_committed = record.state is OperationState.COMMITTED
        self._try_to_write()
        for step in record.steps if is_committed else reversed(record.steps):
            if is_committed and _is_awaited(step):
                record.waits_for = f"{step.name}: {step.node}"
                self._try_to_write()
                return False
            call = step.undo
            if is_committed:
                call = (step.name, step.facts) if step.state is StepState.WAITING else None
            if call is None or step.state is StepState.UNDONE:
                continue
            self._call(*call)
            step.state = StepState.DONE if is_committed else StepState.UNDONE
            self._try_to_write()
        _remove(record.id)
        return True

    def _follow(self, following: Callable[[Operation], Following]) -> bool:
        """Do what follows, up to a step that is elsewhere."""
        record = self.record
        while step := lead(record, following):
            record.waits_for = f"{step.name}: {step.node}" if step.node else ""
            self._write()  # before it is asked or done
            if step.node:
                return False
            self._call(step.name, step.facts)
            step.state = StepState.DONE
        _remove(record.id)
        return True

    def _call(self, name: str, facts: Facts) -> object:
        try:
            return self._kind.functions[name](facts)
        except (BrineError, OSError, LookupError, TypeError, ValueError) as error:
            self.record.waits_for = f"{name}: {error}"
            self._try_to_write()
            raise waiting_error(self.record) from error

    def _added(self, name: str, **known: Any) -> Step:
        return _add_step(self.record, name, **known)

    def _done(self) -> None:
        for step in self.record.steps:
            step.state = StepState.DONE

    def _try_to_write(self) -> None:
        # The former record leads to the same end, with more of it done twice.
        with contextlib.suppress(OperationError):
            self._write()

    def _write(self) -> None:
        file = _file(self.record.id)
        try:
            if not file.parent.is_dir():
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not _is_volatile(file):
                    sync_folder(file.parent.parent)
            data = json.dumps(asdict(self.record), indent=1).encode() + b"\n"
            if data != self._written:  # or the disk would wait for nothing
                write_whole(file, data, mode=0o600, alone=True, durable=not _is_volatile(file))
                self._written = data
        except OSError as error:
            raise OperationError(f"{file}: can't be written: {error.strerror}") from error


@contextlib.contextmanager
def begin(
    kind: OperationKind,
    key: str,
    *also: str,
    deadline_s: float = 0.0,
    facts: Facts | None = None,
    lock: str = "",
) -> Iterator[Work]:
    """Record an operation, for the time of the block. An error in the block undoes its steps,
    unless it is committed. The end of the block commits it and completes it; what can't be
    completed or undone then is a warning, and stays recorded.

    Example::

        with begin(COPY, "instance/web2", deadline_s=3600, facts={"of": "web1"}) as work:
            ...

    :param key: what it works on; *also* names more of it. The caller holds their locks.
    :param deadline_s: after that time no step begins, in seconds; 0 is no limit.
    :param facts: of the whole operation, for people and :func:`pending`.
    :param lock: the name of a lock of what it works on, which the caller holds. A process that
        holds that lock may settle the operation, and no other does meanwhile.
    :raises OperationError: if it can't be recorded; then nothing has begun.
    """
    now = time.time()
    identity = f"{time.time_ns():020}-{os.urandom(4).hex()}"
    identity = f"{_VOLATILE}{identity}" if kind.is_volatile else identity
    record = Operation(identity, kind.name, key, also=list(also), since=now, facts=facts or {})
    record.lock = lock or record.lock
    record.deadline = now + deadline_s if deadline_s else 0.0
    with _held(identity, timeout_s=0):
        work = Work(kind, record)
        work._write()
        try:
            yield work
            is_committed = record.state is OperationState.COMMITTED
            if not (is_committed or work.is_left or kind.following):
                work.commit()
        except BaseException as error:
            if record.state is not OperationState.COMMITTED:
                record.error = str(error) or type(error).__name__
            try:
                work.end()
            except OperationError as fault:
                warn(str(fault), hint=fault.hint)
            raise
        try:
            work.end()
        except OperationError as fault:
            warn(str(fault), hint=fault.hint)


def shown(facts: Any) -> Any:
    """Facts, or a record as JSON, without secrets."""
    if isinstance(facts, dict):
        return {key: shown(one) for key, one in facts.items() if key not in SECRETS}
    return [*map(shown, facts)] if isinstance(facts, (list, tuple)) else facts


def pending(key: str | None = None) -> list[Operation]:
    """The recorded operations, in progress or interrupted: all, or those on a key."""
    ids = [name.removesuffix(".json") for name in _names() if name.endswith(".json")]
    found = [record for one in ids if (record := find(one))]
    return [record for record in found if key is None or key in record.keys]


def _names() -> Iterator[str]:
    """The names in the folders of records, the oldest of each first."""
    for folder in _folders():
        try:
            yield from sorted(os.listdir(folder))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OperationError(f"{folder}: {error.strerror}") from error


def find(identity: str) -> Operation | None:
    """An operation by its id; None if it has ended. What this version can't read is unknown, but
    for its keys, if these can be read."""
    if "/" in identity:
        return None
    file, data = _file(identity), None
    try:
        data = json.loads(read_regular(file))
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, of a newer Brine")
        known = {one.name: data[one.name] for one in fields(Operation)}
        _check(known, identity)
        known["state"] = OperationState(known["state"])
        known["decided_by"] = known["decided_by"] and tuple(known["decided_by"])
        known["steps"] = [_step_of(one) for one in known["steps"]]
        return Operation(**known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"{file}: can't be used: {error}"
        state = OperationState.UNKNOWN
        key, *also = _keys_in(data) or ["unknown"]
        return Operation(identity, "unknown", key, also=also, state=state, waits_for=why)


def _check(known: Facts, identity: str) -> None:
    """Refuse a copy of another operation's record, which would never end, and other types."""
    if known["id"] != identity:
        raise ValueError(f"is of the operation {known['id']}")
    _check_types(known, asdict(Operation(identity, "", "")))


def _check_types(known: Facts, example: Facts) -> None:
    for name, usual in example.items():
        of_type = next((one for one in (str, float, list, dict) if isinstance(usual, one)), object)
        # JSON may have a number of seconds without a point.
        if not isinstance(known[name], (int, float) if of_type is float else of_type):
            raise TypeError(f"{name}: {known[name]!r}")


def _keys_in(data: Any) -> list[str]:
    found = data if isinstance(data, dict) else {}
    also = found.get("also")
    keys = [found.get("key"), *(also if isinstance(also, list) else ())]
    return [one for one in keys if isinstance(one, str)]


def _step_of(data: Facts) -> Step:
    undo = tuple(data["undo"]) if data["undo"] else None
    return Step(**{**data, "state": StepState(data["state"]), "undo": undo})


def interrupted(key: str) -> list[Operation]:
    """The operations on a key that no process works on."""
    return [one for one in pending(key) if one.id not in _worked_for and one.is_interrupted()]


def settle(key: str) -> None:
    """Complete or undo interrupted operations on a key, whose lock the caller does not hold.

    :raises OperationError: why one of them waits.
    """
    found = interrupted(key)
    service = os.environ.get(_SETTLED_BY)
    if found and service:
        _have_settled(service)
        for record in interrupted(key):
            record.waits_for = record.waits_for or f"systemctl status {service} tells why"
            raise waiting_error(record)
        return
    for record in found:
        settle_one(record)


def _have_settled(service: str) -> None:
    """Have a service settle all; what becomes of each is in its record. A service that takes longer
    goes on."""
    command = ["systemctl", "--no-ask-password", "start", "--", service]
    with contextlib.suppress(TimeoutError, OSError):
        run_bounded(command, timeout_s=_SERVICE_TIMEOUT_S, environment=os.environ)


def settle_one(record: Operation) -> bool:
    """Complete or undo an operation, if it was interrupted; returns False if a process works on it,
    or other nodes have to answer.

    :raises OperationError: why it waits.
    """
    if not record.is_interrupted():
        return False
    kind = _kind_of(record)
    try:
        alone = kind.alone(record.keys) if kind.alone else contextlib.nullcontext()
        with alone as own_kind, _held(record.id, timeout_s=_SETTLE_TIMEOUT_S):
            if now := find(record.id):
                now.waits_for = ""
                return Work(own_kind or kind, now).end()
    except LockedError as error:
        if not record.is_interrupted():
            return False
        raise OperationError(f"{_named(record)}: {error}", hint=error.hint) from error
    return True


def answered(step_id: str, answer: Facts) -> Operation | None:
    """Record the answer to a step that is done elsewhere, and complete what follows, up to the next
    such step. A step that has its answer already, and an operation that has ended, stay so.

    Returns the operation as it is now, or as it has just ended; None if it had ended before.

    :raises OperationError: why what follows waits.
    """
    identity = step_id.rpartition("-")[0]
    with _held(identity, timeout_s=_SETTLE_TIMEOUT_S):
        record = find(identity)
        if record is None:
            return None
        work = Work(_kind_of(record), record)
        for step in record.steps:
            if step.id == step_id and _is_awaited(step):
                record.waits_for, record.progress, step.state = "", {}, StepState.DONE
                work.answer(step, answer)
        work.end()
        return record


@contextlib.contextmanager
def changing(identity: str) -> Iterator[Operation]:
    """Change the facts of an operation that several processes work on in turn, and record them at
    the end of the block.

    :raises OperationError: if there is no such operation, or it can't be recorded.
    """
    with _held(identity, timeout_s=_SETTLE_TIMEOUT_S):
        record = find(identity)
        if record is None or record.state is OperationState.UNKNOWN:
            raise OperationError(f"{identity}: no such operation is pending")
        yield record
        Work(OperationKind(record.kind, {}), record).note()


def end(identity: str) -> None:
    """Remove the record of an operation that several processes have worked on in turn. It may have
    gone before.

    :raises OperationError: if that can't be done.
    """
    with _held(identity, timeout_s=_SETTLE_TIMEOUT_S):
        _remove(identity)


@contextlib.contextmanager
def working_for(identity: str) -> Iterator[None]:
    """What this process does in the block belongs to an operation, which keeps only others out."""
    _worked_for.append(identity)
    try:
        yield
    finally:
        _worked_for.remove(identity)


def obstacle(key: str) -> Operation | None:
    """The operation that keeps this process from work on a key; None if there is none."""
    for record in pending(key):
        if record.keeps_out and record.id not in _worked_for:
            return record
    return None


_worked_for: list[str] = []


def progressed(step_id: str, done: float, text: str) -> None:
    """Record how far a step is that is done elsewhere; see :meth:`Work.progress`."""
    identity = step_id.rpartition("-")[0]
    with _held(identity, timeout_s=_SETTLE_TIMEOUT_S):
        record = find(identity)
        if record and any(step.id == step_id and _is_awaited(step) for step in record.steps):
            Work(_kind_of(record), record).progress(done, text)


def awaited(record: Operation) -> Step | None:
    """The step of an operation that waits for other nodes; None if there is none."""
    return next(filter(_is_awaited, record.steps), None)


def lead(record: Operation, following: Callable[[Operation], Following]) -> Step | None:
    """The step of an operation that waits to be done or answered. If there is none, that which
    follows is added. None if nothing follows: the operation has ended.

    :param following: that of the operation's kind.
    """
    waiting = next((one for one in record.steps if one.state is StepState.WAITING), None)
    if waiting:
        return waiting
    record.state, call, error = following(record)
    record.error = record.error or error
    if call is None:
        return None
    name, facts, *node = call
    return _add_step(record, name, facts=facts, state=StepState.WAITING, node="".join(node))


def _add_step(record: Operation, name: str, **known: Any) -> Step:
    record.steps.append(Step(f"{record.id}-{len(record.steps)}", name, **known))
    return record.steps[-1]


def _is_awaited(step: Step) -> bool:
    return step.node != "" and step.state is StepState.WAITING


def _kind_of(record: Operation) -> OperationKind:
    if record.state is not OperationState.UNKNOWN:
        for entry in entry_points(_GROUP):
            if entry.name == record.kind:
                kind: OperationKind = entry.load()
                return kind
        record.waits_for = f"no installed part of Brine knows the kind {record.kind}"
    raise waiting_error(record)


def _named(record: Operation) -> str:
    return f"{record.kind} of {record.key} (operation {record.id})"


def waiting_error(record: Operation) -> OperationError:
    """The error of an operation that can't be settled now."""
    word = "completed" if record.state is OperationState.COMMITTED else "undone"
    hint = f"remove the cause; then: brine operations settle {record.id}"
    return OperationError(f"{_named(record)}: not {word} yet: {record.waits_for}", hint=hint)


# The files of a record.


def _folders() -> tuple[Path, Path]:
    return paths.OPERATIONS_DIR, paths.VOLATILE_OPERATIONS_DIR


def _file(identity: str) -> Path:
    lasting, volatile = _folders()
    return (volatile if identity.startswith(_VOLATILE) else lasting) / f"{identity}.json"


def _is_volatile(file: Path) -> bool:
    return file.name.startswith(_VOLATILE)


def _lock_name(identity: str) -> str:
    return f"operation-{identity}"


def _lock_file(lock: str) -> Path:
    return paths.LOCK_DIR / f"{lock}.lock"


@contextlib.contextmanager
def _held(identity: str, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of an operation. Its file goes with the record."""
    with node_lock(_lock_name(identity), timeout_s=timeout_s):
        try:
            yield
        finally:
            if not _file(identity).exists():
                for file in (unfinished(_file(identity)), _lock_file(_lock_name(identity))):
                    with contextlib.suppress(OSError):
                        file.unlink()


def forget(record: Operation) -> None:
    """Remove the record of an operation whose object has ended, with all that was to be undone."""
    with contextlib.suppress(OperationError):
        _remove(record.id)
    with contextlib.suppress(OSError):
        _lock_file(_lock_name(record.id)).unlink()


def _remove(identity: str) -> None:
    file = _file(identity)
    try:
        file.unlink(missing_ok=True)
        unfinished(file).unlink(missing_ok=True)
        if not _is_volatile(file):
            sync_folder(file.parent)
    except OSError as error:
        raise OperationError(f"{file}: can't be removed: {error.strerror}") from error


def remove_unfinished() -> None:
    """Remove what is left of records that were never whole: their operations did not begin."""
    for file in (one for folder in _folders() for one in folder.glob(".*.json.new")):
        identity = file.name.removeprefix(".").removesuffix(".json.new")
        record = Operation(identity, "", "")
        if not _file(identity).exists() and record.is_interrupted():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                _lock_file(record.lock).unlink(missing_ok=True)
