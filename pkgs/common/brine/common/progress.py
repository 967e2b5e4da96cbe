"""The lines of a command that waits, or whose work takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

Tell = Callable[[float, str], object]
"""Takes how far long work is, from 0 to 1, and a text that names the work."""

_SILENT_S = 2.0
_NEXT_S = 5.0


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


def tell_nothing(_done: float, _text: str) -> None:
    """Tell no one how far long work is."""


class ProgressLines:
    """Prints on stderr how far long work is, with its rate and the time that is left: after two
    seconds, and then every five.

    Example::

        tell = ProgressLines(10 << 30)
        tell(0.25, "web1: disk data")  # brine: web1: disk data: 25 %, 85.3M/s, 92 s left

    :param size: of all the work in bytes; 0 is not known.
    :param clock: monotonic, in seconds.
    """

    def __init__(self, size: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._next = clock() + _SILENT_S
        self._first: tuple[float, float] | None = None
        self._text = ""

    def __call__(self, done: float, text: str) -> None:
        """Take how far it is.

        :param done: from 0 to 1.
        :param text: names the work; each has a rate of its own.
        """
        now = self._clock()
        if self._first is None or text != self._text:
            self._first, self._text = (now, done), text
        if now < self._next:
            return
        self._next = now + _NEXT_S
        began, before = self._first
        said = [f"{100 * done:.0f} %"]
        if now > began and done > before:
            speed = (done - before) / (now - began)
            said += [f"{size_text(int(speed * self._size))}/s"] if self._size else []
            said.append(f"{_time_text((1 - done) / speed)} left")
        print(f"brine: {text}: {', '.join(said)}", file=sys.stderr, flush=True)


def size_text(count: int) -> str:
    """A size in bytes for people, such as ``1.5G``."""
    value = float(count)
    for prefix in "BKMGTPE":
        if value < 1024 or prefix == "E":
            break
        value /= 1024
    return f"{value:.0f}{prefix}" if prefix == "B" or value >= 100 else f"{value:.1f}{prefix}"


def _time_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
