"""The program of a daemon: command line, settings, log, signals, and memory locked into RAM."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from brine.common import __version__, journal, paths
from brine.common.cli import Parser
from brine.common.errors import BrineError, die
from brine.common.settings import SettingsError, load
from brine.common.systemd import ServiceManager

log = logging.getLogger(__name__)

_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_MADV_POPULATE_READ = 22


class DaemonSettings(Protocol):
    """The settings that all daemons have."""

    @property
    def memory_lock(self) -> bool:
        """Whether the daemon is locked into RAM."""

    @property
    def log_level(self) -> str:
        """The least level that is logged."""


class EventDaemon(Protocol):
    """A daemon that does its work in an asyncio event loop."""

    def start(self) -> None:
        """Begin, and say to systemd that it is ready."""

    def stop(self) -> None:
        """Finish what must be done before the process ends."""


S = TypeVar("S", bound=DaemonSettings)


class DaemonProgram(Generic[S]):
    """The program of a daemon. Its settings are read at the start and at each reload.

    :param part: such as ``kvmd``, of ``brine-kvmd`` and ``kvmd.toml``.
    :param about: what it does, as a sentence.
    :param kind: the dataclass of its settings.
    """

    resort = ""
    """The words that say what :meth:`last_resort` returns."""

    def __init__(self, part: str, about: str, kind: type[S]) -> None:
        self.name = f"brine-{part}"
        self.service = ServiceManager()
        self._kind = kind
        self._default_file = paths.settings_file(part)
        about = f"{about} See {self.name}(8)."
        self.parser = Parser(prog=self.name, description=about, allow_abbrev=False)
        help_ = f"settings; by default {self._default_file}, which may be absent"
        self.parser.add_argument("--config", type=Path, metavar="FILE", help=help_)
        help_ = "check the settings and leave"
        self.parser.add_argument("--check", action="store_true", help=help_)
        version = f"{self.name} {__version__}"
        self.parser.add_argument("--version", action="version", version=version)

    @property
    def is_named(self) -> bool:
        """Whether a person named the file of the settings."""
        return self.options.config is not None

    @property
    def file(self) -> Path:
        """The file of the settings."""
        return Path(self.options.config) if self.is_named else self._default_file

    def __str__(self) -> str:
        """The state of good settings."""
        state = "settings are good" if self.file.exists() else "no file: defaults"
        return f"{self.file}: {state}"

    def load(self) -> S:
        """Read the settings. A part may do more.

        :raises SettingsError: if they can't be used.
        """
        return load(self._kind, self.file, required=self.is_named)

    def last_resort(self) -> S | None:
        """The settings for a start with a bad file; None if it can't start."""
        return None

    def act_once(self, settings: S) -> bool:
        """Do what an option asks for in place of the daemon's work; returns whether one did."""
        if self.options.check:
            print(self)
        return bool(self.options.check)

    def begin(self, arguments: Sequence[str] | None) -> S:
        """Read the command line and the settings, and begin to log. An option such as ``--check``
        ends here, and so do bad settings, with status 2."""
        self.options = self.parser.parse_args(arguments)
        fault = None
        try:
            settings = self.load()
        except SettingsError as error:
            fault = error
            resort = None if self.options.check else self.last_resort()
            if resort is None:
                die(self.name, error, 2)
            settings = resort
        if self.act_once(settings):
            sys.exit(0)
        # Until it is looked after, it must not end us.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        journal.setup(self.name, journal.LEVELS[settings.log_level])
        if fault:
            log.error("bad settings, %s: %s", self.resort, fault)
        self._apply(settings)
        return settings

    async def serve(self, daemon: EventDaemon, take: Callable[[S], None]) -> None:
        """Run a daemon until it is told to end.

        :param take: gives it other settings, and lets it say to systemd that it is ready.
        """
        import asyncio  # one daemon does without

        loop = asyncio.get_running_loop()
        end = asyncio.Event()

        def reload() -> None:
            self.service.reloading()
            if fault := self.reload(take):
                self.service.ready(fault)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end.set)
        loop.add_signal_handler(signal.SIGHUP, reload)
        daemon.start()
        await end.wait()
        self.service.stopping()
        daemon.stop()

    def reload(self, take: Callable[[S], None] = lambda _: None) -> str:
        """Read the settings again, and apply them unless *take* fails; returns the fault."""
        try:
            settings = self.load()
            take(settings)
        except BrineError as error:
            return self.tell_not_reloaded(error)
        self._apply(settings)
        return ""

    def tell_not_reloaded(self, error: BrineError) -> str:
        """Log that a reload failed; returns that in words."""
        text = f"settings not reloaded, the old ones stay in use: {error}"
        log.error("%s", text)
        return text

    def _apply(self, settings: S) -> None:
        logging.getLogger().setLevel(journal.LEVELS[settings.log_level])
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        apply_memory_lock(settings.memory_lock)


class MemoryLockError(BrineError):
    """The kernel refused to lock our memory."""


def lock_memory() -> None:
    """Lock all memory of this process, now and later, into RAM (:manpage:`mlockall(2)`).

    Code that has not run yet is read in, too: it is on a disk, and that may be what hangs when it
    is needed first. Writable memory is not written to for that, as ``mlockall`` alone would do, so
    what a forked process has in common with its parent stays in common.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _lock(libc, _MCL_CURRENT | _MCL_ONFAULT)
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, permissions, *_ = line.split(maxsplit=5)
        # Without those that the kernel itself provides.
        if permissions.startswith("r") and not line.endswith(("[vvar]", "[vsyscall]")):
            start, end = (int(part, 16) for part in addresses.split("-"))
            # Memory that can't be read in, such as pages beyond a file's end, is not needed either.
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)
    _lock(libc, _MCL_FUTURE)


def apply_memory_lock(wanted: bool) -> None:
    """Do what the setting ``memory_lock`` of a daemon says; a refusal is logged."""
    if not wanted:
        ctypes.CDLL(None).munlockall()
        return
    try:
        lock_memory()
    except MemoryLockError as error:
        log.warning("%s (%s)", error, error.hint)


def _lock(libc: ctypes.CDLL, flags: int) -> None:
    if libc.mlockall(flags) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryLockError(
            f"memory can't be locked: {reason}",
            hint="set LimitMEMLOCK=infinity on the unit, or memory_lock = false",
        )
