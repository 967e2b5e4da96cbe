"""The units of instances, and what runs in them."""

from __future__ import annotations

from pathlib import Path

from brine.common.qmp_errors import QmpError

PREFIX = "brine-instance@"
SUFFIX = ".service"


class StrangerError(QmpError):
    """Somebody else listens where an instance's QEMU should."""


def unit_of(name: str) -> str:
    """The unit of an instance."""
    return f"{PREFIX}{name}{SUFFIX}"


def runs_in(pid: int, unit: str) -> bool:
    """Whether a process is in the control group of a unit (:manpage:`cgroups(7)`)."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(unit in line.split(":", 2)[2].split("/") for line in lines)


def refuse_stranger(pid: int, name: str, socket: Path) -> None:
    """Refuse who only poses as an instance's QEMU. The folder of its sockets may be written by
    others, who must not be told a password, be given a disk, or be taken at their word.

    :param pid: of the process that listens at the socket.
    :raises StrangerError: if it is not of the instance's unit.
    """
    if not runs_in(pid, unit_of(name)):
        text = f"{socket}: somebody else than its QEMU listens there, process {pid}"
        raise StrangerError(text, hint=f"systemctl status {pid} tells who")
