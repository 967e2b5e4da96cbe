"""Locking a VM, connecting to its QMP socket, and completing interrupted work."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn, Self

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.locks import LockedError, locked
from brine.common.peer import stranger_check
from brine.common.privileges import Capability, may
from brine.common.qmp import wire
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import LINE_LIMIT, READ_SIZE, QmpClosedError, QmpTimeoutError
from brine.hotplug import messages
from brine.hotplug.address import DeviceKind, Slot
from brine.hotplug.errors import HotplugError
from brine.hotplug.net.wiring import unwire
from brine.hotplug.nic import Nic
from brine.hotplug.plug_disk import remove_disk_back_end
from brine.hotplug.plug_nic import close_unused, put_back, remove_nic_back_end
from brine.hotplug.qemu import Machine
from brine.hotplug.runtime_file import RuntimeFileError, lock_of, record
from brine.hotplug.target import silence_of
from brine.hotplug.transaction import (
    LOCK_PREFIX,
    Pending,
    PendingAction,
    PendingFile,
    begun,
    forget_ended,
    identity_of,
)
from brine.hotplug.vm import Vm

# Completing or undoing the work of commands that were killed.

log = logging.getLogger(__name__)

_GUEST_TAKES_S = 5.0
_LOOK_S = 0.05


def recover(vm: Vm, all_of_them: Iterable[Pending]) -> None:
    """Complete or undo interrupted work, as far as possible; ``vm.finished`` gets what is complete.

    :raises brine.common.qmp.client.QmpError: if QEMU does not answer.
    """
    for pending in all_of_them:
        if pending.kind is DeviceKind.NIC and not may(Capability.NET_ADMIN):
            continue  # it is for whoever works on NICs
        try:
            _recover(vm, pending)
        except (QmpTimeoutError, QmpClosedError):
            raise
        except BrineError as error:
            # This error must not block all further work on the VM.
            what = f"{pending.action} of {pending.device_id}"
            log.error("%s: %s was interrupted, and is half-done: %s", vm.name, what, error)
            if not isinstance(error, LockedError):
                vm.pending.end(pending.device_id)


def _recover(vm: Vm, pending: Pending) -> None:
    is_there = vm.machine.has_device(pending.device_id)
    is_old = pending.action is PendingAction.REMOVE or (
        pending.action is PendingAction.MODIFY and not pending.is_out
    )
    if is_there and is_old:
        is_there = _is_kept(vm, pending)
    if is_there and is_old:
        return  # the guest was asked for it, and may still give it up
    if is_there:
        _record(pending, plugged=True)
        is_done = True
    else:
        _remove_rest(vm, pending)
        if pending.action is PendingAction.MODIFY:
            _go_back(vm, pending)
        else:
            _record(pending, plugged=False)
        is_done = pending.action is PendingAction.REMOVE
    vm.pending.end(pending.device_id)
    if is_done:
        vm.finished.append(pending)
    tell = messages.tell_finished if is_done else messages.tell_undone
    tell(vm.name, pending.kind, pending.device_id, pending.action)


def _is_kept(vm: Vm, pending: Pending) -> bool:
    """Whether the guest still has a device after a moment.

    The guest was asked to release it just now, and should not do so in the middle of the next work.
    """
    deadline = time.monotonic() + _GUEST_TAKES_S
    while 0 <= time.time() - pending.since < _GUEST_TAKES_S and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if not vm.machine.has_device(pending.device_id):
            return False
    return True


def _remove_rest(vm: Vm, pending: Pending) -> None:
    if pending.kind is DeviceKind.DISK:
        remove_disk_back_end(vm.machine, pending.device_id)
        return
    remove_nic_back_end(vm.machine, pending.device_id)
    if wanted := pending.device:
        queues, vhost = wanted["queues"], wanted["vhost"]
        close_unused(vm.machine, pending.device_id, queues=queues, vhost=vhost)
    if pending.tap:
        unwire(pending.tap)


def _go_back(vm: Vm, pending: Pending) -> None:
    try:
        put_back(vm, Nic.from_json(pending.before), Slot(**pending.slot))
    except BrineError:
        _record(pending, plugged=False)
        raise


def _record(pending: Pending, *, plugged: bool) -> None:
    try:
        record(pending, plugged=plugged)
    except RuntimeFileError as error:
        log.warning("%s", error)


# A process without privileges between a tool of root's that runs unattended and a QEMU. It alone
# reads what QEMU sends.

NOBODY = 65534
"""The user and the group of the process: Linux's own, without any rights."""

_MEMORY = 256 << 20
_MOST_DESCRIPTORS = 16
_MOST_OPEN = 65536


class Relay:
    """At most one such process, which ends with the block.

    Called with a connection to QEMU, it returns the connection to use instead.
    """

    def __init__(self) -> None:
        self._child = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def __call__(self, qemu: socket.socket) -> socket.socket:
        """Start the process, and hand it QEMU's connection.

        :raises BrineError: if it can't be started.
        """
        ours, its = socket.socketpair()
        with its, qemu:
            try:
                self._child = os.fork()
            except OSError as error:
                ours.close()
                raise BrineError(f"no process to talk to QEMU: {error.strerror}") from error
            if self._child == 0:
                ours.close()
                _run(qemu, its)
        return ours


def _run(qemu: socket.socket, client: socket.socket) -> NoReturn:
    status = 1
    try:
        # Above all locks, which this process must not hold.
        low, high = sorted((qemu.fileno(), client.fileno()))
        for first, last in ((0, low), (low + 1, high), (high + 1, _MOST_OPEN)):
            os.closerange(first, last)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)  # which gives up all capabilities, too
        qemu.setblocking(True)
        relay(qemu, client)
        status = 0
    finally:
        os._exit(status)


def relay(qemu: socket.socket, client: socket.socket) -> None:
    """Relay the client's bytes and descriptors unchanged, and QEMU's answers as whole messages.

    This returns when either end closes.

    :raises OSError: or QmpError, if QEMU sends something else.
    """
    heard = bytearray()
    poll = select.poll()
    for one in (qemu, client):
        poll.register(one, select.POLLIN)
    while ready := {number for number, _ in poll.poll()}:
        if client.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(client, READ_SIZE, _MOST_DESCRIPTORS)
            if not data:
                return
            sent = socket.send_fds(qemu, [data], descriptors) if descriptors else 0
            qemu.sendall(data[sent:])
            for descriptor in descriptors:
                os.close(descriptor)
        if qemu.fileno() in ready:
            data = qemu.recv(READ_SIZE)
            if not data:
                return
            heard += data
            *lines, rest = heard.split(b"\n")
            heard = bytearray(rest)
            for line in lines:
                if wire.parse(bytes(line)) is not None:
                    client.sendall(json.dumps(json.loads(line)).encode() + b"\n")
            if len(heard) > LINE_LIMIT:
                return


LOCK_TIMEOUT_S = 60.0
QMP_TIMEOUT_S = 15.0

LIMIT_S = 1800.0
"""How long work on a VM may take at most, whatever QEMU and its guest do."""

_SETTLE_LIMIT_S = 60.0
_SETTLE_TIMEOUT_S = 5.0


@contextlib.contextmanager
def working_on(
    qmp_path: Path,
    *,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    qmp_timeout_s: float = QMP_TIMEOUT_S,
    only_look: bool = False,
    limit_s: float = LIMIT_S,
    through: Relay | None = None,
) -> Iterator[Vm]:
    """Lock a VM, and connect to its monitor, for the time of the block.

    :param lock_timeout_s: how long to wait for another command of Brine's.
    :param qmp_timeout_s: how long to wait for another client of its monitor, and then for QEMU's
        answer to each command.
    :param only_look: do not lock, and leave interrupted work alone.
    :param limit_s: how long the connection may last.
    :param through: reads QEMU's answers; None is this process itself.
    :raises brine.common.locks.LockedError: if another command of Brine's holds the VM.
    :raises brine.common.qmp.client.QmpError: if there is no monitor, or it does not answer.
    :raises brine.common.peer.StrangerError: if the socket is not that of the instance's QEMU.
    :raises HotplugError: if another client holds the monitor.
    """
    with contextlib.ExitStack() as stack:

        def alone(lock: Path) -> None:
            if only_look:
                return
            try:
                lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                stack.enter_context(locked(lock, timeout_s=lock_timeout_s))
            except OSError as error:
                hint = "be root" if isinstance(error, PermissionError) else None
                raise HotplugError(f"{lock}: {error.strerror}", hint=hint) from error

        alone(lock_of("hotplug", qmp_path))
        qmp = stack.enter_context(_connected(qmp_path, qmp_timeout_s, limit_s, through))
        # A VM may have several monitors.
        identity = identity_of(qmp)
        alone(paths.LOCK_DIR / f"{LOCK_PREFIX}{identity}.lock")
        machine = Machine(qmp)
        vm = Vm(qmp_path, machine, machine.vm_name(), PendingFile(identity))
        if not only_look:
            _settle(vm)
        yield vm
        if not only_look:
            # The guest may have released a device after the block had stopped waiting.
            _settle(vm)


def settle_all() -> None:
    """Complete or undo interrupted work on all VMs of this node, as far as possible.

    A guest may have released a device long after it was asked.
    """
    forget_ended()
    for qmp_path in list(begun()):
        try:
            _settle_one(qmp_path)
        except (BrineError, OSError) as error:
            log.info("%s: not looked at: %s", qmp_path, error)


def _settle_one(qmp_path: Path) -> None:
    with Relay() as through:
        with working_on(
            qmp_path,
            lock_timeout_s=0,
            qmp_timeout_s=_SETTLE_TIMEOUT_S,
            limit_s=_SETTLE_LIMIT_S,
            through=through,
        ):
            pass  # that is all


def _settle(vm: Vm) -> None:
    forget_ended()
    if pending := vm.pending.read():
        recover(vm, pending)


@contextlib.contextmanager
def _connected(
    qmp_path: Path, timeout_s: float, limit_s: float, through: Relay | None
) -> Iterator[QmpClient]:
    with contextlib.ExitStack() as stack:
        try:
            client = QmpClient.connect(
                qmp_path,
                timeout_s=timeout_s,
                answer_timeout_s=timeout_s,
                limit_s=limit_s,
                check_peer=stranger_check(qmp_path),
                through=through,
            )
            qmp = stack.enter_context(client)
        except QmpTimeoutError as error:
            raise silence_of(qmp_path, timeout_s) from error
        yield qmp
