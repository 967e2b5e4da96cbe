"""Having the watcher rest for a while, as during an operator's work on a node.

The file has one number, the epoch second at which the rest ends, as Ganeti's watcher reads it.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, UsageError
from brine.common.option_types import length_of_time
from brine.common.wholefile import write_whole

FILE = paths.STATE_DIR / "watcher.pause"

_LONGEST_S = 365 * 86400
_CLOCK_S = 86400  # by which the node's clock may have been set back since


class PauseError(BrineError):
    """The pause file can't be read, written or removed."""


def paused_until(now: float, *, file: Path = FILE) -> float | None:
    """When the rest ends, in seconds since 1970; None if the watcher does not rest.

    :raises PauseError: if that is not known: the file can't be read, has no such number, or one
        that is more than a year ahead (a number of milliseconds, say).
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PauseError(f"{file}: can't be read: {error}", hint=_HINT) from error
    try:
        until = float(text)
        datetime.fromtimestamp(until)
    except (ValueError, OverflowError, OSError):
        raise PauseError(f"{file}: has no number of seconds: {text[:40]!r}", hint=_HINT) from None
    if until > now + _LONGEST_S + _CLOCK_S:
        what = "ends more than a year ahead, which no pause does"
        raise PauseError(f"{file}: {what}: {text[:40]!r}", hint=_HINT)
    return until if until > now else None


_HINT = "brine watcher resume removes it"


def pause(for_s: float, now: float, *, file: Path = FILE) -> float:
    """Have the watcher rest for so many seconds; returns when that ends, in seconds since 1970.

    :raises PauseError: if the file can't be written.
    """
    until = math.ceil(now + for_s)
    try:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(file, f"{until}\n".encode(), alone=True)
    except OSError as error:
        raise PauseError(
            f"{file}: can't be written: {error.strerror}", hint=_root(error)
        ) from error
    return until


def resume(*, file: Path = FILE) -> bool:
    """Have the watcher rest no more; returns whether it did.

    :raises PauseError: if the file can't be removed.
    """
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PauseError(
            f"{file}: can't be removed: {error.strerror}", hint=_root(error)
        ) from error
    return True


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``2h``, ``3d`` or ``1w``.

    :raises UsageError: if it is none of these, or longer than a year.
    """
    seconds = length_of_time(text.strip())
    if seconds is not None and 0 < seconds <= _LONGEST_S:
        return float(seconds)
    raise UsageError(f"not a length of time: {text!r}", hint="try 90s, 30m, 2h, 3d or 1w")


def _root(error: OSError) -> str | None:
    return "be root" if isinstance(error, PermissionError) else None
