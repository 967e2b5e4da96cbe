"""The spec of a running instance, compared with that of its next start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brine.common.errors import BrineError
from brine.hotplug.disk import runtime_of
from brine.instance.observe import Observed, Oper
from brine.instance.spec import Spec, to_json

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
    """The spec of a running instance.

    :param started: the spec of the start, as JSON. It lacks keys that are newer than the version of
        Brine which started it.
    :param pending: the keys whose values change with the next start.
    """

    started: Mapping[str, Any]
    pending: tuple[str, ...]


def running_spec(seen: Observed) -> RunningSpec | None:
    """The spec of a running instance; None if it does not run, or this user may not read it."""
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
        started = _xen_spec(spec) if spec.is_xen() else (runtime_of(spec.name) or {}).get("spec")
    except (OSError, ValueError, RecursionError):
        return None
    return started if isinstance(started, dict) else None


def _xen_spec(spec: Spec) -> Any:
    from brine.instance.xen.config import spec_in  # most are QEMU's

    return spec_in(spec.name)


def _plugged_already(spec: Spec) -> list[str]:
    """The kinds of devices that are the same now and at the next start: somebody has both redefined
    and plugged them."""
    if spec.is_xen():
        return []
    from brine.instance.kvm.live_changes import devices_now, with_hot_changes  # few have changes

    try:
        now, later = devices_now(spec.name), with_hot_changes(spec)
    except BrineError:
        return []  # the next start says what is wrong with it
    return [key for key in _DEVICES if _compared(now, key) == _compared(later, key)]


def _compared(spec: Spec, key: str) -> list[dict[str, Any]]:
    """The devices of a spec, without the keys that a start completes."""
    rows: list[dict[str, Any]] = to_json(spec)[key]
    return [{name: row[name] for name in row if name not in _FILLED_IN} for row in rows]
