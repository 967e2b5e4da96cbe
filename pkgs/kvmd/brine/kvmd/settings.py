"""The settings of ``/etc/brine/kvmd.toml``; see brine-kvmd.toml(5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from brine.common import paths
from brine.common.journal import LEVELS
from brine.common.settings import setting
from brine.kvmd.control_dir import ControlDir


def _suffix_fault(suffix: str) -> str | None:
    if len(suffix) < 2 or not suffix.startswith(".") or "/" in suffix or "\0" in suffix:
        return f"must be what a file name ends with, such as .kvmd, but is {suffix!r}"
    if suffix in (".stopping", ".shutdown"):
        return f"{suffix} is the name of a file that Brine keeps beside the socket"
    return None


@dataclass(frozen=True)
class KvmdSettings:
    """kvmd's settings, each with its default."""

    control_dir: Path = paths.CONTROL_DIR
    """The directory that the event sockets appear in and the verdicts are written to."""

    marks_dir: Path = paths.MARKS_DIR
    """The directory of markers: an instance's last run, its stop by an admin, and its verdict."""

    suffix: str = setting(".kvmd", check=_suffix_fault)
    """The suffix of event sockets."""

    powerdown_stale_s: float = setting(600.0, minimum=0)
    """After this time a powerdown request no longer explains a guest's shutdown."""

    rescan_interval_s: float = setting(60.0, minimum=1)
    """How often the control directory is looked at as a whole."""

    connect_retry_s: float = setting(10.0, minimum=0)
    """How long a socket that refuses connections is tried in quick succession."""

    greeting_timeout_s: float = setting(10.0, minimum=0.1)
    """After this time a socket that accepts but says nothing is worth a line in the journal."""

    memory_lock: bool = False
    """Whether the daemon is locked into RAM."""

    log_level: str = setting("info", choices=tuple(LEVELS))
    """The least level that is logged."""

    @cached_property
    def directory(self) -> ControlDir:
        """The control directory."""
        return ControlDir(self.control_dir, self.suffix)
