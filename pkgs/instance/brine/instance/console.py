"""The serial line of an instance: attaching a terminal, and reading the log."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import stat
import sys
import termios
import tty
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brine.common import paths
from brine.common.errors import printable
from brine.common.files import read_regular
from brine.common.paths import InstanceFiles
from brine.common.peer import peer_process, refuse_stranger
from brine.instance.store import InstanceError, telling

WAY_OUT = b"\x1d"
"""Ctrl-], as in telnet and in virsh."""

_READ_SIZE = 4096
_LOOK_EVERY_S = 0.5
_CONNECTING, _CONNECTED = "02", "03"


class NoLineError(InstanceError):
    """No process offers the serial line of an instance."""


def attach(name: str, path: Path) -> int:
    """Connect this process's terminal with the serial line at *path*, until one of them ends.

    QEMU serves one client at a time: a second client sees nothing until the first has left.

    :raises NoLineError: if there is no such line.
    :raises InstanceError: if it can't be used.
    :raises brine.common.peer.StrangerError: if another process than its QEMU listens there.
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
        # A user may type a password here, and believes what is shown.
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
    """Whether this client has to wait because another one is served (:manpage:`proc(5)`,
    */proc/net/unix*). A connection that is not accepted yet has the state "connecting"."""
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
    """Copy bytes both ways; returns whether the VM closed the connection.

    :param waits: whether another client is served.
    """
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    is_person = sys.stdin.isatty()
    unsent, has_more = b"", True
    while True:
        # The terminal is read even if the VM hangs, so that the user can leave.
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
    """Send as much as the VM takes at once; returns the number of bytes."""
    try:
        return line.send(data) if data else 0
    except BlockingIOError:
        return 0


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


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


# Logs of serial lines: pipes to one reader, and files of limited size.

LOG_BYTES = 64 * 1024
"""The size of a log in bytes; one former log of that size is kept."""

XEN_LOGS = Path("/var/log/xen/console")
"""The folder of xenconsoled's logs, if it keeps any."""

_PIPE_MODE = 0o600
_LOG_MODE = 0o640
_NEWLINE = re.compile(r"\r*\n|\r+")
_TERMINAL_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-~])")


def open_pipe(name: str) -> int:
    """Open the pipe of a starting instance, for its QEMU.

    :returns: a descriptor for writing, which the caller closes.
    :raises OSError: if that fails.
    """
    pipe = InstanceFiles(name).console_pipe
    pipe.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_pipe(pipe):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, _PIPE_MODE)
    # Without a reader, a pipe can't be opened for writing only.
    both = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            os.write(writer, f"\r\n--- {name} starts, {now} ---\r\n".encode())
        except BlockingIOError:
            pass  # it is full: the reader has stalled, and is about to be ended
        except OSError:
            os.close(writer)
            raise
    finally:
        os.close(both)
    return writer


def append(name: str, data: bytes) -> None:
    """Append to the log of an instance; a new log begins when it would become too large.

    :param data: its last :data:`LOG_BYTES` bytes are kept.
    :raises OSError: if that fails.
    """
    data, file = data[-LOG_BYTES:], InstanceFiles(name).console_log
    descriptor = _open_log(file)
    try:
        if os.fstat(descriptor).st_size + len(data) > LOG_BYTES:
            os.replace(file, InstanceFiles(name).previous_console_log)
            os.close(descriptor)
            descriptor = _open_log(file)
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def read_log(name: str, *, is_xen: bool = False) -> bytes:
    """The last output of the guest of an instance.

    :raises InstanceError: if there is none.
    """
    if is_xen:
        return _read_xen_log(name)
    found = b""
    for file in (InstanceFiles(name).previous_console_log, InstanceFiles(name).console_log):
        with (
            telling(name, f"{file}: can't be read", hint="be root, or in the group brine"),
            contextlib.suppress(FileNotFoundError),
        ):
            found += read_regular(file)
    if not found:
        hint = "it is kept from the next start on, if its spec has a serial_console"
        raise InstanceError(name, "nothing is known that it has said", hint=hint)
    return found


def _read_xen_log(name: str) -> bytes:
    file = XEN_LOGS / f"guest-{name}.log"
    try:
        with file.open("rb") as f:
            f.seek(max(os.fstat(f.fileno()).st_size - 2 * LOG_BYTES, 0))
            return f.read(2 * LOG_BYTES)
    except OSError as error:
        hint = "be root"
        if isinstance(error, FileNotFoundError):
            hint = "XENCONSOLED_TRACE=guest in /etc/default/xen has xenconsoled(8) write it"
        text = f"{file}: can't be read: {error.strerror}"
        raise InstanceError(name, text, hint=hint) from error


def lines_of(data: bytes) -> list[str]:
    """The lines of a guest's output, safe for a terminal: control sequences are removed, and other
    special characters escaped."""
    text = _TERMINAL_CONTROL.sub("", data.decode(errors="replace"))
    lines = _NEWLINE.split(text)
    if lines and not lines[-1]:
        lines.pop()
    return ["\t".join(printable(part) for part in line.split("\t")) for line in lines]


def _open_log(file: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(file, flags, _LOG_MODE)


def _is_pipe(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.lstat().st_mode)
    except FileNotFoundError:
        return False
