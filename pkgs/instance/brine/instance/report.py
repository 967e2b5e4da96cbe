"""What ``brine instance`` says of instances: in a table, in lines, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from time import CLOCK_MONOTONIC, clock_gettime, time
from typing import Any

from brine.common import paths
from brine.common.qmp_blocking import BlockingQmpClient, without_loop
from brine.common.qmp_errors import QmpError
from brine.instance.control import control_of
from brine.instance.schema import to_json
from brine.instance.state import Oper
from brine.instance.states import Seen

_HEADING = ("NAME", "STATUS", "ADMIN STATE", "OPER STATE", "MEMORY", "VCPUS", "WHY")
_ANSWER_S = 3.0


def row(seen: Seen | None) -> tuple[str, ...]:
    """A row of the table; its heading for None."""
    if seen is None:
        return _HEADING
    spec, state = seen.spec, seen.state
    memory = f"{spec.memory_mib} MiB"
    return (
        spec.name,
        state.status,
        spec.admin_state,
        state.oper,
        memory,
        str(spec.vcpus),
        state.why or "-",
    )


def summary(seen: Seen) -> dict[str, Any]:
    """An instance in the JSON of a list."""
    spec, state, unit = seen.spec, seen.state, seen.unit
    return {
        "name": spec.name,
        "uuid": spec.uuid,
        "hypervisor": spec.hypervisor,
        "status": state.status,
        "admin_state": spec.admin_state,
        "admin_state_source": spec.admin_state_source,
        "oper_state": state.oper,
        "why": state.why,
        "memory_mib": spec.memory_mib,
        "vcpus": spec.vcpus,
        "pid": unit.main_pid if unit and unit.main_pid else None,
        "since": _since(seen),
    }


def details(seen: Seen) -> dict[str, Any]:
    """All that is known of an instance."""
    control = control_of(seen.spec.name)
    return {
        **summary(seen),
        "qemu": _qemu(seen),
        "qmp": str(control.qmp),
        "runtime": str(paths.RUNTIME_DIR / f"{seen.spec.name}.json"),
        "spec": to_json(seen.spec),
    }


def text(found: Mapping[str, Any]) -> Iterator[str]:
    """The same in lines for people."""
    labels = {
        "name": "Instance",
        "uuid": "UUID",
        "status": "Status",
        "why": "Why",
        "admin_state": "Admin state",
        "oper_state": "Oper state",
        "since": "Since",
        "pid": "QEMU's process",
        "qemu": "QEMU says",
        "qmp": "QMP socket",
    }
    width = max(map(len, labels.values())) + 1
    for key, label in labels.items():
        if found[key] not in (None, ""):
            source = f", said by the {found['admin_state_source']}" if key == "admin_state" else ""
            yield f"{label + ':':<{width}} {found[key]}{source}"
    yield "Spec:"
    for key, value in found["spec"].items():
        if key not in ("name", "uuid", "admin_state", "admin_state_source"):
            yield f"  {key}: {json.dumps(value)}"


def _since(seen: Seen) -> str | None:
    if seen.state.oper is not Oper.RUNNING or not seen.unit or not seen.unit.since_us:
        return None
    ago_s = clock_gettime(CLOCK_MONOTONIC) - seen.unit.since_us / 1e6
    return datetime.fromtimestamp(time() - ago_s, UTC).isoformat(timespec="seconds")


def _qemu(seen: Seen) -> str | None:
    """What QEMU itself says that it does; None if it does not run."""
    if seen.state.oper is not Oper.RUNNING:
        return None
    try:
        path = control_of(seen.spec.name).qmp
        limits = {"timeout_s": _ANSWER_S, "answer_timeout_s": _ANSWER_S}
        with BlockingQmpClient.connect(path, **limits) as qmp:
            return str(without_loop(qmp.execute("query-status"))["status"])
    except (QmpError, TypeError, KeyError) as error:
        return f"nothing: {error}"
