"""Attaching a terminal to an instance's serial line."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.instance_units import refuse_stranger
from brine.common.listening import peer_process
from brine.instance.spec_files import InstanceError

WAY_OUT = b"\x1d"
"""Ctrl-], as in telnet and in virsh."""

_READ_SIZE = 4096
_LOOK_EVERY_S = 0.5
_CONNECTING, _CONNECTED = "02", "03"


class NoLineError(InstanceError):
    """Nothing has a serial line of an instance open."""


def attach(name: str, path: Path) -> int:
    """Join this process's terminal with the serial line at *path*, until one of them ends.

    QEMU serves one at a time: who comes second sees nothing until the first has left.

    :raises NoLineError: if there is no such line.
    :raises InstanceError: if it can't be used.
    :raises brine.common.instance_units.StrangerError: if somebody else than its QEMU listens there.
    """
    if sys.stdin is None or sys.stdout is None:
        raise InstanceError(name, "a console needs standard input and standard output")
    with socket.socket(socket.AF_UNIX) as line:
        line.setblocking(False)
        try:
            line.connect(str(path))
        except BlockingIOError:
            text = f"{path}: somebody is attached to it, and others wait already"
            raise InstanceError(name, text) from None
        except OSError as error:
            hint = f'see brine instance info {name}; its spec needs "serial_console": true'
            if isinstance(error, PermissionError):
                hint = f"be root, or in the group {paths.CONTROL_GROUP}"
            raise NoLineError(name, f"{path}: {error.strerror}", hint=hint) from error
        # What is typed may be a password, and what is shown is believed.
        refuse_stranger(peer_process(line), name, path)
        waits = others_are_served(path)
        if waits:
            text = f"Somebody else is attached to {name}, and is served until they leave."
            way_out = " Ctrl-] leaves." if sys.stdin.isatty() else ""
            print(f"{text} Waiting ...{way_out}", file=sys.stderr, flush=True)
        else:
            _greet(name, end="\n")
        with _raw(sys.stdin):
            ended_there = _join(line, name, path, waits=waits)
    if sys.stdin.isatty():
        print("\r\nThe VM has ended." if ended_there else "\r\nLeft.", file=sys.stderr)
    return 0


def others_are_served(path: Path) -> bool:
    """Whether somebody waits at a socket, and somebody else is served (:manpage:`proc(5)`,
    */proc/net/unix*). The state of a connection that nobody has accepted yet is "connecting"."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return False  # nobody can be told then
    states = [fields[5] for line in lines if (fields := line.split(None, 7))[7:] == [str(path)]]
    return _CONNECTING in states and _CONNECTED in states


def _greet(name: str, *, end: str) -> None:
    if sys.stdin.isatty():
        print(f"Connected to {name}. Ctrl-] leaves.", end=end, file=sys.stderr, flush=True)


def _join(line: socket.socket, name: str, path: Path, *, waits: bool) -> bool:
    """Carry bytes both ways; returns whether it was the VM that ended it.

    :param waits: whether somebody else is served.
    """
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    is_person = sys.stdin.isatty()
    unsent, has_more = b"", True
    while True:
        # A person is heard whatever the VM does: one that hangs must not keep anybody.
        is_heard = has_more and (is_person or not unsent)
        watched = [line, keyboard] if is_heard else [line]
        ready, _, _ = select.select(
            watched, [line] if unsent else [], [], _LOOK_EVERY_S if waits else None
        )
        if waits and (line in ready or not others_are_served(path)):
            waits = False
            _greet(name, end="\r\n")
        if keyboard in ready:
            typed = os.read(keyboard, _READ_SIZE)
            before, way_out, _ = typed.partition(WAY_OUT)
            unsent += before
            if way_out:
                with contextlib.suppress(ConnectionError):
                    _send(line, unsent)
                return False
            has_more = bool(typed)  # a script that has no more to say still wants to hear
        try:
            unsent = unsent[_send(line, unsent) :]
            received = line.recv(_READ_SIZE)
        except BlockingIOError:
            continue
        except ConnectionError:
            return True
        if not received:
            return True
        _write(screen, received)


def _send(line: socket.socket, data: bytes) -> int:
    """Send what the VM takes at once; returns how many bytes that are."""
    try:
        return line.send(data) if data else 0
    except BlockingIOError:
        return 0


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _raw(stream: Any) -> Iterator[None]:
    """Have a terminal pass each key on as it is, and be as it was afterwards."""
    if not stream.isatty():
        yield
        return
    before = termios.tcgetattr(stream)
    try:
        tty.setraw(stream)
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
