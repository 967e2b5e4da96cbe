"""A running QEMU: its process, its monitor, and the guest agent.

The guest agent is a program in the guest that answers on a socket of QEMU's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from brine.common.errors import BrineError, printable
from brine.common.process import Process
from brine.common.qmp.wire import (
    QmpClosedError,
    QmpCommandError,
    QmpError,
    QmpProtocolError,
    QmpTimeoutError,
)
from brine.common.unix_socket import is_listening, peer_process
from brine.instance.claims import refuse_elsewhere
from brine.instance.hypervisor import DeafGuestError, Hypervisor, ended_early
from brine.instance.kvm.programs import with_machine_version
from brine.instance.observe import Observed, Oper, oper_of
from brine.instance.store import InstanceError, is_here, load_sound
from brine.instance.unit import Unit
from brine.vm import markers
from brine.vm.files import InstanceFiles
from brine.vm.halt import GOING_STATES, IO_ERROR, PAUSED, SUSPENDED, Halt
from brine.vm.markers import MarkerKind
from brine.vm.peer import StrangerError, refuse_stranger
from brine.vm.run import Run
from brine.vm.runtime_file import Runtime
from brine.vm.spec import Spec
from brine.vm.unit_name import unit_of

if TYPE_CHECKING:
    from brine.common.qmp.client import QmpClient

_ANSWER_S = 2.0
_READY_S = 5.0
_QMP_TIMEOUT_S = 5.0
_AGENT_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _PAUSE_S = 0.002, 0.02
_SETTLED_S = 0.5
"""A disk that is still full stops QEMU again within this time."""
_WAYS_ON = {
    **dict.fromkeys((PAUSED, IO_ERROR, "prelaunch", "watchdog", "guest-panicked", "debug"), "cont"),
    SUSPENDED: "system_wakeup",
}
"""How a guest goes on from a RunState. From others there is no way, or no safe one."""
_DEAF = {
    "internal-error": "its processor can't go on",
    "guest-panicked": "its guest has panicked",
    "postmigrate": "its guest was moved to another QEMU",
    "inmigrate": "it waits for a guest of another node",
}
"""RunStates in which the guest will never shut down, and why."""


class Kvm(Hypervisor):
    """QEMU."""

    def prepared(self, spec: Spec) -> Spec:
        """The spec with the devices that were plugged during the last run, and with the version of
        its machine type."""
        from brine.instance.kvm.runtime_devices import with_last_run  # only a start needs it

        return with_machine_version(with_last_run(spec))

    def exec(self, spec: Spec, awaited: Runtime | None = None) -> NoReturn:
        from brine.instance.kvm.resources import become_qemu  # only a start needs it

        become_qemu(spec, awaited)

    def wait_ready(self, spec: Spec, process: Process | None) -> None:
        """Return when QEMU answers and has the password of VNC, which is closed without it."""
        limit_s = spec.start_limit_s()
        began_s = time.monotonic()
        deadline = began_s + limit_s
        while True:
            if process is None or process.ended():
                raise ended_early(spec.name, "QEMU")
            try:
                with monitor_of(spec.name, of_unit=True, timeout_s=_READY_S) as qmp:
                    if spec.vnc_password_file:
                        from brine.instance.kvm.resources import read_password  # few have one

                        password = {"protocol": "vnc", "password": read_password(spec)}
                        qmp.execute("set_password", password)
                return
            except (QmpClosedError, QmpTimeoutError) as error:
                if time.monotonic() >= deadline:
                    text = f"QEMU does not answer within {limit_s:g} s: {error}"
                    hint = "start_timeout of its spec gives it more time"
                    raise InstanceError(spec.name, text, hint=hint) from error
            # Most answer at once; of those that have much memory to prepare, some take minutes.
            waited_s = time.monotonic() - began_s
            process.ended(min(_FIRST_PAUSE_S + waited_s / 50, _PAUSE_S))

    @contextlib.contextmanager
    def guest(self, name: str, pid: int, *, uuid: str | None = None) -> Iterator[QemuGuest]:
        with Process.of(pid, unit=unit_of(name)) as process:
            yield QemuGuest(name, process)

    def may_run(self, name: str) -> bool:
        """Whether a QEMU listens, or a process is there that is about to become one, or to end."""
        return is_listening(InstanceFiles(name).qmp) or Run.last(name).has_process()

    def is_ending(self, name: str, unit: Unit) -> bool:
        """Whether a QEMU that systemd says is running has begun to end."""
        if oper_of(unit) is Oper.STOPPING:
            return True
        if oper_of(unit) is not Oper.RUNNING or not unit.main_pid:
            return False
        if unit.run.was_shut_down():
            return True
        with self.guest(name, unit.main_pid) as qemu:
            if qemu.ended():
                return True
            try:
                with monitor_of(name, timeout_s=_ANSWER_S, of_unit=True) as qmp:
                    run_state(qmp)
            except QmpClosedError:
                return True
            except QmpError:
                return qemu.ended()  # it is busy, or another program is connected
        return False

    def is_paused(self, seen: Observed) -> bool:
        """Whether its processors stand still. QEMU is asked only if a marker says so."""
        if seen.halted:
            return seen.halted.state == PAUSED
        if not seen.run.is_paused():
            return False
        try:
            with monitor_of(seen.name, timeout_s=_ANSWER_S) as qmp:
                return run_state(qmp) in (PAUSED, "prelaunch")  # a reset while it was paused
        except BrineError:
            return True  # this user may not ask, or another program is connected

    def set_paused(self, seen: Observed, run: str, *, paused: bool) -> bool:
        with monitor_of(seen.name) as qmp:
            state = run_state(qmp)
            if paused:
                return _pause(seen.name, run, qmp, state)
            changed = state != "running"
            if changed:
                refuse_elsewhere(seen.spec)
            if changed and state not in _WAYS_ON:
                text = f"can't be continued: QEMU is in the state {state}"
                hint = f"brine instance reboot --reset {seen.name} begins anew"
                raise InstanceError(seen.name, text, hint=hint)
            if changed and (left := continue_guest(qmp)) == IO_ERROR:
                text = f"QEMU has stopped it again: {left}"
                raise InstanceError(seen.name, text, hint="make room for its disk, and resume it")
        with contextlib.suppress(OSError):  # then lists show what was
            markers.remove_marker(MarkerKind.PAUSED, seen.name)
            markers.remove_marker(MarkerKind.HALTED, seen.name)
        return changed


def _pause(name: str, run: str, qmp: QmpClient, state: str) -> bool:
    if state in (PAUSED, "prelaunch"):
        return False
    if state != "running":
        text = f"can't be paused: it stands still, and QEMU is in the state {state}"
        raise InstanceError(name, text, hint=f"brine instance resume {name}, if it is to go on")
    # The marker comes first, so that brine-kvmd knows whose pause that is. Without it, lists do
    # not show the pause.
    with contextlib.suppress(OSError):
        markers.write_marker(MarkerKind.PAUSED, name, run=run)
    try:
        qmp.execute("stop")
    except QmpCommandError:
        with contextlib.suppress(OSError):
            markers.remove_marker(MarkerKind.PAUSED, name)
        raise
    return True


def continue_guest(qmp: QmpClient) -> str:
    """Have a guest go on, whatever has stopped it; returns QEMU's state afterwards."""
    before = state = run_state(qmp)
    if way := _WAYS_ON.get(state):
        qmp.execute(way)
        state = run_state(qmp)
    if state == SUSPENDED != before:  # it was suspended, and paused then
        qmp.execute(_WAYS_ON[SUSPENDED])
        state = run_state(qmp)
    deadline = time.monotonic() + _SETTLED_S
    while before == IO_ERROR and state == "running" and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        state = run_state(qmp)
    return state


def press_reset(qmp: QmpClient) -> None:
    """Press the reset button, also of a guest that QEMU itself has stopped: it begins anew."""
    is_fault = Halt(state := run_state(qmp)).is_fault and state not in GOING_STATES
    qmp.execute("system_reset")
    if is_fault:
        deadline, name = time.monotonic() + _QMP_TIMEOUT_S, ""
        while name != "RESET":
            event = qmp.next_event(timeout_s=max(deadline - time.monotonic(), 0))
            name = event.name if event else ""
        qmp.execute("cont")


class QemuGuest:
    """The QEMU of an instance.

    :param process: None if it has ended.
    """

    def __init__(self, name: str, process: Process | None) -> None:
        self._name = name
        self._process = process

    def ended(self, timeout_s: float = 0) -> bool:
        return self._process is None or self._process.ended(timeout_s)

    def ask(self, left_s: float, *, is_first: bool, may_use_agent: bool) -> str | None:
        """Ask its guest to shut down; returns None, or why QEMU did not pass that on."""
        # An agent may not be allowed to shut down, and does not report that.
        by_agent = is_first and may_use_agent
        try:
            with monitor_of(self._name, of_unit=True, timeout_s=_QMP_TIMEOUT_S) as qmp:
                if fault := self._wake(qmp):
                    return fault
                if not (by_agent and has_agent(qmp) and self._ask_agent()):
                    qmp.execute("system_powerdown")
        except QmpError as error:
            # Another program may have the monitor; the agent has a socket of its own.
            is_busy = by_agent and isinstance(error, QmpTimeoutError)
            return None if is_busy and self._ask_agent() else str(error)
        except (TypeError, KeyError, AttributeError):
            return f"{InstanceFiles(self._name).qmp}: no answers of QEMU's"
        return None

    def _wake(self, qmp: QmpClient) -> str:
        """Have a guest that stands still go on, or it would hear nothing; returns why it does not,
        if it may later.

        :raises DeafGuestError: if it never will.
        """
        state = run_state(qmp)
        if why := _DEAF.get(state):
            raise DeafGuestError(self._name, f"can't be asked to shut down: {why} ({state})")
        if state == "shutdown":  # the guest has, and -no-shutdown keeps QEMU
            qmp.execute("quit")
        elif state == "prelaunch":
            pass  # started with -S, it has not begun: what asks it to end does not set it going
        elif state in _WAYS_ON and self._is_elsewhere():
            text = "can't be asked to shut down: its guest is of another node, and stands still"
            raise DeafGuestError(self._name, text)
        elif state in _WAYS_ON and continue_guest(qmp) == IO_ERROR:
            return f"QEMU has stopped it: {IO_ERROR}"
        return ""

    def _is_elsewhere(self) -> bool:
        spec = load_sound(self._name)
        return spec is not None and not is_here(spec)

    def _ask_agent(self) -> bool:
        return shut_down_by_agent(self._name, timeout_s=_AGENT_TIMEOUT_S)

    def kill(self) -> str:
        """End it by SIGTERM, or SIGKILL; returns by which."""
        number = self._process.terminate() if self._process else signal.SIGTERM
        if number is None:
            text = "QEMU does not end, not even by SIGKILL: it waits for the kernel"
            raise InstanceError(self._name, text)
        return number.name


# The monitor.


@contextlib.contextmanager
def monitor_of(name: str, *, timeout_s: float = 10, of_unit: bool = False) -> Iterator[QmpClient]:
    """Connect to an instance's QEMU; disconnect when the block ends.

    :param timeout_s: for the greeting, and for each answer.
    :param of_unit: use the socket that only root reaches. A QEMU that an older Brine started lacks
        it; then use the other one.
    :raises QmpError: as :meth:`brine.common.qmp.client.QmpClient.connect` does;
        :class:`StrangerError` if the listener is not of the instance's unit. It was told nothing
        then.
    """
    from brine.common.qmp.client import LIMIT_S, QmpClient  # most starts ask no QEMU

    control = InstanceFiles(name)
    path = control.unit if of_unit and os.path.exists(control.unit) else control.qmp
    with QmpClient.connect(
        path,
        timeout_s=timeout_s,
        limit_s=LIMIT_S,
        check_peer=partial(refuse_stranger, name=name, socket=path),
    ) as qmp:
        yield qmp


def run_state(qmp: QmpClient) -> str:
    """The state of the guest by QEMU, such as ``running`` or ``paused``."""
    answer = qmp.execute("query-status")
    state = answer.get("status") if type(answer) is dict else None
    if type(state) is not str:
        raise QmpProtocolError(f"{qmp.path}: no answer to query-status: {answer!r:.60}")
    return printable(state)


def has_agent(qmp: QmpClient) -> bool:
    """Whether a program in the guest has its end of the agent's channel open."""
    rows = qmp.execute("query-chardev")
    return any(row["label"] == "agent" and row["frontend-open"] is True for row in rows)


# The guest agent. The guest may answer anything, without end, and nothing of it is trusted.

_READ_SIZE = 4096
_MOST_BYTES = 64 * 1024
_MOST_ADDRESSES = 64
_LONGEST_NAME = 32
_MAC = re.compile("[0-9a-f]{2}(:[0-9a-f]{2}){5}")


def shut_down_by_agent(name: str, *, timeout_s: float) -> bool:
    """Ask the agent to shut the guest down; False if none answers."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(OSError, StrangerError), _agent(name, deadline) as connection:
        _say(connection, "guest-shutdown", {"mode": "powerdown"})  # to which it answers nothing
        return True
    return False


def guest_addresses(name: str, *, timeout_s: float) -> list[dict[str, Any]] | None:
    """The addresses of a guest's network interfaces but loopback, as its agent says; None if none
    answers. They are the guest's own words, and prove nothing.

    :returns: of each the ``interface``, its ``mac``, the ``address`` and its ``prefix``.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(OSError, StrangerError), _agent(name, deadline) as connection:
        _say(connection, "guest-network-get-interfaces", {})
        for line in _lines(connection, deadline):
            if isinstance(rows := _returned(line), list):
                return list(islice(_addresses(rows), _MOST_ADDRESSES))
    return None


def freeze_by_agent(name: str, *, timeout_s: float) -> bool:
    """Have the agent write out the guest's file systems, and hold all further writes to them; False
    if it did not. :func:`thaw_by_agent` has to follow in each case."""
    return _counted(name, "guest-fsfreeze-freeze", timeout_s)


def thaw_by_agent(name: str, *, timeout_s: float) -> bool:
    """Have the guest write to its file systems again; False if the agent did not say so."""
    return _counted(name, "guest-fsfreeze-thaw", timeout_s)


def _counted(name: str, command: str, timeout_s: float) -> bool:
    """Give the agent a command that returns how many file systems it was done to."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(OSError, StrangerError), _agent(name, deadline) as connection:
        _say(connection, command, {})
        for line in _lines(connection, deadline):
            if b"error" in line:
                return False
            if isinstance(_returned(line), int):
                return True
    return False


def _addresses(interfaces: list[Any]) -> Iterator[dict[str, Any]]:
    from ipaddress import ip_interface  # a start needs no addresses

    for one in interfaces:
        rows = one.get("ip-addresses") if isinstance(one, dict) else None
        for row in rows if isinstance(rows, list) else ():
            try:
                bare = row["ip-address"].partition("%")[0]  # without its zone
                found = ip_interface(f"{bare}/{int(row['prefix'])}")
            except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
                continue
            if found.ip.is_loopback:
                continue
            mac = str(one.get("hardware-address")).lower()
            yield {
                "interface": printable(str(one.get("name"))[:_LONGEST_NAME]),
                "mac": mac if _MAC.fullmatch(mac) else None,
                "address": str(found.ip),
                "prefix": found.network.prefixlen,
            }


@contextlib.contextmanager
def _agent(name: str, deadline: float) -> Iterator[socket.socket]:
    """Connect to the agent of a guest; an OSError or a StrangerError without a sign of life."""
    path = InstanceFiles(name).agent
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(max(deadline - time.monotonic(), _PAUSE_S))
        connection.connect(str(path))
        refuse_stranger(peer_process(connection), name=name, socket=path)
        mark = int.from_bytes(os.urandom(4), "big") >> 1
        _say(connection, "guest-sync", {"id": mark})
        # Answers to earlier questions may come before.
        if not any(_returned(line) == mark for line in _lines(connection, deadline)):
            raise TimeoutError
        yield connection


def _lines(connection: socket.socket, deadline: float) -> Iterator[bytes]:
    """The agent's output in lines, until the deadline or the largest size."""
    size, pending = 0, b""
    while size < _MOST_BYTES and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(_READ_SIZE)
        if not data:
            return
        size += len(data)
        *lines, pending = (pending + data).split(b"\n")
        yield from lines


def _returned(line: bytes) -> Any:
    try:
        message = json.loads(line.replace(b"\xff", b""))
    except (ValueError, RecursionError):
        return None
    return message.get("return") if isinstance(message, dict) else None


def _say(connection: socket.socket, command: str, arguments: dict[str, Any]) -> None:
    connection.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
