"""The owner of an instance, as a start sees it: its folder, its watchdog and its request.

brine-lifecycle(7) describes the files. An owner may write to its folder, and may be hostile. So
everything here works below an open folder, follows no link, and opens no file of the owner's.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import math
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from brine.common import paths
from brine.common.errors import warn
from brine.common.process import run_bounded, start_time_of
from brine.instance.store import InstanceError, telling
from brine.instance.unit import UnitError, why_not_running
from brine.vm import markers
from brine.vm.run import Run
from brine.vm.spec import OwnerSpec, Spec

WATCHDOG = "watchdog"
TERMINATE = "terminate"
PID = "pid"

FUTURE_S = 2.0
"""So far ahead of the clock a watchdog may be: the clock may have been set back by as much."""

HANDLER = Path("/usr/sbin/brine-lifecycle")

CLOCK = Path("/run/brine-lifecycle/clock")
"""The handler's note, which it writes each second. It begins with the monotonic clock."""

USER = "brine-lifecycle"
"""The user of the handler, which owns all folders."""

_UNIT = f"{USER}.service"
_SILENT_S = 20.0  # systemd restarts a handler that is silent for so long
_MODE = 0o2770
_OPTIONS = "size=1m,nr_inodes=256,nosuid,nodev,noexec,X-mount.mkdir"
_LONGEST = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OwnersFile(NamedTuple):
    """A file of an owner's, as it was found.

    :param mtime_ns: when it was changed last, in nanoseconds since 1970.
    :param inode: of it.
    :param fault: why it does not count; empty if it does.
    """

    mtime_ns: int
    inode: int = 0
    fault: str = ""

    def age_s(self, now: float) -> float:
        """How long ago it was changed.

        :param now: in seconds since 1970.
        """
        return now - self.mtime_ns / 1e9


def folder_of(name: str) -> Path:
    """The folder that an instance and its owner share."""
    return paths.LIFECYCLE_DIR / name


def open_folder(folder: Path) -> int:
    """Open a folder of an owner.

    :raises OSError: if there is none.
    """
    return os.open(folder, _FOLDER)


@contextlib.contextmanager
def below(path: Path) -> Iterator[int]:
    """The same, open for the time of the block."""
    folder = open_folder(path)
    try:
        yield folder
    finally:
        os.close(folder)


def find_file(folder: int, name: str) -> OwnersFile | None:
    """The status of an owner's file, without opening it; None if there is none.

    :param folder: an open one.
    :raises OSError: if that can't be known.
    """
    return found_at(name, folder)


def found_at(path: str, folder: int | None = None) -> OwnersFile | None:
    """The same of a file by its path.

    :raises OSError: if that can't be known.
    """
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    fault = "" if stat.S_ISREG(found.st_mode) else "is no regular file"
    return OwnersFile(found.st_mtime_ns, found.st_ino, fault)


def read(folder: int, name: str) -> str:
    """The text of a short file; empty if there is none, or it is no regular file.

    :param folder: an open one.
    :raises OSError: if this process, or the node, has no room to open it.
    """
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.read(descriptor, _LONGEST).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def fault_of(watchdog: OwnersFile | None, now: float) -> str:
    """Why a watchdog does not count, however old it is; empty if it does.

    :param now: in seconds since 1970.
    """
    if watchdog is None:
        return "there is no watchdog"
    if watchdog.fault:
        return f"the watchdog {watchdog.fault}"
    return "the watchdog is in the future" if watchdog.age_s(now) < -FUTURE_S else ""


def why_not_alive(watchdog: OwnersFile | None, timeout_s: float, now: float) -> str:
    """Why a watchdog does not say that the owner is there; empty if it does.

    :param now: in seconds since 1970.
    """
    fault = fault_of(watchdog, now)
    if watchdog is None or fault:
        return fault
    age_s = watchdog.age_s(now)
    if age_s > timeout_s:
        return f"the watchdog was touched {age_s:.0f} s ago, and {timeout_s:g} s are its limit"
    return ""


def why_owner_absent(spec: Spec) -> str:
    """Why the owner of an instance does not let it start; empty if it does, or there is none."""
    if spec.owner is None:
        return ""
    if not HANDLER.exists():
        return f"{HANDLER} does not exist, which looks after owners"
    path = folder_of(spec.name)
    try:
        with below(path) as folder:
            watchdog, request = find_file(folder, WATCHDOG), find_file(folder, TERMINATE)
    except FileNotFoundError:
        return f"{path} does not exist"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if fault := why_not_alive(watchdog, spec.owner.watchdog_timeout, time.time()):
        return f"{path}: {fault}"
    if request and not request.fault:
        return f"{path / TERMINATE}: its owner has asked for its end"
    return ""


def warn_without_handler() -> None:
    """Warn if no handler looks after owners: then an instance may outlive its own."""
    try:
        silent_s = time.monotonic() - float(CLOCK.read_text().split()[0])
    except FileNotFoundError:
        silent_s = math.inf
    except (OSError, ValueError, IndexError):
        return  # this user may not know
    if 0 <= silent_s <= _SILENT_S:
        return
    with contextlib.suppress(UnitError):
        state = why_not_running(_UNIT)
        if state or math.isfinite(silent_s):
            how = f"is {state}" if state else f"gives no sign of life for {silent_s:.0f} s"
            text = f"{_UNIT} {how}, and looks after no owner: VMs may outlive theirs"
            what = f"start {USER}.path" if state == "inactive" else f"status {_UNIT}"
            warn(text, hint=f"systemctl {what}")


def refuse_without_owner(spec: Spec) -> None:
    """Refuse to start an instance whose owner is not there.

    :raises InstanceError: what is missing.
    """
    if lack := why_owner_absent(spec):
        hint = f"brine lifecycle own {spec.name} --start is an owner; see brine-lifecycle(7)"
        if not HANDLER.exists():
            hint = "install the package brine-lifecycle"
        raise InstanceError(spec.name, f"its owner is not there: {lack}", hint=hint)


def make_folder(name: str, owner: OwnerSpec) -> None:
    """Make the folder of an instance and its owner, or give it the group of the spec.

    It is a small file system of its own, so that no owner can fill the node's /run. The caller
    holds the instance's lock.

    :raises InstanceError: if it can't be made.
    """
    path, group = folder_of(name), _group(name, owner.group)
    with telling(name, f"{path}: can't be made"):
        paths.LIFECYCLE_DIR.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            options = f"uid={_handler()},gid={group},mode={_MODE:o},{_OPTIONS}"
            try:
                _on_node(name, "mount", "--types=tmpfs", f"--options={options}", "tmpfs", str(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    path.rmdir()
                raise
        else:
            with below(path) as folder:
                os.fchown(folder, _handler(), group)
                os.fchmod(folder, _MODE)
    _note_running(name)


def remove_folder(name: str) -> None:
    """Remove the folder of an instance that is no more, with the files that belong there. If an
    owner has put anything else there, that stays, and so does the folder.

    The caller holds the instance's lock.

    :raises InstanceError: if it can't be removed.
    """
    path = folder_of(name)
    with telling(name, f"{path}: can't be removed"), contextlib.suppress(FileNotFoundError):
        with below(path) as folder:
            for file in filter(_belongs_there, os.listdir(folder)):
                with contextlib.suppress(IsADirectoryError):
                    _unlink(file, folder)
            if os.listdir(folder):
                return
        if path.is_mount():
            _on_node(name, "umount", "--lazy", str(path))  # containers may have it mounted
        path.rmdir()


def note_process(spec: Spec) -> None:
    """Tell the owner of an instance which process becomes its QEMU or xl: this one.

    :raises InstanceError: if that can't be written, or its owner is not there.
    """
    if spec.owner is None:
        return
    _note(spec.name, os.getpid(), markers.this_run())
    # A request that came before has seen no process, so no owner waits for its end.
    refuse_without_owner(spec)


def runs(name: str) -> bool:
    """Whether the process of an instance's last run is there."""
    return Run.last(name).has_process()


def _running(name: str) -> tuple[int, str] | None:
    """The process of an instance, and its run; None if it does not run."""
    run = Run.last(name)
    return (run.pid, run.id) if run.pid is not None and run.has_process() else None


def _note_running(name: str) -> None:
    """Tell the owner of an instance again which process it has, if its folder was emptied or made
    anew while it runs."""
    found = _running(name)
    if found and not os.path.lexists(folder_of(name) / PID):
        _note(name, *found)
        if _running(name) != found:
            forget_process(name, found[1])


def _note(name: str, pid: int, run: str) -> None:
    path = folder_of(name)
    text = f"{pid} {start_time_of(pid)} {run}\n"
    with (
        telling(name, f"{path / PID}: can't be written"),
        below(path) as folder,
        whole_file(folder, PID, text, mode=0o644) as (temporary, descriptor),
    ):
        os.fchmod(descriptor, 0o644)
        os.rename(temporary, PID, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def whole_file(folder: int, name: str, text: str, *, mode: int) -> Iterator[tuple[str, int]]:
    """Write a file under a temporary name; gives that name and the open file to a block that gives
    the file its own name.

    :param folder: an open one.
    :raises OSError: if it can't be written.
    """
    temporary = f".{name}.{os.getpid()}"
    _unlink(temporary, folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
        yield temporary, descriptor
    finally:
        os.close(descriptor)
        _unlink(temporary, folder)


def forget_process(name: str, run: str) -> None:
    """Remove the number of an instance's process, if it is of this run."""
    with contextlib.suppress(OSError), below(folder_of(name)) as folder:
        if read(folder, PID).split()[2:3] == [run]:
            _unlink(PID, folder)


def _belongs_there(file: str) -> bool:
    """Whether a file is one of the three, or a temporary file for one."""
    return any(file == one or file.startswith(f".{one}.") for one in (WATCHDOG, TERMINATE, PID))


def _on_node(name: str, *command: str) -> None:
    """Mount or unmount for the whole node: this process may have a mount namespace of its own.

    :raises InstanceError: if that fails.
    """
    # systemd-mount would take long for many: systemd notes mounts five times a second at most.
    done = run_bounded(
        ("nsenter", "--mount=/proc/1/ns/mnt", *command),
        timeout_s=None,
        environment={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode:
        said = done.stderr.strip().partition("\n")[0]
        raise InstanceError(name, f"{folder_of(name)}: {said or command[0]}")


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _handler() -> int:
    try:
        return pwd.getpwnam(USER).pw_uid
    except KeyError:
        return 0  # brine-lifecycle is not installed


def _group(name: str, group: str) -> int:
    if not group:
        return 0
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InstanceError(name, f"the group of its owner is not known: {group}") from None
