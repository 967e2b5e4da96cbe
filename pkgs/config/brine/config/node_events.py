"""Events of a node, recorded in the configuration: ``brine config record``.

They are what ``brine outbox list --json`` prints there. A node is not trusted: it may speak of its
own instances only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from brine.common.errors import BrineError, printable
from brine.common.outbox import MOST_EVENTS, ClusterEvent, is_event_id
from brine.common.schema import key, parse, shown
from brine.config.model import Configuration, Node
from brine.config.schema import ConfigError, shallow

_KIND = "admin-state"
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdminState:
    """The data of an event of the kind ``admin-state``."""

    admin_state: str = key(choices=("up", "down", "offline"))
    source: str = key(choices=("admin", "user"))


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """What became of an event, with the keys that ``--json`` prints.

    :param id: of the event; empty if it has none that can be one.
    :param recorded: whether the configuration says so now; *changed* whether it did not before.
    :param reason: of what was not done, in one line.
    """

    id: str
    recorded: bool
    changed: bool
    reason: str = ""


@shallow()
def record(
    configuration: Configuration, node: Node, events: Any
) -> tuple[Configuration, list[RecordedEvent]]:
    """Set the admin_state of the instances that a node's *events* tell of; the latest one of an
    instance counts.

    :return: the new configuration, and what became of each event, in their order.
    :raises ConfigError: if *events* is no list, or has more than an outbox keeps: the lock is held
        meanwhile.
    """
    if type(events) is not list:
        hint = "events are what brine outbox list --json prints"
        raise ConfigError(f"must be a list of events, but is {shown(events)}", hint=hint)
    if len(events) > MOST_EVENTS:
        raise ConfigError(f"has {len(events)} events, and an outbox keeps {MOST_EVENTS}")
    instances = dict(configuration.instances)
    results: dict[int, RecordedEvent] = {}
    sound: list[tuple[str, int, ClusterEvent, _AdminState]] = []
    for index, item in enumerate(events):
        try:
            event = parse(ClusterEvent, item)
            sound.append((event.id, index, event, _read(configuration, node, event)))
        except BrineError as error:
            given = item.get("id") if isinstance(item, dict) else None
            event_id = given if isinstance(given, str) and is_event_id(given) else ""
            reason = printable(str(error))[:_LONGEST_REASON]
            results[index] = RecordedEvent(event_id, recorded=False, changed=False, reason=reason)
    for _, index, event, said in sorted(sound, key=lambda one: one[:2]):
        old = instances[event.instance]
        if old.admin_state == "offline" and said.source == "user":
            reason = f"{old.name} is offline in the configuration, and stays so"
            results[index] = RecordedEvent(event.id, recorded=True, changed=False, reason=reason)
            continue
        new = replace(old, admin_state=said.admin_state, admin_state_source=said.source)
        instances[event.instance] = new
        results[index] = RecordedEvent(event.id, recorded=True, changed=new != old)
    return replace(configuration, instances=instances), [results[i] for i in range(len(events))]


def _read(configuration: Configuration, node: Node, event: ClusterEvent) -> _AdminState:
    """What an event says; raises ConfigError or SchemaError if it can't be, or is not for the
    node to say."""
    if event.kind != _KIND:
        raise ConfigError(f"must be {_KIND}, but is {shown(event.kind)}", where="/kind")
    if event.instance not in configuration.instances:
        raise ConfigError(f"there is no instance {shown(event.instance)}", where="/instance")
    instance = configuration.instances[event.instance]
    if instance.primary_node != node.uuid:
        text = f"{instance.name} is not an instance of {node.name}"
        raise ConfigError(text, where="/instance")
    said = parse(_AdminState, event.data, "/data")
    if said.source == "user" and said.admin_state != "down":
        text = f"a user can only shut an instance down, but this is {said.admin_state}"
        raise ConfigError(text, where="/data/admin_state")
    return said
