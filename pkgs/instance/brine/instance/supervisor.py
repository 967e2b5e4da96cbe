"""What starts instances again, if the node has it: brine-watcher.

It provides a :class:`Supervision` by an entry point of the group ``brine.supervisors``, as nothing
here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.entry_points import entry_points

_GROUP = "brine.supervisors"


def _no_tries(_name: str) -> bool:
    return False


def _no_record(_name: str) -> None:
    return None


def _not_kept(_name: str, _record: Any) -> None:
    pass


def _no_reasons() -> Callable[[str], str | None]:
    return lambda _name: None


@dataclass(frozen=True, slots=True)
class Supervision:
    """What others ask of it and tell it. The defaults are those of a node that has none.

    :param tried: the names of instances that it tried to start, none of which has run since.
    :param given_up: the number of tries of each instance that it has given up.
    :param forget: forget the tries of an instance, as an administrator acts on it; raises a
        BrineError if that fails.
    :param reasons_to_wait: makes a function that tells why it would not start the instance of a
        name now, and returns None if it would.
    :param record: the tries of an instance, as JSON has them, for the node that it moves to; None
        if there are none.
    :param keep: keep the tries of an instance that another node has told; raises a BrineError if
        they are no such record, or can't be kept.
    """

    tried: Callable[[], Collection[str]] = frozenset
    given_up: Callable[[], Mapping[str, int]] = dict
    forget: Callable[[str], object] = _no_tries
    reasons_to_wait: Callable[[], Callable[[str], str | None]] = _no_reasons
    record: Callable[[str], Mapping[str, Any] | None] = _no_record
    keep: Callable[[str, Any], None] = _not_kept


def supervisor() -> Supervision:
    """The node's."""
    for entry in entry_points(_GROUP):
        found: Supervision = entry.load()
        return found
    return Supervision()
