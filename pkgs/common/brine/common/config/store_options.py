"""The options of commands that work on the configuration: which one, and how long to wait."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from brine.common import paths
from brine.common.errors import UsageError

if TYPE_CHECKING:
    from brine.common.config.store import ConfigStore


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the options that :func:`store_of` reads."""
    parser.add_argument(
        "--config",
        type=Path,
        default=paths.CONFIG_FILE,
        metavar="FILE",
        help="the configuration, if not %(default)s",
    )
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for another writer (default: 10)",
    )


def store_of(arguments: argparse.Namespace) -> ConfigStore:
    """The store of the configuration that the command line says.

    :raises UsageError: if the time to wait is none.
    :raises brine.common.config.objects.ConfigError: see :class:`ConfigStore`.
    """
    from brine.common.config.store import ConfigStore  # takes long to import

    if not 0 <= arguments.lock_timeout < 1e6:
        raise UsageError("--lock-timeout must be a number of seconds, 0 or more")
    return ConfigStore(Path(arguments.config).absolute())
