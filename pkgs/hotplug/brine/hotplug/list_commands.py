"""``brine nic list`` and ``brine disk list``, which load nothing that changes a VM."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from typing import Any

from brine.common.errors import BrineError, UsageError, printable
from brine.common.qmp.client import LIMIT_S
from brine.common.tables import print_table
from brine.hotplug.known_devices import Device, devices_of
from brine.hotplug.qemu import Machine, monitor
from brine.hotplug.target import Target, find_target, give_up_privileges, is_instance, waiting
from brine.vm.address import DeviceKind
from brine.vm.files import InstanceFiles
from brine.vm.identities import rows_in
from brine.vm.instances import started_with
from brine.vm.stored_spec import read_spec


def target_of(arguments: argparse.Namespace) -> Target:
    """The VM that the options of any verb name."""
    given = vars(arguments)
    device = given.get("device")
    is_named = arguments.vm is not None or arguments.qmp is not None
    # A single name where two are due.
    if not is_named and device and "/" not in device and is_instance(device):
        noun = arguments.noun
        raise UsageError(f"which {noun}?", hint=f"brine {noun.lower()} list {device}")
    must_run = not given.get("no_hotplug")
    return find_target(arguments.vm, arguments.qmp, given.get("runtime"), must_run=must_run)


def list_nics(arguments: argparse.Namespace) -> int:
    return _list(arguments, DeviceKind.NIC)


def list_disks(arguments: argparse.Namespace) -> int:
    return _list(arguments, DeviceKind.DISK)


def _list(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    """Print the devices that Brine plugged into a VM."""
    target = target_of(arguments)
    give_up_privileges(kind)
    found = _devices(target, kind, timeout_s=arguments.qmp_timeout)
    is_by_hand = _by_hand(target.instance(), kind)
    devices = [{**one.described(), "by_hand": is_by_hand(one.uuid)} for one in found]
    if arguments.json:
        print(json.dumps(devices, indent=2))
    else:
        heading = [key.upper().replace("_", " ") for one in devices[:1] for key in one]
        rows = [[_cell(value) for value in one.values()] for one in devices]
        print_table(heading, rows, none="nothing is plugged in")
    return 0


def _by_hand(name: str | None, kind: DeviceKind) -> Callable[[str], bool | None]:
    """Whether the device of an instance with a UUID was added by hand. Its spec tells; it lacks a
    device that was plugged in since the start. None is not known."""
    spec, key = None, f"{kind}s"
    if name is not None:
        with contextlib.suppress(OSError, BrineError):
            spec = read_spec(InstanceFiles(name).spec)
    if name is None or spec is None:
        return lambda _: None
    known = {one.uuid: one.by_hand for one in getattr(spec, key)}
    started = {row.get("uuid") for row in rows_in(started_with(name), key)}
    return lambda uuid: known.get(uuid, uuid not in started)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else printable(str(value))


def _devices(target: Target, kind: DeviceKind, *, timeout_s: float) -> list[Device]:
    limit_s = max(LIMIT_S, 2 * timeout_s)
    with waiting(), monitor(target.qmp, timeout_s=timeout_s, limit_s=limit_s) as qmp:
        machine = Machine(qmp)
        return devices_of(machine, kind, machine.vm_name())
