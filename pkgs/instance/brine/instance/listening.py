"""Where a process listens for TCP connections, as the kernel says; see :manpage:`proc(5)`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENS = "0A"  # the state, in the kernel's tables
_TABLES = ("tcp", "tcp6")


def listens_at(pid: int, *, proc: Path = Path("/proc")) -> list[tuple[str, int]]:
    """The addresses and ports of a process, sorted; none if that can't be seen, which takes root.

    :param pid: of the process.
    """
    try:
        own = set(_sockets_of(proc / str(pid) / "fd"))
    except OSError:
        return []
    found = []
    for table in _TABLES:
        try:
            lines = (proc / str(pid) / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        found += [_place(row[1]) for row in rows if row[3] == _LISTENS and row[9] in own]
    return sorted(found, key=lambda place: (place[1], place[0]))


def _sockets_of(folder: Path) -> Iterator[str]:
    """The inodes of a process's sockets."""
    for name in os.listdir(folder):
        try:
            match = _SOCKET.fullmatch(os.readlink(folder / name))
        except FileNotFoundError:
            continue  # it has just closed it
        if match:
            yield match[1]


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.partition(":")
    # Words of four bytes, each in the order of the processor, which is the little end first.
    data = bytes.fromhex(address)
    words = [data[start : start + 4][::-1] for start in range(0, len(data), 4)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
