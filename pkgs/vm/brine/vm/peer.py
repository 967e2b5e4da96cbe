"""The check that an instance's own QEMU listens at a socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from brine.common import paths, process
from brine.common.qmp.wire import QmpError
from brine.vm.files import InstanceFiles
from brine.vm.unit_name import unit_of


class StrangerError(QmpError):
    """Another process listens at the socket of an instance's QEMU."""


def refuse_stranger(pid: int, name: str, socket: Path) -> None:
    """Refuse a process that only poses as an instance's QEMU. Others may write to the folder of the
    sockets. They must not be told a password, be given a disk, or be believed.

    :raises StrangerError: if it is not of the instance's unit.
    """
    if not process.runs_in(pid, unit_of(name)):
        text = f"{socket}: another process than its QEMU listens there: process {pid}"
        raise StrangerError(text, hint=f"systemctl status {pid} tells more")


def stranger_check(socket: Path) -> Callable[[int], None] | None:
    """The check of a QMP socket's listener, as :func:`refuse_stranger` does it; None for a VM that
    is no instance of Brine's: its QEMU may run in any unit."""
    name = socket.stem
    is_ours = InstanceFiles(name).spec.exists()
    if is_ours and socket.parent == paths.CONTROL_DIR:
        return lambda pid: refuse_stranger(pid, name, socket)
    return None
