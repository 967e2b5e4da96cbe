"""The target's side of a live move: a QEMU that was started with ``-incoming defer -S``, and takes
disks and memory of the one that has the guest.

Nothing here lets the guest run but :meth:`Incoming.go`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence

from brine.common.qmp.wire import QmpClosedError, QmpCommandError
from brine.hotplug.block_graph import top_node
from brine.hotplug.qemu import Machine
from brine.instance import store
from brine.instance.kvm.guest import monitor_of, run_state
from brine.instance.observe import look
from brine.moves.migration import (
    CAPABILITIES,
    IDLE,
    Migration,
    MigrationState,
    MoveError,
    MoveSide,
    given_memory_socket,
    hand_over_socket,
    take_back_socket,
)
from brine.moves.target import TargetGuest, target_guest

_SERVER_FD = "move-disks"
_EXPORT = "move-"
_CONT_S = 30.0


def guest_here(name: str) -> TargetGuest:
    """The guest of an instance that moves to this node, as its QEMU tells, or Xen.

    :raises BrineError: if that does not answer.
    """
    spec = store.load_sound(name)
    if spec and spec.is_xen():
        return TargetGuest.RUNS if look(name).is_going else TargetGuest.NONE
    try:
        with monitor_of(name, of_unit=True) as qmp:
            return target_guest(run_state(qmp))
    except QmpClosedError:
        return TargetGuest.NONE


class Incoming(MoveSide):
    """A QEMU that takes a guest.

    Its steps, in order; each may be done twice, and returns whether there was something to do::

        prepare          capabilities, the key, names of bitmaps
        serve_disks      the source's mirrors may connect, once told which port that is
        receive          one connection, which has proved that it has the key, becomes the guest
        await_received   all is here, and the guest stands still
        go               it runs: only when the claim is this node's
        quit             if the move is given up: before the source goes on

    QEMU ends by itself, with status 1, if the connection breaks before all is here. So
    :class:`QemuGoneError` of any step before *go* means that the source has the guest.
    """

    def prepare(self, bitmaps: Mapping[str, Sequence[str]]) -> bool:
        """Set QEMU up.

        :param bitmaps: what :meth:`brine.moves.outgoing.Outgoing.prepare` has returned.
        """
        with self._machine() as machine:
            state = Migration.read(machine.qmp).state
            if state is not MigrationState.NONE:
                return False
            if (found := run_state(machine.qmp)) != "inmigrate":
                raise MoveError(f"{self.name}: this QEMU awaits no guest: it is {found}")
            # Images are not taken into use, and not locked, before the guest goes on.
            capabilities = CAPABILITIES | {"late-block-activate"}
            self._set_up(machine, capabilities, "server", bitmaps)
        return True

    def serve_disks(self, listener: socket.socket, device_ids: Sequence[str]) -> bool:
        """Have QEMU accept connections that write disks, until :meth:`go` or :meth:`quit`.

        :param listener: of :func:`brine.moves.channel.listen`, with the source's callers alone.
        :param device_ids: of the disks; they are also their exports' names.
        """
        with self._machine() as machine:
            exported = {str(one.get("id")) for one in machine.list_of("query-block-exports")}
            missing = [one for one in device_ids if _EXPORT + one not in exported]
            if not missing:
                return False
            if not exported:
                self._listen(machine, listener)
            for device_id in missing:
                arguments = {"type": "nbd", "id": _EXPORT + device_id, "name": device_id}
                node = top_node(machine, device_id)
                machine.qmp.execute(
                    "block-export-add", {**arguments, "node-name": node, "writable": True}
                )
        return True

    def _listen(self, machine: Machine, listener: socket.socket) -> None:
        hand_over_socket(machine, _SERVER_FD, listener)
        address = {"type": "fd", "data": {"str": _SERVER_FD}}
        try:
            machine.qmp.execute(
                "nbd-server-start", {"addr": address, **self._tls(), "max-connections": 0}
            )
        except QmpCommandError as error:
            take_back_socket(machine, _SERVER_FD)
            if "already running" not in error.description:
                raise

    def receive(self, connection: socket.socket) -> bool:
        """Have QEMU take the guest from a connection.

        :param connection: of :func:`brine.moves.channel.accept_call`; it is closed here.
        """
        with self._machine() as machine:
            if Migration.read(machine.qmp).state is not MigrationState.NONE:
                return False
            try:
                with given_memory_socket(machine, connection) as uri:
                    machine.qmp.execute("migrate-incoming", {"uri": uri})
            except QmpCommandError as error:
                if "already been started" in error.description:
                    return False  # and nothing has come yet
                raise
        return True

    def await_received(self, *, timeout_s: float) -> str:
        """Wait until all of the guest is here.

        :returns: QEMU's state of the guest: ``paused``, if it ran on the source or was paused
            there; otherwise the fault that had stopped it there.
        :raises QemuGoneError: if it never will be: the source has the guest.
        """
        found = self._await(_has_ended, timeout_s, "has not come whole")
        if found.state is not MigrationState.COMPLETED:
            raise MoveError(f"{self.name}: was not taken whole: {found.error or found.state}")
        with self._machine() as machine:
            return _settled(self.name, machine)

    def go(self) -> bool:
        """Have the guest run here. The claim must be this node's before: the source's QEMU would
        run it, too, if it was told to.

        :returns: False if it runs already.
        :raises MoveError: if it is not whole, or QEMU can't run it: it stands still then.
        """
        with self._machine() as machine:
            qmp = machine.qmp
            state = run_state(qmp)
            if state == "running":
                return False
            received = Migration.read(qmp).state
            # Of a guest that is still coming, QEMU would remember to run it as soon as it can.
            if received is not MigrationState.COMPLETED or state == "inmigrate":
                raise MoveError(f"{self.name}: is not here: QEMU is {state}, and {received}")
            self._stop_serving(machine)
            try:
                qmp.execute("cont")
            except QmpCommandError as error:
                text = f"{self.name}: can't go on here: {error.description}"
                raise MoveError(text) from error
            _await_state(self.name, machine, "running")
            with contextlib.suppress(QmpCommandError):
                self._clear_key(machine)
        return True

    def stop_serving(self) -> None:
        """Have QEMU take no writes of disks any more: for a guest that stays paused."""
        with self._machine() as machine:
            self._stop_serving(machine)

    def flush(self) -> None:
        """Have QEMU write out all that it has taken for disks. A source's guest has been told that
        it is on the disk, and QEMU may still have a part of it."""
        with self._machine() as machine:
            machine.qmp.execute("stop")  # of a guest that stands still, this is all that it does

    def serves(self) -> bool:
        """Whether a source may write disks."""
        with self._machine() as machine:
            return bool(machine.list_of("query-block-exports"))

    def _stop_serving(self, machine: Machine) -> None:
        try:
            machine.qmp.execute("nbd-server-stop")
        except QmpCommandError as error:
            if "not running" not in error.description:
                raise


def _has_ended(_machine: Machine, found: Migration) -> bool:
    return found.state is MigrationState.COMPLETED or found.state in IDLE - {MigrationState.NONE}


def _settled(name: str, machine: Machine) -> str:
    """The state of a guest that is here: QEMU says so a moment before it is."""
    deadline = time.monotonic() + _CONT_S
    while (state := run_state(machine.qmp)) == "inmigrate":
        if time.monotonic() > deadline:
            raise MoveError(f"{name}: QEMU has all of it, and does not take it")
        time.sleep(0.002)
    return state


def _await_state(name: str, machine: Machine, wanted: str) -> None:
    deadline = time.monotonic() + _CONT_S
    while (state := run_state(machine.qmp)) != wanted:
        if time.monotonic() > deadline:
            raise MoveError(f"{name}: was told to go on, and is {state}")
        time.sleep(0.002)
