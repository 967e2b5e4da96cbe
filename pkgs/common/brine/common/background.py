"""Doing something while something else is waited for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_SILENT_S = 2.0


@contextlib.contextmanager
def spoken_wait(text: str) -> Iterator[None]:
    """Say on stderr what a person waits for, if the block takes longer than two seconds.

    :param text: what for, and how long at most.
    """
    timer = threading.Timer(_SILENT_S, lambda: print(f"brine: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def begun(work: Callable[[], T]) -> Callable[[], T]:
    """Begin to do something, in a thread; returns what waits for its end, and returns or raises
    what it did."""
    results: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> T:
        thread.join()
        for fault in faults:
            raise fault
        return results[0]

    return result
