"""Types of options that several commands have."""

from __future__ import annotations

from argparse import ArgumentTypeError


def seconds(text: str) -> float:
    """A type for how long to wait, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentTypeError(f"no seconds above 0 and below 1000000: {text!r}")
    return value
