"""Work in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def begun(work: Callable[[], T]) -> Callable[[], T]:
    """Begin *work* in a thread. The result waits for its end, and returns or raises its outcome."""
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
