"""The process that listens at a socket, and whether it belongs to the unit of an instance."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path

from brine.common import paths
from brine.common.qmp.wire import QmpError

PREFIX = "brine-instance@"
SUFFIX = ".service"

_CREDENTIALS = struct.Struct("3i")  # of unix(7), SO_PEERCRED: process, user, group


class StrangerError(QmpError):
    """Another process listens at the socket of an instance's QEMU."""


def unit_of(name: str) -> str:
    """The unit of an instance."""
    return f"{PREFIX}{name}{SUFFIX}"


def runs_in(pid: int, unit: str) -> bool:
    """Whether a process is in the control group of a unit of the system's (:manpage:`cgroups(7)`).

    The whole path counts: a user's own service manager has units of the same names, but below a
    service of the system's. Above a unit of the system's there are slices only.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):  # of cgroup v2, and of v1
            _, *slices, last = path.split("/")
            if last == unit and all(one.endswith(".slice") for one in slices):
                return True
    return False


def refuse_stranger(pid: int, name: str, socket: Path) -> None:
    """Refuse a process that only poses as an instance's QEMU. Others may write to the folder of the
    sockets. They must not be told a password, be given a disk, or be believed.

    :raises StrangerError: if it is not of the instance's unit.
    """
    if not runs_in(pid, unit_of(name)):
        text = f"{socket}: somebody else than its QEMU listens there, process {pid}"
        raise StrangerError(text, hint=f"systemctl status {pid} tells who")


def stranger_check(socket: Path) -> Callable[[int], None] | None:
    """The check of a QMP socket's listener, as :func:`refuse_stranger` does it; None for a VM that
    is no instance of Brine's: its QEMU may run in any unit."""
    name = socket.stem
    is_ours = paths.InstanceFiles(name).spec.exists()
    if is_ours and socket.parent == paths.CONTROL_DIR:
        return lambda pid: refuse_stranger(pid, name, socket)
    return None


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
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(found)[0]
    return process
