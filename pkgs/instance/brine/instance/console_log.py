"""What guests have said on their serial lines: pipes to one reader, and bounded logs.

QEMU writes what the guest says into a named pipe, beside whoever is attached to the line. One
program of the node's, :mod:`brine.instance.console_reader`, reads all these pipes and writes the
logs. QEMU has nothing but the pipe's end for writing, so that it neither fills the node's disks nor
changes what was logged. Where nobody reads, a write fails at once, and QEMU goes on.
"""

from __future__ import annotations

import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path

from brine.common.printable import printable
from brine.common.regular_file import read_regular
from brine.instance.control import log_of, pipe_of, previous_log_of
from brine.instance.spec_files import InstanceError

LOG_BYTES = 64 * 1024
"""The size of a log; there is one before it of the same size."""

XEN_LOGS = Path("/var/log/xen/console")
"""Where xenconsoled logs what guests say, if it is told to."""

_PIPE_MODE = 0o600
_LOG_MODE = 0o640
_NEWLINE = re.compile(r"\r*\n|\r+")
_TERMINAL_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-~])")


def open_pipe(name: str) -> int:
    """Open the pipe of an instance that starts, for its QEMU.

    :returns: a descriptor for writing, whose owner closes it.
    :raises OSError: if that fails.
    """
    pipe = pipe_of(name)
    pipe.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_pipe(pipe):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, _PIPE_MODE)
    # Without a reader it can't be opened for writing alone.
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
    """Add to the log of an instance, which begins anew where it would be too large.

    :param data: at most :data:`LOG_BYTES` of it are kept, the last ones.
    :raises OSError: if that fails.
    """
    data, file = data[-LOG_BYTES:], log_of(name)
    descriptor = _open_log(file)
    try:
        if os.fstat(descriptor).st_size + len(data) > LOG_BYTES:
            os.replace(file, previous_log_of(name))
            os.close(descriptor)
            descriptor = _open_log(file)
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def read_log(name: str, *, is_xen: bool = False) -> bytes:
    """What the guest of an instance has said last.

    :raises InstanceError: if that is not known.
    """
    if is_xen:
        return _read_xen_log(name)
    found = b""
    for file in (previous_log_of(name), log_of(name)):
        try:
            found += read_regular(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            hint = "be root, or in the group brine" if isinstance(error, PermissionError) else None
            text = f"{file}: can't be read: {error.strerror}"
            raise InstanceError(name, text, hint=hint) from error
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
    """What a guest has said in lines that do nothing to a terminal: sequences that control one are
    left out, other odd characters become escapes."""
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
