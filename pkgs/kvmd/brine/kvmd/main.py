"""The ``brine-kvmd`` program."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import sys
from collections.abc import Sequence

from brine.common.daemon import DaemonProgram
from brine.common.files import write_whole
from brine.common.settings import SettingsError, load
from brine.kvmd.daemon import Daemon
from brine.kvmd.settings import KvmdSettings

log = logging.getLogger(__name__)

_ALLOCATIONS = 20_000
"""Of so many more objects than were given back, those of a cycle are looked for."""


class KvmdProgram(DaemonProgram[KvmdSettings]):
    """Keeps settings that were good, under systemd: a daemon that does not start would lose the
    connections that systemd keeps for it."""

    resort = "those of the last start stay in use"

    def __init__(self) -> None:
        about = "Watches the VMs of this node and says who ended each."
        super().__init__("kvmd", about, KvmdSettings)
        folder = self.service.runtime_dir
        self._last_good = folder / "settings.toml" if folder else None

    def load(self) -> KvmdSettings:
        """Read the settings, which are kept if they are good."""
        settings = super().load()
        if self._last_good and not self.options.check:
            with contextlib.suppress(OSError):  # a later start then has one resort less
                data = self.file.read_bytes() if self.file.exists() else b""
                write_whole(self._last_good, data, mode=0o600, durable=False)
        return settings

    def last_resort(self) -> KvmdSettings | None:
        """The last good settings."""
        with contextlib.suppress(SettingsError):
            if self._last_good:
                return load(KvmdSettings, self._last_good, required=True)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to end. Returns its exit status; 2 is for bad settings."""
    program = KvmdProgram()
    settings = program.begin(arguments)
    # Each VM takes a descriptor; the customary soft limit of 1,024 is for select(2) users.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # All objects of now stay. Python would look through it whenever some VMs come, and through
    # what is new in the middle of an event.
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS)
    asyncio.run(_serve(program, settings))
    return 0


async def _serve(program: KvmdProgram, settings: KvmdSettings) -> None:
    daemon = Daemon(settings, program.service)

    def take(settings: KvmdSettings) -> None:
        daemon.reload(settings)
        log.info("settings reloaded: %s", program)

    await program.serve(daemon, take)


if __name__ == "__main__":
    sys.exit(main())
