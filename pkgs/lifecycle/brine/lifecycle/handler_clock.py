"""The handler's note of both its clocks, by which the next handler sees how long none was there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from brine.lifecycle.owner_watch import PAUSE_S

_UNKNOWN_GRACE_S = 2.0  # after the handler's start owners may be as late as it is
_LONGEST_GRACE_S = 30.0
_JUMP_S = 1.0  # two clocks that differ by more have not gone alike
_BYTES = 64


class HandlerClock:
    """The note, and when this handler may end the first instance.

    The fence sees by the note that the handler works, which one that dies at each start does not.

    :param file: None keeps no note.
    :ivar goes_on: whether it is known for how long no handler was there.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        now_s = time.monotonic()
        absent_s, not_before_s = self._read()
        self.goes_on = absent_s is not None
        # If the handler was away for long, its owners may have been, too. Otherwise the time of a
        # watchdog's change tells what happened meanwhile.
        late_s = _UNKNOWN_GRACE_S if absent_s is None else absent_s if absent_s > PAUSE_S else 0.0
        not_before_s = max(not_before_s, now_s + late_s)
        self._not_before_s = min(not_before_s, now_s + _LONGEST_GRACE_S)

    def is_kept(self) -> bool:
        """Whether there is a note. It is kept where systemd starts the handler again."""
        return self._file is not None

    def may_end(self, now_s: float) -> bool:
        """Whether an instance may be ended by now."""
        return now_s >= self._not_before_s

    def note(self) -> None:
        """Note both clocks, and when this handler may end the first instance."""
        if self._file is None:
            return
        text = f"{time.monotonic():.3f} {time.time():.3f} {self._not_before_s:.3f}"
        with contextlib.suppress(OSError):
            self._file.touch()
            with self._file.open("r+b", buffering=0) as clock:
                # In place, which needs no room.
                clock.write(text.ljust(_BYTES - 1).encode() + b"\n")

    def _read(self) -> tuple[float | None, float]:
        """For how long no handler was there, and when the last one might have ended the first
        instance. None and 0 if that is not known, or the wall clock has not gone as the monotonic
        one meanwhile."""
        with contextlib.suppress(OSError, ValueError):
            if self._file:
                monotonic_s, wall_s, not_before_s = map(float, self._file.read_text().split())
                absent_s = time.monotonic() - monotonic_s
                if absent_s >= 0 and abs(time.time() - wall_s - absent_s) < _JUMP_S:
                    return absent_s, not_before_s
        return None, 0.0
