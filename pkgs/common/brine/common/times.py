"""Points in time: one form for people, one for programs."""

from __future__ import annotations

import time


def local_time(seconds: float) -> str:
    """A time for people, in the node's zone, such as ``2026-01-31 12:30:00+01:00``.

    :param seconds: since 1970.
    """
    text = time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(seconds))
    return f"{text[:-2]}:{text[-2:]}"


def iso_time(seconds: float) -> str:
    """A time for programs, ISO 8601 in UTC, such as ``2026-01-31T11:30:00+00:00``."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))
