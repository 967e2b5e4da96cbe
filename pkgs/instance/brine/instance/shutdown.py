"""Stopping an instance: its guest is asked, gets its time, and is ended only then.

Each way to stop one goes this way: the command, ``systemctl stop``, and the node's shutdown.
Source: "Who ended this VM" in the design: whoever stops an instance for the admin says so first, by
a file, so that it is not taken for its user's will.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from ipaddress import ip_interface
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from brine.common import markers
from brine.common.errors import BrineError, die, printable
from brine.common.markers import MarkerKind
from brine.common.peer import StrangerError, peer_process, refuse_stranger, unit_of
from brine.common.process import Process, main_pid
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpError, QmpTimeoutError
from brine.instance import messages, store
from brine.instance.control import control_of, domain_file
from brine.instance.kvm.monitor import monitor_of, run_state
from brine.instance.store import InstanceError

# The guest agent: a program in the guest that does what it is told over a socket of QEMU's.

_READ_SIZE = 4096
_LONGEST = 64 * 1024
_MOST_ADDRESSES = 64
_LONGEST_NAME = 32
_MAC = re.compile("[0-9a-f]{2}(:[0-9a-f]{2}){5}")


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
    """What of an answer is addresses; all else is left out."""
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
    mark = secrets.randbelow(1 << 31)
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


DEFAULT_TIMEOUT_S = 120.0
TERM_TIMEOUT_S = 10.0
"""How long QEMU itself may take to end, which writes what it has not written yet."""

_PROGRAM = "brine-instance"
_NO_FAULT = "success"  # systemd.exec(5), $SERVICE_RESULT
_WAY = "its guest is asked, and ended if need be"
_WAKENINGS = {"paused": "cont", "suspended": "system_wakeup"}  # or it would hear nothing
_AGENT_TIMEOUT_S = 2.0
_QMP_TIMEOUT_S = 5.0
_PRESS_AGAIN_S = 20.0  # a guest that was still booting has not heard of the power button
_PRESS_SOON_S = 2.0
_ASK_AGAIN_S = 1.0  # somebody else had the monitor


class Ended(Enum):
    """How an instance came to its end."""

    BY_ITSELF = auto()
    BY_TERM = auto()
    BY_KILL = auto()


class Ending(Protocol):
    """What runs, and is to end: a QEMU's process, or a domain."""

    def ended(self, timeout_s: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""


def main() -> None:
    """End the instance that is named on the command line: what the unit runs when it is stopped.

    systemd runs it as well when QEMU ended by itself, and when the unit has failed. Then nothing
    was stopped: there is no main process, or it is a killed one that still frees its memory.
    """
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if os.environ.get("SERVICE_RESULT", _NO_FAULT) != _NO_FAULT:
        return
    messages.log_to_journal(_PROGRAM)
    try:
        stop_run(name, main_pid(), markers.this_run())
    except BrineError as error:
        die(_PROGRAM, error, 1)


def stop_run(name: str, pid: int, run: str) -> None:
    """End a run of an instance that systemd stops; nothing happens if it has ended.

    :param pid: the main process of its unit.
    :param run: the unit's invocation id.
    :raises BrineError: what keeps it from ending.
    """
    with Process.of(pid, unit=unit_of(name)) as qemu, contextlib.ExitStack() as stack:
        if qemu is None:
            return
        with contextlib.suppress(OSError):  # or its end is a reboot's
            markers.remove_marker(MarkerKind.REBOOT, name)
        timeout_s = _timeout_of(name)
        messages.tell(messages.STOP_ASKED, name, by="systemd", how=_WAY, timeout=timeout_s)
        # Whatever becomes of it, systemd ends it now: the marker stays.
        with contextlib.suppress(OSError):
            stack.enter_context(markers.held_marker(MarkerKind.STOP, name, run=run))
        if domain_file(name).exists():
            from brine.instance.xen.domain import stop_domain  # most are QEMU's

            stop_domain(name, pid, run, timeout_s=timeout_s, force=True, must_be_said=False)
        else:
            end(name, qemu, run, timeout_s=timeout_s, must_be_said=False)


def end(
    name: str, qemu: Process, run: str, *, timeout_s: float, must_be_said: bool = True
) -> Ended:
    """Have an instance's guest shut down; if it does not in time, end QEMU.

    :param run: which run of the unit it is.
    :param must_be_said: whether nothing is done where it can't be said that the admin wants it.
        Where systemd stops the unit, QEMU would be ended then, and its guest never asked.
    :raises InstanceError: if even that does not end it.
    """
    with said(name, qemu, run, must=must_be_said) as is_said:
        if _asked(name, qemu, run, timeout_s, may_use_agent=is_said):
            return Ended.BY_ITSELF
        if number := ended_by(qemu):
            messages.tell(messages.ENDED, name, timeout=timeout_s, signal=number.name)
            return Ended.BY_TERM if number is signal.SIGTERM else Ended.BY_KILL
    raise InstanceError(name, "QEMU does not end, not even by SIGKILL: it waits for the kernel")


def ended_by(qemu: Process) -> signal.Signals | None:
    """End QEMU; returns the signal that did it, or None if none does."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        qemu.signal(number)
        if qemu.ended(TERM_TIMEOUT_S):
            return number
    return None


def shut_down(name: str, qemu: Process, run: str, *, timeout_s: float) -> bool:
    """Have an instance's guest shut down; False if it does not in time, and still runs.

    :param run: which run of the unit it is.
    :raises InstanceError: if nobody could say that it is the admin who wants it.
    """
    with said(name, qemu, run, must=True):
        return _asked(name, qemu, run, timeout_s, may_use_agent=True)


@contextlib.contextmanager
def said(name: str, machine: Ending, run: str, *, must: bool) -> Iterator[bool]:
    """Have it said that the admin stops a run of an instance, as long as somebody does so; and for
    good if it has ended then. What a user does with one that runs on is the user's will again.

    Yields whether it is said.

    :param must: whether it is an error that it can't be said; else a warning.
    :raises InstanceError: that error.
    """
    with contextlib.ExitStack() as stack:
        is_said = True
        try:
            stack.enter_context(markers.held_marker(MarkerKind.STOP, name, run=run))
        except OSError as error:
            text = f"{markers.file_of(MarkerKind.STOP, name)}: can't be made: {error.strerror}"
            if must:
                raise InstanceError(name, text) from error
            print(f"{_PROGRAM}: warning: {text}", file=sys.stderr)
            is_said = False
        try:
            yield is_said
        finally:
            stack.close()
            if not machine.ended():
                with contextlib.suppress(OSError):
                    markers.remove_unheld(MarkerKind.STOP, name)


def _asked(name: str, qemu: Process, run: str, timeout_s: float, *, may_use_agent: bool) -> bool:
    """As :func:`asked`; the guest may still do what it was told to after its time.

    :param may_use_agent: if not, nothing but the power button is used. QEMU reports that as the
        admin's, and what an agent does as the guest's own will.
    """

    def ask(is_first: bool, _: float) -> str | None:
        # An agent may not be allowed to do what it is told, and nobody hears of that.
        fault = _ask(name, by_agent=is_first and may_use_agent)
        if fault is None:
            with contextlib.suppress(OSError):
                markers.write_marker(MarkerKind.ASKED, name, run=run)
        return fault

    return asked(name, qemu, ask, timeout_s)


def asked(
    name: str, machine: Ending, ask: Callable[[bool, float], str | None], timeout_s: float
) -> bool:
    """Have a guest be asked to shut down, and again, until it has; False if it does not in time.

    :param ask: is told whether it has not been asked yet, and how many seconds are left; returns
        why it could not be asked, or None if it was.
    """
    deadline = time.monotonic() + timeout_s
    again_s = min(_PRESS_AGAIN_S, max(_PRESS_SOON_S, timeout_s / 4))
    is_first = True
    said_last = None
    while not machine.ended():
        fault = ask(is_first, max(deadline - time.monotonic(), 0))
        is_asked = fault is None
        if fault and fault != said_last:
            text = f"{name}: its guest was not reached: {fault}"
            print(f"{_PROGRAM}: warning: {text}", file=sys.stderr)
        said_last = fault
        is_first = is_first and not is_asked
        left_s = deadline - time.monotonic()
        pause_s = again_s if is_asked else _ASK_AGAIN_S
        if machine.ended(min(left_s, pause_s)):
            break
        if left_s <= pause_s:
            return False
    return True


def _ask(name: str, *, by_agent: bool) -> str | None:
    """Ask the guest, by its agent or else by its power button; returns why QEMU did not pass it on,
    or None if it did."""
    control = control_of(name)
    try:
        limits = {"timeout_s": _QMP_TIMEOUT_S, "answer_timeout_s": _QMP_TIMEOUT_S}
        with monitor_of(name, of_unit=True, **limits) as qmp:
            if wakening := _WAKENINGS.get(run_state(qmp)):
                qmp.execute(wakening)
            agent_s = _AGENT_TIMEOUT_S
            if (
                by_agent
                and _has_agent(qmp)
                and shut_down_by_agent(name, control.agent, timeout_s=agent_s)
            ):
                return None
            qmp.execute("system_powerdown")
    except QmpError as error:
        # Somebody else may have the monitor; the agent has a socket of its own.
        may_ask = by_agent and isinstance(error, QmpTimeoutError)
        if may_ask and shut_down_by_agent(name, control.agent, timeout_s=_AGENT_TIMEOUT_S):
            return None
        return str(error)
    except (TypeError, KeyError, AttributeError):
        return f"{control.qmp}: no answers of QEMU's"
    return None


def _has_agent(qmp: QmpClient) -> bool:
    """Whether a program in the guest has its end of the agent's channel open."""
    chardevs = qmp.execute("query-chardev")
    return any(one["label"] == "agent" and one["frontend-open"] for one in chardevs)


def _timeout_of(name: str) -> float:
    try:
        return store.load(name).shutdown_timeout
    except BrineError as error:
        # It was undefined while it ran, or its spec is damaged: it must be possible to stop it.
        print(f"{_PROGRAM}: warning: {error}", file=sys.stderr)
        return DEFAULT_TIMEOUT_S


if __name__ == "__main__":
    main()
