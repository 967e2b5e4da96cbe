"""The ``brine-confd`` program: command line, settings, keys, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from brine.common import journal, paths
from brine.common.cli import Parser
from brine.common.errors import BrineError, die
from brine.common.memory import apply_memory_lock
from brine.common.settings import SettingsError
from brine.common.systemd import ServiceManager
from brine.confd import __version__, messages
from brine.confd.keys import SHORTEST, FoundKey, KeyFileError, find_keys, hand_over_keys
from brine.confd.server import PortError
from brine.confd.settings import ConfdSettings, load_settings
from brine.confd.supervisor import Supervisor

log = logging.getLogger(__name__)

_PROGRAM = "brine-confd"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to end. Returns its exit status; 2 is for bad settings."""
    parsed = _parser().parse_args(arguments)
    named = parsed.config is not None
    file = parsed.config if named else paths.settings_file("confd")
    try:
        settings = load_settings(file, required=named)
        if parsed.check:
            print(f"{file}: {'settings are good' if file.exists() else 'no file: defaults'}")
            return 0
        if parsed.hand_over_keys:
            hand_over_keys(settings.key_file, settings.previous_key_file)
            return 0
        # Until it is looked after, it must not end us.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        journal.setup(_PROGRAM, journal.LEVELS[settings.log_level])
        keys = _load_keys(settings)
        asyncio.run(_serve(settings, keys, file, named))
    except PortError as error:
        journal.tell(log, messages.PORT_TAKEN, str(error))
        die(_PROGRAM, error, 1)
    except (SettingsError, KeyFileError) as error:
        die(_PROGRAM, error, 2)
    except BrineError as error:
        die(_PROGRAM, error, 1)
    return 0


async def _serve(settings: ConfdSettings, keys: list[FoundKey], file: Path, named: bool) -> None:
    loop = asyncio.get_running_loop()
    service = ServiceManager()
    _apply(settings)
    supervisor = Supervisor(settings, keys, service)
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, supervisor, service, file, named)
    supervisor.start()
    await end.wait()
    service.stopping()
    supervisor.stop()


def _reload(supervisor: Supervisor, service: ServiceManager, file: Path, named: bool) -> None:
    service.reloading()
    try:
        settings = load_settings(file, required=named)
        keys = _load_keys(settings)
        supervisor.reload(settings, keys, done=lambda: log.info("settings and keys reloaded"))
    except BrineError as error:
        text = f"nothing reloaded, all stays as it was: {error}"
        if isinstance(error, KeyFileError):
            journal.tell(log, messages.KEYS_REFUSED, text)
        elif isinstance(error, PortError):
            journal.tell(log, messages.PORT_TAKEN, text)
        else:
            log.error("%s", text)
        service.ready(text)
    else:
        _apply(settings)


def _load_keys(settings: ConfdSettings) -> list[FoundKey]:
    found = find_keys(settings.key_file, settings.previous_key_file)
    sources = " and ".join(str(one.source) for one in found)
    journal.tell(log, messages.KEYS_LOADED, f"{len(found)} of 2 possible keys: {sources}")
    for one in found:
        if len(one.secret) < SHORTEST:
            text = f"{one.source} has {len(one.secret)} bytes only: brine confd new-key --replace"
            journal.tell(log, messages.KEYS_SHORT, text)
    return found


def _apply(settings: ConfdSettings) -> None:
    logging.getLogger().setLevel(journal.LEVELS[settings.log_level])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    apply_memory_lock(settings.memory_lock)


def _parser() -> Parser:
    description = "Answers for the cluster's configuration over UDP. See brine-confd(8)."
    parser = Parser(prog=_PROGRAM, description=description, allow_abbrev=False)
    help_ = f"settings; by default {paths.settings_file('confd')}, which may be absent"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help_)
    parser.add_argument("--check", action="store_true", help="check the settings and leave")
    help_ = "give the keys to the running daemon, for its reload, and leave; needs root"
    parser.add_argument("--hand-over-keys", action="store_true", help=help_)
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    return parser
