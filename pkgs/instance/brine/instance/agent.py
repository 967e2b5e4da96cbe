"""The guest agent: a program in the guest that does what it is told over a socket of QEMU's.

Source: QEMU's qemu-ga(8) and its protocol, which is QMP's without a greeting.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path
from typing import Any

_READ_SIZE = 4096
_LONGEST = 64 * 1024


def shut_down_by_agent(path: Path, *, timeout_s: float) -> bool:
    """Ask the agent to shut the guest down; False if none answers.

    It answers nothing to that itself, so it is first asked for a sign of life.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            if not _answers(connection, timeout_s):
                return False
            _say(connection, "guest-shutdown", {"mode": "powerdown"})
        except OSError:
            return False
    return True


def _answers(connection: socket.socket, timeout_s: float) -> bool:
    """Whether there is an agent at the other end, which is one only if a guest runs it."""
    deadline = time.monotonic() + timeout_s
    mark = secrets.randbelow(1 << 31)
    _say(connection, "guest-sync", {"id": mark})
    size, pending = 0, b""
    # It is the guest's, which may say anything, and for ever.
    while size < _LONGEST and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(_READ_SIZE)
        if not data:
            return False
        size += len(data)
        *lines, pending = (pending + data).split(b"\n")
        # What is still on the way from earlier questions comes before.
        if any(_returned(line) == mark for line in lines):
            return True
    return False


def _returned(line: bytes) -> Any:
    try:
        message = json.loads(line.replace(b"\xff", b""))
    except (ValueError, RecursionError):
        return None
    return message.get("return") if isinstance(message, dict) else None


def _say(connection: socket.socket, command: str, arguments: dict[str, Any]) -> None:
    connection.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
