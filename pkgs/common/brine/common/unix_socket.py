"""Unix sockets: whether a process listens at one, and which process that is."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # of unix(7), SO_PEERCRED: process, user, group


def is_listening(path: Path) -> bool:
    """Whether a process listens at a socket, even if it is busy with other clients."""
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
    return _peer_credentials(connection)[0]


def peer_user(connection: socket.socket) -> int:
    """The user of that process when it began to listen."""
    return _peer_credentials(connection)[1]


def _peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(found)
    return process, user, group
