"""``brine instance info``: all details of an instance, as lines or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError, printable
from brine.common.progress import size_text
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpError
from brine.common.times import local_time
from brine.hotplug.known_devices import devices_of
from brine.hotplug.qemu import Machine
from brine.instance.history import verdicts_on, with_reasons
from brine.instance.kvm.guest import guest_addresses, has_agent, monitor_of, run_state
from brine.instance.listing import begin_volumes, summary_of
from brine.instance.movable import Movee, disks_on_network, obstacles
from brine.instance.observe import Observed, Oper, look
from brine.instance.running_spec import RunningSpec, running_spec
from brine.instance.serial_log import lines_of, read_log
from brine.instance.store import InstanceError
from brine.instance.supervisor import supervisor
from brine.instance.xen.config import KEYS
from brine.vm.address import DeviceKind
from brine.vm.disk import Disk, Interface
from brine.vm.files import InstanceFiles
from brine.vm.halt import GOING_STATES, PAUSED, Halt
from brine.vm.markers import WHO_UNKNOWN
from brine.vm.runtime_file import Runtime, qemu_id
from brine.vm.spec import AS_ROOT, Spec, to_json
from brine.vm.values import Mode

_MOUNTS = Path("/proc/self/mountinfo")
_ANSWER_S = 3.0
_AGENT_ANSWER_S = 2.0
_LAST_WORDS = 40
_NO_ANSWER = "nothing:"
_PANIC = "Kernel panic - not syncing"
_NOTHING_OF_QEMU: Mapping[str, Any] = {
    "qemu": None,
    "disks": None,
    "nics": None,
    "guest_addresses": None,
}
_ODD_ANSWERS = (QmpError, TypeError, KeyError, ValueError, AttributeError, OSError)
_TYING = ("cpu", "accel", "extra_arguments")
"""The keys of the spec of a start that may keep a running instance from moving."""

_SAID_ABOVE = ("name", "uuid", "admin_state", "admin_state_source", "ignored")


def details(seen: Observed, held_back: str | None = None) -> dict[str, Any]:
    """All details of an instance.

    :param held_back: why the watcher would not start it now.
    """
    name = seen.name
    control = InstanceFiles(name)
    is_qemu = not seen.spec.is_xen()
    volumes = begin_volumes([seen.spec])
    running = running_spec(seen)
    started = running.started if running else {}
    verdict = _verdict(seen) if is_qemu else None
    of_qemu = _of_qemu(seen, running) if is_qemu else _NOTHING_OF_QEMU
    seen = _as_qemu_says(seen, of_qemu["qemu"])
    has_line = is_qemu and started.get("serial_console", seen.spec.serial_console)
    found = summary_of(seen, running, volumes().get(name, ()))
    return {
        **found,
        "held_back": held_back,
        "running": {key: started[key] for key in running.pending} if running else None,
        "xen": seen.domain.state if seen.domain else None,
        **of_qemu,
        "verdict": verdict,
        "last_words": _last_words(name) if verdict and verdict["who"] == "crash" else None,
        "qmp": str(control.qmp) if is_qemu else None,
        "console": str(control.serial) if has_line else None,
        "runtime": str(control.runtime if is_qemu else control.domain),
        "ignored": [*seen.spec.keys_without_effect(), *seen.spec.ignored],
        **_movability(seen, running, of_qemu, found["volumes"]),
        "spec": to_json(seen.spec),
    }


_LABELS = {
    "name": "Instance",
    "uuid": "UUID",
    "status": "Status",
    "why": "Why",
    "restart_pending": "Restart pending",
    "admin_state": "Admin state",
    "oper_state": "Oper state",
    "since": "Since",
    "pid": "QEMU's process",
    "domain": "Domain",
    "xen": "Xen says",
    "qemu": "QEMU says",
    "verdict": "Last end",
    "vnc": "VNC",
    "console": "Serial line",
    "qmp": "QMP socket",
    "disks": "Disk",
    "volumes": "Volume",
    "nics": "NIC",
    "guest_addresses": "Guest address",
    "movable": "Movable",
}
_WIDTH = max(map(len, _LABELS.values())) + 1


def report_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The same in lines for people."""
    is_qemu = found["spec"]["hypervisor"] == "kvm"
    labels = _LABELS if is_qemu else {**_LABELS, "pid": "xl's process"}
    for key, label in labels.items():
        for value in _values(key, found):
            yield f"{label + ':':<{_WIDTH}} {value}"
    if found["last_words"]:
        yield "Last console output (brine instance log has more):"
        yield from (f"  {line}" for line in found["last_words"])
    for warning in _warnings(found, is_qemu=is_qemu):
        yield f"{'Warning:':<{_WIDTH}} {warning}"
    yield "Spec:"
    for key, value in found["spec"].items():
        if key not in _SAID_ABOVE and (is_qemu or key in KEYS):
            yield f"  {key}: {json.dumps(value)}"


def _values(key: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The values of a key in words, a line each."""
    value = found[key]
    if key == "movable":
        yield from _movable_lines(found)
    elif key in _ONE_A_LINE:
        yield from (_ONE_A_LINE[key](one, found) for one in value or ())
    elif value not in (None, "", []):
        yield _IN_WORDS[key](found) if key in _IN_WORDS else str(value)


def _warnings(found: Mapping[str, Any], *, is_qemu: bool) -> Iterator[str]:
    if is_qemu and found["spec"]["security_model"] == "none":
        yield AS_ROOT
    if found["ignored"]:
        yield f"set, and without effect: {', '.join(found['ignored'])}"


_SOURCES = {"admin": "an administrator", "user": "its user"}


def _admin_state_in_words(found: Mapping[str, Any]) -> str:
    source = found["admin_state_source"]
    return f"{found['admin_state']}, set by {_SOURCES.get(source, source)}"


def _verdict_in_words(found: Mapping[str, Any]) -> str:
    who, cause = found["verdict"]["who"], found["verdict"]["cause"]
    by = "" if who == WHO_UNKNOWN else ", by the verdict of brine-kvmd"
    return f"{who} ({cause}){by}"


def _pending_in_words(found: Mapping[str, Any]) -> str:
    return ", ".join(_pending_line(found, one) for one in found["restart_pending"])


def _since_in_words(found: Mapping[str, Any]) -> str:
    return local_time(datetime.fromisoformat(found["since"]).timestamp())


_IN_WORDS = {
    "since": _since_in_words,
    "admin_state": _admin_state_in_words,
    "verdict": _verdict_in_words,
    "restart_pending": _pending_in_words,
}


def _pending_line(found: Mapping[str, Any], key: str) -> str:
    """A key that changes with the next start, with both values if they are short."""
    now, later = found["running"][key], found["spec"][key]
    if isinstance(now, list) or isinstance(later, list):
        return key
    return f"{key} ({json.dumps(now)}, then {json.dumps(later)})"


def _movable_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Whether it can move; if not, each reason in a line."""
    is_movable, reasons = found["movable"], found["obstacles"]
    if is_movable:
        yield "yes, while it does not run" if reasons else "yes"
    answer = "not while it runs" if is_movable else "no"
    yield from (f"{answer}, because {one['why']}" for one in reasons)
    if not is_movable and not any("cold" in one["blocks"] for one in reasons):
        yield "yes, once it is stopped"


def _disk_line(one: Mapping[str, Any], _found: Mapping[str, Any]) -> str:
    path = printable(str(one["path"] or "of an unknown path"))
    return f"{path}, serial {printable(one['serial'])}, {_place(one)}"


def _volume_line(one: Mapping[str, Any], _found: Mapping[str, Any]) -> str:
    size = size_text(one["made"]) if one["made"] else "of unknown size"
    why = f": {one['why']}" if one["why"] else ""
    text = f"{one['name'] or one['uuid']} in {one['unit']}, {size}, {one['status']}{why}"
    return printable(text + (", added by hand" if one["by_hand"] else ""))


def _nic_line(one: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    there = f", {one['tap']} {_link_of(one, found)}" if one["tap"] else ""
    return printable(f"{printable(one['mac'])}{there}, {_place(one)}")


def _link_of(one: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Where the tap of a NIC leads. A routed one has addresses, and often no link."""
    known = [*((found["running"] or {}).get("nics") or ()), *found["spec"]["nics"]]
    nic: Mapping[str, Any] = next((nic for nic in known if nic["uuid"] == one["uuid"]), {})
    link = f"on {one['link']}" if one["link"] else ""
    if one["link"] and nic.get("mode") != Mode.ROUTED:
        return link
    return " ".join(filter(None, ["routed", link, *nic.get("ips", ())]))


def _place(one: Mapping[str, Any]) -> str:
    text = f"slot {one['slot']}" + ("" if one["since_start"] else ", plugged in since the start")
    return text + (", added by hand" if one["by_hand"] else "")


def _address_line(one: Mapping[str, Any], _found: Mapping[str, Any]) -> str:
    return f"{one['address']}/{one['prefix']} on {one['interface']}, as its agent says"


_ONE_A_LINE = {
    "disks": _disk_line,
    "volumes": _volume_line,
    "nics": _nic_line,
    "guest_addresses": _address_line,
}


def _verdict(seen: Observed) -> dict[str, str] | None:
    """The verdict on an instance that does not run."""
    if seen.is_going:
        return None
    found = verdicts_on([seen]).get(seen.name)
    return found._asdict() if found else None


def _last_words(name: str) -> list[str] | None:
    """The last output on an instance's serial line, if there is a log."""
    try:
        lines = lines_of(read_log(name))
    except InstanceError:
        return None
    # The reason of a kernel panic stands above a trace of any length.
    begin = len(lines)
    while begin and not lines[begin - 1].startswith(f"--- {name} starts"):
        begin -= 1
    panic = next((n for n in range(begin, len(lines)) if _PANIC in lines[n]), len(lines))
    begin = min(panic, max(len(lines) - _LAST_WORDS, 0))
    return lines[begin : begin + _LAST_WORDS]


def _of_qemu(seen: Observed, running: RunningSpec | None) -> dict[str, Any]:
    """The facts that QEMU itself reports; None for each key if it does not run."""
    found = dict(_NOTHING_OF_QEMU)
    if seen.state.oper is not Oper.RUNNING:
        return found
    name = seen.name
    try:
        with monitor_of(name, timeout_s=_ANSWER_S) as qmp:
            found["qemu"] = run_state(qmp)
            with suppress(*_ODD_ANSWERS):
                found |= _devices(seen.spec, running, qmp)
            with suppress(*_ODD_ANSWERS):
                if has_agent(qmp):
                    addresses = guest_addresses(name, timeout_s=_AGENT_ANSWER_S)
                    found["guest_addresses"] = addresses
    except QmpError as error:
        found["qemu"] = f"{_NO_ANSWER} {error}"
    return found


def _movability(
    seen: Observed,
    running: RunningSpec | None,
    of_qemu: Mapping[str, Any],
    volumes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Whether an instance could move, as far as that lies in it, and what keeps it from that."""
    movee = _as_it_runs(seen, running) if running else Movee(seen.spec)
    rows = [row for key in ("disks", "nics") for row in of_qemu[key] or ()]
    if of_qemu["disks"] is not None:
        movee = movee._replace(present={row["device_id"] for row in rows})
    snapshots = {one["name"] or one["uuid"]: one["snapshots"] for one in volumes}
    movee = movee._replace(snapshots=snapshots)
    with suppress(OSError):
        mounts = _MOUNTS.read_text(errors="replace")
        movee = movee._replace(on_network=disks_on_network(movee.spec.disks, mounts))
    found = obstacles(movee)
    blocking = [one for one in found if one.cold or seen.is_going]
    return {"movable": not blocking, "obstacles": [one.to_json() for one in found]}


def _as_it_runs(seen: Observed, running: RunningSpec) -> Movee:
    """A running instance with what its QEMU was started with, and the disks that it has now."""
    started = {key: running.started[key] for key in _TYING if key in running.started}
    started["extra_arguments"] = tuple(started.get("extra_arguments", ()))
    spec = replace(seen.spec, **started)
    if spec.is_xen():
        return Movee(spec)
    try:
        runtime = Runtime.load(InstanceFiles(seen.name).runtime)
        disks = [Disk.from_recorded(one) for one in runtime.devices[DeviceKind.DISK]]
    except BrineError as error:
        return Movee(spec, file_fault=str(error))
    except (AttributeError, KeyError, TypeError, ValueError):
        return Movee(spec, file_fault="a disk in it is damaged")
    # The file does not have the units, and a disk may have been adopted since.
    known = {disk.uuid: disk for disk in spec.disks}
    disks = [
        replace(one, unit=known[one.uuid].unit, name=known[one.uuid].name)
        if one.uuid in known
        else one
        for one in disks
    ]
    disks += [one for one in spec.disks if one.interface == Interface.IDE]
    entries = [one for kind in DeviceKind for one in runtime.devices[kind]]
    ids = {device_id for one in entries if (device_id := qemu_id(one))}
    return Movee(replace(spec, disks=tuple(disks)), recorded=ids)


def _as_qemu_says(seen: Observed, state: str | None) -> Observed:
    """An instance that stands still or goes on as QEMU says, also where brine-kvmd is off."""
    if state is None or state.startswith(_NO_ANSWER):
        return seen
    if state in GOING_STATES or (state == PAUSED and seen.run.is_paused()):
        return replace(seen, halted=None)
    is_known = seen.halted and seen.halted.state == state
    return seen if is_known else replace(seen, halted=Halt(state))


def _devices(spec: Spec, running: RunningSpec | None, qmp: QmpClient) -> dict[str, Any]:
    """The disks and NICs of Brine's, with whether the instance was started with them, and whether
    they were added by hand."""
    found: dict[str, Any] = {}
    for key, kind in (("disks", DeviceKind.DISK), ("nics", DeviceKind.NIC)):
        rows = running.started.get(key) if running else None
        started = {row["uuid"] for row in rows} if rows is not None else None
        by_hand = {one.uuid: one.by_hand for one in getattr(spec, key)}
        found[key] = []
        for one in devices_of(Machine(qmp), kind, spec.name):
            is_started = started is None or one.uuid in started
            more = {"since_start": is_started, "by_hand": by_hand.get(one.uuid, not is_started)}
            found[key].append({**one.described(), **more})
    return found


def info(arguments: argparse.Namespace) -> int:
    names = list(dict.fromkeys(arguments.name))
    several = with_reasons([look(name) for name in names])
    held_back = supervisor().reasons_to_wait()
    found = [details(seen, held_back(seen.name)) for seen in several]
    if arguments.json:
        print(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    else:
        print("\n\n".join("\n".join(report_lines(one)) for one in found))
    return 0
