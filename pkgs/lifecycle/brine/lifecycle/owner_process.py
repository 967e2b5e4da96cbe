"""The owner's side: an owner's watchdog, its request, and the process of its instance.

All of it works in a container that has only the instance's folder, and none of Brine's other files.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from brine.common import paths
from brine.common.errors import BrineError, tell_error, warn
from brine.common.process import start_time_of
from brine.common.progress import spoken_wait
from brine.instance import store
from brine.instance.messages import who_asks
from brine.instance.owner import (
    PID,
    TERMINATE,
    WATCHDOG,
    find_file,
    folder_of,
    open_folder,
    read,
    runs,
    whole_file,
)
from brine.instance.start import start_instance
from brine.lifecycle.owner_watch import EndReason
from brine.vm import markers
from brine.vm.markers import MarkerKind
from brine.vm.run import Run

_LOOK_S = 0.25
_VERDICT_S = 10.0
_STALE_S = 300.0
_MOST_OWNERS = 8
_NO_INODE = -1

STATUSES = {"user": 0, "admin": 10, "crash": 11}
"""The exit status of an owner, by the party that ended the instance."""
STATUS_UNKNOWN = 12


class OwnerError(BrineError):
    """An owner that can't do its work.

    :param name: of the instance.
    """

    def __init__(self, name: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{name}: {message}", hint=hint)


@dataclass(frozen=True, slots=True)
class NotedProcess:
    """The process of an instance, as the file ``pid`` has it, or an owner in its watchdog.

    :param start_time: in clock ticks since the boot; with it, the number is no later process's.
    :param run: the invocation id of the instance's unit; of an owner, its own unit or its user.
    """

    pid: int
    start_time: str
    run: str

    def is_visible(self) -> bool:
        """Whether it runs, and this process can see it."""
        return bool(self.start_time) and start_time_of(self.pid) == self.start_time


class Folder:
    """The folder of an instance and its owner.

    :raises OwnerError: if it is not there.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = folder_of(name)
        self._has_asked = self._is_to_ask_again = False
        try:
            self.descriptor = open_folder(self.path)
        except PermissionError as error:
            hint = "be root, or in the group of its owner; see group in brine-spec(5)"
            raise OwnerError(name, f"{self.path}: {error.strerror}", hint=hint) from error
        except OSError as error:
            hint = f"brine lifecycle prepare {name} makes it, as root"
            raise OwnerError(name, f"{self.path}: {error.strerror}", hint=hint) from error

    def reopen(self) -> None:
        """Use the folder that has taken this one's place. A request is to be made there again.

        :raises OSError: if there is none.
        """
        descriptor = open_folder(self.path)
        os.close(self.descriptor)
        self.descriptor = descriptor
        self._is_to_ask_again = self._has_asked

    def is_replaced(self) -> bool:
        """Whether its path now leads to another folder, or to none."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def process(self) -> NotedProcess | None:
        """The process of the instance; None if it does not run.

        :raises OSError: if that can't be known now.
        """
        words = read(self.descriptor, PID).split()
        if len(words) != 3 or not words[0].isdecimal():
            return None
        return NotedProcess(int(words[0]), words[1], words[2])

    def owners(self) -> list[NotedProcess]:
        """The owners that have put themselves down in the watchdog, the last one first."""
        found = []
        for line in read(self.descriptor, WATCHDOG).splitlines()[:_MOST_OWNERS]:
            pid, start_time, unit = (*line.split(), "", "", "")[:3]
            if pid.isdecimal():
                found.append(NotedProcess(int(pid), start_time, unit))
        return found

    def ask(self) -> None:
        """Ask for the instance's end.

        :raises OSError: if the request can't be made.
        """
        process, folder = self.process(), self.descriptor
        text = f"{process.run}\n" if process else ""
        with (
            whole_file(folder, TERMINATE, text, mode=0o660) as (temporary, _),
            contextlib.suppress(FileExistsError),
        ):
            os.link(
                temporary,
                TERMINATE,
                src_dir_fd=folder,
                dst_dir_fd=folder,
                follow_symlinks=False,
            )
        self._has_asked, self._is_to_ask_again = True, False

    def is_without_process(self) -> bool:
        """Whether the instance does not run, as far as this process can see."""
        try:
            return self.process() is None and not is_seen_running(self.name)
        except OSError:
            return False

    def is_asked(self) -> bool:
        """Whether a request waits to be confirmed."""
        try:
            return find_file(self.descriptor, TERMINATE) is not None
        except OSError:
            return True

    def has_ended(self) -> bool:
        """Whether the request was confirmed, or the instance has ended."""
        try:
            if self.is_replaced():
                self.reopen()
            if self._is_to_ask_again:
                self.ask()
            return not self.is_asked() or self.is_without_process()
        except OSError:
            return not self.path.is_dir() and not is_seen_running(self.name)


def is_seen_running(name: str) -> bool:
    """Whether this process sees that an instance with an owner runs, which no container does."""
    if not runs(name):
        return False
    try:
        return store.load(name).owner is not None
    except BrineError:
        return True


class Watchdog:
    """The watchdog of this process, which it makes anew: the last owner counts."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._inode = 0
        self._is_lost = False
        self._trouble = ""

    def touch(self) -> None:
        """Say that the owner is there. A failure is told once, and the next time tries again."""
        try:
            if self._folder.is_replaced():
                self._folder.reopen()
                self._inode = self._inode and _NO_INODE
            self._touch()
            self._trouble = ""
        except OSError as error:
            if self._trouble != str(error):
                warn(f"{self._folder.path / WATCHDOG}: can't be touched: {error.strerror}")
            self._trouble = str(error)

    def _touch(self) -> None:
        folder = self._folder.descriptor
        found = find_file(folder, WATCHDOG)
        if self._inode and found and found.inode != self._inode:
            if not self._is_lost:
                warn(f"{self._folder.name}: another owner has taken it over, and counts now")
            self._is_lost = True
            return
        if not self._inode or found is None:
            self._make()
            return
        os.utime(WATCHDOG, dir_fd=folder, follow_symlinks=False)

    def _make(self) -> None:
        folder, pid = self._folder.descriptor, os.getpid()
        others = [one for one in self._folder.owners() if one.is_visible() and one.pid != pid]
        me = NotedProcess(pid, start_time_of(pid), who_asks())
        text = "".join(f"{one.pid} {one.start_time} {one.run}\n" for one in (me, *others))
        with whole_file(folder, WATCHDOG, text, mode=0o664) as (temporary, descriptor):
            self._inode = os.fstat(descriptor).st_ino
            os.rename(temporary, WATCHDOG, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self) -> None:
        """Say that the owner is no more."""
        with contextlib.suppress(OSError):
            found = find_file(self._folder.descriptor, WATCHDOG)
            if found and found.inode == self._inode:
                os.unlink(WATCHDOG, dir_fd=self._folder.descriptor)


def ask_and_wait(name: str, timeout_s: float | None) -> bool:
    """Ask for an instance's end, and wait for it; returns whether it has ended.

    :param timeout_s: None is without a limit.
    :raises OwnerError: if the request could not be made in that time.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    trouble = ""
    while not folder_of(name).is_dir():
        if not is_seen_running(name):
            return True
        if deadline and time.monotonic() > deadline:
            Folder(name)  # its error names the missing part
        time.sleep(_LOOK_S)
    folder = Folder(name)
    while True:
        try:
            folder.ask()
            break
        except OSError as error:
            if trouble != str(error):
                warn(f"{folder.path / TERMINATE}: can't be made: {error.strerror}; trying again")
            trouble = str(error)
        if folder.is_without_process():
            return True
        if deadline and time.monotonic() > deadline:
            raise OwnerError(name, f"its end can't be asked for: {trouble}")
        time.sleep(_LOOK_S)
    while not folder.has_ended():
        if deadline and time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class OwnerProcess:
    """An owner: this process, for as long as it runs.

    :param interval_s: between two touches of the watchdog.
    :param starts: whether it starts the instance.
    :param command: that it owns the instance for; empty if it is the instance's end that counts.
    """

    def __init__(
        self, folder: Folder, *, interval_s: float, starts: bool, command: list[str]
    ) -> None:
        self._folder = folder
        self._watchdog = Watchdog(folder)
        self._interval_s = interval_s
        self._starts = starts
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._process: NotedProcess | None = None
        self._starting: SimpleQueue[BrineError | None] = SimpleQueue()
        self._is_asking = self._is_to_ask = False
        self._woken, self._waker = socket.socketpair()
        # A container that has just the folder sees no processes of the node's.
        self._sees_node = paths.MARKS_DIR.is_dir()
        self._run_before = Run.last(folder.name)
        self._poll = select.poll()
        self._pidfd = -1
        self._has_exited = False
        self._touch_s = 0.0
        self._trouble = ""
        self._fault: OwnerError | None = None

    def run(self) -> int:
        """Own the instance; returns the exit status."""
        if self._command and not shutil.which(self._command[0]):
            raise OwnerError(self._folder.name, f"there is no command {self._command[0]}")
        for one in (self._woken, self._waker):
            one.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        if self._is_told_while_former_ends():
            return 0
        self._watchdog.touch()
        try:
            if self._starts:
                Thread(target=self._start, daemon=True).start()
            elif self._command:
                self._run_command()
            return self._own()
        finally:
            if self._child and self._child.poll() is None:
                self._child.kill()
            self._watchdog.remove()

    def _is_told_while_former_ends(self) -> bool:
        """Wait until a former owner's request is confirmed; returns whether this process was told
        to end meanwhile."""
        name, deadline = self._folder.name, time.monotonic() + _STALE_S
        what = f"{name}: waiting for the end that a former owner has asked for"
        with spoken_wait(f"{what}, at most {_STALE_S:g} s"):
            while self._folder.is_asked():
                if time.monotonic() > deadline:
                    text = "a former owner's request is not confirmed"
                    hint = "systemctl status brine-lifecycle tells why"
                    raise OwnerError(name, text, hint=hint)
                if select.select([self._woken], [], [], _LOOK_S)[0]:
                    return True
        return False

    def _start(self) -> None:
        try:
            start_instance(self._folder.name)
            self._starting.put(None)
        except BrineError as error:
            self._starting.put(error)

    def _run_command(self) -> None:
        try:
            self._child = subprocess.Popen(self._command)
        except OSError as error:
            text = f"{self._command[0]}: {error.strerror}"
            self._fault = OwnerError(self._folder.name, text)
            self._is_to_ask = True

    def _own(self) -> int:
        self._poll.register(self._woken, select.POLLIN)
        while True:
            now_s = time.monotonic()
            if now_s >= self._touch_s:
                self._watchdog.touch()
                self._touch_s = now_s + self._interval_s
            left_s = self._touch_s - now_s
            if self._pidfd < 0 or self._command or self._is_asking:
                left_s = min(left_s, _LOOK_S)  # files do not tell of their changes
            for descriptor, _ in self._poll.poll(max(left_s, 0.01) * 1000):
                if descriptor == self._pidfd:
                    self._note_exit()
                else:
                    self._woken.recv(100)
                    self._is_to_ask = True
            if self._is_to_ask:
                self._ask()
            status = self._status()
            if status is not None:
                return status

    def _ask(self) -> None:
        """Ask for the instance's end, as this process was told to end."""
        if self._child and self._child.poll() is None:
            self._child.terminate()
        try:
            # Of an instance that has ended already, a request would hold up the next owner.
            if self._process is None or not self._folder.is_without_process():
                self._folder.ask()
            self._is_asking, self._is_to_ask = True, False
        except OSError as error:
            if self._trouble != str(error):
                warn(f"{self._folder.path / TERMINATE}: can't be made: {error.strerror}")
            self._trouble = str(error)

    def _status(self) -> int | None:
        """The exit status, if it is time to end."""
        if self._is_asking and self._folder.has_ended():
            if self._fault:
                raise self._fault
            return self._child.wait() if self._child else 0
        with contextlib.suppress(Empty):
            error = self._starting.get_nowait()
            if error and not self._is_asking:
                raise error
            if self._command and not self._is_asking:
                self._run_command()
        if self._child:
            if not self._is_asking and self._child.poll() is not None:
                self._is_to_ask = True
            return None
        return None if self._is_asking else self._end_of_instance()

    def _end_of_instance(self) -> int | None:
        if self._pidfd >= 0:
            return None
        try:
            now = self._folder.process()
        except OSError:
            return None
        if now and self._sees_node and not now.is_visible() and self._is_over(now.run):
            now = None  # the unit's last step could not remove the file
        if self._process is None:
            self._process = now
            if now and self._sees_node:
                self._watch(now)
            return None if now else self._end_between_looks()
        if not self._has_exited and now is not None and now.run == self._process.run:
            return None
        return _status_of(Run(self._folder.name, self._process.run))

    def _end_between_looks(self) -> int | None:
        """The exit status if the instance has begun and ended before this process saw it run."""
        run = Run.last(self._folder.name)
        return _status_of(run) if run != self._run_before and run.verdict else None

    def _is_over(self, run: str) -> bool:
        """Whether the node's markers say that a run has ended. An owner that does not see its
        process may be in another PID namespace."""
        last = Run.last(self._folder.name)
        return last.id != run or last.verdict is not None

    def _watch(self, process: NotedProcess) -> None:
        """Have the kernel tell when a process exits, if this one can see it."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            return
        if not process.is_visible():  # the number may be another process's by now
            os.close(pidfd)
            return
        self._pidfd = pidfd
        self._poll.register(pidfd, select.POLLIN)

    def _note_exit(self) -> None:
        self._poll.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd, self._has_exited = -1, True


def _status_of(run: Run) -> int:
    """The exit status for the end of a run. An end that neither its user nor an owner has asked
    for is told."""
    who, cause = _verdict(run)
    status = 0 if cause == EndReason.REQUEST else STATUSES.get(who, STATUS_UNKNOWN)
    if status:
        text = f"has ended: {who}, {cause}" if who else "has ended, and it is not known here why"
        tell_error(OwnerError(run.name, text, hint=f"brine instance info {run.name}"))
    return status


def _verdict(run: Run) -> tuple[str, str]:
    """The party that ended a run, and the cause; both are empty if they are not known here."""
    deadline = time.monotonic() + _VERDICT_S
    while markers.file_of(MarkerKind.START, run.name).exists():
        if verdict := run.again().verdict:
            return verdict.who, verdict.cause
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    return "", ""
