"""Whether a guest changes its memory faster than that can be sent. It only decides."""

from __future__ import annotations

from dataclasses import dataclass

from brine.common.progress import size_text
from brine.moves.migration import Migration, MoveOptions

_LESS = 0.95
_MOST_THROTTLED = 99


@dataclass(slots=True)
class DirtyWatch:
    """Looks at one migration again and again.

    A pass sends what the guest has changed during the one before. While each leaves less than all
    before it, there is an end to it. The move is given up if for some passes, and some seconds,
    none did, and QEMU has no more means against that.
    """

    options: MoveOptions
    passes: int = 0
    least: float = float("inf")
    without_gain: int = 0
    gained_at: float | None = None

    def hopeless(self, now: float, seen: Migration) -> str:
        """Why there will be no end; empty while there may be one.

        :param now: monotonic, in seconds.
        """
        if self.gained_at is None:
            self.gained_at, self.passes = now, seen.passes
        if seen.passes <= self.passes:
            return ""
        self.without_gain += seen.passes - self.passes
        self.passes = seen.passes
        if seen.remaining < _LESS * self.least:
            self.least, self.without_gain, self.gained_at = seen.remaining, 0, now
            return ""
        if self.without_gain < self.options.patience:
            return ""
        if now - self.gained_at < self.options.patience_s:
            return ""
        if self.options.auto_converge and seen.throttle < _MOST_THROTTLED:
            return ""  # it is being slowed down further
        rate, dirtied = size_text(int(seen.rate)), size_text(int(seen.dirtied))
        return f"it changes {dirtied}/s of its memory, and {rate}/s can be sent"

    def choices(self) -> str:
        """What may help."""
        words = [] if self.options.auto_converge else ["--auto-converge slows it down"]
        longer = f"--max-downtime lets it stand still for longer than {_time(self.options)}"
        return "; ".join([*words, longer, "--cold stops it for the move"])


def _time(options: MoveOptions) -> str:
    return f"{options.max_downtime_ms} ms"
