"""Logging to the journal with structured fields, or to stderr where there is no journal.

A record that has an entry in the message catalog is logged with :func:`tell`, which gives it the
entry's message id, ``BRINE_EVENT=``, and ``BRINE_INSTANCE=`` if it concerns an instance. Only the
finished text and the named fields leave the process: a record's arguments do not, since a secret
could be among them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from brine.common.errors import printable
from brine.common.message import NOTICE, Message

logging.addLevelName(NOTICE, "NOTICE")

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""The values of the setting ``log_level`` of a daemon."""

SOCKET = Path("/run/systemd/journal/socket")
"""Where the journal listens, if there is one."""

CONSOLE = Path("/dev/console")

_SEND_BUFFER = 8 * 2**20
_SO_SNDBUFFORCE = 32  # socket(7); Python has no name for it

_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, NOTICE: 5}


def tell(
    logger: logging.Logger,
    message: Message,
    text: str,
    *,
    instance: str | None = None,
    **fields: str,
) -> None:
    """Log *text*, of a kind that the message catalog explains.

    :param instance: the name of the instance that it is about, as the file system gave it.
    :param fields: further journal fields, such as ``BRINE_VERDICT``.
    """
    if not logger.isEnabledFor(message.level):
        return
    fields["MESSAGE_ID"] = message.id
    fields["BRINE_EVENT"] = message.event
    if instance is not None:
        fields["BRINE_INSTANCE"] = instance
        text = f"{printable(instance)}: {text}"
    logger.log(message.level, "%s", text, extra={"fields": fields}, stacklevel=2)


def setup(identifier: str, level: int) -> None:
    """Send this process's log records of *level* and above to the journal, if systemd connected our
    stderr to it, or else to stderr, for a person at a terminal."""
    handler: logging.Handler
    if _stderr_is_journal():
        handler = JournalHandler(identifier)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"{identifier}: %(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def send_line(identifier: str, text: str, level: int) -> None:
    """Send a record without fields of Brine's, if systemd connected our stderr to the journal.

    :raises OSError: if it did not, or the journal takes no record.
    """
    if not _stderr_is_journal():
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    JournalHandler(identifier).send(text, level)


def log_command(identifier: str) -> None:
    """Send a command's records to the journal, if there is one, and warnings to the person, too."""
    root = logging.getLogger()
    root.handlers[:] = [JournalHandler(identifier)] if SOCKET.exists() else []
    # In a unit that would be the journal once more.
    if not (root.handlers and _stderr_is_journal()):
        warnings = logging.StreamHandler(sys.stderr)
        warnings.setLevel(logging.WARNING)
        warnings.setFormatter(logging.Formatter("brine: warning: %(message)s"))
        root.handlers.append(warnings)
    # Records of libraries at this level are for their authors.
    logging.getLogger("brine").setLevel(logging.INFO)


class JournalHandler(logging.Handler):
    """Sends records to the journal, without ever waiting; what can't get there goes to the console.

    systemd's own library waits for a journal that hangs, drops a record in silence where there is
    none, and its Python handler sends a record's arguments. Source of the format: "Native Journal
    Protocol", systemd's documentation.
    """

    def __init__(self, identifier: str) -> None:
        super().__init__()
        self._identifier = identifier
        self._journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._missed = 0
        # Records wait in the socket while the journal is slow, as those of systemd's own programs
        # do. Without the right to more, the kernel allows net.core.wmem_max, which is twice what a
        # socket has by default.
        for option in (socket.SO_SNDBUF, _SO_SNDBUFFORCE):
            with contextlib.suppress(OSError):
                self._journal.setsockopt(socket.SOL_SOCKET, option, _SEND_BUFFER)

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        fields = {
            "MESSAGE": text,
            "PRIORITY": str(_priority(record.levelno)),
            "SYSLOG_IDENTIFIER": self._identifier,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
            **getattr(record, "fields", {}),
        }
        try:
            if self._missed:
                self._send({**fields, "MESSAGE": f"{self._missed} records did not get here"})
                self._missed = 0
            self._send(fields)
        except OSError:
            self._missed += 1
            self._to_console(f"{self._identifier}: {text}\n")

    def send(self, text: str, level: int) -> None:
        """Send a record without fields. Raises OSError."""
        fields = {"MESSAGE": text, "PRIORITY": str(_priority(level))}
        self._send({**fields, "SYSLOG_IDENTIFIER": self._identifier})

    def _send(self, fields: Mapping[str, str]) -> None:
        data = b"".join(_journal_field(key, value) for key, value in fields.items())
        self._journal.sendto(data, str(SOCKET))

    def _to_console(self, line: str) -> None:
        with contextlib.suppress(OSError):  # neither journal nor console: nowhere left to say it
            # A console on a slow or stopped serial line must not stop the daemon.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(CONSOLE, flags)
            try:
                os.write(descriptor, line.encode(errors="backslashreplace"))
            finally:
                os.close(descriptor)


def _journal_field(key: str, value: str) -> bytes:
    # Names of files need not be UTF-8; a field takes any bytes.
    data = (
        os.fsencode(value) if key == "BRINE_INSTANCE" else value.encode(errors="backslashreplace")
    )
    if b"\n" in data:
        return key.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
    return key.encode() + b"=" + data + b"\n"


def _priority(level: int) -> int:
    """The syslog priority for a level of :mod:`logging`."""
    return _PRIORITIES.get(level, 7 if level < logging.INFO else 6)


def _stderr_is_journal() -> bool:
    """Whether systemd connected our stderr to the journal (systemd.exec(5), $JOURNAL_STREAM)."""
    try:
        device, inode = os.environ.get("JOURNAL_STREAM", "").split(":")
        status = os.fstat(sys.stderr.fileno())
    except (ValueError, OSError):
        return False
    return (int(device), int(inode)) == (status.st_dev, status.st_ino)
