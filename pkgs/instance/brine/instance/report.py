"""What ``brine instance`` says of instances: in a table, in lines, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

from brine.common import paths
from brine.common.marks import WHO_UNKNOWN
from brine.common.qmp_blocking import without_loop
from brine.common.qmp_errors import QmpError
from brine.instance.control import control_of, domain_file
from brine.instance.listening import listens_at
from brine.instance.monitor import monitor_of
from brine.instance.schema import to_json
from brine.instance.state import Oper
from brine.instance.states import Seen
from brine.instance.unit import time_of
from brine.instance.verdicts import verdict_on
from brine.instance.vnc import FIRST_VNC_PORT

_HEADING = ("NAME", "STATUS", "ADMIN STATE", "OPER STATE", "MEMORY", "VCPUS", "WHY")
AS_ROOT = 'security_model is "none": QEMU runs as root, and so does a guest that breaks out of it'
_ANSWER_S = 3.0
_SAID_ABOVE = ("name", "uuid", "admin_state", "admin_state_source")


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
        "vnc": _vnc(seen),
        "domain": seen.domain.number if seen.domain else None,
    }


def details(seen: Seen) -> dict[str, Any]:
    """All that is known of an instance."""
    name = seen.spec.name
    control = control_of(name)
    is_qemu = not seen.spec.is_xen()
    has_line = is_qemu and seen.spec.serial_console
    return {
        **summary(seen),
        "xen": seen.domain.state if seen.domain else None,
        "qemu": _qemu(seen) if is_qemu else None,
        "verdict": _verdict(seen) if is_qemu else None,
        "qmp": str(control.qmp) if is_qemu else None,
        "console": str(control.serial) if has_line else None,
        "runtime": str(paths.RUNTIME_DIR / f"{name}.json" if is_qemu else domain_file(name)),
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
        "pid": "xl's process" if found["spec"]["hypervisor"] != "kvm" else "QEMU's process",
        "domain": "Domain",
        "xen": "Xen says",
        "qemu": "QEMU says",
        "verdict": "Last end",
        "vnc": "VNC",
        "console": "Serial line",
        "qmp": "QMP socket",
    }
    width = max(map(len, labels.values())) + 1
    for key, label in labels.items():
        if found[key] not in (None, ""):
            value = found[key]
            if key == "verdict":
                by = "" if value["who"] == WHO_UNKNOWN else ", by the verdict of brine-kvmd"
                value = f"{value['who']} ({value['cause']}){by}"
            source = f", said by the {found['admin_state_source']}" if key == "admin_state" else ""
            yield f"{label + ':':<{width}} {value}{source}"
    if found["spec"]["hypervisor"] == "kvm" and found["spec"]["security_model"] == "none":
        yield f"{'Warning:':<{width}} {AS_ROOT}"
    yield "Spec:"
    for key, value in found["spec"].items():
        if key not in _SAID_ABOVE and _means_something(key, found["spec"]["hypervisor"]):
            yield f"  {key}: {json.dumps(value)}"


def _means_something(key: str, hypervisor: str) -> bool:
    if hypervisor == "kvm":
        return True
    from brine.instance.xen.configuration import KEYS  # most are QEMU's

    return key in KEYS


def _since(seen: Seen) -> str | None:
    if seen.state.oper is not Oper.RUNNING or not seen.unit or not seen.unit.since_us:
        return None
    return datetime.fromtimestamp(time_of(seen.unit.since_us), UTC).isoformat(timespec="seconds")


def _vnc(seen: Seen) -> str | None:
    """Where QEMU listens for VNC, as the kernel says: the port may be one that it has found."""
    bind, unit = seen.spec.vnc_bind, seen.unit
    if seen.state.oper is not Oper.RUNNING or not bind or not unit or not unit.main_pid:
        return None
    if bind.startswith("/"):
        return bind
    for address, port in listens_at(unit.main_pid):
        if port >= FIRST_VNC_PORT and address == str(ip_address(bind)):
            return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return None


def _verdict(seen: Seen) -> dict[str, str] | None:
    """What is known of who ended an instance that does not run."""
    if seen.state.oper not in (Oper.DOWN, Oper.USER_SHUTDOWN):
        return None
    try:
        found = verdict_on(seen)
    except OSError:
        return None  # there is no journal
    return asdict(found) if found else None


def _qemu(seen: Seen) -> str | None:
    """What QEMU itself says that it does; None if it does not run."""
    if seen.state.oper is not Oper.RUNNING:
        return None
    try:
        limits = {"timeout_s": _ANSWER_S, "answer_timeout_s": _ANSWER_S}
        with monitor_of(seen.spec.name, **limits) as qmp:
            return str(without_loop(qmp.execute("query-status"))["status"])
    except (QmpError, TypeError, KeyError) as error:
        return f"nothing: {error}"
