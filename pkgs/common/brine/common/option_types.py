"""Types of options that several commands have."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable

_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str) -> float:
    """A type for how long to wait, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentTypeError(f"no seconds above 0 and below 1000000: {text!r}")
    return value


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type for whole numbers between two, both inclusive."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text[:9]) <= high):
            raise ArgumentTypeError(f"must be from {low} to {high}, but is {text!r}")
        return int(text)

    return parse


def length_of_time(text: str) -> int | None:
    """The seconds of ``90s``, ``30m`` (or ``min``), ``2h``, ``3d`` or ``1w``; None of all else."""
    match = re.fullmatch(r"(\d{1,6})\s*([a-z]+)", text)
    if match is None or match[2] not in _UNITS_S:
        return None
    return int(match[1]) * _UNITS_S[match[2]]
