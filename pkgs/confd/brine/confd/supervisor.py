"""The main process of the daemon: loads configuration, keys and settings, supervises workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from brine.common.errors import BrineError
from brine.common.inotify import DirectoryWatch
from brine.common.journal import tell
from brine.common.memory import apply_memory_lock
from brine.common.systemd import ServiceManager
from brine.confd import messages
from brine.confd.answers import Answers
from brine.confd.protocol import HmacKey
from brine.confd.server import LargeAnswers, Report, Responder, Worker, open_sockets, plain_address
from brine.confd.settings import ConfdSettings
from brine.config.model import Configuration
from brine.config.schema import ConfigError

# The worker processes: they are forked, watched, and replaced all at once or one by one.

log = logging.getLogger(__name__)

_STUCK_S = 10.0
"""How long a worker may show no sign of life before it is replaced."""
_STOP_S = 2.0
"""How long a worker may take to stop."""
_SHORT_LIFE_S = 1.0
"""A worker that has lived shorter is replaced only after this time."""
_READ_SIZE = 65536


class WorkerError(BrineError):
    """Worker processes can't be started."""


@dataclass
class _WorkerProcess:
    """A worker process of the supervisor.

    :param number: of its set of sockets.
    :param orders: descriptor to write to; -1 once it was told to stop.
    :param reports: descriptor to read from.
    """

    pid: int
    number: int
    orders: int
    reports: int
    started_s: float
    heard_s: float
    told_s: float | None = None
    pending: bytes = b""


class WorkerPool:
    """Keeps workers running. Needs a running event loop, and handles its SIGCHLD.

    :param report: called with each worker's report.
    :param prepare: called in each new worker, before it begins.
    """

    def __init__(self, *, report: Callable[[Report], None], prepare: Callable[[], None]) -> None:
        self._report = report
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _WorkerProcess] = {}  # by process id
        self._sockets: Sequence[Sequence[socket.socket]] = []
        self._former_sockets: list[socket.socket] = []  # open until new workers have been forked
        self._when_taken_over: list[Callable[[], None]] = []
        self._responder: Responder | None = None
        # A pipe that ends with these workers, and one that ends with the former workers.
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
        """Replace all workers by new ones.

        :param sockets: of each worker. Former sockets that are not among them are closed.
        :param taken_over: called when the new workers answer, and no old one does.
        :raises WorkerError: if processes can't be started; then the old workers go on.
        """
        old = list(self._processes.values())
        former = self._sockets, self._responder, self._turn, self._before
        kept = {one for its in sockets for one in its}
        former_sockets = [one for its in self._sockets for one in its if one not in kept]
        try:
            turn = os.pipe()
        except OSError as error:
            raise WorkerError(f"no pipe for workers: {error.strerror}") from error
        self._sockets, self._responder, self._former_sockets = sockets, responder, former_sockets
        self._before, self._turn = self._turn, turn
        try:
            for number in range(len(sockets)):
                self._start(number)
        except OSError as error:
            for pid in self._processes.keys() - {process.pid for process in old}:
                os.kill(pid, signal.SIGKILL)  # it waits for its turn, which will not come
                self._processes[pid].told_s = time.monotonic()
            _close(turn)
            self._sockets, self._responder, self._turn, self._before = former
            self._former_sockets = []
            raise WorkerError(f"no process for a worker: {error.strerror}") from error
        self._when_taken_over.append(taken_over)
        for one in self._former_sockets:
            one.close()
        self._former_sockets = []
        for process in old:
            self._tell_to_stop(process)
        if self._before:
            os.close(self._before[1])
            self._before = (self._before[0], -1)
        if former[3]:
            os.close(former[3][0])
        self._see_whether_taken_over()

    def check(self) -> None:
        """Replace workers that are missing or show no sign of life. Call this each second."""
        now_s = time.monotonic()
        for process in self._processes.values():
            if process.told_s is not None:
                stuck = now_s > process.told_s + _STOP_S
            else:
                stuck = now_s > process.heard_s + _STUCK_S
            if stuck:
                text = f"worker {process.number} (process {process.pid}) hangs: replacing it"
                tell(log, messages.WORKER_STUCK, text)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.heard_s = now_s
                process.told_s = now_s if process.told_s is not None else None
        self._fill_up()

    def stop(self) -> None:
        """Tell all workers to stop, and wait for them, at most for a while."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for process in self._processes.values():
            self._tell_to_stop(process)
        limit_s = time.monotonic() + _STOP_S
        for process in self._processes.values():
            while not _has_ended(process.pid):
                if time.monotonic() > limit_s:
                    os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.005)
            self._hear(process)
            self._forget(process)
        self._processes.clear()

    def _start(self, number: int) -> None:
        """:raises OSError: if there can be no more processes, or descriptors."""
        with contextlib.ExitStack() as undo:
            orders = os.pipe()
            undo.callback(_close, orders)
            reports = os.pipe()
            undo.callback(_close, reports)
            for end in reports:
                os.set_blocking(end, False)
            with _no_signals() as mask:
                pid = os.fork()
                if pid == 0:
                    self._be_worker(number, orders, reports, mask)
            undo.pop_all()
        os.close(orders[0])
        os.close(reports[1])
        now_s = time.monotonic()
        process = _WorkerProcess(pid, number, orders[1], reports[0], now_s, now_s)
        self._processes[pid] = process
        self._loop.add_reader(process.reports, self._hear, process)

    def _be_worker(
        self,
        number: int,
        orders: tuple[int, int],
        reports: tuple[int, int],
        mask: set[signal.Signals],
    ) -> None:
        """Run a worker; does not return."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            # They are for the main process; when that ends, so does the pipe of orders.
            for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(ignored, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # The other ends of pipes: they must end when the process ends that they belong to.
            for process in self._processes.values():
                if process.orders >= 0:
                    os.close(process.orders)
                os.close(process.reports)
            os.close(orders[1])
            os.close(reports[0])
            if self._before and self._before[1] >= 0:
                os.close(self._before[1])
            # A socket that nobody reads would still get its share of what comes in.
            own = self._sockets[number]
            for one in (*self._former_sockets, *(one for its in self._sockets for one in its)):
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

    def _hear(self, process: _WorkerProcess) -> None:
        try:
            data = os.read(process.reports, _READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(process.reports)
            return
        process.heard_s = time.monotonic()
        *lines, process.pending = (process.pending + data).split(b"\n")
        for line in lines:
            self._report(Report.decode(line))

    def _tell_to_stop(self, process: _WorkerProcess) -> None:
        if process.orders >= 0:
            os.close(process.orders)
            process.orders = -1
            process.told_s = time.monotonic()

    def _reap(self) -> None:
        for process in list(self._processes.values()):
            status = _has_ended(process.pid)
            if status is None:
                continue
            del self._processes[process.pid]
            self._hear(process)
            self._forget(process)
            if process.told_s is None:
                self._lost(process, status)
        self._see_whether_taken_over()

    def _see_whether_taken_over(self) -> None:
        if any(process.told_s is not None for process in self._processes.values()):
            return
        if self._before:
            os.close(self._before[0])
            self._before = None
        due, self._when_taken_over = self._when_taken_over, []
        for taken_over in due:
            taken_over()

    def _lost(self, process: _WorkerProcess, status: str) -> None:
        text = f"worker {process.number} (process {process.pid}) ended: {status}: starting another"
        tell(log, messages.WORKER_LOST, text)
        if time.monotonic() - process.started_s > _SHORT_LIFE_S:
            self._fill_up()  # else with the next check, so as not to do nothing else

    def _fill_up(self) -> None:
        """Start the workers that are missing."""
        there = {process.number for process in self._processes.values() if process.told_s is None}
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

    def _forget(self, process: _WorkerProcess) -> None:
        self._loop.remove_reader(process.reports)
        os.close(process.reports)
        if process.orders >= 0:
            os.close(process.orders)
            process.orders = -1


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


_LOOK_INTERVAL_S = 1.0
_STATUS_INTERVAL_S = 10.0
_REFUSALS_INTERVAL_S = 60.0
"""At most one line about refused datagrams in this time."""

_Identity = tuple[int, int, int, int]
_NEVER_LOOKED: _Identity = (0, 0, 0, 0)


@dataclass(frozen=True)
class Keys:
    """The keys that are valid.

    :param previous_since_s: since when the second one is the previous one, in seconds since the
        epoch; None where there is one only.
    """

    valid: tuple[HmacKey, ...]
    previous_since_s: float | None = None


class Supervisor:
    """Everything that confd does beside answering. Needs a running event loop.

    :param settings: may be replaced, with :meth:`reload`; so may be *keys*.
    """

    def __init__(self, settings: ConfdSettings, keys: Keys, service: ServiceManager) -> None:
        self._settings = settings
        self._keys = keys
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._workers = WorkerPool(report=self._take_report, prepare=self._prepare_worker)
        self._sockets: list[list[socket.socket]] = []
        self._configuration: Configuration | None = None
        self._answers: Answers | None = None
        self._given = LargeAnswers()
        self._seen: _Identity | None = _NEVER_LOOKED  # what was loaded, or refused, last
        self._trouble = ""
        self._watch = self._new_watch()
        self._answered = 0
        self._refused: Counter[str] = Counter()
        self._refused_source = ""
        self._refusals_due_s = 0.0

    def start(self) -> None:
        """Open the port, load what there is, and begin to answer.

        :raises PortError: if the port can't be had.
        """
        settings = self._settings
        self._sockets = open_sockets(settings.addresses(), settings.port, settings.workers)
        if self._service.watchdog_s:
            self._every(self._service.watchdog_s / 3, self._service.alive)
        self._watch.start()
        if not self._answers:
            self._replace_workers()  # all that asks is told that there is nothing to answer from
        self._every(_LOOK_INTERVAL_S, self._check)
        self._every(_STATUS_INTERVAL_S, self._show_status)
        self._service.ready(self._status())
        log.info("%s", self._status())

    def reload(self, settings: ConfdSettings, keys: Keys, *, done: Callable[[], None]) -> None:
        """Go on with other settings and keys. No request is lost, unless ports or workers go.

        :param done: called when all answers are by the new ones.
        :raises PortError: if a new address or port can't be had; then all stays as it was.
        :raises WorkerError: if no process can be had; likewise.
        """
        old, before = self._settings, self._sockets
        kept: list[list[socket.socket]] = []
        if (settings.addresses(), settings.port) == (old.addresses(), old.port):
            kept = before[: settings.workers]
        missing = settings.workers - len(kept)
        added = open_sockets(settings.addresses(), settings.port, missing, sole=False)
        former_keys, former_answers = self._keys, self._answers

        def taken_over() -> None:
            self._service.ready(self._status())
            done()

        self._settings, self._keys, self._sockets = settings, keys, [*kept, *added]
        if self._configuration and settings.reveal_secrets != old.reveal_secrets:
            self._answers = self._make_answers(self._configuration)
        try:
            self._replace_workers(taken_over)
        except WorkerError:
            self._settings, self._keys, self._sockets = old, former_keys, before
            self._answers = former_answers
            for sockets in added:
                for one in sockets:
                    one.close()
            raise
        if settings.config_file != old.config_file:
            self._watch.close()
            self._watch = self._new_watch()
            self._seen = _NEVER_LOOKED
            self._watch.start()

    def stop(self) -> None:
        """End the workers; each finishes what it is at."""
        self._workers.stop()
        self._tell_refusals()

    # The configuration.

    def _new_watch(self) -> DirectoryWatch:
        file = self._settings.config_file

        def appeared(name: str) -> None:
            if name == file.name:
                self._look()

        return DirectoryWatch(file.parent, appeared=appeared, rescan=self._look)

    def _look(self) -> None:
        """Load the configuration if its file is another than the last time."""
        file = self._settings.config_file
        identity = _identity(file)
        if identity == self._seen:
            return
        self._seen = identity
        if identity is None:
            self._tell_missing(file)
            return
        started_s = time.monotonic()
        before = self._configuration, self._answers
        try:
            self._configuration, self._answers = self._load(file)
            # It stays as it is until it is dropped: not to be gone through, and copied, by workers.
            gc.freeze()
            self._replace_workers()
        except WorkerError as error:
            self._seen = _NEVER_LOOKED  # to be tried again
            self._refuse(str(error), before)
            return
        except ConfigError as error:
            self._refuse(f"{file}: {error}", before)
            return
        except OSError as error:
            self._seen = _NEVER_LOOKED
            self._refuse(f"{file} can't be read: {error.strerror}", before)
            return
        except Exception:
            # Whatever it is in that file that nobody thought of, answering goes on.
            log.exception("%s", file)
            self._refuse(f"{file} can't be used", before)
            return
        self._trouble = ""
        took_ms = (time.monotonic() - started_s) * 1000
        tell(log, messages.CONFIG_LOADED, f"{self._contents()}, loaded in {took_ms:.0f} ms")
        self._show_status()

    def _load(self, file: Path) -> tuple[Configuration, Answers]:
        """:raises ConfigError: if it can't be used. :raises OSError: if it can't be read."""
        data = file.read_bytes()
        gc.disable()  # it makes a hundred thousands of objects, all of which stay
        try:
            configuration = Configuration.parse(data)
            answers = self._make_answers(configuration)
        finally:
            gc.enable()
        now = self._configuration
        if now and now.cluster.uuid == configuration.cluster.uuid:
            old, new = now.cluster.serial_no, configuration.cluster.serial_no
            if new < old:
                raise ConfigError(
                    f"serial {new} is older than {old}, which is in use",
                    hint="brine config restore gives an old configuration a new serial",
                )
        return configuration, answers

    def _make_answers(self, configuration: Configuration) -> Answers:
        return Answers(configuration, reveal_secrets=self._settings.reveal_secrets)

    def _tell_missing(self, file: Path) -> None:
        if self._configuration:
            self._refuse(f"{file} is gone", (self._configuration, self._answers))
            return
        self._trouble = f"no configuration: there is no {file}"
        tell(log, messages.NO_CONFIG, self._trouble)
        self._show_status()

    def _refuse(self, trouble: str, before: tuple[Configuration | None, Answers | None]) -> None:
        self._configuration, self._answers = before
        use = "the old one stays in use" if self._configuration else "there is none to use"
        if trouble != self._trouble:  # what is tried again and again is said once
            tell(log, messages.CONFIG_REFUSED, f"{trouble}; {use}")
        self._trouble = trouble
        self._show_status()

    # The workers.

    def _replace_workers(self, taken_over: Callable[[], None] = lambda: None) -> None:
        """Start workers with the current configuration, keys and settings."""
        responder = Responder(
            self._answers,
            self._keys.valid,
            max_clock_skew_s=self._settings.max_clock_skew_s,
            given=self._given,
        )
        self._workers.replace(self._sockets, responder, taken_over=taken_over)

    def _prepare_worker(self) -> None:
        # A lock on memory does not pass to a child.
        apply_memory_lock(self._settings.memory_lock)

    def _take_report(self, report: Report) -> None:
        self._answered += report.answered
        if report.refused:
            self._refused += report.refused
            self._refused_source = plain_address(report.source)
            self._tell_refusals_if_due()

    # What happens at intervals.

    def _every(self, interval_s: float, act: Callable[[], None]) -> None:
        self._loop.call_later(interval_s, self._every, interval_s, act)
        act()

    def _check(self) -> None:
        self._workers.check()
        self._watch.refresh()
        self._look()  # a file that is written in place, or over a network, is not told about
        self._tell_refusals_if_due()

    def _tell_refusals_if_due(self) -> None:
        if self._refused and self._loop.time() >= self._refusals_due_s:
            self._tell_refusals()

    def _tell_refusals(self) -> None:
        if not self._refused:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._refused.most_common())
        text = f"not answered: {reasons}; the last from {self._refused_source}"
        tell(log, messages.REFUSED_DATAGRAMS, text)
        self._refused.clear()
        self._refusals_due_s = self._loop.time() + _REFUSALS_INTERVAL_S

    def _show_status(self) -> None:
        self._service.status(self._status())

    def _status(self) -> str:
        count = self._settings.workers
        workers = "1 worker" if count == 1 else f"{count} workers"
        places = ", ".join(_place(one) for one in self._sockets[0])
        parts = [self._contents(), f"{workers} on {places}", f"{self._answered} answered"]
        if self._keys.previous_since_s is not None:
            age_s = max(0.0, time.time() - self._keys.previous_since_s)
            parts.append(f"a previous key is valid, too, for {_age(age_s)} now")
        if self._trouble:
            parts.insert(0, f"TROUBLE: {self._trouble}")
        return "; ".join(part for part in parts if part)

    def _contents(self) -> str:
        now = self._configuration
        if not now:
            return ""
        counts = f"{len(now.nodes)} nodes, {len(now.instances)} instances"
        return f"serial {now.cluster.serial_no}: {counts}"


def _identity(file: Path) -> _Identity | None:
    """What changes when a file is replaced or written to; None if it is not there."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _age(seconds: float) -> str:
    """A time in its largest unit, such as "3 days"."""
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length_s)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


def _place(one: socket.socket) -> str:
    address, port = one.getsockname()[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
