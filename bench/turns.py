"""The order in which those that are measured take turns."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turned(items: Sequence[T], number: int) -> Sequence[T]:
    """Each round begins with another one, and every second goes the other way round.

    So that what comes before costs nobody more than others.
    """
    first = number % len(items)
    in_turn = [*items[first:], *items[:first]]
    return in_turn if number % 2 == 0 else in_turn[::-1]
