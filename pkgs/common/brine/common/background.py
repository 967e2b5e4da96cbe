"""Doing something while something else is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
