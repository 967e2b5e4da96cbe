"""What a running instance was started as, with what was plugged since, beside its spec.

What differs waits for a restart, but for keys that are read when they matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.errors import BrineError
from brine.hotplug.disk_uses import runtime_of
from brine.instance.schema import to_json
from brine.instance.spec import Spec
from brine.instance.state import Oper
from brine.instance.states import Seen

_READ_WHEN_NEEDED = frozenset(
    {
        *("version", "name", "node", "admin_state", "admin_state_source", "tags"),
        *("user_shutdown", "shutdown_timeout", "start_order"),
    }
)
_DEVICES = ("disks", "nics")
_FILLED_IN = ("slot", "format_source")


@dataclass(frozen=True, slots=True)
class RunningSpec:
    """What runs.

    :param started: the spec of the start, as JSON. It lacks keys that are newer than the Brine
        which started it.
    :param pending: the keys of which the next start has other values.
    """

    started: Mapping[str, Any]
    pending: tuple[str, ...]


def running_spec(seen: Seen) -> RunningSpec | None:
    """What an instance runs as; None if it does not run, or this user may not know."""
    if seen.state.oper not in (Oper.RUNNING, Oper.STOPPING):
        return None
    started = _started(seen.spec)
    if started is None:
        return None
    pending = tuple(
        key
        for key, value in to_json(seen.spec).items()
        if key not in _READ_WHEN_NEEDED and key in started and started[key] != value
    )
    if any(key in _DEVICES for key in pending):
        plugged = _plugged_already(seen.spec)
        pending = tuple(key for key in pending if key not in plugged)
    return RunningSpec(started, pending)


def _started(spec: Spec) -> Mapping[str, Any] | None:
    started: Any
    try:
        if spec.is_xen():
            from brine.instance.xen.started import spec_in  # most are QEMU's

            started = spec_in(spec.name)
        else:
            started = (runtime_of(spec.name) or {}).get("spec")
    except (OSError, ValueError, RecursionError):
        return None
    return started if isinstance(started, dict) else None


def _plugged_already(spec: Spec) -> list[str]:
    """Which kinds of devices a running instance has as its next start will: somebody has defined
    them anew, and plugged them, too."""
    if spec.is_xen():
        return []
    from brine.instance.hot_changes import devices_now, with_hot_changes  # most have none

    try:
        now, later = devices_now(spec.name), with_hot_changes(spec)
    except BrineError:
        return []  # the next start says what is wrong with it
    return [key for key in _DEVICES if _compared(now, key) == _compared(later, key)]


def _compared(spec: Spec, key: str) -> list[dict[str, Any]]:
    """The devices of a spec, but for what a start fills in."""
    rows: list[dict[str, Any]] = to_json(spec)[key]
    return [{name: row[name] for name in row if name not in _FILLED_IN} for row in rows]
