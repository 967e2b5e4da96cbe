"""The ``brine-kvmd`` program: command line, settings, signals."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brine.common import journal, paths
from brine.common.command import Parser
from brine.common.errors import die
from brine.common.memory import MemoryLockError, lock_memory, unlock_memory
from brine.common.service import ServiceManager
from brine.common.settings import SettingsError
from brine.kvmd import __version__
from brine.kvmd.daemon import Daemon
from brine.kvmd.settings import LEVELS, Settings, load_settings

log = logging.getLogger(__name__)

_PROGRAM = "brine-kvmd"


@dataclass(frozen=True)
class _SettingsFile:
    """Where settings come from, at start and at each reload.

    :param named: whether a person named the file; only then must it exist.
    """

    path: Path
    named: bool

    def load(self) -> Settings:
        return load_settings(self.path, required=self.named)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to end. Returns its exit status; 2 is for bad settings."""
    parsed = _parser().parse_args(arguments)
    named = parsed.config is not None
    file = _SettingsFile(parsed.config if named else paths.settings_file("kvmd"), named)
    try:
        settings = file.load()
    except SettingsError as error:
        die(_PROGRAM, error, 2)
    if parsed.check:
        print(f"{file.path}: {'settings are good' if file.path.exists() else 'no file: defaults'}")
        return 0
    journal.setup(_PROGRAM, LEVELS[settings.log_level])
    _apply(settings)
    _raise_descriptor_limit()
    asyncio.run(_serve(settings, file))
    return 0


async def _serve(settings: Settings, file: _SettingsFile) -> None:
    loop = asyncio.get_running_loop()
    service = ServiceManager()
    daemon = Daemon(settings, service)
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, daemon, service, file)
    daemon.start()
    await end.wait()
    service.stopping()
    daemon.stop()


def _reload(daemon: Daemon, service: ServiceManager, file: _SettingsFile) -> None:
    service.reloading()
    try:
        settings = file.load()
    except SettingsError as error:
        log.error("settings not reloaded, the old ones stay in use: %s", error)
        service.ready(f"settings not reloaded: {error}")
        return
    _apply(settings)
    daemon.reload(settings)
    log.info("settings reloaded from %s", file.path)


def _apply(settings: Settings) -> None:
    """What settings mean for the process as a whole."""
    logging.getLogger().setLevel(LEVELS[settings.log_level])
    if not settings.memory_lock:
        unlock_memory()
        return
    try:
        lock_memory()
    except MemoryLockError as error:
        log.warning("%s (%s)", error, error.hint)


def _raise_descriptor_limit() -> None:
    """Each VM takes a descriptor; the customary soft limit of 1,024 is for select(2) users."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROGRAM,
        description="Watches the VMs of this node and says who ended each. See brine-kvmd(8).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"settings; by default {paths.settings_file('kvmd')}, which may be absent",
    )
    parser.add_argument("--check", action="store_true", help="check the settings and leave")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    return parser
