"""What an administrator can set in ``/etc/brine/instance.toml``; see brine-instance(1)."""

from __future__ import annotations

from dataclasses import dataclass

from brine.common import paths
from brine.common.settings import load, setting


@dataclass(frozen=True)
class Settings:
    """The settings of a node's instances, each with its default."""

    parallel_starts: int = setting(4, minimum=1, maximum=100)
    """How many instances start at the same time when the node does."""

    uid_pool: str = ""
    """User ids for the security model ``pool``, as ``4000-4099,5000``, on a node of no cluster."""


def load_settings() -> Settings:
    """The settings of this node.

    :raises brine.common.settings.SettingsError: if the file can't be used.
    """
    return load(Settings, paths.settings_file("instance"))
