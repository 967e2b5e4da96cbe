"""What people are told when a command on disks is told to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brine.common import operation
from brine.common.errors import warn


@contextmanager
def telling_what_is_left(key: str | None = None, *, goes_on: str = "") -> Iterator[None]:
    """If a signal ends the block, say in a line what is left of its operations.

    :param key: of the operations; None is of any.
    :param goes_on: what another program still does, in words.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        left = [one for one in operation.pending(key) if one.is_interrupted()]
        if left:
            named = ", ".join(f"{one.kind} of {one.key}" for one in left)
            hint = "the next command on it does that, or brine operations settle"
            warn(f"interrupted: {named} is to be completed or undone", hint=hint)
        elif goes_on:
            warn(f"interrupted: {goes_on}", hint="the same command waits for it, and goes on")
        else:
            warn("interrupted: the work is complete or undone, and no part of it is pending")
        raise
