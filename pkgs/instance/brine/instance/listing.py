"""``brine instance list``: tables and JSON of instances."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common.errors import tell_error, warn
from brine.common.tables import Cell, Colour, print_table
from brine.common.times import iso_time, local_time
from brine.instance.history import with_reasons
from brine.instance.hypervisor_choice import hypervisor_of
from brine.instance.observe import Observed, Oper, Status, look_at_all
from brine.instance.running_spec import RunningSpec, running_spec
from brine.instance.store import InstanceError
from brine.instance.supervisor import supervisor
from brine.instance.unit import time_of
from brine.vm.halt import Halt
from brine.vm.spec import Spec, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from brine.instance.disks.states import DiskState

HEADING = ("NAME", "STATUS", "ADMIN STATE", "OPER STATE", "MEMORY", "VCPUS", "WHY")
WIDE_HEADING = (*HEADING[:-1], "UP SINCE", "NODE", HEADING[-1])
_FIRST_VNC_PORT = 5900
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_STORAGE_ANSWER_S = 5.0
_LISTENS = "0A"  # the state, in the kernel's tables


def list_all(arguments: argparse.Namespace) -> int:
    found = list(look_at_all(asked=arguments.ahead))
    seen = [one for one in found if not isinstance(one, InstanceError)]
    looked = begin_volumes(one.spec for one in seen)
    seen = with_reasons(seen)
    volumes = looked()
    faults = [one for one in found if isinstance(one, InstanceError)]
    if arguments.json:
        reason = supervisor().reasons_to_wait()
        # A line each: json.dumps() with an indent takes several times as long.
        rows = (summary(one, reason(one.name), volumes.get(one.name, ())) for one in seen)
        lines = ",\n".join(map(json.dumps, rows))
        print(f"[\n{lines}\n]" if lines else "[]")
    else:
        heading = WIDE_HEADING if arguments.wide else HEADING
        cells = [row(one, volumes.get(one.name, ()), wide=arguments.wide) for one in seen]
        print_table(heading, cells, none="" if faults else "no instance is defined")
        if pause := supervisor().pause():
            warn(pause)
    for fault in faults:
        tell_error(fault)
    return 1 if faults else 0


def begin_volumes(
    specs: Iterable[Spec], *, timeout_s: float = _STORAGE_ANSWER_S
) -> Callable[[], Mapping[str, Sequence[DiskState]]]:
    """Begin to look at the volumes of instances. The result waits for that, for a limited time, and
    returns their states by the name of the instance. Most instances have none."""
    specs = [spec for spec in specs if any(disk.unit for disk in spec.disks)]
    if not specs:
        return dict
    from brine.instance.disks.states import begin_look  # with it all of storage

    return begin_look(specs, timeout_s=timeout_s)


def row(
    seen: Observed, volumes: Sequence[DiskState] = (), *, wide: bool = False
) -> tuple[str, ...]:
    """A row of the table.

    :param volumes: of its disks.
    :param wide: with the time of its start, and its node.
    """
    found = summary_of(seen, running_spec(seen), volumes, with_vnc=False)
    oper, pending = seen.state.oper, ", ".join(found["restart_pending"] or ())
    still = "paused" if found["paused"] else (found["halted"] or {}).get("state")
    # Only root can ask LVM.
    told = [one for one in volumes if not one.is_ok and not (one.is_unknown and os.geteuid())]
    whys = [found["why"], *(one.words() for one in told)]
    whys += [f"restart pending: {pending}"] if pending else []
    return (
        found["name"],
        _status_cell(f"{found['status']} ({still})" if still else found["status"]),
        found["admin_state"],
        Cell(oper, Colour.WARNING) if oper is Oper.USER_SHUTDOWN else oper,
        f"{found['memory_mib']} MiB",
        str(found["vcpus"]),
        *((_up_since(seen, found), found["node"]) if wide else ()),
        "; ".join(filter(None, whys)) or "-",
    )


def _status_cell(text: str) -> str:
    if text.startswith("ERROR"):
        return Cell(text, Colour.BAD)
    return Cell(text, Colour.GOOD) if text == Status.RUNNING else text


def _up_since(seen: Observed, found: Mapping[str, Any]) -> str:
    return local_time(time_of(seen.unit.since_us)) if found["since"] and seen.unit else "-"


def summary(
    seen: Observed, held_back: str | None = None, volumes: Sequence[DiskState] = ()
) -> dict[str, Any]:
    """An instance in the JSON of a list.

    :param held_back: why the watcher would not start it now.
    :param volumes: of its disks.
    """
    found = summary_of(seen, running_spec(seen), volumes)
    return {**found, "held_back": held_back, "spec": to_json(seen.spec)}


def summary_of(
    seen: Observed,
    running: RunningSpec | None,
    volumes: Sequence[DiskState],
    *,
    with_vnc: bool = True,
) -> dict[str, Any]:
    """The same, of an instance whose running spec was read.

    :param with_vnc: whether to look for the port of its VNC, which takes long.
    """
    spec, state, unit = seen.spec, seen.state, seen.unit
    started = running.started if running else {}
    runs = state.oper is Oper.RUNNING
    pid = unit.main_pid if unit and unit.main_pid else None
    since = iso_time(time_of(unit.since_us)) if runs and unit and unit.since_us else None
    bind = str(started.get("vnc_bind", spec.vnc_bind))
    return {
        "name": spec.name,
        "uuid": spec.uuid,
        "hypervisor": spec.hypervisor,
        "status": state.status,
        "admin_state": spec.admin_state,
        "admin_state_source": spec.admin_state_source,
        "oper_state": state.oper,
        "why": state.why,
        "paused": runs and seen.may_be_paused and hypervisor_of(spec).is_paused(seen),
        "halted": _halted(seen.halted) if runs and seen.halted else None,
        "restart_pending": list(running.pending) if running else None,
        "memory_mib": started.get("memory_mib", spec.memory_mib),
        "vcpus": started.get("vcpus", spec.vcpus),
        "pid": pid,
        "since": since,
        "vnc": _vnc(bind, pid) if runs and pid and with_vnc else None,
        "domain": seen.domain.number if seen.domain else None,
        "node": (seen.bar and seen.bar.node) or os.uname().nodename,
        "volumes": [one.row() for one in volumes],
    }


def _halted(halt: Halt) -> dict[str, Any]:
    return {
        "state": halt.state,
        "reason": halt.reason or None,
        "device": halt.device or None,
        "no_space": halt.no_space,
        "since": iso_time(halt.since) if halt.since else None,
    }


def _vnc(bind: str, pid: int) -> str | None:
    """The address of VNC, read from the kernel: QEMU may have chosen the port."""
    if not bind or bind.startswith("/"):
        return bind or None
    for address, port in _listens_at(pid):
        if port >= _FIRST_VNC_PORT and address == str(ip_address(bind)):
            return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return None


def _listens_at(pid: int) -> list[tuple[str, int]]:
    """The TCP addresses and ports of a process, by port; empty for a user other than root.

    Source: :manpage:`proc(5)`.
    """
    found, own, rows = [], set(), []
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it has just closed it
                if match := _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{descriptor}")):
                    own.add(match[1])
    for protocol in ("tcp", "tcp6"):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]
            rows += [line.split() for line in lines]
    for fields in rows:
        if fields[3] == _LISTENS and fields[9] in own:
            address, _, port = fields[1].partition(":")
            # Words of four bytes, each in the processor's byte order: little endian.
            data = bytes.fromhex(address)
            words = [data[start : start + 4][::-1] for start in range(0, len(data), 4)]
            found.append((str(ip_address(b"".join(words))), int(port, 16)))
    return sorted(found, key=lambda place: (place[1], place[0]))
