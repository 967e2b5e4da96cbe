"""Events of this node that the cluster has to learn, kept until they are acknowledged.

Each instance has at most one event, its newest, in a small file. A new event supersedes the older
one. Salt carries the events to the master, and acknowledges each once the master has it: a master
that is away hears of it later. An event that is carried twice has the same id.

If no program takes events, the outbox keeps the newest thousand, and a hundred damaged files.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.files import put_aside, sync_folder, write_whole
from brine.common.schema import SchemaError, key, parse, shown

if TYPE_CHECKING:
    import logging

_ID = re.compile(r"\d{20}-[0-9a-f]{8}")
_LATEST_S = 1e11
MOST_EVENTS = 1000
"""One for each instance, and far more than a node has; the oldest of more are dropped."""
_MOST_DAMAGED = 100


class OutboxError(BrineError):
    """An event that can't be kept, read or removed."""


def is_event_id(text: str) -> bool:
    """Whether an event can have that id."""
    return bool(_ID.fullmatch(text))


def _id_fault(text: str) -> str | None:
    return None if is_event_id(text) else f"{shown(text)} is no id of an event"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """An event on this node.

    :param id: given once; ids sort as the events happened.
    :param time: in seconds since 1970.
    :param kind: in one word, such as ``admin-state``.
    :param instance: its UUID, and *name* is its name at that time.
    :param data: more of it, of the kind's own.
    """

    id: str = key(check=_id_fault)
    time: float = key(minimum=0, maximum=_LATEST_S)
    kind: str
    instance: str
    name: str
    data: dict[str, Any]


def put(kind: str, *, instance: str, name: str, data: Mapping[str, Any]) -> ClusterEvent:
    """Keep an event, in place of an earlier one of the same instance. It survives a power cut from
    when this returns. An event that says the same as the earlier one is not kept again."""
    folder = paths.OUTBOX_DIR
    every = list(events())
    known = [event for event in every if event.instance == instance]
    if known and (known[-1].kind, known[-1].name, known[-1].data) == (kind, name, data):
        return known[-1]
    # A clock that was set back must not have it come before what happened earlier.
    now_ns = max(time.time_ns(), int(every[-1].id.partition("-")[0]) + 1 if every else 0)
    event = ClusterEvent(
        id=f"{now_ns:020}-{os.urandom(4).hex()}",
        time=now_ns / 1e9,
        kind=kind,
        instance=instance,
        name=name,
        data=dict(data),
    )
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(folder.parent)
        text = json.dumps(asdict(event), indent=1)
        write_whole(_file(folder, event.id), text.encode() + b"\n", mode=0o600, alone=True)
    except OSError as error:
        raise OutboxError(f"{folder}: can't be written: {error.strerror}") from error
    # Only now, so that a full disk or a power cut leaves the earlier one.
    _remove_superseded(known, folder)
    return event


def events() -> Iterator[ClusterEvent]:
    """The newest event of each instance, unless it is acknowledged; the oldest first. Damaged files
    are reported, and kept under another name. Superseded events are removed."""
    folder = paths.OUTBOX_DIR
    newest: dict[str, ClusterEvent] = {}
    superseded = []
    for event in _stored(folder):
        if earlier := newest.pop(event.instance, None):
            superseded.append(earlier)
        newest[event.instance] = event
    kept = list(newest.values())
    if len(kept) > MOST_EVENTS:
        _log().error(
            "%s: no reader takes events: the oldest %s are dropped", folder, len(kept) - MOST_EVENTS
        )
        superseded += kept[:-MOST_EVENTS]
    _remove_superseded(superseded, folder)
    yield from kept[-MOST_EVENTS:]


def _remove_superseded(superseded: list[ClusterEvent], folder: Path) -> None:
    """Remove superseded events. Those that can't be removed stay for the next call."""
    if not superseded:
        return
    try:
        for event in superseded:
            _file(folder, event.id).unlink(missing_ok=True)
        # None of them may be back after its successor was acknowledged and the power cut.
        sync_folder(folder)
    except OSError as error:
        _log().warning("%s: superseded events can't be removed: %s", folder, error.strerror)


def _stored(folder: Path) -> Iterator[ClusterEvent]:
    """Every event that there is a file of, the oldest first."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        raise OutboxError(f"{folder}: can't be read: {error.strerror}", hint=hint) from error
    is_damaged = False
    for name in names:
        file, event_id = folder / name, name.removesuffix(".json")
        if event_id == name or not is_event_id(event_id):
            continue
        try:
            event = parse(ClusterEvent, json.loads(file.read_bytes()))
            if event.id != event_id:
                raise SchemaError("it is another event's", where="/id")
            yield event
        except FileNotFoundError:
            continue  # acknowledged just now
        except OSError as error:
            # The others must be told all the same.
            _log().error("%s: can't be read: %s; left out", file, error.strerror)
        except (ValueError, SchemaError, RecursionError) as error:
            # The events after it must be told all the same.
            _keep_aside(file, error)
            is_damaged = True
    if is_damaged:
        _keep_newest_damaged(folder)


def _keep_newest_damaged(folder: Path) -> None:
    """Remove the oldest damaged files."""
    try:
        damaged = sorted(file for file in folder.iterdir() if ".damaged" in file.suffix)
        for file in damaged[:-_MOST_DAMAGED]:
            file.unlink(missing_ok=True)
    except OSError as error:
        _log().warning("%s: damaged events can't be removed: %s", folder, error.strerror)


def _keep_aside(file: Path, error: Exception) -> None:
    try:
        aside = put_aside(file, file.with_suffix(".damaged"))
    except OSError as fault:
        _log().error("%s: damaged, and can't be kept aside: %s; left out", file, fault.strerror)
    else:
        _log().error("%s: damaged: %s; kept as %s", file, error, aside.name)


def acknowledge(event_id: str) -> bool:
    """Remove an event that the master has; returns whether it was there."""
    folder = paths.OUTBOX_DIR
    if not is_event_id(event_id):
        raise OutboxError(f"{event_id!r}: no event has such an id", hint="brine outbox list")
    try:
        _file(folder, event_id).unlink()
        sync_folder(folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        hint = "be root" if isinstance(error, PermissionError) else None
        raise OutboxError(f"{event_id}: can't be removed: {error.strerror}", hint=hint) from error
    return True


def _file(folder: Path, event_id: str) -> Path:
    return folder / f"{event_id}.json"


def _log() -> logging.Logger:
    import logging  # takes long to load, and few events are damaged

    return logging.getLogger(__name__)
