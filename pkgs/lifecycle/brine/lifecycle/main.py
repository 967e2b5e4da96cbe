"""The ``brine-lifecycle`` program."""

from __future__ import annotations

from collections.abc import Sequence

from brine.common.daemon import DaemonProgram
from brine.lifecycle.handler import Handler
from brine.lifecycle.settings import LifecycleSettings


class LifecycleProgram(DaemonProgram[LifecycleSettings]):
    """Starts in any case: without a handler, VMs would outlive their owners."""

    resort = "the defaults are in use"

    def last_resort(self) -> LifecycleSettings | None:
        """The defaults, unless a person named the file."""
        return None if self.is_named else LifecycleSettings()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the handler until it is told to end. Returns its exit status; 2 is for bad settings."""
    about = "Ends the VMs whose owners are gone."
    program = LifecycleProgram("lifecycle", about, LifecycleSettings)
    program.begin(arguments)
    Handler(program.service).run(on_reload=program.reload)
    return 0
