"""The ``brine-lifecycle`` program: command line and settings of the handler."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from brine.common import journal, paths
from brine.common.cli import Parser
from brine.common.errors import die
from brine.common.memory import apply_memory_lock
from brine.common.settings import SettingsError, load
from brine.common.systemd import ServiceManager
from brine.lifecycle import __version__
from brine.lifecycle.handler import Handler
from brine.lifecycle.settings import LifecycleSettings

log = logging.getLogger(__name__)

_PROGRAM = "brine-lifecycle"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the handler until it is told to end. Returns its exit status; 2 is for bad settings."""
    parsed = _parser().parse_args(arguments)
    is_named = parsed.config is not None
    file = parsed.config if is_named else paths.settings_file("lifecycle")

    def load_settings() -> LifecycleSettings:
        return load(LifecycleSettings, file, required=is_named)

    trouble = None
    try:
        settings = load_settings()
    except SettingsError as error:
        if is_named or parsed.check:
            die(_PROGRAM, error, 2)
        # Without a handler, VMs would outlive their owners.
        settings, trouble = LifecycleSettings(), error
    if parsed.check:
        print(f"{file}: settings are good")
        return 0
    journal.setup(_PROGRAM, journal.LEVELS[settings.log_level])
    if trouble:
        log.error("bad settings, the defaults are in use: %s", trouble)
    apply_memory_lock(settings.memory_lock)

    def reload() -> None:
        try:
            settings = load_settings()
        except SettingsError as error:
            log.error("settings not reloaded, the old ones stay in use: %s", error)
            return
        logging.getLogger().setLevel(journal.LEVELS[settings.log_level])
        apply_memory_lock(settings.memory_lock)

    Handler(ServiceManager()).run(on_reload=reload)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROGRAM,
        description="Ends the VMs whose owners are gone. See brine-lifecycle(8).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"settings; by default {paths.settings_file('lifecycle')}, which may be absent",
    )
    parser.add_argument("--check", action="store_true", help="check the settings and leave")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    return parser
