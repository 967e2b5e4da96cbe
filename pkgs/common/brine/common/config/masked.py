"""Salt's mask: what its command line shows in place of pillar's values, as of Salt 3008."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brine.common.config.params import Mistake
from brine.common.config.shape import member

MASK = "*" * 10


def find_masked(declared: Any) -> list[Mistake]:
    """A mistake, if any value in an input is masked: one for all, as usually all of them are."""
    places = list(_places(declared, ""))
    if not places:
        return []
    more = f", one of {len(places)} such values" if len(places) > 1 else ""
    text = f"is {MASK}{more}: that hides the value, and is none"
    return [Mistake(places[0] or "/", text, "masked")]


def _places(value: Any, where: str) -> Iterator[str]:
    if value == MASK:
        yield where
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, member(where, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, f"{where}/{index}")
