"""The lines of a command that waits."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_SILENT_S = 2.0


@contextlib.contextmanager
def spoken_wait(text: str) -> Iterator[None]:
    """Print on stderr why the command waits, and how long at most, after two seconds."""
    timer = threading.Timer(_SILENT_S, lambda: print(f"brine: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
