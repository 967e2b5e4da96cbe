"""Events of this node that operators' programs are told of.

A part declares which of its journal records are events by an entry point of the group
``brine.events``: :class:`~brine.common.message.EventKind` objects. The journal is where they are
read, so that none is lost while no program runs, and no part waits for one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from brine.common.entry_points import entry_points
from brine.common.errors import printable
from brine.common.message import EventKind, is_from

_GROUP = "brine.events"
_FIELD = "BRINE_"
_LONGEST = 2000
_KNOWN_BY_OTHER_NAMES = frozenset({"INSTANCE", "EVENT"})


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An event, as a program gets it.

    :param id: the same if it is told twice; ids sort by time.
    :param time: ISO 8601, in UTC.
    :param text: for people, in one line.
    :param facts: the record's fields, such as ``cause``.
    """

    id: str
    event: str
    time: str
    node: str
    instance: str
    text: str
    facts: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """It as JSON. The facts may have no names of the rest."""
        return {
            "id": self.id,
            "event": self.event,
            "time": self.time,
            "node": self.node,
            "instance": self.instance,
            "text": self.text,
            "facts": dict(self.facts),
        }


def event_kinds() -> dict[str, EventKind]:
    """The kinds that the installed parts have, by the message's id."""
    kinds = [kind for entry in entry_points(_GROUP) for kind in entry.load()]
    return {kind.message.id: kind for kind in kinds}


def event_of(entry: Mapping[str, Any], kinds: Mapping[str, EventKind]) -> NodeEvent | None:
    """The event of a record of systemd's journal.Reader; None if it is none, or a stranger's."""
    message_id = getattr(entry.get("MESSAGE_ID"), "hex", "")  # a UUID
    kind = kinds.get(message_id)
    if kind is None or not is_from(entry, kind.sender):
        return None
    when: datetime = entry["__REALTIME_TIMESTAMP"]
    facts = {
        field.removeprefix(_FIELD).lower(): _text(value)
        for field, value in sorted(entry.items())
        if field.startswith(_FIELD) and field.removeprefix(_FIELD) not in _KNOWN_BY_OTHER_NAMES
    }
    cursor = str(entry.get("__CURSOR", ""))
    return NodeEvent(
        id=event_id(when, cursor),
        event=kind.name,
        time=when.astimezone(UTC).isoformat(timespec="milliseconds"),
        node=os.uname().nodename,
        instance=_text(entry.get("BRINE_INSTANCE", "")),
        text=_text(entry.get("MESSAGE", "")),
        facts=facts,
    )


def event_id(when: datetime, what: str) -> str:
    """An id that sorts by time."""
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()
    return f"{int(when.timestamp() * 1e6):020}-{digest[:8]}"


def trial_event() -> NodeEvent:
    """An event that did not happen, to try programs with."""
    when, node = datetime.now(UTC), os.uname().nodename
    return NodeEvent(
        id=event_id(when, node),
        event="test",
        time=when.isoformat(timespec="milliseconds"),
        node=node,
        instance="test",
        text="test: nothing has happened: brine events test",
        facts={},
    )


def _text(value: Any) -> str:
    # The journal returns a field that is not UTF-8 as bytes, and several of one name as a list.
    value = value[0] if isinstance(value, list) and value else value
    text = os.fsdecode(value) if isinstance(value, bytes) else str(value)
    return printable(text)[:_LONGEST]
