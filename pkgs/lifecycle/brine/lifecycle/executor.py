"""``brine-lifecycle-executor.service``: does for the handler what needs root.

It checks by itself that the instance has an owner. It starts with the first request, and ends when
there has been none for a while.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading

from brine.common.errors import BrineError, printable
from brine.instance import messages, store, unit
from brine.instance.observe import GOING, Oper, look, oper_of
from brine.instance.owner import folder_of, remove_folder, why_owner_absent
from brine.instance.start import start_instance
from brine.instance.stop import Stopped, stop_instance
from brine.lifecycle.executor_client import LONGEST_PACKET, Outcome, Verb
from brine.lifecycle.owner_watch import EndReason
from brine.vm.spec import AdminState, Source
from brine.vm.values import vm_name_fault

_PROGRAM = "brine-lifecycle-executor"
_LISTENER = 3  # the first descriptor that systemd passes (sd_listen_fds(3))
_IDLE_S = 30.0
_STACK_BYTES = 512 * 1024
_STAYS = (Oper.RUNNING, Oper.STARTING, Oper.USER_SHUTDOWN)  # as it is, when an owner is back


def main() -> None:
    """Serve the handler until there has been nothing to do for half a minute."""
    messages.log_to_journal(_PROGRAM)
    threading.stack_size(_STACK_BYTES)
    with socket.socket(fileno=_LISTENER) as listener:
        serve(listener, idle_s=_IDLE_S)


def serve(listener: socket.socket, *, idle_s: float) -> None:
    """Do what each connection's packets say, all at once.

    :param listener: a listening socket of sequential packets.
    :param idle_s: return when nothing has been to do for so many seconds.
    """
    connections: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while (ready := poll.poll(idle_s * 1000)) or threading.active_count() > 1:
        for descriptor, _ in ready:
            connection = connections.get(descriptor)
            if connection is None:
                connection, _ = listener.accept()
                connections[connection.fileno()] = connection
                poll.register(connection, select.POLLIN)
            elif packet := _received(connection):
                arguments = (packet, connection)
                try:
                    threading.Thread(target=_work, args=arguments, daemon=True).start()
                except RuntimeError:  # no room for more: the handler asks again
                    _answer(connection, packet.decode(errors="replace"), "too many at once")
            else:
                poll.unregister(descriptor)
                del connections[descriptor]  # a thread that answers still has it
    for connection in connections.values():
        connection.close()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(LONGEST_PACKET)
    except OSError:
        return b""


def _work(packet: bytes, connection: socket.socket) -> None:
    name, verb, cause, *_ = (*packet.decode(errors="replace").split(" "), "", "", "")
    try:
        result, text = _done(name, verb, cause), ""
    except Exception as error:  # the handler must have an answer, whatever went wrong
        result, text = Outcome.FAILED, str(error) or repr(error)
        print(f"{_PROGRAM}: error: {text}", file=sys.stderr)
    _answer(connection, f"{name} {verb}", text, result)


def _answer(
    connection: socket.socket, request: str, text: str, result: Outcome = Outcome.FAILED
) -> None:
    name, verb, *_ = (*request.split(" "), "", "")
    answer = f"{name} {verb} {result} {printable(text)}".encode(errors="replace")
    with contextlib.suppress(OSError):  # the handler is gone; the next one asks again
        connection.send(answer[:LONGEST_PACKET])


def _done(name: str, verb: str, cause: str) -> Outcome:
    if fault := vm_name_fault(name):
        raise BrineError(f"{name!r}: {fault}")
    if verb == Verb.END:
        done = _end(name, EndReason(cause))
        if cause != EndReason.REQUEST:
            _remove_folder(name)
        return done
    _refuse_unowned(name)
    if verb == Verb.START:
        return _start(name)
    raise BrineError(f"no such request: {verb!r}")


def _refuse_unowned(name: str) -> None:
    """Leave alone an instance that has no owner: the handler is not to be trusted with it."""
    try:
        has_owner = store.load(name).owner is not None
    except BrineError:
        has_owner = folder_of(name).is_dir()
    if not has_owner:
        raise BrineError(f"{name}: has no owner")


def _end(name: str, cause: EndReason) -> Outcome:
    has_spec = store.spec_file_of(name).exists()
    if (cause is EndReason.SPEC_GONE and has_spec) or not _is_to_end(name, cause, has_spec):
        return Outcome.IDLE
    _refuse_unowned(name)
    done = stop_instance(name, force=True, by=Source.OWNER, cause=cause)
    return Outcome.DONE if done is Stopped.STOPPED else Outcome.IDLE


def _is_to_end(name: str, cause: EndReason, has_spec: bool) -> bool:
    """Whether an instance has a QEMU or a domain, or a start of it has begun or is to be called off
    by a request. Its user's will that it is down stays."""
    is_start_called_off = cause is EndReason.REQUEST and has_spec
    try:
        seen = look(name)
    except BrineError:
        if oper_of(unit.units([name]).get(name)) in GOING:
            return True
        if is_start_called_off:
            raise
        return False
    if seen.is_going or (seen.domain is not None and seen.domain.lives()):
        return True
    is_users_will = seen.state.oper is Oper.USER_SHUTDOWN
    return is_start_called_off and seen.spec.admin_state == AdminState.UP and not is_users_will


def _remove_folder(name: str) -> None:
    """Remove the folder of an instance if it has no spec."""
    if store.spec_file_of(name).exists():
        return
    with store.alone(name):
        if not store.spec_file_of(name).exists():  # it may have been defined meanwhile
            remove_folder(name)


def _start(name: str) -> Outcome:
    """Start an instance that ended with its owner, or with the node, and whose owner is back."""
    seen = look(name)
    spec = seen.spec
    if spec.admin_state != AdminState.UP and spec.admin_state_source != Source.OWNER:
        return Outcome.IDLE
    if seen.state.oper in _STAYS or not spec.owner:
        return Outcome.IDLE
    if not spec.owner.restart_with_owner or why_owner_absent(spec):
        return Outcome.IDLE
    start_instance(name)
    return Outcome.DONE


if __name__ == "__main__":
    main()
