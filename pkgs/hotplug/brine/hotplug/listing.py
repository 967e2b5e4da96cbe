"""``brine nic list`` and ``brine disk list``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from brine.common.cli import print_table
from brine.common.errors import printable
from brine.common.qmp.client import LIMIT_S
from brine.hotplug.address import DeviceKind
from brine.hotplug.qemu import Device, Machine, devices_of, monitor
from brine.hotplug.target import find_socket, give_up_privileges, waiting


def list_nics(arguments: argparse.Namespace) -> int:
    """``brine nic list``."""
    return _list(arguments, DeviceKind.NIC)


def list_disks(arguments: argparse.Namespace) -> int:
    """``brine disk list``."""
    return _list(arguments, DeviceKind.DISK)


def _list(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    """Print the devices that Brine plugged into a VM."""
    find_socket(arguments)
    give_up_privileges(kind)
    devices = [device.described() for device in _look(arguments, kind)]
    if arguments.json:
        print(json.dumps(devices, indent=2))
    else:
        heading = [key.upper().replace("_", " ") for one in devices[:1] for key in one]
        rows = [[_cell(value) for value in one.values()] for one in devices]
        print_table(heading, rows, none="nothing is plugged in")
    return 0


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else printable(str(value))


def _look(arguments: argparse.Namespace, kind: DeviceKind) -> list[Device]:
    timeout_s = arguments.qmp_timeout
    limit_s = max(LIMIT_S, 2 * timeout_s)
    with waiting(), monitor(arguments.qmp, timeout_s=timeout_s, limit_s=limit_s) as qmp:
        machine = Machine(qmp)
        return devices_of(machine, kind, machine.vm_name())
