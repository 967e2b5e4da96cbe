"""The spec of a running instance, compared with that of its next start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from brine.instance.observe import Observed, Oper
from brine.vm.disk import as_plugged
from brine.vm.instances import started_with
from brine.vm.spec import to_json

_READ_WHEN_NEEDED = frozenset(
    {
        *("version", "name", "node", "claim_serial", "admin_state", "admin_state_source", "tags"),
        *("user_shutdown", "shutdown_timeout", "start_order", "owner", "ignored"),
    }
)


class RunningSpec(NamedTuple):
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
    spec = seen.spec
    started = started_with(spec.name)
    if not isinstance(started, dict):
        return None
    pending = [
        key
        for key, value in to_json(spec).items()
        if key not in _READ_WHEN_NEEDED and key in started and _differ(started[key], value)
    ]
    if {"disks", "nics"}.intersection(pending) and not spec.is_xen():
        from brine.instance.kvm.runtime_devices import plugged_already  # few have changes

        plugged = plugged_already(spec)
        pending = [key for key in pending if key not in plugged]
    return RunningSpec(started, tuple(pending))


def _differ(started: Any, now: Any) -> bool:
    """Whether the values of a key differ by more than what QEMU is not told of its devices."""
    return bool(started != now and _as_plugged(started) != _as_plugged(now))


def _as_plugged(value: Any) -> Any:
    rows = value if isinstance(value, list) else []
    return [as_plugged(one) for one in rows if isinstance(one, dict)] or value
