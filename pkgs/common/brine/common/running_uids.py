"""The user ids that processes run with (:manpage:`proc(5)`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from brine.common.privileges import Capability, may
from brine.common.uid_pool import UidPoolError

PROC = Path("/proc")

_HINT = "be root, with a /proc that shows all processes"


def running_uids(proc: Path = PROC) -> set[int]:
    """The real, effective, saved and file system user ids of all processes.

    :raises UidPoolError: if there may be processes that we do not see.
    """
    try:
        ourselves = os.readlink(proc / "self")
        processes = [name for name in os.listdir(proc) if name.isdecimal()]
        hiding = _hiding(proc)
    except OSError as error:
        raise _unknown(f"{proc}: {error.strerror}") from error
    if ourselves not in processes:
        raise _unknown(f"{proc} does not show this process")
    if hiding:
        raise _unknown(f"{proc} hides those of others (it is mounted with {hiding})")
    found: set[int] = set()
    for process in processes:
        found.update(_uids_of(proc / process / "status"))
    return found


def _uids_of(status: Path) -> Iterator[int]:
    try:
        lines = status.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended meanwhile; for those that are hidden see below
    except OSError as error:
        raise _unknown(f"{status}: {error.strerror}") from error
    uids = next((line.split()[1:] for line in lines if line.startswith(b"Uid:")), [])
    if len(uids) != 4 or not all(map(bytes.isdigit, uids)):
        raise _unknown(f"{status} does not say whose it is")
    yield from map(int, uids)


def _hiding(proc: Path) -> str | None:
    """The mount option that hides other users' processes from us, if one does.

    They look like processes that have ended: there is no such file.
    """
    options = _options(proc)
    hiding = next((each for each in options if each.startswith("hidepid=")), None)
    if hiding is None or may(Capability.SYS_PTRACE):
        return None
    # The kernel asks this group's members nothing more, but for hidepid=ptraceable.
    exempt = next((int(each[4:]) for each in options if each.startswith("gid=")), None)
    groups = {os.getegid(), *os.getgroups()}
    return None if exempt in groups and hiding not in _FOR_EVERYBODY else hiding


_FOR_EVERYBODY = ("hidepid=ptraceable", "hidepid=4")


def _options(proc: Path) -> list[str]:
    """The options of the file system at *proc*."""
    device = os.stat(proc).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (proc / "self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[-1].split(",")
    raise _unknown(f"{proc} is not among the mounts of this process")


def _unknown(why: str) -> UidPoolError:
    return UidPoolError(f"which user ids are in use can't be found out: {why}", hint=_HINT)
