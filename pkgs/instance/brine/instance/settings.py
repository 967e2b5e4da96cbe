"""The settings of ``/etc/brine/instance.toml``; see brine-instance(1)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die
from brine.common.settings import SettingsError, load, setting
from brine.common.uids import UidPoolError, parse_uid_pool

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


def load_settings(file: Path | None = None) -> InstanceSettings:
    """The settings of this node, or those in a file that must be there.

    :raises brine.common.settings.SettingsError: if the file can't be used.
    """
    required = file is not None
    return load(InstanceSettings, file or paths.settings_file("instance"), required=required)


def load_uid_pool(file: Path | None = None) -> list[list[int]]:
    """The node's own pool of user ids; empty if it has none.

    :param file: as for :func:`load_settings`, which raises the same.
    """
    try:
        return parse_uid_pool(load_settings(file).uid_pool)
    except UidPoolError as error:
        place = file or paths.settings_file("instance")
        raise SettingsError(place, str(error), key="uid_pool", hint=error.hint) from error


def main() -> None:
    """Check the file that is named on the command line, before it is put in place."""
    try:
        load_uid_pool(Path(sys.argv[1] if len(sys.argv) == 2 else ""))
    except BrineError as error:
        die("brine-instance", error, 1)


if __name__ == "__main__":
    main()
