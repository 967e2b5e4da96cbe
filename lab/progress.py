"""Telling a person at the terminal what is going on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_started = time.monotonic()


def say(text: str) -> None:
    """Print one line of progress, with the seconds since the program began."""
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step that takes a while, and how long it took when it is done."""
    say(f"{text} ...")
    began = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{text}: failed after {time.monotonic() - began:.1f} s")
        raise
    say(f"{text}: {time.monotonic() - began:.1f} s")
