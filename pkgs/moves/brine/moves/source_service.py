"""The process of a move away from this node.

The decisions are those of :mod:`brine.moves.source`. Here is what they look at, and how each act is
done. An act is done again after a kill, and an error of an act is the move's, unless the claim is
given away: then it is tried until it is done.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from brine.common import paths
from brine.common.errors import BrineError, printable
from brine.common.files import sync_folder, try_to_write
from brine.common.operation import OperationError
from brine.common.progress import size_text
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpTimeoutError
from brine.common.systemd import ServiceManager
from brine.instance import store
from brine.instance.claim_changes import give_away
from brine.instance.kvm.guest import monitor_of
from brine.instance.messages import tell
from brine.instance.observe import look
from brine.instance.store import try_to_save
from brine.moves import channel, messages, records, source
from brine.moves.belongings import belongings_of, to_message
from brine.moves.copying import checksum_of, copy_key, files_by_role, send_file, size_in
from brine.moves.keys import key_folder_of, qemu_user
from brine.moves.leaving import end_here, start_again, stop_for_move
from brine.moves.migration import (
    MigrationState,
    MoveError,
    MoveOptions,
    MoveProgress,
    QemuGoneError,
)
from brine.moves.move_key import MoveKey
from brine.moves.outgoing import Leaving, Outgoing
from brine.moves.prepared import Prepared
from brine.moves.records import MoveRecord, MoverStatus
from brine.moves.source import (
    SourceAct,
    SourceDecision,
    SourceGuest,
    SourceMove,
    SourceStep,
    SourceView,
    TargetWord,
)
from brine.moves.talk import ANSWER_S, Asker, Topic
from brine.storage.volumes import volume_in
from brine.vm.run import Run

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a target may take to answer that it holds all, before the guest runs on here."""

_COPY_S = 7 * 86400.0
_MEMORY_S = 86400.0
_POLL_S = 0.1
_SOON_S = 0.01
_RETRY_S = 2.0
_TALK_S = 10.0
_RECORD_BYTES = 64 * 1024


def _port_of(answer: Mapping[str, Any]) -> int:
    """:raises MoveError: if there is none."""
    port = answer.get("port")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise MoveError("the target's answer has no port")
    return port


class CancelledError(MoveError):
    """The master has asked to go back meanwhile."""


def work(record: MoveRecord) -> None:
    """Do one act after another until the record has ended."""
    records.remove_status(record.name)
    source_work = SourceWork(record)
    with contextlib.closing(source_work):
        while source_work.step():
            pass


class SourceWork:
    """The process of a move away from this node. What it knows beside the record ends with it.

    :param service: is told that the first decision was made.
    """

    def __init__(self, record: MoveRecord, service: ServiceManager | None = None) -> None:
        self.record = record
        self._service = service or ServiceManager()
        self._is_ready = False
        self._asker: Asker | None = None
        self._word = TargetWord.NONE
        self._down_since: float | None = None
        self._stands_since: float | None = None  # of a guest that this process has sent
        self._ran_ms = 0  # there, before this process has heard of it
        self._downtime_ms = 0
        self._faulty_since: float | None = None  # since when no act has succeeded
        self._warned: set[str] = set()  # of the faults since then
        self._is_copied = False  # of a cold move
        self._has_brought = False  # of a cold move
        self._is_durable = False  # that the claim is given away
        self._status = MoverStatus(record.move.id)
        self.outgoing = Outgoing(record.name, partial(_monitor, record.name), key_folder_of(record))

    @property
    def move(self) -> SourceMove:
        return self.record.as_source()

    @property
    def prepared(self) -> Prepared:
        """What the target has prepared.

        :raises MoveError: if it has prepared nothing.
        """
        found = self.record.facts.get("prepared")
        if not found:
            raise MoveError("the target has not prepared anything")
        return Prepared.of(found, is_live=self.move.is_live)

    @property
    def _key(self) -> MoveKey:
        """:raises MoveError: if the target has prepared nothing, so there is none."""
        if found := self.record.facts.get("key"):
            return MoveKey.of(str(found))
        raise MoveError("there is no key for this move")

    def close(self) -> None:
        """End what it has open. QEMU keeps what it got."""
        if self._asker:
            self._asker.close()
        self._asker = None

    def step(self) -> bool:
        """Do the next act; False if the record has ended."""
        found = records.find(self.record.name)
        if found is None or found.move.id != self.move.id:
            return False
        self.record = found
        try:
            if records.last_ended(found.uuid) == found.move.id:
                self._finish()
                return False
            view = self.view()
            decision = source.source_act(self.move, view)
            self._tell(act=decision.act.name, asked=self.move.asked, error=self.move.error)
            self._be_ready(decision)
            self._do(decision, view)
            self._is_well()
        except CancelledError:
            time.sleep(_POLL_S)
        except QmpTimeoutError as error:
            self._is_deaf(error)
        except (BrineError, OSError) as error:
            self._failed(error)
        return True

    def _is_deaf(self, error: QmpTimeoutError) -> None:
        """QEMU does not answer. It may wait for a target that hangs: that one has to end before."""
        self._tell(fault=str(error))
        self._faulty_since = self._faulty_since or time.monotonic()
        is_cancelled = self.move.asked is SourceStep.CANCEL
        is_late = time.monotonic() - self._faulty_since > PATIENCE_S
        if not self.move.error and not records.is_given(self.record) and (is_cancelled or is_late):
            self._try_to_fail("the move was cancelled" if is_cancelled else "QEMU does not answer")
        if self.move.error:
            with contextlib.suppress(MoveError):
                self._tell_target(Topic.LEAVE, timeout_s=_TALK_S)
        time.sleep(_POLL_S)

    def _failed(self, error: BrineError | OSError) -> None:
        """An error of an act ends the move, unless the claim is given away, or it goes back
        already. One that may go by itself has some time for that."""
        hint = getattr(error, "hint", None)
        text = f"{error}; {hint}" if hint else str(error)
        self._warn(text)
        self._faulty_since = self._faulty_since or time.monotonic()
        is_late = time.monotonic() - self._faulty_since > PATIENCE_S
        is_final = (isinstance(error, MoveError) or is_late) and not self.move.error
        if is_final and not records.is_given(self.record):
            reason = text.removeprefix(f"{self.record.name}: ")
            if not self._try_to_fail(reason) and is_late:
                self._run_on(reason)
            return
        time.sleep(_RETRY_S)

    def _is_well(self) -> None:
        """An act does what it should again: an earlier fault is none of this move's any more."""
        if self._faulty_since is not None:
            self._tell(fault="")
        self._faulty_since = None
        self._warned.clear()

    def _try_to_fail(self, error: str) -> bool:
        """Record that the move goes back, if that can be recorded now; returns whether it is. Until
        then, such as while a disk is full, the guest stays as it is."""
        try:
            self._fail(error)
        except OperationError as fault:
            self._warn(f"{fault}; until there is room, the move goes neither on nor back")
            time.sleep(_RETRY_S)
            return False
        return True

    def _run_on(self, error: str) -> None:
        """Have a guest that stands still run on here, though it can't be recorded that the move
        goes back. No process gives it away after that: each sees that it runs on, or, if the node
        has lost its power since, that it has ended. The target takes nothing that is not given."""
        try:
            view = self.view()
            if source.source_act(replace(self.move, error=error), view).act is SourceAct.RESUME:
                self._resume(view)
                log.warning("%s", printable(f"{self.record.name}: runs on here: {error}"))
        except (BrineError, OSError) as fault:
            self._warn(str(fault))

    def _warn(self, text: str) -> None:
        """Tell a fault, and log it if it is a new one."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", printable(text))
        self._tell(fault=text)

    def _be_ready(self, decision: SourceDecision) -> None:
        """systemd goes on with the boot when what the boot has ended is recorded."""
        if not self._is_ready and decision.act is not SourceAct.FAIL:
            self._is_ready = True
            move = self.move
            self._service.ready(f"moves {move.instance} to {move.target}")

    # What it sees.

    def view(self) -> SourceView:
        """What there is to see now."""
        move, is_given = self.move, records.is_given(self.record)
        if is_given:
            return SourceView(SourceGuest.OFF, is_given=True, word=self._word)
        run, status, migration = Run.last(move.instance).id, "", ""
        mirrors: Mapping[str, Any] = {}
        if leaving := self._leaving() if run == move.run else None:
            status, mirrors = leaving.run_state, leaving.mirrors
            state = leaving.migration.state
            migration = "" if state is MigrationState.NONE else str(state)
        elif look(move.instance).is_going:
            status = "running"
        guest = source.source_guest(move, run=run, status=status, migration=migration)
        is_down = guest is (SourceGuest.SENT if move.is_live else SourceGuest.OFF)
        hands_over = move.asked is SourceStep.HAND_OVER  # before, the guest is off for its copies
        if is_down and hands_over and self._down_since is None:
            self._down_since = time.monotonic()
        late_s = time.monotonic() - (self._down_since or time.monotonic())
        ready = [one for one in mirrors.values() if one.state == "ready"]
        is_mirrored = len(ready) == len(self._mirrored())
        return SourceView(
            guest,
            is_copied=is_mirrored if move.is_live else self._is_copied,
            has_mirrors=bool(mirrors),
            word=self._word,
            is_late=late_s > PATIENCE_S,
        )

    def _leaving(self) -> Leaving | None:
        """How far QEMU is; None if there is none. systemd is not asked: the guest stands still
        meanwhile."""
        try:
            return self.outgoing.look(self._mirrored())
        except QemuGoneError:
            return None

    def _mirrored(self) -> list[str]:
        """The device ids of the disks that are copied while the guest runs."""
        if self.move.is_live:
            with contextlib.suppress(MoveError):
                return self.prepared.copied()
        return []

    # What it does.

    def _do(self, decision: SourceDecision, view: SourceView) -> None:
        acts: dict[SourceAct, Callable[[], object]] = {
            SourceAct.STOP: self._stop,
            SourceAct.COPY: self._copy,
            SourceAct.SEND: self._send,
            SourceAct.SWITCH: self._switch,
            SourceAct.WAIT: partial(self._wait, view),
            SourceAct.ASK: self._ask,
            SourceAct.GIVE: self._give,
            SourceAct.GO: self._go,
            SourceAct.CLEAR: self._clear,
            SourceAct.FAIL: partial(self._fail, decision.error),
            SourceAct.RESUME: partial(self._resume, view),
            SourceAct.NOTHING: partial(time.sleep, _POLL_S),
            SourceAct.END: self._end,
        }
        acts[decision.act]()

    def _stop(self) -> None:
        self._try_files()
        stop_for_move(self.move)

    def _try_files(self) -> None:
        """See that there is room for what is recorded while the guest stands still: that the claim
        is given away, or that the move goes back."""
        try_to_save(store.load(self.record.name), self.record.name)
        for folder in (paths.OPERATIONS_DIR, paths.CLAIMS_DIR, paths.MOVES_DIR):
            try_to_write(folder, _RECORD_BYTES)

    def _copy(self) -> None:
        if not self.move.is_live:
            self._copy_files()
            return
        mirrored = self._mirrored()
        self._prepare()
        jobs = self.outgoing.look(mirrored).mirrors
        missing = [one for one in mirrored if one not in jobs]
        if missing:
            self._mirror(missing)
        self.outgoing.await_mirrors(mirrored, timeout_s=_COPY_S, tell=self._tell_progress)

    def _copy_files(self) -> None:
        """Copy the disks of a guest that is off, and have the target compare them."""
        key = copy_key(self.record.name)
        key.write(self._key)
        address, sums = self.prepared.address, dict[str, dict[str, Any]]()
        for disk, unit in self.record.facts["copied"].items():
            sums[disk] = {}
            for role, file in files_by_role(volume_in(unit, disk)).items():
                path = file.path
                size = size_in(path)
                where = self._tell_target(Topic.COPY, disk=disk, role=role, size=size)
                send_file(
                    path,
                    address,
                    _port_of(where),
                    key,
                    is_zero=bool(where.get("is_zero")),
                    tell=self._tell_progress,
                )
                checksum = checksum_of(path, look=self._refuse_cancelled)
                sums[disk][role] = {"size_bytes": size, "sha256": checksum}
        self._tell(text="the copies are compared")
        while (found := self._tell_target(Topic.COPIED, disks=sums)).get("word") == "wait":
            self._refuse_cancelled()
        if found.get("word") != "whole":
            text = str(found.get("error") or "the copies differ from the volumes here")
            raise MoveError(f"{self.move.target}: {text}")
        self._is_copied = True
        key.remove()

    def _prepare(self) -> None:
        """Set QEMU up. What another process has set up before is set up again, but not while it
        sends."""
        folder = key_folder_of(self.record)
        if folder:
            folder.write(self._key, qemu_user(self.record.name))
        self.outgoing.prepare(self._options(), sorted(self.prepared.disks))

    def _mirror(self, device_ids: list[str]) -> None:
        """Begin to copy disks. The target's kernel takes no connection but those it was told of."""
        own = str(self.record.facts["source_address"])
        address, port = self.prepared.address, self.prepared.nbd_port
        if port is None:
            raise MoveError("the target takes no disks")
        with contextlib.ExitStack() as stack:
            reserved = [stack.enter_context(channel.reserve(own)) for _ in device_ids]
            ports = [list(one.getsockname()[:2]) for one in reserved]
            self._tell_target(Topic.ADMIT, ports=ports)
            for device_id, connection in zip(device_ids, reserved, strict=True):
                channel.connect_bare(connection, address, port)
                self.outgoing.mirror(device_id, connection, rate=self._options().rate)

    def _send(self) -> None:
        """Record that it is begun, then begin to send the guest's memory."""
        self._try_files()
        if not self.move.copies:  # else its mirrors were prepared
            self._prepare()
        machine, asker = self.prepared.machine, self._connected()
        if machine is None:
            raise MoveError("the target has no QEMU that waits for the guest")
        if not self._bring():
            raise MoveError(f"{self.move.target}: {self._status.fault}")
        self._tell_target(Topic.RECEIVE)
        connection = asker.memory()
        with connection:
            self.record = records.change(self.record, lambda move: replace(move, has_sent=True))
            self.outgoing.send(connection, machine, self._mirrored())

    def _wait(self, view: SourceView) -> None:
        """Wait for what QEMU does by itself."""
        if view.guest is SourceGuest.SENDING:
            self.outgoing.await_standstill(
                self._options(), timeout_s=_MEMORY_S, tell=self._tell_progress
            )
        else:
            time.sleep(_SOON_S)

    def _switch(self) -> None:
        self._down_since = time.monotonic()
        self.outgoing.leave_mirrors(self._mirrored())
        found = self.outgoing.switch_over()
        self._stands_since = time.monotonic() - found.downtime_ms / 1000

    def _ask(self) -> None:
        if not self.move.is_live:  # of a guest that runs, it was brought before its memory
            self._has_brought = self._has_brought or self._bring()
        if self.move.is_live or self._has_brought:
            self._word = self._asked_word(Topic.HOLD)
        if self._word is not TargetWord.HELD:
            time.sleep(_SOON_S)

    def _bring(self) -> bool:
        """Bring what comes along beside the disks, as it is now; False if the target does not
        answer."""
        found = to_message(belongings_of(store.load(self.record.name)))
        word = self._asked_word(Topic.BRING, files=found, timeout_s=ANSWER_S)
        if word is TargetWord.REFUSED:
            raise MoveError(f"{self.move.target}: {self._status.fault}")
        return word is TargetWord.HELD

    def _give(self) -> None:
        move = self.move
        give_away(move.instance, move.target, move.serial, is_live=move.is_live)

    def _go(self) -> None:
        if not self._is_durable:  # a process may have been killed just before that
            sync_folder(paths.SPECS_DIR)
            self._is_durable = True
        self._word = self._asked_word(Topic.GO, serial=self.move.serial)
        if self._word is not TargetWord.RUNS:
            time.sleep(_POLL_S)
        elif self._stands_since is not None:
            stood_ms = round(1000 * (time.monotonic() - self._stands_since))
            self._downtime_ms = max(stood_ms - self._ran_ms, 1)

    def _asked_word(self, topic: Topic, **more: Any) -> TargetWord:
        """The target's word; NONE if it does not answer now."""
        try:
            found = self._tell_target(topic, **more)
        except MoveError as error:
            if str(error) != self._status.fault:
                log.warning("%s", printable(str(error)))
            self._tell(fault=str(error))
            time.sleep(_POLL_S)
            return TargetWord.NONE
        self._tell(fault=str(found.get("error", "")))
        ran_ms = found.get("ran_ms")
        self._ran_ms = max(ran_ms, 0) if type(ran_ms) is int else 0
        known = {one.name.lower(): one for one in TargetWord}
        return known.get(str(found.get("word")), TargetWord.NONE)

    def _clear(self) -> None:
        """The guest runs on the target: remove all of it here."""
        copied = self.record.facts.get("copied", {})
        known = {"downtime_ms": self._downtime_ms}
        end_here(self.move, self.record.uuid, copied, self.outgoing, **known)
        # The target hears nothing more of this process once it has heard this.
        records.note_end(self.record, self._downtime_ms)
        self._finish()

    def _finish(self) -> None:
        """End the record of a move whose end is noted."""
        if records.is_given(self.record):
            with contextlib.suppress(MoveError):  # it waits for this in vain, and does no harm
                self._tell_target(Topic.CLEARED)
        self._end()

    def _fail(self, error: str) -> None:
        """Record that the move goes back, before anything is done for that. From then on the
        claim is never given away, and others may start the instance again."""
        self.record = records.change(
            self.record, lambda move: replace(move, error=move.error or error), keeps_out=""
        )
        move = self.move
        tell(messages.MOVE_FAILED, move.instance, node=move.target, reason=printable(error))

    def _resume(self, view: SourceView) -> None:
        """Have the guest run on here. Where the target hangs, this QEMU may hang with it until that
        one has ended, so it is asked to end first."""
        self._word = TargetWord.NONE  # what it held, it holds no more
        with contextlib.suppress(MoveError):
            self._tell_target(Topic.LEAVE, timeout_s=_TALK_S)
        if view.guest is SourceGuest.OFF:
            start_again(self.move)
            return
        disks = self._mirrored()
        if view.guest is SourceGuest.SENT:
            self.outgoing.take_back(disks)
        else:
            self.outgoing.cancel(disks)

    def _end(self) -> None:
        copy_key(self.record.name).remove()
        if folder := key_folder_of(self.record):
            folder.remove()
        records.end(self.record)

    # The target.

    def _connected(self) -> Asker:
        if self._asker is None:
            prepared = self.prepared
            self._asker = Asker(prepared.address, prepared.port, self._key)
        return self._asker

    def _tell_target(
        self, topic: Topic, *, timeout_s: float = _TALK_S, **more: Any
    ) -> Mapping[str, Any]:
        found = self._connected().ask(topic, timeout_s=timeout_s, **more)
        if topic in (Topic.ADMIT, Topic.RECEIVE, Topic.COPY) and found.get("error"):
            raise MoveError(f"{self.move.target}: {found['error']}")
        return found

    # What it knows.

    def _options(self) -> MoveOptions:
        wishes = self.record.facts.get("wishes") or {}
        known = {key: wishes[key] for key in ("max_downtime_ms", "rate") if wishes.get(key)}
        return MoveOptions(auto_converge=bool(wishes.get("auto_converge")), **known)

    # What others see.

    def _tell(self, **changes: Any) -> None:
        new = self._status._replace(**changes)
        if new != self._status:
            self._status = new
            records.write_status(self.record.name, new)

    def _tell_progress(self, found: MoveProgress) -> None:
        """Tell how far it is, and end the wait if the master has asked to go back."""
        rate = f"{size_text(int(found.rate))}/s"
        rest = f", {found.rest_s:.0f} s left" if found.rest_s is not None else ""
        done = f"{size_text(found.done)} of {size_text(found.total)}"
        share = found.done / found.total if found.total else 0.0
        text = f"{found.phase}: {done}, {rate}{rest}"
        self._is_well()  # an act may take hours
        self._tell(progress=round(min(share, 1.0), 3), text=text)
        self._refuse_cancelled()

    def _refuse_cancelled(self) -> None:
        now = records.find(self.record.name)
        if now is None or now.as_source().asked is SourceStep.CANCEL:
            raise CancelledError(f"{self.record.name}: its move is cancelled")


@contextlib.contextmanager
def _monitor(name: str) -> Iterator[QmpClient]:
    with monitor_of(name, of_unit=False) as qmp:
        yield qmp
