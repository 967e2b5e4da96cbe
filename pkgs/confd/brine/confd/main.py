"""The ``brine-confd`` program, and its keys."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from brine.common import journal
from brine.common.daemon import DaemonProgram
from brine.common.errors import BrineError, die
from brine.confd import messages
from brine.confd.keys import SHORTEST, FoundKey, KeyFileError, find_keys, hand_over_keys
from brine.confd.server import PortError
from brine.confd.settings import ConfdSettings
from brine.confd.supervisor import Supervisor

log = logging.getLogger(__name__)


class ConfdProgram(DaemonProgram[ConfdSettings]):
    """A program that loads keys with its settings."""

    def __init__(self) -> None:
        about = "Answers for the cluster's configuration over UDP."
        super().__init__("confd", about, ConfdSettings)
        help_ = "give the keys to the running daemon, for its reload, and leave; needs root"
        self.parser.add_argument("--hand-over-keys", action="store_true", help=help_)

    def act_once(self, settings: ConfdSettings) -> bool:
        """Do what an option asks for in place of the daemon's work; returns whether one did."""
        if super().act_once(settings):
            return True
        if self.options.hand_over_keys:
            hand_over_keys(settings.key_file, settings.previous_key_file)
        return bool(self.options.hand_over_keys)

    def tell_not_reloaded(self, error: BrineError) -> str:
        """Log that a reload failed; returns that in words."""
        text = f"nothing reloaded, all stays as it was: {error}"
        if isinstance(error, KeyFileError):
            journal.tell(log, messages.KEYS_REFUSED, text)
        elif isinstance(error, PortError):
            journal.tell(log, messages.PORT_TAKEN, text)
        else:
            log.error("%s", text)
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to end. Returns its exit status; 2 is for bad settings."""
    program = ConfdProgram()
    try:
        settings = program.begin(arguments)
        asyncio.run(_serve(program, settings, _load_keys(settings)))
    except PortError as error:
        journal.tell(log, messages.PORT_TAKEN, str(error))
        die(program.name, error, 1)
    except BrineError as error:
        die(program.name, error, 2 if isinstance(error, KeyFileError) else 1)
    return 0


async def _serve(program: ConfdProgram, settings: ConfdSettings, keys: list[FoundKey]) -> None:
    supervisor = Supervisor(settings, keys, program.service)

    def take(settings: ConfdSettings) -> None:
        supervisor.reload(settings, _load_keys(settings))

    await program.serve(supervisor, take)


def _load_keys(settings: ConfdSettings) -> list[FoundKey]:
    found = find_keys(settings.key_file, settings.previous_key_file)
    sources = " and ".join(str(one.source) for one in found)
    journal.tell(log, messages.KEYS_LOADED, f"{len(found)} of 2 possible keys: {sources}")
    for one in found:
        if len(one.secret) < SHORTEST:
            text = f"{one.source} has {len(one.secret)} bytes only: brine confd new-key --replace"
            journal.tell(log, messages.KEYS_SHORT, text)
    return found


if __name__ == "__main__":
    sys.exit(main())
