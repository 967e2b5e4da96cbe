"""Logs of serial lines, and ``brine instance log``: pipes to one reader, files of limited size."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from pathlib import Path

from brine.common.errors import printable
from brine.common.files import read_regular
from brine.instance import store
from brine.instance.store import InstanceError, telling
from brine.vm.files import InstanceFiles

LOG_BYTES = 64 * 1024
"""The size of a log in bytes; one former log of that size is kept."""

XEN_LOGS = Path("/var/log/xen/console")
"""The folder of xenconsoled's logs, if it keeps any."""

_LOG_MODE = 0o640
_NEWLINE = re.compile(r"\r*\n|\r+")
_TERMINAL_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-~])")


def append(name: str, data: bytes) -> None:
    """Append to the log of an instance; a new log begins when it would become too large.

    :param data: its last :data:`LOG_BYTES` bytes are kept.
    :raises OSError: if that fails.
    """
    data, file = data[-LOG_BYTES:], InstanceFiles(name).console_log
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(file, flags, _LOG_MODE)
    try:
        if os.fstat(descriptor).st_size + len(data) > LOG_BYTES:
            os.replace(file, InstanceFiles(name).previous_console_log)
            os.close(descriptor)
            descriptor = os.open(file, flags, _LOG_MODE)
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def read_log(name: str, *, is_xen: bool = False) -> bytes:
    """The last output of the guest of an instance; an error if there is none."""
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
        hint = "Brine keeps it from the next start on, if the spec has serial_console"
        raise InstanceError(name, "no output of its console is kept", hint=hint)
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
        raise InstanceError(name, f"{file}: can't be read: {error.strerror}", hint=hint) from error


def lines_of(data: bytes) -> list[str]:
    """The lines of a guest's output, safe for a terminal: control sequences are removed, and other
    special characters escaped."""
    lines = _NEWLINE.split(_TERMINAL_CONTROL.sub("", data.decode(errors="replace")))
    if not lines[-1]:
        lines.pop()
    return ["\t".join(map(printable, line.split("\t"))) for line in lines]


def log(arguments: argparse.Namespace) -> int:
    name = arguments.name
    try:
        is_xen = store.load(name).is_xen()
    except store.DamagedSpecError:
        is_xen = False
    data = read_log(name, is_xen=is_xen)
    lines = lines_of(data)
    if arguments.lines is not None:
        lines = lines[-arguments.lines :]
        data = b"".join(data.splitlines(keepends=True)[-arguments.lines :])
    if arguments.json:
        print(json.dumps({"name": name, "lines": lines}, indent=2))
    elif arguments.raw:
        sys.stdout.buffer.write(data)
    else:
        print(*lines, sep="\n")
    return 0
