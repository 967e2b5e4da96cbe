"""What an administrator can set in ``/etc/brine/instance.toml``; see brine-instance(1)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die
from brine.common.settings import SettingsError, load, setting
from brine.common.uids import UidPoolError, parse_uid_pool

_PROGRAM = "brine-instance"

DEFAULT_UID_POOL = "1900000000-1900000999"
"""Of the range that systemd leaves unused: https://systemd.io/UIDS-GIDS."""


@dataclass(frozen=True)
class InstanceSettings:
    """The settings of a node's instances, each with its default."""

    parallel_starts: int = setting(4, minimum=1, maximum=100)
    """How many instances start at the same time when the node does."""

    uid_pool: str = ""
    """User ids for the security model ``pool``, as ``4000-4099,5000``; empty is the cluster's pool,
    and where that is empty, too, :data:`DEFAULT_UID_POOL`."""


def load_settings() -> InstanceSettings:
    """The settings of this node.

    :raises brine.common.settings.SettingsError: if the file can't be used.
    """
    return load(InstanceSettings, paths.settings_file("instance"))


def load_uid_pool() -> list[list[int]]:
    """The node's own pool of user ids; empty if it has none.

    :raises brine.common.settings.SettingsError: if it can't be used, or the file can't.
    """
    return _uid_pool_of(load_settings(), paths.settings_file("instance"))


def _uid_pool_of(settings: InstanceSettings, file: Path) -> list[list[int]]:
    try:
        return parse_uid_pool(settings.uid_pool)
    except UidPoolError as error:
        raise SettingsError(file, str(error), key="uid_pool", hint=error.hint) from error


def main() -> None:
    """Check the file that is named on the command line, before it is put in place."""
    try:
        check(Path(sys.argv[1] if len(sys.argv) == 2 else ""))
    except BrineError as error:
        die(_PROGRAM, error, 1)


def check(file: Path) -> None:
    """Refuse settings that instances could not be started with.

    :raises brine.common.settings.SettingsError: what is wrong, and where.
    """
    _uid_pool_of(load(InstanceSettings, file, required=True), file)


if __name__ == "__main__":
    main()
