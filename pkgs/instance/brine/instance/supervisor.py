"""What starts instances again, if the node has it: brine-watcher.

It provides a :class:`Supervision` by an entry point of the group ``brine.supervisors``, as nothing
here imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.entry_points import entry_points
from brine.common.times import local_time

_GROUP = "brine.supervisors"


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts to start an instance that has ended, none of which has lasted.

    :param next: when the next one is due, in seconds since 1970; it may be over.
    :param given_up: whether they come rarely from now on.
    """

    count: int
    next: float
    given_up: bool = False

    def next_text(self) -> str:
        """When the next one comes, for people."""
        if self.next <= time.time():
            return "the next try comes with the watcher's next pass"
        return f"the next try comes at {local_time(self.next)}"


def _no_pause() -> None:
    return None


def _no_tries(_name: str) -> bool:
    return False


def _no_record(_name: str) -> None:
    return None


def _not_kept(_name: str, _record: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Supervision:
    """What others ask of it and tell it. The defaults are those of a node that has none.

    :param attempts: at instances, by name.
    :param pause: why it starts no instance now; None if it does.
    :param forget: forget the tries of an instance, as an administrator acts on it; raises a
        BrineError if that fails.
    :param record: the tries of an instance, as JSON has them, for the node that it moves to; None
        if there are none.
    :param keep: keep the tries of an instance that another node has told; raises a BrineError if
        they are no such record, or can't be kept.
    """

    attempts: Callable[[], Mapping[str, Attempts]] = dict
    pause: Callable[[], str | None] = _no_pause
    forget: Callable[[str], object] = _no_tries
    record: Callable[[str], Mapping[str, Any] | None] = _no_record
    keep: Callable[[str, Any], None] = _not_kept

    def reasons_to_wait(self) -> Callable[[str], str | None]:
        """A function that tells why it would not start the instance of a name now, and returns
        None if it would."""
        pause, attempts = self.pause(), self.attempts()

        def reason(name: str) -> str | None:
            found = attempts.get(name)
            if pause or not (found and found.given_up):
                return pause
            hint = f"brine instance start {name} starts it, and has the watcher begin anew"
            return f"the watcher has given it up after {found.count} tries; {hint}"

        return reason


def supervisor() -> Supervision:
    """The node's."""
    for entry in entry_points(_GROUP):
        found: Supervision = entry.load()
        return found
    return Supervision()
