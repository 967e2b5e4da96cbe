"""
Beacon: what happened to this node's virtual machines
=====================================================

.. code-block:: yaml

    beacons:
      brine: []

The event ``salt/beacon/MINION/brine/`` has two lists:

* ``outbox``: all events that the cluster does not know yet, as ``brine outbox list --json`` has
  them. While there are any, they are sent again: after 30 seconds, and then each time after twice
  as long, up to 5 minutes. So a master that was away hears of them, too.
* ``verdicts``: who ended an instance, as ``brine kvmd verdicts --json`` has it; each once.

The reactor ``brine/reactor/recorded.sls`` has the master record the outbox in the cluster's
configuration. While nothing happens, the beacon only looks at the names of the outbox's files, and
at the time of another folder.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

_OUTBOX = "/var/lib/brine/outbox"
_MARKS = "/run/brine/marks"
_KVMD = "/usr/sbin/brine-kvmd"

_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 300.0
# Verdicts of instances that end at once may come in another order than they are dated.
_OVERLAP = timedelta(minutes=1)

log = logging.getLogger(__name__)

# What was seen last. Salt forgets it when it loads the beacon anew; then the outbox is read again.
_seen: dict[str, Any] = {"outbox": [], "marks": "", "events": [], "again": 0.0, "pause_s": 0.0}


def validate(config: Any) -> tuple[bool, str]:
    """Check the beacon's configuration; there is nothing in it but Salt's own."""
    if not isinstance(config, list):
        return False, "the configuration of the beacon brine must be a list"
    return True, "valid"


def beacon(config: Any) -> list[dict[str, Any]]:
    """The event that is due, if one is."""
    if "brine.ask" not in __salt__:
        return []  # the execution module has not come yet
    verdicts, is_due = _new_verdicts(), _is_outbox_due()
    if not verdicts and not is_due:
        return []
    return [{"outbox": _seen["events"] or [], "verdicts": verdicts}]


def _is_outbox_due() -> bool:
    """Whether there are events that are to be sent, for the first time or again."""
    names, now = _event_files(), time.monotonic()
    is_new = names != _seen["outbox"]
    if not is_new and (_seen["events"] == [] or now < _seen["again"]):
        return False
    if is_new or _seen["events"] is None:
        _seen["events"] = _ask("outbox", "list") if names else []
    pause_s = _FIRST_PAUSE_S if is_new else min(2 * _seen["pause_s"], _LONGEST_PAUSE_S)
    _seen.update(outbox=names, again=now + pause_s, pause_s=pause_s)
    return bool(_seen["events"])


def _event_files() -> list[str]:
    """The names of the outbox's files, each of one event. The folder's time would not do: it has
    steps of some milliseconds, and an event that comes in the same step as a look is never seen."""
    try:
        return sorted(name for name in os.listdir(_OUTBOX) if name.endswith(".json"))
    except FileNotFoundError:
        return []


def _new_verdicts() -> list[Any]:
    """The verdicts that no event had yet."""
    stamp = _stamp(_MARKS)
    if stamp in (None, _seen["marks"]):
        return []
    _seen["marks"] = stamp
    if not os.path.exists(_KVMD):
        return []
    told = _read_told()
    newest = max(datetime.fromisoformat(when) for when, _ in told)
    verdicts = _ask("kvmd", "verdicts", "--since", (newest - _OVERLAP).isoformat()) or []
    keys = [[one["time"], one["instance"]] for one in verdicts]
    if keys:
        _write_told(keys)
    return [one for one, key in zip(verdicts, keys, strict=True) if key not in told]


def _read_told() -> list[list[str]]:
    """Time and instance of the verdicts that were sent last; on a new node, of now."""
    try:
        with open(_told_file(), encoding="utf-8") as file:
            return json.load(file)  # type: ignore[no-any-return]
    except (FileNotFoundError, ValueError):
        return [[datetime.now().astimezone().isoformat(), ""]]


def _write_told(keys: list[list[str]]) -> None:
    new = f"{_told_file()}.new"
    with open(new, "w", encoding="utf-8") as file:
        json.dump(keys, file)
    os.replace(new, _told_file())


def _told_file() -> str:
    return os.path.join(__opts__["cachedir"], "brine_verdicts.json")


def _stamp(folder: str) -> int | None:
    """When something was added to a folder, or removed; None if there is no such folder."""
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return None


def _ask(*command: str) -> list[Any] | None:
    """The output of ``brine``; None, and a line in the log, if it failed."""
    answer = __salt__["brine.ask"](*command)
    if "refused" in answer:
        log.error("brine %s: %s", " ".join(command), answer["refused"])
        return None
    return answer["said"]  # type: ignore[no-any-return]
