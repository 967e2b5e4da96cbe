"""The main process: loads configurations, keys and settings, and keeps workers that answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from brine.common.config.configuration import Configuration
from brine.common.config.objects import ConfigError
from brine.common.inotify import DirectoryWatch
from brine.common.journal import tell
from brine.common.memory import apply_memory_lock
from brine.common.service import ServiceManager
from brine.confd import messages
from brine.confd.answers import Answers
from brine.confd.crew import Crew, CrewError
from brine.confd.protocol import Key
from brine.confd.responder import GivenAnswers, Responder
from brine.confd.settings import Settings
from brine.confd.sockets import open_sockets, plain_address
from brine.confd.worker import Report

log = logging.getLogger(__name__)

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

    valid: tuple[Key, ...]
    previous_since_s: float | None = None


class Supervisor:
    """Everything that confd does beside answering. Needs a running event loop.

    :param settings: may be replaced, with :meth:`reload`; so may be *keys*.
    """

    def __init__(self, settings: Settings, keys: Keys, service: ServiceManager) -> None:
        self._settings = settings
        self._keys = keys
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._crew = Crew(report=self._take_report, prepare=self._prepare_worker)
        self._sockets: list[list[socket.socket]] = []
        self._configuration: Configuration | None = None
        self._answers: Answers | None = None
        self._given = GivenAnswers()
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
            self._employ()  # all that asks is told that there is nothing to answer from
        self._every(_LOOK_INTERVAL_S, self._look_after)
        self._every(_STATUS_INTERVAL_S, self._show_status)
        self._service.ready(self._status())
        log.info("%s", self._status())

    def reload(self, settings: Settings, keys: Keys, *, done: Callable[[], None]) -> None:
        """Go on with other settings and keys. No request is lost, unless ports or workers go.

        :param done: called when all answers are by the new ones.
        :raises PortError: if a new address or port can't be had; then all stays as it was.
        :raises CrewError: if no process can be had; likewise.
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
            self._employ(taken_over)
        except CrewError:
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
        self._crew.stop()
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
            self._lack(file)
            return
        started_s = time.monotonic()
        before = self._configuration, self._answers
        try:
            self._configuration, self._answers = self._load(file)
            # It stays as it is until it is dropped: not to be gone through, and copied, by workers.
            gc.freeze()
            self._employ()
        except CrewError as error:
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

    def _lack(self, file: Path) -> None:
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

    def _employ(self, taken_over: Callable[[], None] = lambda: None) -> None:
        """Have workers that answer with what is current."""
        responder = Responder(
            self._answers,
            self._keys.valid,
            max_clock_skew_s=self._settings.max_clock_skew_s,
            given=self._given,
        )
        self._crew.replace(self._sockets, responder, taken_over=taken_over)

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

    def _look_after(self) -> None:
        self._crew.check()
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
