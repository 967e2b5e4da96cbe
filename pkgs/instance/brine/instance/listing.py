"""``brine instance list``: tables and JSON of instances."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from brine.common.cli import table
from brine.common.errors import tell_error
from brine.instance.history import with_reasons
from brine.instance.hypervisor import hypervisor_of
from brine.instance.observe import Observed, Oper, look_at_all
from brine.instance.running_spec import RunningSpec, running_spec
from brine.instance.spec import Spec
from brine.instance.store import InstanceError
from brine.instance.unit import time_of

_HEADING = ("NAME", "STATUS", "ADMIN STATE", "OPER STATE", "MEMORY", "VCPUS", "WHY")
_WIDE_HEADING = (*_HEADING[:-1], "UP SINCE", "NODE", _HEADING[-1])
_FIRST_VNC_PORT = 5900


def list_all(arguments: argparse.Namespace) -> int:
    """``brine instance list``"""
    found = list(look_at_all())
    seen = with_reasons([one for one in found if not isinstance(one, InstanceError)])
    faults = [one for one in found if isinstance(one, InstanceError)]
    if arguments.json:
        print(json.dumps([summary(one) for one in seen], indent=2))
    elif seen:
        wide = arguments.wide
        print(*table([row(one, wide=wide) for one in (None, *seen)]), sep="\n")
    elif not faults:
        print("no instance is defined")
    for fault in faults:
        tell_error(fault)
    return 1 if faults else 0


def row(seen: Observed | None, *, wide: bool = False) -> tuple[str, ...]:
    """A row of the table; its heading for None.

    :param wide: with the time of its start, and its node.
    """
    if seen is None:
        return _WIDE_HEADING if wide else _HEADING
    spec, state = seen.spec, seen.state
    running = running_spec(seen)
    size = _size(spec, running)
    more = (_since(seen) or "-", _node()) if wide else ()
    return (
        spec.name,
        f"{state.status} (paused)" if _is_paused(seen) else state.status,
        spec.admin_state,
        state.oper,
        f"{size['memory_mib']} MiB",
        str(size["vcpus"]),
        *more,
        "; ".join(filter(None, (state.why, _pending_words(running)))) or "-",
    )


def summary(seen: Observed) -> dict[str, Any]:
    """An instance in the JSON of a list."""
    return summary_of(seen, running_spec(seen))


def summary_of(seen: Observed, running: RunningSpec | None) -> dict[str, Any]:
    """The same, of an instance whose running spec was read."""
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
        "paused": _is_paused(seen),
        "restart_pending": list(running.pending) if running else None,
        **_size(spec, running),
        "pid": unit.main_pid if unit and unit.main_pid else None,
        "since": _since(seen),
        "vnc": _vnc(seen, running),
        "domain": seen.domain.number if seen.domain else None,
        "node": _node(),
    }


def _size(spec: Spec, running: RunningSpec | None) -> dict[str, Any]:
    """The memory and processors of the running instance, or else those of the spec."""
    started = running.started if running else {}
    return {key: started.get(key, getattr(spec, key)) for key in ("memory_mib", "vcpus")}


def _node() -> str:
    return os.uname().nodename


def _pending_words(running: RunningSpec | None) -> str:
    return f"restart pending: {', '.join(running.pending)}" if running and running.pending else ""


def _is_paused(seen: Observed) -> bool:
    """Whether it is paused. QEMU is asked only if a marker says so."""
    return seen.state.oper is Oper.RUNNING and hypervisor_of(seen.spec).is_paused(seen)


def _since(seen: Observed) -> str | None:
    if seen.state.oper is not Oper.RUNNING or not seen.unit or not seen.unit.since_us:
        return None
    return datetime.fromtimestamp(time_of(seen.unit.since_us), UTC).isoformat(timespec="seconds")


def _vnc(seen: Observed, running: RunningSpec | None) -> str | None:
    """The address of VNC, read from the kernel: QEMU may have chosen the port."""
    started = running.started if running else {}
    bind = str(started.get("vnc_bind", seen.spec.vnc_bind))
    unit = seen.unit
    if seen.state.oper is not Oper.RUNNING or not bind or not unit or not unit.main_pid:
        return None
    if bind.startswith("/"):
        return bind
    for address, port in listens_at(unit.main_pid):
        if port >= _FIRST_VNC_PORT and address == str(ip_address(bind)):
            return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return None


# The TCP sockets that a process listens at; see :manpage:`proc(5)`.

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENS = "0A"  # the state, in the kernel's tables
_TABLES = ("tcp", "tcp6")


def listens_at(pid: int, *, proc: Path = Path("/proc")) -> list[tuple[str, int]]:
    """The addresses and ports of a process, sorted; empty for a user other than root.

    :param pid: of the process.
    """
    try:
        own = set(_sockets_of(proc / str(pid) / "fd"))
    except OSError:
        return []
    found = []
    for protocol in _TABLES:
        try:
            lines = (proc / str(pid) / "net" / protocol).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        found += [_place(row[1]) for row in rows if row[3] == _LISTENS and row[9] in own]
    return sorted(found, key=lambda place: (place[1], place[0]))


def _sockets_of(folder: Path) -> Iterator[str]:
    """The inodes of a process's sockets."""
    for name in os.listdir(folder):
        try:
            match = _SOCKET.fullmatch(os.readlink(folder / name))
        except FileNotFoundError:
            continue  # it has just closed it
        if match:
            yield match[1]


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.partition(":")
    # Words of four bytes, each in the processor's byte order: little endian.
    data = bytes.fromhex(address)
    words = [data[start : start + 4][::-1] for start in range(0, len(data), 4)]
    return str(ip_address(b"".join(words))), int(port, 16)
