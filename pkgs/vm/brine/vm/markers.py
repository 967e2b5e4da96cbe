"""Markers: what units of instances, root's tools and brine-kvmd tell each other of an instance.

Each marker is a small JSON file ``<name>.<kind>`` in ``/run/brine/marks``, a folder that only root
and brine-kvmd write and everybody may read. It names the run that it is about: the invocation id
of the instance's unit (systemd.exec(5), ``$INVOCATION_ID``), so that a marker of an earlier
run says nothing of a later one.

Several processes can hold a marker at once, for as long as they do what it says. Holding is a lock
of an open file (fcntl(2), "Open file description locks"), which ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import json
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from brine.common import paths
from brine.common.files import sync_folder
from brine.common.process import run_bounded

GROUP = "brine-kvmd"
"""The group of the folder. Only brine-kvmd is in it."""

UNKNOWN_RUN = "unknown"
"""Stands for an unknown run."""

WHO_UNKNOWN = "unknown"
"""Stands in a verdict for the party that ended a run while brine-kvmd was off."""

_FOLDER_MODE = 0o2775
_MODE = 0o644
_LARGEST = 64 * 1024
_CHMOD_TIMEOUT_S = 30
_TRIES = 5
_PAUSE_S = 0.005
_LONGEST_WAIT_S = 1.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# What open() says of a link, a folder, a socket, a FIFO or a device; EAGAIN is a lease, whose
# holder would otherwise keep us waiting (fcntl(2), F_SETLEASE).
_IN_THE_WAY = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EAGAIN)
_FLOCK = struct.Struct("hhqqi")  # of fcntl(2): type, whence, start, length, process

BELIEVED_S = 600.0
"""So long after its time a guest that was told to shut down may still do so on the admin's behalf:
brine-kvmd's own default (powerdown_stale_s)."""


class MarkerKind(StrEnum):
    """The kind of a marker, which is also its file's suffix."""

    START = "start"
    """This run has begun. Fact ``pid``: the process that becomes QEMU, or xl."""
    STARTED = "started"
    """This run has come up."""
    STOP = "stop"
    """An administrator stops this run. The process that does so holds the marker."""
    SHUTDOWN = "shutdown"
    """The user has shut this run down, and the spec does not say so yet."""
    VERDICT = "verdict"
    """The verdict on this run. Facts ``who`` and ``cause``, in brine-kvmd's words. Its own verdicts
    also have ``time_usec`` and ``given_usec``: the times of the end and of the verdict."""
    FAILURE = "failure"
    """systemd has seen this run fail, and none has begun since. Fact ``lacks``: the files and
    network interfaces that it needs and that were not there. Of a failed start, ``reason`` and
    ``hint``."""
    ASKED = "asked"
    """The guest of this run was told to shut down, and had not done so in time."""
    REBOOT = "reboot"
    """An administrator reboots the instance: it is to start when this run has ended. Fact
    ``until``: how long its guest may take (seconds since 1970)."""
    PAUSED = "paused"
    """An administrator has paused this run, and has not resumed it."""
    AWAITS = "awaits"
    """The QEMU of this run waits for the guest of another node's. Fact ``node``."""
    HALTED = "halted"
    """The QEMU of this run stands still, and no administrator has paused it: by brine-kvmd. Its
    facts are those of :class:`brine.vm.halt.Halt`."""


_NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class Marker(NamedTuple):
    """A marker: of a run, by its invocation id, and made at a time, in seconds since 1970. The
    facts are not checked."""

    kind: MarkerKind
    name: str
    run: str
    made_at: float = 0.0
    facts: Mapping[str, Any] = _NO_FACTS


def this_run() -> str:
    """The run that this process belongs to: for programs that an instance's unit runs."""
    return os.environ.get("INVOCATION_ID") or UNKNOWN_RUN


def file_of(kind: MarkerKind, name: str, *, folder: Path | None = None) -> Path:
    """Where a marker is. For all functions here, no *folder* is the node's."""
    return Path(_place_of(kind, name, folder))


def _place_of(kind: MarkerKind, name: str, folder: Path | None) -> str:
    """The same as text. kvmd reads a marker between the end of a VM and its verdict, and a Path
    takes as long to make as the file to open."""
    if "/" in name or "\0" in name or not name:
        raise ValueError(f"{name!r} is no instance's name")
    return f"{folder or paths.MARKS_DIR}/{name}.{kind}"


def read_marker(
    kind: MarkerKind, name: str, *, run: str | None = None, folder: Path | None = None
) -> Marker | None:
    """A marker; None if it is missing, damaged, unreadable, or of another run than *run*.

    :class:`brine.vm.run.Run` calls it, and answers all questions about markers.
    """
    try:
        descriptor = os.open(_place_of(kind, name, folder), _READ)
    except OSError:
        return None
    try:
        marker = _parse(kind, name, descriptor)
    finally:
        os.close(descriptor)
    return marker if marker and run in (None, marker.run) else None


def write_marker(
    kind: MarkerKind,
    name: str,
    *,
    run: str,
    folder: Path | None = None,
    durable: bool = False,
    **facts: Any,
) -> None:
    """Make a marker, whole, in place of whatever has its name.

    :param durable: have it survive a power cut, where the folder does.
    :param facts: what else it says, as JSON.
    """
    path = file_of(kind, name, folder=folder)
    with _draft(path, run, facts) as (descriptor, draft):
        if durable:
            os.fsync(descriptor)
        try:
            draft.rename(path)
        except IsADirectoryError:
            clear_way(path)
            draft.rename(path)
    if durable:
        sync_folder(path.parent)


def remove_marker(kind: MarkerKind, name: str, *, folder: Path | None = None) -> None:
    """Remove a marker, or whatever has its name."""
    clear_way(file_of(kind, name, folder=folder))


@contextlib.contextmanager
def held_marker(kind: MarkerKind, name: str, *, run: str, **facts: Any) -> Iterator[Path]:
    """Make a marker of a run, and hold it for the time of the block. The marker stays.

    Several processes can hold the same marker. A marker of another run is replaced. One of this run
    stays as it is, whatever *facts* a new one would have.
    """
    path = file_of(kind, name)
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while True:
        is_late = time.monotonic() > deadline
        descriptor = _hold(kind, name, run, path, is_late=is_late)
        if descriptor is None:
            descriptor = _make_held(path, run, facts)
        if descriptor is not None:
            break
        time.sleep(_PAUSE_S)
    try:
        yield path
    finally:
        os.close(descriptor)


def is_held(kind: MarkerKind, name: str) -> bool:
    """Whether a process holds a marker, as far as this process can see it. It takes no lock itself,
    and so never holds up a process that holds or removes the marker."""
    return _is_locked(file_of(kind, name))


def remove_unheld(kind: MarkerKind, name: str, *, but: str = "") -> None:
    """Remove a marker unless a process holds it. Its last holder may have been killed.

    :param but: a run whose marker stays.
    """
    path = file_of(kind, name)
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, (_READ & ~os.O_ACCMODE) | os.O_RDWR)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            clear_way(path)
            return
        try:
            if not _lock(descriptor, fcntl.F_WRLCK):
                return
            if _is_at(path, descriptor):
                marker = _parse(kind, name, descriptor)
                if marker is None or marker.run != but:
                    clear_way(path)
                return
        finally:
            os.close(descriptor)


def clear_way(path: Path) -> None:
    """Have nothing be at *path*. A folder that has something in it is moved aside, as
    ``.<name>.aside-<number>`` beside it."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        try:
            path.rmdir()
        except OSError:
            path.rename(path.with_name(f".{path.name}.aside-{time.time_ns()}"))
    except OSError:  # a read-only file system refuses before it looks
        if os.path.lexists(path):
            raise


def _parse(kind: MarkerKind, name: str, descriptor: int) -> Marker | None:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        data = json.loads(os.read(descriptor, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    run = data.pop("run", None) if isinstance(data, dict) else None
    if not isinstance(run, str) or not run:
        return None
    return Marker(kind, name, run, status.st_mtime, data)


@contextlib.contextmanager
def _draft(path: Path, run: str, facts: dict[str, Any]) -> Iterator[tuple[int, Path]]:
    """An open file with a marker in it, under another name, which is removed after an error."""
    draft = path.with_name(f".{os.urandom(8).hex()}{path.suffix}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(draft, flags, _MODE)
    except FileNotFoundError:
        make_shared_folder(path.parent, group=GROUP, mode=_FOLDER_MODE)  # it was removed meanwhile
        descriptor = os.open(draft, flags, _MODE)
    try:
        os.fchmod(descriptor, _MODE)  # whatever the umask is
        data = json.dumps({"run": run, **facts}).encode() + b"\n"
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))
        yield descriptor, draft
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    finally:
        os.close(descriptor)


def make_shared_folder(folder: Path, *, group: str, mode: int) -> None:
    """Make a folder as systemd-tmpfiles does: for a group, which its files belong to as well.

    :param group: its name; a node without the packages has none.
    :param mode: with the bit that gives files the folder's group.
    :raises OSError: if it can't be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(KeyError):
        os.chown(folder, -1, grp.getgrnam(group).gr_gid)
    try:
        folder.chmod(mode)
    except PermissionError:
        # RestrictSUIDSGID= of this process's unit forbids the bit, which is no danger on a folder.
        outside = ["systemd-run", "--quiet", "--wait", "--collect", "--", "chmod"]
        done = run_bounded(
            [*outside, f"{mode:o}", str(folder)],
            timeout_s=_CHMOD_TIMEOUT_S,
            environment=os.environ,
        )
        if done.returncode:
            raise


def _hold(kind: MarkerKind, name: str, run: str, path: Path, *, is_late: bool) -> int | None:
    """Hold the marker of this run that is there. Any other one is removed."""
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        clear_way(path)
        return None
    is_kept = False
    try:
        marker = _parse(kind, name, descriptor)
        if marker and marker.run == run:
            if _lock(descriptor, fcntl.F_RDLCK):
                is_kept = _is_at(path, descriptor)
                return descriptor if is_kept else None
            # remove_unheld() holds it for a moment; no process of Brine does for long.
        elif not is_late:
            # One that replaces it at the same time may have done so by now.
            remove_unheld(kind, name, but=run)
        if is_late and _is_at(path, descriptor):
            clear_way(path)
        return None
    finally:
        if not is_kept:
            os.close(descriptor)


def _make_held(path: Path, run: str, facts: dict[str, Any]) -> int | None:
    """Make a marker that is held from its first moment on; None if another one is there by now."""
    with _draft(path, run, facts) as (descriptor, draft):
        _lock(descriptor, fcntl.F_RDLCK)
        try:
            os.link(draft, path)
        except FileExistsError:
            return None
        finally:
            draft.unlink()
        return os.dup(descriptor)  # which has the same lock


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a marker; False if another one's lock is in the way."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):  # both are allowed to say that
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    except OSError:
        return False  # no file, and so no marker
    finally:
        os.close(descriptor)
    kind: int = _FLOCK.unpack(found)[0]
    return kind == fcntl.F_RDLCK


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at *path*, and no other has taken its place."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
