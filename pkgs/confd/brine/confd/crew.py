"""The worker processes: forked with what they need, watched, replaced all at once or one by one.

A configuration is loaded in one process and reaches the workers by :manpage:`fork(2)`, so none of
them stops answering to load it: new workers stand ready, the old ones are told to stop, and the
new ones begin when the last old one has gone. The sockets stay open all the time, and hold what
comes in between, for some hundred microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from brine.common.errors import BrineError
from brine.common.journal import tell
from brine.confd import messages
from brine.confd.responder import Responder
from brine.confd.worker import Report, Worker

log = logging.getLogger(__name__)

_STUCK_S = 10.0
"""Without a sign of life for so long, a worker is replaced."""
_STOP_S = 2.0
"""So long a worker may take to stop."""
_SHORT_LIFE_S = 1.0
"""A worker that ends sooner is replaced only after as long."""
_READ_SIZE = 65536


class CrewError(BrineError):
    """Workers that can't be had."""


@dataclass
class _Member:
    """A worker, seen from outside.

    :param number: which set of sockets it has.
    :param orders: descriptor, to write to; -1 once it was told to stop.
    :param reports: descriptor, to read from.
    """

    pid: int
    number: int
    orders: int
    reports: int
    started_s: float
    heard_s: float
    told_s: float | None = None
    pending: bytes = b""


class Crew:
    """Keeps workers at work. Needs a running event loop, whose signals it takes part in.

    :param report: called with each worker's report.
    :param prepare: called in each new worker, before it begins.
    """

    def __init__(self, *, report: Callable[[Report], None], prepare: Callable[[], None]) -> None:
        self._report = report
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._members: dict[int, _Member] = {}  # by process id
        self._sockets: Sequence[Sequence[socket.socket]] = []
        self._given_up: list[socket.socket] = []  # open until the new workers have been forked
        self._when_taken_over: list[Callable[[], None]] = []
        self._responder: Responder | None = None
        # A pipe that ends with these workers, and one that ended, or will, with those before them.
        self._turn: tuple[int, int] | None = None
        self._before: tuple[int, int] | None = None
        self._trouble = ""
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def replace(
        self,
        sockets: Sequence[Sequence[socket.socket]],
        responder: Responder,
        *,
        taken_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Put new workers in the place of those that there are.

        :param sockets: for each worker those that it has. Those of before that are not among them
            are closed.
        :param taken_over: called when the new workers answer, and no old one does.
        :raises CrewError: if there can be no more processes; then the old ones go on.
        """
        old = list(self._members.values())
        former = self._sockets, self._responder, self._turn, self._before
        kept = {one for its in sockets for one in its}
        given_up = [one for its in self._sockets for one in its if one not in kept]
        try:
            turn = os.pipe()
        except OSError as error:
            raise CrewError(f"no pipe for workers: {error.strerror}") from error
        self._sockets, self._responder, self._given_up = sockets, responder, given_up
        self._before, self._turn = self._turn, turn
        try:
            for number in range(len(sockets)):
                self._start(number)
        except OSError as error:
            for pid in self._members.keys() - {member.pid for member in old}:
                os.kill(pid, signal.SIGKILL)  # it waits for its turn, which will not come
                self._members[pid].told_s = time.monotonic()
            _close(turn)
            self._sockets, self._responder, self._turn, self._before = former
            self._given_up = []
            raise CrewError(f"no process for a worker: {error.strerror}") from error
        self._when_taken_over.append(taken_over)
        for one in self._given_up:
            one.close()
        self._given_up = []
        for member in old:
            self._tell_to_stop(member)
        if self._before:
            os.close(self._before[1])
            self._before = (self._before[0], -1)
        if former[3]:
            os.close(former[3][0])
        self._see_whether_taken_over()

    def check(self) -> None:
        """Replace workers that are missing, or give no sign of life. To be called each second."""
        now_s = time.monotonic()
        for member in self._members.values():
            if member.told_s is not None:
                stuck = now_s > member.told_s + _STOP_S
            else:
                stuck = now_s > member.heard_s + _STUCK_S
            if stuck:
                text = f"worker {member.number} (process {member.pid}) hangs: replacing it"
                tell(log, messages.WORKER_STUCK, text)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
                member.heard_s = now_s
                member.told_s = now_s if member.told_s is not None else None
        self._fill_up()

    def stop(self) -> None:
        """Tell all workers to stop, and wait for them, at most for a while."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for member in self._members.values():
            self._tell_to_stop(member)
        limit_s = time.monotonic() + _STOP_S
        for member in self._members.values():
            while not _has_ended(member.pid):
                if time.monotonic() > limit_s:
                    os.kill(member.pid, signal.SIGKILL)
                time.sleep(0.005)
            self._hear(member)
            self._forget(member)
        self._members.clear()

    def _start(self, number: int) -> None:
        """:raises OSError: if there can be no more processes, or descriptors."""
        orders = os.pipe()
        try:
            reports = os.pipe()
        except OSError:
            _close(orders)
            raise
        os.set_blocking(reports[0], False)
        os.set_blocking(reports[1], False)
        try:
            with _no_signals() as mask:
                pid = os.fork()
                if pid == 0:
                    self._be_worker(number, orders, reports, mask)
        except OSError:
            _close(orders)
            _close(reports)
            raise
        os.close(orders[0])
        os.close(reports[1])
        now_s = time.monotonic()
        member = _Member(pid, number, orders[1], reports[0], now_s, now_s)
        self._members[pid] = member
        self._loop.add_reader(member.reports, self._hear, member)

    def _be_worker(
        self,
        number: int,
        orders: tuple[int, int],
        reports: tuple[int, int],
        mask: set[signal.Signals],
    ) -> None:
        """What the new process does; it does not return."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            # They are for the main process; when that ends, so does the pipe of orders.
            for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(ignored, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # The other ends of pipes: they must end when the process ends that they belong to.
            for member in self._members.values():
                if member.orders >= 0:
                    os.close(member.orders)
                os.close(member.reports)
            os.close(orders[1])
            os.close(reports[0])
            if self._before and self._before[1] >= 0:
                os.close(self._before[1])
            # A socket that nobody reads would still get its share of what comes in.
            own = self._sockets[number]
            for one in (*self._given_up, *(one for its in self._sockets for one in its)):
                if one not in own:
                    one.close()
            self._prepare()
            assert self._responder is not None
            Worker(
                own,
                self._responder,
                orders=orders[0],
                reports=reports[1],
                turn=self._before[0] if self._before else None,
            ).run()
            status = 0
        except BaseException:
            log.exception("worker %d failed", number)
        finally:
            os._exit(status)

    def _hear(self, member: _Member) -> None:
        try:
            data = os.read(member.reports, _READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(member.reports)
            return
        member.heard_s = time.monotonic()
        *lines, member.pending = (member.pending + data).split(b"\n")
        for line in lines:
            self._report(Report.decode(line))

    def _tell_to_stop(self, member: _Member) -> None:
        if member.orders >= 0:
            os.close(member.orders)
            member.orders = -1
            member.told_s = time.monotonic()

    def _reap(self) -> None:
        for member in list(self._members.values()):
            status = _has_ended(member.pid)
            if status is None:
                continue
            del self._members[member.pid]
            self._hear(member)
            self._forget(member)
            if member.told_s is None:
                self._lost(member, status)
        self._see_whether_taken_over()

    def _see_whether_taken_over(self) -> None:
        if any(member.told_s is not None for member in self._members.values()):
            return
        if self._before:
            os.close(self._before[0])
            self._before = None
        due, self._when_taken_over = self._when_taken_over, []
        for taken_over in due:
            taken_over()

    def _lost(self, member: _Member, status: str) -> None:
        text = f"worker {member.number} (process {member.pid}) ended: {status}: starting another"
        tell(log, messages.WORKER_LOST, text)
        if time.monotonic() - member.started_s > _SHORT_LIFE_S:
            self._fill_up()  # else with the next check, so as not to do nothing else

    def _fill_up(self) -> None:
        """Start the workers that are missing."""
        there = {member.number for member in self._members.values() if member.told_s is None}
        try:
            for number in range(len(self._sockets)):
                if number not in there:
                    self._start(number)
        except OSError as error:
            if not self._trouble:
                self._trouble = f"no process for a worker: {error.strerror}; trying again"
                tell(log, messages.WORKER_LOST, self._trouble)
        else:
            self._trouble = ""

    def _forget(self, member: _Member) -> None:
        self._loop.remove_reader(member.reports)
        os.close(member.reports)
        if member.orders >= 0:
            os.close(member.orders)
            member.orders = -1


def _close(pipe: tuple[int, int]) -> None:
    for descriptor in pipe:
        os.close(descriptor)


def _has_ended(pid: int) -> str | None:
    """How a child ended, in words; None while it has not."""
    try:
        waited, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "unknown"
    if not waited:
        return None
    code = os.waitstatus_to_exitcode(status)
    return f"status {code}" if code >= 0 else signal.Signals(-code).name


@contextlib.contextmanager
def _no_signals() -> Iterator[set[signal.Signals]]:
    """Hold signals back: between a fork and the child's own handlers they would reach ours."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield {signal.Signals(number) for number in mask}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
