"""The main process of the daemon: loads configuration, keys and settings, supervises workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brine.common.daemon import apply_memory_lock
from brine.common.errors import BrineError
from brine.common.figures import INTERVAL_S, FiguresFile, rows_of
from brine.common.inotify import DirectoryWatch
from brine.common.journal import tell
from brine.common.systemd import ServiceManager
from brine.confd import messages
from brine.confd.answers import Answers
from brine.confd.keys import FoundKey
from brine.confd.protocol import HmacKey, place
from brine.confd.server import LargeAnswers, Responder, Worker, open_sockets
from brine.confd.settings import ConfdSettings
from brine.config.model import Configuration
from brine.config.schema import ConfigError

# The worker processes: they are forked, watched, and replaced all at once or one by one.

log = logging.getLogger(__name__)

_STUCK_S = 10.0  # without a sign of life from a worker
_STOP_S = 2.0  # until a worker has stopped
_SHORT_LIFE_S = 1.0
"""A worker that has lived shorter is not replaced at once."""
_READ_SIZE = 65536


class WorkerError(BrineError):
    """Worker processes can't be started."""


@dataclass(frozen=True)
class _Use:
    """The state that workers answer with: all of it changes at once, or nothing does.

    :param sockets: of each worker.
    :param answers: None without a configuration.
    """

    settings: ConfdSettings
    keys: Sequence[FoundKey]
    sockets: list[list[socket.socket]]
    answers: Answers | None = None

    def all_sockets(self) -> set[socket.socket]:
        return {one for its in self.sockets for one in its}


@dataclass(frozen=True)
class _Generation:
    """Workers that answer with the same.

    :param turn: a pipe that ends when the last of these workers is gone and this process has
        closed its own end: then it is the next generation's turn.
    """

    use: _Use
    turn: tuple[int, int]


@dataclass
class _WorkerProcess:
    """A worker process, its number in its generation, and this end of its link."""

    pid: int
    number: int
    link: socket.socket
    started_s: float
    due_s: float  # when it must have shown a sign of life, or have ended if it was told to
    is_told_to_end: bool = False


class WorkerPool:
    """Keeps workers running. Needs a running event loop, and handles its SIGCHLD.

    :param report: called with each worker's report, see :class:`~brine.confd.server.Worker`.
    """

    def __init__(self, report: Callable[[int, Mapping[str, int], str], None]) -> None:
        self._report = report
        self._given = LargeAnswers()
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _WorkerProcess] = {}  # by process id
        self._current: _Generation | None = None
        self._former_turn: int | None = None  # its end to read from, while any of those work
        self._when_taken_over: list[Callable[[], None]] = []
        self._trouble = ""
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def replace(self, use: _Use, taken_over: Callable[[], None]) -> None:
        """Replace all workers by new ones, and close former sockets that these don't have.

        :param taken_over: called when the new workers answer, and no old one does.
        :raises WorkerError: if processes can't be started; then the old workers go on.
        """
        old, former = list(self._processes.values()), self._current
        try:
            new = _Generation(use, os.pipe())
        except OSError as error:
            raise WorkerError(f"no pipe for workers: {error.strerror}") from error
        try:
            for number in range(len(use.sockets)):
                self._start(number, new, former.turn[0] if former else None)
        except OSError as error:
            for pid in self._processes.keys() - {process.pid for process in old}:
                os.kill(pid, signal.SIGKILL)  # it waits for its turn, which will not come
                self._tell_to_end(self._processes[pid])
            for end in new.turn:
                os.close(end)
            raise WorkerError(f"no process for a worker: {error.strerror}") from error
        self._current = new
        self._when_taken_over.append(taken_over)
        for process in old:
            self._tell_to_end(process)
        if former:
            for one in former.use.all_sockets() - use.all_sockets():
                one.close()
            os.close(former.turn[1])
            if self._former_turn is not None:
                os.close(self._former_turn)
            self._former_turn = former.turn[0]
        self._see_whether_taken_over()

    def check(self) -> None:
        """Replace workers that are missing or show no sign of life. Call this each second."""
        now_s = time.monotonic()
        for process in self._processes.values():
            if now_s > process.due_s:
                text = f"worker {process.number} (process {process.pid}) hangs: replacing it"
                tell(log, messages.WORKER_STUCK, text)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.due_s = now_s + _STOP_S
        self._fill_up()

    def stop(self) -> None:
        """Tell all workers to stop, and wait for them, at most for a while."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for process in self._processes.values():
            self._tell_to_end(process)
        limit_s = time.monotonic() + _STOP_S
        for process in self._processes.values():
            while not _has_ended(process.pid):
                if time.monotonic() > limit_s:
                    os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.005)
            self._forget(process)
        self._processes.clear()

    def _start(self, number: int, generation: _Generation, turn: int | None) -> None:
        """:raises OSError: if there can be no more processes, or descriptors."""
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        link, its_link = socket.socketpair(socket.AF_UNIX, kind)
        with its_link, contextlib.ExitStack() as undo:
            undo.enter_context(link)
            with _no_signals() as mask:
                pid = os.fork()
                if pid == 0:
                    link.close()
                    self._be_worker(number, generation, turn, its_link, mask)
            undo.pop_all()
        now_s = time.monotonic()
        self._processes[pid] = _WorkerProcess(pid, number, link, now_s, now_s + _STUCK_S)
        self._loop.add_reader(link, self._hear, self._processes[pid])

    def _be_worker(
        self,
        number: int,
        generation: _Generation,
        turn: int | None,
        link: socket.socket,
        mask: set[signal.Signals],
    ) -> None:
        """Run a worker; does not return."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            # They are for the main process; when that ends, so does the link.
            for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(ignored, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # Links and pipes must end when the process ends that they belong to.
            for process in self._processes.values():
                process.link.close()
            # A socket that no worker reads would still get its share of datagrams.
            use = generation.use
            others = use.all_sockets()
            if self._current and self._current is not generation:
                os.close(self._current.turn[1])
                others |= self._current.use.all_sockets()
            for one in others.difference(use.sockets[number]):
                one.close()
            apply_memory_lock(use.settings.memory_lock)  # the main process's is not inherited
            keys = tuple(HmacKey(one.secret) for one in use.keys)
            skew_s = use.settings.max_clock_skew_s
            responder = Responder(use.answers, keys, max_clock_skew_s=skew_s, given=self._given)
            Worker(use.sockets[number], responder, link=link, turn=turn).run()
            status = 0
        except BaseException:
            log.exception("worker %d failed", number)
        finally:
            os._exit(status)

    def _hear(self, process: _WorkerProcess) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := process.link.recv(_READ_SIZE):
                if not process.is_told_to_end:
                    process.due_s = time.monotonic() + _STUCK_S
                self._report(*json.loads(data))
            self._loop.remove_reader(process.link)

    def _tell_to_end(self, process: _WorkerProcess) -> None:
        if not process.is_told_to_end:
            with contextlib.suppress(OSError):  # it has ended by itself
                process.link.shutdown(socket.SHUT_WR)
            process.due_s = time.monotonic() + _STOP_S
            process.is_told_to_end = True

    def _reap(self) -> None:
        for process in list(self._processes.values()):
            status = _has_ended(process.pid)
            if status is None:
                continue
            del self._processes[process.pid]
            self._forget(process)
            if process.is_told_to_end:
                continue
            text = f"worker {process.number} (process {process.pid}) ended: {status}"
            tell(log, messages.WORKER_LOST, f"{text}: starting another")
            if time.monotonic() - process.started_s > _SHORT_LIFE_S:
                self._fill_up()  # else with the next check, so as not to do nothing else
        self._see_whether_taken_over()

    def _see_whether_taken_over(self) -> None:
        if any(process.is_told_to_end for process in self._processes.values()):
            return
        if self._former_turn is not None:
            os.close(self._former_turn)
            self._former_turn = None
        due, self._when_taken_over = self._when_taken_over, []
        for taken_over in due:
            taken_over()

    def _fill_up(self) -> None:
        """Start the workers that are missing."""
        if not self._current:
            return
        there = {one.number for one in self._processes.values() if not one.is_told_to_end}
        try:
            for number in range(len(self._current.use.sockets)):
                if number not in there:
                    self._start(number, self._current, self._former_turn)
        except OSError as error:
            if not self._trouble:
                self._trouble = f"no process for a worker: {error.strerror}; trying again"
                tell(log, messages.WORKER_LOST, self._trouble)
        else:
            self._trouble = ""

    def _forget(self, process: _WorkerProcess) -> None:
        self._hear(process)
        self._loop.remove_reader(process.link)
        process.link.close()


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


_LOOK_INTERVAL_S = 1.0
_STATUS_INTERVAL_S = 10.0
_REFUSALS_INTERVAL_S = 60.0
"""At most one line about refused datagrams in this time."""

_NEVER_LOOKED = (0, 0, 0, 0)


class Supervisor:
    """Everything that confd does beside answering. Needs a running event loop.

    :param keys: the valid keys, the current one first.
    """

    def __init__(
        self, settings: ConfdSettings, keys: Sequence[FoundKey], service: ServiceManager
    ) -> None:
        self._use = _Use(settings, keys, [])
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._workers = WorkerPool(self._take_report)
        self._seen: tuple[int, ...] | None = _NEVER_LOOKED  # what was loaded, or refused, last
        self._trouble = ""
        self._watch = self._new_watch()
        self._figures = FiguresFile(service.runtime_dir)
        self._answered = 0
        self._all_refused: Counter[tuple[str, ...]] = Counter()
        self._refused: Counter[str] = Counter()
        self._refused_source = ""
        self._refusals_due_s = 0.0

    def start(self) -> None:
        """Open the port, load what there is, and begin to answer.

        :raises PortError: if the port can't be had.
        """
        settings = self._use.settings
        sockets = open_sockets(settings.addresses(), settings.port, settings.workers)
        self._use = replace(self._use, sockets=sockets)
        if self._service.watchdog_s:
            self._every(self._service.watchdog_s / 3, self._service.alive)
        self._watch.start()
        if not self._use.answers:
            self._begin(self._use)  # all that asks is told that there is nothing to answer from
        self._every(_LOOK_INTERVAL_S, self._check)
        self._every(_STATUS_INTERVAL_S, self._show_status)
        self._every(INTERVAL_S, self._write_figures)
        self._service.ready(self._status())
        log.info("%s", self._status())

    def reload(self, settings: ConfdSettings, keys: Sequence[FoundKey]) -> None:
        """Go on with other settings and keys; that all answers are by them is logged. No request is
        lost, unless ports or workers go.

        :raises BrineError: if a port, an address or a process can't be had; all stays as it was.
        """
        former = self._use
        kept: list[list[socket.socket]] = []
        places = [(one.addresses(), one.port) for one in (settings, former.settings)]
        if places[0] == places[1]:
            kept = former.sockets[: settings.workers]
        missing = settings.workers - len(kept)
        added = open_sockets(settings.addresses(), settings.port, missing, sole=False)
        answers = former.answers
        if answers and settings.reveal_secrets != former.settings.reveal_secrets:
            answers = Answers(answers.configuration, reveal_secrets=settings.reveal_secrets)

        def taken_over() -> None:
            self._service.ready(self._status())
            log.info("settings and keys reloaded")

        use = _Use(settings, keys, [*kept, *added], answers)
        try:
            self._begin(use, taken_over)
        except WorkerError:
            for one in use.all_sockets() - former.all_sockets():
                one.close()
            raise
        if settings.config_file != former.settings.config_file:
            self._watch.close()
            self._watch = self._new_watch()
            self._seen = _NEVER_LOOKED
            self._watch.start()

    def stop(self) -> None:
        """End the workers; each first finishes its datagram."""
        self._workers.stop()
        self._tell_refusals()
        self._write_figures()

    def _begin(self, use: _Use, taken_over: Callable[[], None] = lambda: None) -> None:
        """Have workers answer with this."""
        self._workers.replace(use, taken_over)
        self._use = use

    # The configuration.

    def _new_watch(self) -> DirectoryWatch:
        file = self._use.settings.config_file

        def appeared(name: str) -> None:
            if name == file.name:
                self._look()

        return DirectoryWatch(file.parent, appeared=appeared, rescan=self._look)

    def _look(self) -> None:
        """Load the configuration if its file is another than the last time."""
        file = self._use.settings.config_file
        identity = _identity(file)
        if identity == self._seen:
            return
        self._seen = identity
        if identity is None:
            if self._use.answers:
                self._refuse(f"{file} is gone")
                return
            self._trouble = f"no configuration: there is no {file}"
            tell(log, messages.NO_CONFIG, self._trouble)
            self._show_status()
            return
        started_s = time.monotonic()
        try:
            answers = self._load(file)
            # It stays as it is until it is dropped: not to be gone through, and copied, by workers.
            gc.freeze()
            self._begin(replace(self._use, answers=answers))
        except WorkerError as error:
            self._seen = _NEVER_LOOKED  # to be tried again
            self._refuse(str(error))
        except OSError as error:
            self._seen = _NEVER_LOOKED
            self._refuse(f"{file} can't be read: {error.strerror}")
        except ConfigError as error:
            self._refuse(f"{file}: {error}")
        except Exception:
            # Whatever the fault in that file is, the workers go on answering.
            log.exception("%s", file)
            self._refuse(f"{file} can't be used")
        else:
            self._trouble = ""
            took_ms = (time.monotonic() - started_s) * 1000
            tell(log, messages.CONFIG_LOADED, f"{self._contents()}, loaded in {took_ms:.0f} ms")
            self._show_status()

    def _load(self, file: Path) -> Answers:
        """:raises ConfigError: if it can't be used. :raises OSError: if it can't be read."""
        data = file.read_bytes()
        gc.disable()  # it makes a hundred thousands of objects, all of which stay
        try:
            configuration = Configuration.parse(data)
            reveal = self._use.settings.reveal_secrets
            answers = Answers(configuration, reveal_secrets=reveal)
        finally:
            gc.enable()
        now = self._use.answers
        is_same = now and now.configuration.cluster.uuid == configuration.cluster.uuid
        if now and is_same and answers.serial < now.serial:
            message = f"serial {answers.serial} is older than {now.serial}, which is in use"
            hint = "brine config restore gives an old configuration a new serial"
            raise ConfigError(message, hint=hint)
        return answers

    def _refuse(self, trouble: str) -> None:
        use = "the old one stays in use" if self._use.answers else "there is none to use"
        if trouble != self._trouble:  # the log has a repeated fault once
            tell(log, messages.CONFIG_REFUSED, f"{trouble}; {use}")
        self._trouble = trouble
        self._show_status()

    # Reports, and what happens at intervals.

    def _take_report(self, answered: int, refused: Mapping[str, int], source: str) -> None:
        self._answered += answered
        if refused:
            self._refused.update(refused)
            self._all_refused.update({(reason,): count for reason, count in refused.items()})
            # As an IPv6 socket that takes IPv4, too, shows it.
            self._refused_source = source.removeprefix("::ffff:")
            self._tell_refusals(if_due=True)

    def _every(self, interval_s: float, act: Callable[[], None]) -> None:
        self._loop.call_later(interval_s, self._every, interval_s, act)
        act()

    def _check(self) -> None:
        self._workers.check()
        self._watch.refresh()
        self._look()  # a file that is written in place, or over a network, is not told about
        self._tell_refusals(if_due=True)

    def _tell_refusals(self, *, if_due: bool = False) -> None:
        if not self._refused or (if_due and self._loop.time() < self._refusals_due_s):
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._refused.most_common())
        text = f"not answered: {reasons}; the last from {self._refused_source}"
        tell(log, messages.REFUSED_DATAGRAMS, text)
        self._refused.clear()
        self._refusals_due_s = self._loop.time() + _REFUSALS_INTERVAL_S

    def _write_figures(self) -> None:
        """Write what this process has counted, and what it answers from."""
        now = self._use.answers
        values: dict[str, Any] = {
            "answered": self._answered,
            "refused": rows_of(self._all_refused),
            "workers": self._use.settings.workers,
            "keys": len(self._use.keys),
            "in_trouble": int(bool(self._trouble)),
        }
        if now:
            values["serial"] = now.serial
            values["instances"] = len(now.configuration.instances)
            values["nodes"] = len(now.configuration.nodes)
        self._figures.write(values)

    def _show_status(self) -> None:
        self._service.status(self._status())

    def _status(self) -> str:
        count = self._use.settings.workers
        workers = "1 worker" if count == 1 else f"{count} workers"
        places = ", ".join(place(*one.getsockname()[:2]) for one in self._use.sockets[0])
        parts = [self._contents(), f"{workers} on {places}", f"{self._answered} answered"]
        if len(self._use.keys) > 1:
            age_s = time.time() - self._use.keys[1].since_s
            parts.append(f"a previous key is valid, too, for {_age(age_s)} now")
        if self._trouble:
            parts.insert(0, f"TROUBLE: {self._trouble}")
        return "; ".join(part for part in parts if part)

    def _contents(self) -> str:
        if not self._use.answers:
            return ""
        now = self._use.answers.configuration
        nodes, instances = len(now.nodes), len(now.instances)
        counts = f"{nodes} node{'s' * (nodes != 1)}, "
        counts += f"{instances} instance{'s' * (instances != 1)}"
        return f"serial {now.cluster.serial_no}: {counts}"


def _identity(file: Path) -> tuple[int, ...] | None:
    """A value that changes when a file is replaced or written to; None if the file is not there."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _age(seconds: float) -> str:
    """A time in its largest unit, such as "3 days"."""
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length_s)
        if count > 0:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"
