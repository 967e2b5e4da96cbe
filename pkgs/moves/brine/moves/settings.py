"""The settings of ``/etc/brine/moves.toml``; see brine-moves.toml(5)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die, warn
from brine.common.settings import load, setting


class Unasked(StrEnum):
    """The instances that start while too few candidates have said whose they are."""

    LOCAL = "local"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class MovesSettings:
    """The settings of a node's moves, each with its default."""

    start_unasked: str = setting(Unasked.LOCAL.value, choices=tuple(Unasked))
    """Which instances start while too few master candidates answer: those whose disks no other node
    could have, all, or none."""

    ask_timeout: int = setting(10, minimum=1, maximum=120)
    """Seconds for which a node that boots waits for all answers."""


def settings_or_defaults() -> MovesSettings:
    """The settings of this node. A mistake in them does not keep all instances from starting: the
    defaults hold, and a warning names it."""
    try:
        return load(MovesSettings, paths.settings_file("moves"))
    except BrineError as error:
        warn(f"{error}; the defaults are used", hint=error.hint)
        return MovesSettings()


def main() -> None:
    """Check the file that is named on the command line, before it is put in place."""
    try:
        load(MovesSettings, Path(sys.argv[1] if len(sys.argv) == 2 else ""), required=True)
    except BrineError as error:
        die("brine-moves", error, 1)


if __name__ == "__main__":
    main()
