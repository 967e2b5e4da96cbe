"""The settings of ``/etc/brine/lifecycle.toml``; see brine-lifecycle.toml(5)."""

from __future__ import annotations

from dataclasses import dataclass

from brine.common.journal import LEVELS
from brine.common.settings import setting


@dataclass(frozen=True)
class LifecycleSettings:
    """The settings of the handler and of the fence, each with its default."""

    fence_after_s: float = setting(60.0, minimum=10)
    """How long the handler may give no sign of life before the fence acts."""

    memory_lock: bool = False
    """Whether the handler is locked into RAM."""

    log_level: str = setting("info", choices=tuple(LEVELS))
    """The least level that is logged."""
