"""What somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown *word*: the known one that looks most like it, or all of them."""
    from difflib import get_close_matches  # only a mistake takes it

    known = sorted(known)
    close = get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are: {', '.join(known)}"
