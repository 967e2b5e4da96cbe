"""The ``brine-kvmd`` program: command line, settings, signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brine.common import journal, paths
from brine.common.cli import Parser
from brine.common.errors import die
from brine.common.files import write_whole
from brine.common.memory import apply_memory_lock
from brine.common.settings import SettingsError, load
from brine.common.systemd import ServiceManager
from brine.kvmd import __version__
from brine.kvmd.daemon import Daemon
from brine.kvmd.settings import KvmdSettings

log = logging.getLogger(__name__)

_PROGRAM = "brine-kvmd"


@dataclass(frozen=True)
class _SettingsFile:
    """Where settings come from, at start and at each reload. Those that were good are kept, under
    systemd. The file must exist only if a person *named* it."""

    path: Path
    named: bool
    last_good: Path | None

    def load(self) -> KvmdSettings:
        """The settings, which are kept if they are good."""
        settings = load(KvmdSettings, self.path, required=self.named)
        if self.last_good:
            with contextlib.suppress(OSError):  # a later start then has one resort less
                data = self.path.read_bytes() if self.path.exists() else b""
                write_whole(self.last_good, data, mode=0o600, durable=False)
        return settings

    def __str__(self) -> str:
        state = "settings are good" if self.path.exists() else "no file: defaults"
        return f"{self.path}: {state}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to end. Returns its exit status; 2 is for bad settings."""
    parsed = _parser().parse_args(arguments)
    named = parsed.config is not None
    service = ServiceManager()
    last_good = service.runtime_dir / "settings.toml" if service.runtime_dir else None
    file = _SettingsFile(
        parsed.config if named else paths.settings_file("kvmd"),
        named,
        None if parsed.check else last_good,
    )
    trouble = None
    try:
        settings = file.load()
    except SettingsError as error:
        trouble = error
        try:
            if not file.last_good:
                raise
            settings = load(KvmdSettings, file.last_good, required=True)
        except SettingsError:
            die(_PROGRAM, error, 2)
    if parsed.check:
        print(file)
        return 0
    journal.setup(_PROGRAM, journal.LEVELS[settings.log_level])
    if trouble:
        # A daemon that does not start would lose the connections that systemd keeps for it.
        log.error("bad settings, those of the last start stay in use: %s", trouble)
    _apply(settings)
    # Each VM takes a descriptor; the customary soft limit of 1,024 is for select(2) users.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(settings, file, service))
    return 0


async def _serve(settings: KvmdSettings, file: _SettingsFile, service: ServiceManager) -> None:
    loop = asyncio.get_running_loop()
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
    log.info("settings reloaded: %s", file)


def _apply(settings: KvmdSettings) -> None:
    """Apply the settings of the process."""
    logging.getLogger().setLevel(journal.LEVELS[settings.log_level])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    apply_memory_lock(settings.memory_lock)


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
