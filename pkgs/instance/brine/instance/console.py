"""``brine instance console``: attaching a terminal to the serial line of an instance."""

from __future__ import annotations

import argparse
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
from brine.common.cli import undo_when_told_to_end
from brine.common.unix_socket import peer_process
from brine.instance import store
from brine.instance.observe import Oper, look
from brine.instance.store import InstanceError
from brine.vm.files import InstanceFiles
from brine.vm.peer import refuse_stranger

WAY_OUT = b"\x1d"
"""Ctrl-], as in telnet and in virsh."""

_READ_SIZE = 4096
_LOOK_EVERY_S = 0.5
_CONNECTING, _CONNECTED = "02", "03"


def attach(name: str, path: Path) -> int:
    """Connect this process's terminal with the serial line at *path*, until one of them ends.

    QEMU serves one client at a time: a second client sees nothing until the first has left.

    :raises InstanceError: if there is no such line, or it can't be used.
    :raises brine.vm.peer.StrangerError: if another process than its QEMU listens there.
    """
    if sys.stdin is None or sys.stdout is None:
        raise InstanceError(name, "a console needs standard input and standard output")
    with socket.socket(socket.AF_UNIX) as line:
        line.setblocking(False)
        try:
            line.connect(str(path))
        except BlockingIOError:
            text = f"{path}: another user is attached to it, and others wait already"
            raise InstanceError(name, text) from None
        except OSError as error:
            hint = f'see brine instance info {name}; its spec needs "serial_console": true'
            if isinstance(error, PermissionError):
                hint = f"be root, or in the group {paths.CONTROL_GROUP}"
            raise InstanceError(name, f"{path}: {error.strerror}", hint=hint) from error
        # A user may type a password here, and trusts the screen.
        refuse_stranger(peer_process(line), name, path)
        waits = _others_are_served(path)
        if waits:
            text = f"Another user is attached to {name}, and is served until they leave."
            way_out = " Ctrl-] leaves." if sys.stdin.isatty() else ""
            print(f"{text} Waiting ...{way_out}", file=sys.stderr, flush=True)
        else:
            _greet(name, end="\n")
        with _raw(sys.stdin):
            ended_there = _join(line, name, path, waits=waits)
    if sys.stdin.isatty():
        print("\r\nThe VM has ended." if ended_there else "\r\nLeft.", file=sys.stderr)
    return 0


def _others_are_served(path: Path) -> bool:
    """Whether this client has to wait because another one is served (:manpage:`proc(5)`,
    */proc/net/unix*). A connection that is not accepted yet has the state "connecting"."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return False  # it is not known then
    states = {fields[5] for line in lines if (fields := line.split(None, 7))[7:] == [str(path)]}
    return {_CONNECTING, _CONNECTED} <= states


def _greet(name: str, *, end: str) -> None:
    if sys.stdin.isatty():
        print(f"Connected to {name}. Ctrl-] leaves.", end=end, file=sys.stderr, flush=True)


def _join(line: socket.socket, name: str, path: Path, *, waits: bool) -> bool:
    """Copy bytes both ways; returns whether the VM closed the connection.

    :param waits: whether another client is served.
    """
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    is_person = sys.stdin.isatty()
    unsent, has_more, leaves = b"", True, False
    while True:
        # The terminal is read even if the VM hangs, so that the user can leave.
        is_heard = has_more and (is_person or not unsent)
        watched = [line, keyboard] if is_heard else [line]
        patience_s = _LOOK_EVERY_S if waits else None
        ready, _, _ = select.select(watched, [line] if unsent else [], [], patience_s)
        if waits and (line in ready or not _others_are_served(path)):
            waits = False
            _greet(name, end="\r\n")
        if keyboard in ready:
            typed = os.read(keyboard, _READ_SIZE)
            before, way_out, _ = typed.partition(WAY_OUT)
            unsent += before
            has_more = bool(typed)  # a script that has no more to say still wants to hear
            leaves = bool(way_out)
        try:
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[line.send(unsent) :] if unsent else b""
            if leaves:
                return False
            received = line.recv(_READ_SIZE)
        except BlockingIOError:
            continue
        except ConnectionError:
            return not leaves
        if not received:
            return True
        while received:
            received = received[os.write(screen, received) :]


@contextlib.contextmanager
def _raw(stream: Any) -> Iterator[None]:
    """Set a terminal to raw mode for the time of the block."""
    if not stream.isatty():
        yield
        return
    before = termios.tcgetattr(stream)
    try:
        tty.setraw(stream)
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


def console(arguments: argparse.Namespace) -> int:
    undo_when_told_to_end()
    name = arguments.name
    store.spec_file_of(name)  # or it is no name
    if InstanceFiles(name).has_domain():
        _refuse_down(name)
        from brine.instance.xen.domain import become_console  # most are QEMU's

        become_console(name)
    try:
        return attach(name, InstanceFiles(name).serial)
    except InstanceError:
        _refuse_down(name)
        raise


def _refuse_down(name: str) -> None:
    if look(name).state.oper in (Oper.DOWN, Oper.USER_SHUTDOWN):
        raise InstanceError(name, "does not run", hint=f"brine instance start {name}")
