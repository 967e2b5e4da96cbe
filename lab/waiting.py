"""Waiting for something to become true, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lab.errors import LabError

T = TypeVar("T")

_PAUSE_SHARE, _LONGEST_PAUSE_S = 2, 2.0
"""The pause after a probe is this many times longer than the probe took, up to a limit: a probe is
often a command on a node, which takes processor time from what it waits for."""


def wait_for(
    what: str, probe: Callable[[], T | None], *, timeout_s: float = 30, interval_s: float = 0.02
) -> T:
    """Call `probe` until it returns something true, and return that.

    The pauses take `interval_s`, or longer if the probe itself takes long. Raises LabError, naming
    `what`, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if result := probe():
            return result
        now = time.monotonic()
        if now >= deadline:
            raise LabError(f"waited {timeout_s:g} s for {what}, in vain")
        time.sleep(max(interval_s, min(_PAUSE_SHARE * (now - asked), _LONGEST_PAUSE_S)))
