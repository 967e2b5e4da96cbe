"""Waiting for something to become true, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lab.errors import LabError

T = TypeVar("T")


def wait_for(
    what: str, probe: Callable[[], T | None], *, timeout_s: float = 30, interval_s: float = 0.02
) -> T:
    """Call `probe` until it returns something true, and return that.

    Raises LabError, naming `what`, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not (result := probe()):
        if time.monotonic() >= deadline:
            raise LabError(f"waited {timeout_s:g} s for {what}, in vain")
        time.sleep(interval_s)
    return result
