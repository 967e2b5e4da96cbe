"""The source's side of a live move: a QEMU whose guest goes to another one.

Until :meth:`Outgoing.switch_over` has returned, the guest is here: whatever fails, it runs on. From
then on this QEMU holds a copy that stands still, and runs it only by :meth:`Outgoing.take_back`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpProtocolError, QmpTimeoutError
from brine.hotplug import block_jobs
from brine.hotplug.block_graph import top_node
from brine.hotplug.block_jobs import Job, JobState, of_move
from brine.hotplug.qemu import Machine
from brine.instance.kvm.guest import run_state
from brine.moves.dirtying import DirtyWatch
from brine.moves.migration import (
    CAPABILITIES,
    IDLE,
    CopyPhase,
    MachineFacts,
    Migration,
    MigrationState,
    MoveError,
    MoveOptions,
    MoveProgress,
    MoveSide,
    TellProgress,
    bitmaps_of,
    given_memory_socket,
    hand_over_socket,
    take_back_socket,
    tell_no_progress,
)

CONNECT_S = 15.0
"""How long a target may take to answer to a new connection."""
STALLED_S = 30.0
"""How long a target may take nothing. A guest's writes wait for it meanwhile."""

_ENDS_S = 60.0
_LOOK_S = 0.25
_BEGINS_S = 0.01
_MOVED = (MigrationState.COMPLETED,)
_STANDING = ("finish-migrate", "postmigrate")  # the first for a moment
_KEEPS_STATE = 9  # QEMU's version
_UNLIMITED = 1 << 62
_NEEDED = CAPABILITIES | {"pause-before-switchover"}


class Leaving(NamedTuple):
    """How far a source is.

    :param run_state: of the guest by QEMU.
    :param mirrors: the job of each disk that is being copied, by device id.
    """

    run_state: str
    migration: Migration
    mirrors: Mapping[str, Job]

    def has_left(self) -> bool:
        """Whether this QEMU's guest stands still because the other one has all of it."""
        return self.migration.state in _MOVED and self.run_state in _STANDING


class Outgoing(MoveSide):
    """A QEMU whose guest goes away.

    Its steps, in order; each may be done twice, and returns whether there was something to do::

        prepare           capabilities, limits, the key
        mirror            each disk that the target can't reach: it is copied, and then each write
                          is done on both nodes
        await_mirrors
        send              the memory, to a target that has the same devices
        await_standstill  the guest stands still, for the rest
        leave_mirrors     the disks are the same
        switch_over       the target has all of it; this QEMU stays as it is
        quit              when the guest runs there

    :meth:`cancel` undoes all of it at any time before *switch_over* has returned, also what another
    process has begun. :meth:`take_back` is for a guest that has left and was not claimed.

    From *await_standstill* on, a target that hangs without being dead holds this QEMU up, which
    waits for its disk: no step is answered (:class:`QmpTimeoutError`) until the target's QEMU is
    killed. So whoever gives a move up ends the target first.
    """

    def look(self, device_ids: Sequence[str] = ()) -> Leaving:
        """How far it is."""
        with self._machine() as machine:
            return self._look(machine, device_ids)

    def _look(self, machine: Machine, device_ids: Sequence[str]) -> Leaving:
        state = run_state(machine.qmp)
        found = {one: block_jobs.find_job(machine, of_move(one)) for one in device_ids}
        jobs = {device_id: job for device_id, job in found.items() if job}
        return Leaving(state, Migration.read(machine.qmp), jobs)

    def prepare(
        self, options: MoveOptions, device_ids: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        """Set QEMU up.

        :param device_ids: of all disks, those too that both nodes reach.
        :returns: the names of each disk's dirty bitmaps, which the target has to know.
        :raises MoveError: if it is being moved already, or was.
        """
        more = {"auto-converge"} if options.auto_converge else set()
        with self._machine() as machine:
            self._refuse_moving(machine)
            _refuse_standing(self.name, machine)
            bitmaps = bitmaps_of(machine, device_ids)
            limits = {
                "downtime-limit": options.max_downtime_ms,
                "max-bandwidth": options.rate or _UNLIMITED,
            }
            self._set_up(machine, _NEEDED | more, "client", bitmaps, **limits)
        return bitmaps

    def _refuse_moving(self, machine: Machine) -> None:
        found = Migration.read(machine.qmp)
        if found.state in _MOVED and run_state(machine.qmp) in _STANDING:
            raise MoveError(f"{self.name}: its guest has left this QEMU")
        if found.state not in {*IDLE, *_MOVED}:
            hint = "brine operations list shows that move"
            raise MoveError(f"{self.name}: is being moved already", hint=hint)

    def mirror(self, device_id: str, connection: socket.socket, *, rate: int = 0) -> bool:
        """Begin to copy a disk to the target.

        :param connection: to where the target's QEMU serves disks; it is closed here.
        :param rate: in bytes a second at most; 0 is no limit.
        :raises MoveError: if the target does not take it; it may lack the key of this move.
        """
        with connection, self._machine() as machine:
            if block_jobs.find_job(machine, of_move(device_id)):
                return False
            block_jobs.refuse_busy(machine, device_id)
            node, name = _node_of(device_id), f"move-{device_id}"
            machine.remove("blockdev-del", {"node-name": node})  # of a process that was killed
            hand_over_socket(machine, name, connection)
            arguments = {
                "driver": "nbd",
                "node-name": node,
                "server": {"type": "fd", "str": name},
                "export": device_id,
                "discard": "unmap",
                **self._tls(),
            }
            try:
                _execute_by(machine.qmp, "blockdev-add", arguments, connection)
            except QmpCommandError as error:
                take_back_socket(machine, name)
                text = f"{self.name}: the target does not take {device_id}: {error.description}"
                raise MoveError(text) from error
            top = top_node(machine, device_id)
            block_jobs.begin_mirror(machine, of_move(device_id), top, node, rate)
        return True

    def await_mirrors(
        self,
        device_ids: Sequence[str],
        *,
        timeout_s: float,
        tell: TellProgress = tell_no_progress,
    ) -> None:
        """Wait until all disks are copied, and each write is done on both nodes.

        :raises MoveError: if a copy has failed: the guest runs on here.
        """
        began = time.monotonic()
        deadline, first = began + timeout_s, -1
        stall = _Stall(self.name)
        while True:
            jobs = self.look(device_ids).mirrors
            for device_id in device_ids:
                _refuse_failed(self.name, device_id, jobs.get(device_id))
            done, total = (sum(column) for column in zip(*_sizes(jobs), strict=True))
            first = done if first < 0 else first
            spent_s = time.monotonic() - began
            rate = (done - first) / spent_s if spent_s > 0 else 0.0
            rest_s = (total - done) / rate if rate else None
            tell(MoveProgress(CopyPhase.DISKS, done, total, rate, rest_s))
            if all(job.state is JobState.READY for job in jobs.values()):
                return
            stall.refuse(done)
            if time.monotonic() > deadline:
                raise MoveError(f"{self.name}: its disks were not copied within {timeout_s:g} s")
            time.sleep(_LOOK_S if spent_s > 1 else _LOOK_S / 10)

    def send(
        self, connection: socket.socket, target: MachineFacts, mirrored: Sequence[str] = ()
    ) -> bool:
        """Begin to send the guest's memory.

        :param connection: of :func:`brine.moves.channel.connect`; it is closed here.
        :param target: what the target's QEMU has, compared with what this one has now.
        :param mirrored: the disks that are being copied.
        :raises MoveError: if the two differ, then nothing is sent; or the target does not answer.
        """
        with self._machine() as machine:
            if Migration.read(machine.qmp).state not in {*IDLE, *_MOVED}:
                return False
            self._refuse_unprepared(machine)
            for device_id in mirrored:
                job = block_jobs.find_job(machine, of_move(device_id))
                _refuse_failed(self.name, device_id, job)
                if job and job.state is not JobState.READY:
                    raise MoveError(f"{self.name}: {device_id} is not copied yet")
            if differences := MachineFacts.read(machine).differences(target):
                text = f"{self.name}: the target is another machine: {'; '.join(differences)}"
                raise MoveError(text, hint="nothing was sent; a new target has it as it is now")
            try:
                with given_memory_socket(machine, connection) as uri:
                    machine.qmp.execute("migrate", {"uri": uri})
                    _await_begun(self.name, machine, connection)
            except QmpCommandError as error:
                text = f"{self.name}: can't be moved now: {error.description}"
                raise MoveError(text) from error
        return True

    def _refuse_unprepared(self, machine: Machine) -> None:
        """Without these a fault of the target would end the guest, or it would leave too early."""
        rows = machine.list_of("query-migrate-capabilities")
        have = {one.get("capability") for one in rows if one.get("state") is True}
        if missing := _NEEDED - have:
            raise MoveError(f"{self.name}: QEMU was not prepared for a move: {min(missing)} is off")

    def await_standstill(
        self,
        options: MoveOptions,
        *,
        timeout_s: float,
        tell: TellProgress = tell_no_progress,
    ) -> None:
        """Wait until the guest stands still, and all but the rest of its memory is sent.

        :raises MoveError: if it runs on here: the target is gone, or there is no end to it.
        """
        watch, stall = DirtyWatch(options), _Stall(self.name)

        def is_over(_machine: Machine, seen: Migration) -> bool:
            done = max(seen.total - seen.remaining, 0)
            tell(MoveProgress(CopyPhase.MEMORY, done, seen.total, seen.rate, seen.rest_s()))
            if seen.state is MigrationState.ACTIVE:
                if why := watch.hopeless(time.monotonic(), seen):
                    text = f"{self.name}: can't be moved as fast as it works: {why}"
                    raise MoveError(text, hint=watch.choices())
                stall.refuse(seen.sent)
                return False
            return seen.state is MigrationState.PRE_SWITCHOVER or _is_settled(seen)

        found = self._await(is_over, timeout_s, "its memory was not sent")
        if found.state is not MigrationState.PRE_SWITCHOVER:
            self._tell_end(found)

    def leave_mirrors(self, device_ids: Sequence[str]) -> bool:
        """End the copying of disks, while the guest stands still: both are the same then.

        :raises MoveError: if one has failed; then :meth:`cancel` has the guest run on.
        """
        with self._machine() as machine:
            found = self._look(machine, device_ids)
            if found.mirrors and found.migration.state is not MigrationState.PRE_SWITCHOVER:
                raise MoveError(f"{self.name}: does not stand still: {found.migration.state}")
            for device_id in found.mirrors:
                block_jobs.leave_copy(machine, of_move(device_id))
            for device_id in device_ids:
                machine.remove("blockdev-del", {"node-name": _node_of(device_id)})
        return bool(found.mirrors)

    def switch_over(self, *, timeout_s: float = 120.0) -> Migration:
        """Send the rest. When this returns, the target has all of the guest, and this QEMU does not
        run it.

        :raises MoveError: if the target is gone: the guest runs on here.
        """
        with self._machine() as machine:
            state = Migration.read(machine.qmp).state
            if state is MigrationState.PRE_SWITCHOVER:
                _refuse_mirrors(self.name, machine)
                machine.qmp.execute("migrate-continue", {"state": state.value})
            elif state not in {*_MOVED, MigrationState.DEVICE}:
                raise MoveError(f"{self.name}: does not stand still for the rest: it is {state}")
        found = self._await(lambda _, seen: _is_settled(seen), timeout_s, "the rest was not sent")
        if found.state not in _MOVED:
            self._tell_end(found)
        with self._machine() as machine:
            _await_back(machine)
        return found

    def _tell_end(self, found: Migration) -> None:
        """Say that the target has not taken it, when the guest runs here again."""
        if found.state in _MOVED:
            raise MoveError(f"{self.name}: has left before its disks were left")
        with self._machine() as machine:
            state = _await_back(machine)
        why = found.error or f"it was {found.state}"
        raise MoveError(f"{self.name}: the target has not taken it: {why}; here it is {state}")

    def cancel(self, device_ids: Sequence[str]) -> bool:
        """Have the guest stay: stop sending, stop copying, forget the target. What QEMU had stopped
        for the move runs on.

        :returns: False if there was no move.
        :raises MoveError: if the guest has left: then the claim decides, see :meth:`take_back`.
        """
        with self._machine() as machine:
            state = Migration.read(machine.qmp).state
            is_sending = state not in {*IDLE, *_MOVED}
            if is_sending:
                machine.qmp.execute("migrate_cancel")
        if is_sending:
            self._await(lambda _, seen: _is_settled(seen), _ENDS_S, "is still being sent")
        with self._machine() as machine:
            found = self._look(machine, device_ids)
            if found.has_left():
                raise MoveError(f"{self.name}: its guest has left this QEMU")
            _await_back(machine)
            self._forget(machine, device_ids)
        return is_sending or bool(found.mirrors)

    def take_back(self, device_ids: Sequence[str]) -> bool:
        """Run a guest on that has left, and that was never claimed by the target's node.

        QEMU does not know whether it runs there, and would run it twice. So the target's QEMU must
        have ended before, or its node be fenced; and the claim must be this node's.

        :returns: False if it has not left.
        :raises MoveError: if QEMU can't: its images may be locked by the target.
        """
        with self._machine() as machine:
            if not self._look(machine, ()).has_left():
                return False
            try:
                machine.qmp.execute("cont")
            except QmpCommandError as error:
                text = f"{self.name}: can't go on here: {error.description}"
                raise MoveError(text) from error
            state = _await_back(machine)
            if state == "postmigrate":
                raise MoveError(f"{self.name}: was told to go on, and does not")
            self._forget(machine, device_ids)
        return True

    def _forget(self, machine: Machine, device_ids: Sequence[str]) -> None:
        """Remove what a move has made in this QEMU."""
        for device_id in device_ids:
            node = _node_of(device_id)
            # A target that hangs holds what was sent to it, and with it the guest's writes.
            with contextlib.suppress(QmpCommandError):
                instance = {"type": "block-node", "node-name": node}
                machine.qmp.execute("yank", {"instances": [instance]})
            block_jobs.cancel_job(machine, of_move(device_id))
            machine.remove("blockdev-del", {"node-name": node})
        self._clear_key(machine)


class _Stall:
    """Looks at a number that rises while a target takes what it gets."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._most = -1
        self._at = time.monotonic()

    def refuse(self, done: int) -> None:
        """Refuse a target that takes nothing any more."""
        if done > self._most:
            self._most, self._at = done, time.monotonic()
        elif time.monotonic() - self._at > STALLED_S:
            raise MoveError(f"{self._name}: the target has taken nothing for {STALLED_S:g} s")


def _node_of(device_id: str) -> str:
    """The block node of a disk's copy: it begins with the id, as all nodes of a disk do."""
    return f"{device_id}.move"


def _is_settled(seen: Migration) -> bool:
    return seen.state in {*_MOVED, *IDLE}


def _await_back(machine: Machine) -> str:
    """The state of the guest, when QEMU has it back: it says that a move has ended a moment before
    the guest runs on."""
    deadline = time.monotonic() + _ENDS_S
    while (state := run_state(machine.qmp)) == "finish-migrate" and time.monotonic() < deadline:
        time.sleep(0.002)
    return state


def _await_begun(name: str, machine: Machine, connection: socket.socket) -> None:
    """Wait until the target has answered. If it does not, its connection is ended: while QEMU waits
    for TLS, nothing else cancels a migration."""
    deadline = time.monotonic() + CONNECT_S
    while Migration.read(machine.qmp).state is MigrationState.SETUP:
        if time.monotonic() > deadline:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            raise MoveError(f"{name}: the target does not answer within {CONNECT_S:g} s")
        time.sleep(_BEGINS_S)


def _refuse_standing(name: str, machine: Machine) -> None:
    """Refuse a guest that stands still, if QEMU would not know that after a move that fails: it
    would be in the state ``postmigrate``, as if it had left."""
    if (state := run_state(machine.qmp)) == "running":
        return
    answer = machine.qmp.execute("query-version")
    try:
        major = int(answer["qemu"]["major"])
    except (TypeError, KeyError, ValueError) as error:
        raise QmpProtocolError(f"{machine.qmp.path}: no answer to query-version") from error
    if major < _KEEPS_STATE:
        text = f"{name}: is {state}, and QEMU {major} moves only a guest that runs"
        raise MoveError(text, hint=f"brine instance resume {name}, or move it with --cold")


def _refuse_failed(name: str, device_id: str, job: Job | None) -> None:
    if job is None:
        raise MoveError(f"{name}: {device_id} is not being copied any more")
    if job.state is JobState.CONCLUDED:
        why = job.error or "it was cancelled"
        raise MoveError(f"{name}: the copy of {device_id} has failed: {why}")


def _refuse_mirrors(name: str, machine: Machine) -> None:
    """Refuse to go on with a copy that is not left: the source's image would be locked by it, and
    the last writes be missing."""
    for one in machine.list_of("query-jobs"):
        if one.get("type") == "mirror":
            raise MoveError(f"{name}: {one.get('id')} still copies a disk")


def _sizes(jobs: Mapping[str, Job]) -> list[tuple[int, int]]:
    return [(job.copied, job.size) for job in jobs.values()] or [(0, 0)]


def _execute_by(
    qmp: QmpClient, command: str, arguments: Mapping[str, object], connection: socket.socket
) -> None:
    """Give a command in which QEMU talks over a connection. If that takes too long the connection
    is ended: a target that does not answer would hold QEMU's monitor for ever."""
    number = qmp.begin(command, arguments)
    deadline, is_cut = time.monotonic() + CONNECT_S, False
    while qmp.answer(number, command) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            if is_cut:
                raise MoveError(f"no answer to {command}")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            deadline, is_cut = time.monotonic() + CONNECT_S, True
            continue
        with contextlib.suppress(QmpTimeoutError):
            qmp.next_event(timeout_s=left_s, or_answer=number)
