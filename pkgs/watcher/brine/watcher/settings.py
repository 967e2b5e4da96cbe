"""The settings of ``/etc/brine/watcher.toml``; see brine-watcher.toml(5)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die
from brine.common.settings import load, setting

_PROGRAM = "brine-watcher"
_DAY_S = 86400
_LONGEST_S = 30 * _DAY_S


@dataclass(frozen=True)
class WatcherSettings:
    """The settings of a node's watcher, each with its default."""

    interval: int = setting(300, minimum=1, maximum=_DAY_S)
    """Seconds between two passes, and between a first try to start an instance and the second."""

    manage: str = setting("ours", choices=("ours", "all"))
    """Whether Xen's domains that are no instances of ours are cleaned up when they have ended."""

    tries: int = setting(5, minimum=0, maximum=1000)
    """How often an instance that crashed is started again."""

    forget_after: int = setting(8 * 3600, minimum=1, maximum=_LONGEST_S)
    """Seconds after the last try; an instance that runs then is as good as new."""

    slow_interval: int = setting(8 * 3600, minimum=1, maximum=_LONGEST_S)
    """Seconds between two tries to start an instance that is given up."""

    parallel: int = setting(4, minimum=1, maximum=100)
    """How many instances are cleaned up at the same time, and how many started."""

    instance_timeout: int = setting(300, minimum=1, maximum=_DAY_S)
    """Seconds for which the start of one is waited for."""


def load_settings() -> WatcherSettings:
    """The settings of this node."""
    return load(WatcherSettings, paths.settings_file("watcher"))


def main() -> None:
    """Check the file that is named on the command line, before it is put in place."""
    try:
        load(WatcherSettings, Path(sys.argv[1] if len(sys.argv) == 2 else ""), required=True)
    except BrineError as error:
        die(_PROGRAM, error, 1)


if __name__ == "__main__":
    main()
