"""Ending in good order when told to end."""

from __future__ import annotations

import signal
from types import FrameType


def unwind_on_sigterm() -> None:
    """Let SIGTERM unwind this program as ^C does, so that its nodes and guests end with it."""

    def unwind(_number: int, _frame: FrameType | None) -> None:
        # pytest takes SystemExit for one more failed test, and goes on.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, unwind)
