"""Whether somebody listens at a socket, and who."""

from __future__ import annotations

import socket
import struct
from pathlib import Path


def is_listening(path: Path) -> bool:
    """Whether a process listens at a socket, also if it is busy with others."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except BlockingIOError:
            pass
        except OSError:
            return False
    return True


def peer_process(connection: socket.socket) -> int:
    """The id of the process that made the socket that this one is connected to (``SO_PEERCRED`` of
    :manpage:`unix(7)`); 0 if it can't be seen from here."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process: int = struct.unpack("3i", credentials)[0]
    return process
