"""A running QEMU: its monitor, and its guest, which shuts down by its agent or the power button.

The guest agent is a program in the guest that does what it is told over a socket of QEMU's.
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
from ipaddress import ip_interface
from itertools import islice
from pathlib import Path
from typing import Any

from brine.common import markers
from brine.common.errors import BrineError, printable
from brine.common.markers import MarkerKind
from brine.common.paths import InstanceFiles
from brine.common.peer import StrangerError, peer_process, refuse_stranger, unit_of
from brine.common.process import Process
from brine.common.qmp.client import LIMIT_S, QmpClient
from brine.common.qmp.wire import (
    QmpClosedError,
    QmpError,
    QmpProtocolError,
    QmpTimeoutError,
)
from brine.instance.observe import Observed, Oper, oper_of
from brine.instance.spec import Spec
from brine.instance.store import InstanceError
from brine.instance.unit import Unit

_READ_SIZE = 4096
_LONGEST = 64 * 1024
_MOST_ADDRESSES = 64
_LONGEST_NAME = 32
_MAC = re.compile("[0-9a-f]{2}(:[0-9a-f]{2}){5}")


# The monitor.


@contextlib.contextmanager
def monitor_of(
    name: str, *, timeout_s: float = 10, answer_timeout_s: float = 10, of_unit: bool = False
) -> Iterator[QmpClient]:
    """Connect to an instance's QEMU; disconnect when the block ends.

    :param of_unit: at the socket for what the unit runs, which only root reaches. A QEMU that an
        older version of Brine has started has none; then it is the one for everybody.

    Other parameters, and errors, are those of :meth:`brine.common.qmp.client.QmpClient.connect`.

    :raises brine.common.peer.StrangerError: if who listens is not of the instance's
        unit. It was told nothing then.
    """
    control = InstanceFiles(name)
    path = control.unit if of_unit and os.path.exists(control.unit) else control.qmp
    check = partial(refuse_stranger, name=name, socket=path)
    with QmpClient.connect(
        path,
        timeout_s=timeout_s,
        answer_timeout_s=answer_timeout_s,
        limit_s=LIMIT_S,
        check_peer=check,
    ) as qmp:
        yield qmp


def run_state(qmp: QmpClient) -> str:
    """The state of the guest by QEMU, such as ``running`` or ``paused``.

    :raises QmpError: if it does not say so.
    """
    answer = qmp.execute("query-status")
    state = answer.get("status") if type(answer) is dict else None
    if type(state) is not str:
        raise QmpProtocolError(f"{qmp.path}: no answer to query-status: {answer!r:.60}")
    return printable(state)


# A QEMU's state.

_ANSWER_S = 2.0
_READY_S = 5.0
_PAUSE_S = 0.02


def wait_ready(spec: Spec, process: Process | None) -> None:
    """Return when QEMU answers, and has what it is told after its start."""
    deadline = time.monotonic() + spec.start_limit_s()
    while True:
        if process is None or process.ended():
            raise InstanceError(spec.name, "QEMU has ended; see what it said above")
        try:
            with monitor_of(spec.name, of_unit=True, timeout_s=_READY_S) as qmp:
                set_password(qmp, spec)
            return
        except (QmpClosedError, QmpTimeoutError) as error:
            if time.monotonic() >= deadline:
                limit_s = spec.start_limit_s()
                text = f"QEMU does not answer within {limit_s:g} s: {error}"
                hint = "start_timeout of its spec gives it more time"
                raise InstanceError(spec.name, text, hint=hint) from error
        process.ended(_PAUSE_S)


def set_password(qmp: QmpClient, spec: Spec) -> None:
    """Give QEMU the password of VNC, without which nobody gets in."""
    if spec.vnc_password_file:
        from brine.instance.kvm.resources import read_password  # few have one

        qmp.execute("set_password", {"protocol": "vnc", "password": read_password(spec)})


def is_ending(name: str, unit: Unit) -> bool:
    """Whether a QEMU that systemd says is running has begun to end."""
    if oper_of(unit) is Oper.STOPPING:
        return True
    if oper_of(unit) is not Oper.RUNNING or not unit.main_pid:
        return False
    if markers.read_marker(MarkerKind.SHUTDOWN, name, run=unit.invocation):
        return True
    with Process.of(unit.main_pid, unit=unit_of(name)) as qemu:
        if qemu is None:
            return True
        try:
            with monitor_of(
                name, timeout_s=_ANSWER_S, answer_timeout_s=_ANSWER_S, of_unit=True
            ) as qmp:
                run_state(qmp)
        except QmpClosedError:
            return True
        except QmpError:
            return qemu.ended()  # it is busy, or another program is connected
    return False


def is_paused(name: str) -> bool:
    """Whether a QEMU that was paused still is."""
    try:
        with monitor_of(name, timeout_s=_ANSWER_S, answer_timeout_s=_ANSWER_S) as qmp:
            return run_state(qmp) == "paused"
    except BrineError:
        return True  # this user may not ask, or somebody else does


def set_paused(seen: Observed, run: str, *, paused: bool) -> bool:
    """Stop or resume its processors; False if it is so already."""
    with monitor_of(seen.name) as qmp:
        if run_state(qmp) not in (("running",) if paused else ("paused", "prelaunch")):
            return False
        qmp.execute("stop" if paused else "cont")
    with contextlib.suppress(OSError):  # then lists do not show it
        if paused:
            markers.write_marker(MarkerKind.PAUSED, seen.name, run=run)
        else:
            markers.remove_marker(MarkerKind.PAUSED, seen.name)
    return True


# The guest agent.


def shut_down_by_agent(name: str, path: Path, *, timeout_s: float) -> bool:
    """Ask the agent to shut the guest down; False if none answers.

    :param path: of the agent's socket of the instance *name*.

    It answers nothing to that itself, so it is first asked for a sign of life.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            refuse_stranger(peer_process(connection), name=name, socket=path)
            if not _answers(connection, timeout_s):
                return False
            _say(connection, "guest-shutdown", {"mode": "powerdown"})
        except (OSError, StrangerError):
            return False
    return True


def guest_addresses(name: str, path: Path, *, timeout_s: float) -> list[dict[str, Any]] | None:
    """The addresses of a guest's network interfaces, but those of its loopback, as its agent says;
    None if none answers. They are the guest's own words, and prove nothing.

    :param path: of the agent's socket of the instance *name*.
    :returns: of each the ``interface``, its ``mac``, the ``address`` and its ``prefix``.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            refuse_stranger(peer_process(connection), name=name, socket=path)
            if not _answers(connection, timeout_s):
                return None
            _say(connection, "guest-network-get-interfaces", {})
            for line in _lines(connection, deadline):
                if isinstance(rows := _returned(line), list):
                    return list(islice(_addresses(rows), _MOST_ADDRESSES))
        except (OSError, StrangerError):
            pass
    return None


def _addresses(interfaces: list[Any]) -> Iterator[dict[str, Any]]:
    """The addresses in an answer."""
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


def _lines(connection: socket.socket, deadline: float) -> Iterator[bytes]:
    """What the agent says, in lines, until *deadline*, and not more than it may say."""
    size, pending = 0, b""
    # It is the guest's, which may say anything, and for ever.
    while size < _LONGEST and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(_READ_SIZE)
        if not data:
            return
        size += len(data)
        *lines, pending = (pending + data).split(b"\n")
        yield from lines


def _answers(connection: socket.socket, timeout_s: float) -> bool:
    """Whether there is an agent at the other end, which is one only if a guest runs it."""
    deadline = time.monotonic() + timeout_s
    mark = int.from_bytes(os.urandom(4), "big") >> 1
    _say(connection, "guest-sync", {"id": mark})
    # What is still on the way from earlier questions comes before.
    return any(_returned(line) == mark for line in _lines(connection, deadline))


def _returned(line: bytes) -> Any:
    try:
        message = json.loads(line.replace(b"\xff", b""))
    except (ValueError, RecursionError):
        return None
    return message.get("return") if isinstance(message, dict) else None


def _say(connection: socket.socket, command: str, arguments: dict[str, Any]) -> None:
    connection.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")


# The process.

_WAKENINGS = {"paused": "cont", "suspended": "system_wakeup"}  # or it would hear nothing
_AGENT_TIMEOUT_S = 2.0
_QMP_TIMEOUT_S = 5.0


class QemuGuest:
    """The QEMU of an instance.

    :param process: None if it has ended.
    """

    def __init__(self, name: str, process: Process | None) -> None:
        self._name = name
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def of(cls, name: str, pid: int) -> Iterator[QemuGuest]:
        """The QEMU of an instance.

        :param pid: of the main process of its unit; 0 if there is none.
        """
        with Process.of(pid, unit=unit_of(name)) as process:
            yield cls(name, process)

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        return self._process is None or self._process.ended(timeout_s)

    def ask(self, left_s: float, *, is_first: bool, may_use_agent: bool) -> str | None:
        """Ask its guest to shut down; returns why QEMU did not pass that on, or None if it did."""
        # An agent may not be allowed to do what it is told, and nobody hears of that.
        by_agent = is_first and may_use_agent
        control = InstanceFiles(self._name)
        try:
            limits = {"timeout_s": _QMP_TIMEOUT_S, "answer_timeout_s": _QMP_TIMEOUT_S}
            with monitor_of(self._name, of_unit=True, **limits) as qmp:
                if wakening := _WAKENINGS.get(run_state(qmp)):
                    qmp.execute(wakening)
                if by_agent and has_agent(qmp) and self._ask_agent():
                    return None
                qmp.execute("system_powerdown")
        except QmpError as error:
            # Somebody else may have the monitor; the agent has a socket of its own.
            if by_agent and isinstance(error, QmpTimeoutError) and self._ask_agent():
                return None
            return str(error)
        except (TypeError, KeyError, AttributeError):
            return f"{control.qmp}: no answers of QEMU's"
        return None

    def _ask_agent(self) -> bool:
        agent = InstanceFiles(self._name).agent
        return shut_down_by_agent(self._name, agent, timeout_s=_AGENT_TIMEOUT_S)

    def kill(self) -> str:
        """End it by SIGTERM, or SIGKILL; returns by which."""
        number = self._process.terminate() if self._process else signal.SIGTERM
        if number is None:
            text = "QEMU does not end, not even by SIGKILL: it waits for the kernel"
            raise InstanceError(self._name, text)
        return number.name


def has_agent(qmp: QmpClient) -> bool:
    """Whether a program in the guest has its end of the agent's channel open."""
    rows = qmp.execute("query-chardev")
    return any(row["label"] == "agent" and row["frontend-open"] is True for row in rows)
