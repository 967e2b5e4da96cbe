"""``brine nic list`` and ``brine disk list``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from brine.common.cli import table
from brine.common.errors import printable
from brine.common.peer import stranger_check
from brine.common.process import spoken_wait
from brine.common.qmp.client import LIMIT_S, QmpClient
from brine.common.qmp.wire import QmpTimeoutError
from brine.hotplug.address import DeviceKind
from brine.hotplug.qemu import Device, Inventory, devices_of
from brine.hotplug.target import find_socket, give_up_privileges, silence_of


def list_nics(arguments: argparse.Namespace) -> int:
    """``brine nic list``."""
    return _list(arguments, DeviceKind.NIC)


def list_disks(arguments: argparse.Namespace) -> int:
    """``brine disk list``."""
    return _list(arguments, DeviceKind.DISK)


def _list(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    """Print the devices of ours that a VM has."""
    find_socket(arguments)
    give_up_privileges(kind)
    devices = [device.described() for device in _look(arguments, kind)]
    if arguments.json:
        print(json.dumps(devices, indent=2))
    elif devices:
        heading = [key.upper().replace("_", " ") for key in devices[0]]
        rows = [[_cell(value) for value in one.values()] for one in devices]
        print(*table([heading, *rows]), sep="\n")
    else:
        print("nothing is plugged in")
    return 0


def _look(arguments: argparse.Namespace, kind: DeviceKind) -> list[Device]:
    timeout_s = arguments.qmp_timeout
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            stack.enter_context(spoken_wait("waiting for the VM ..."))
        client = QmpClient.connect(
            arguments.qmp,
            timeout_s=timeout_s,
            answer_timeout_s=timeout_s,
            limit_s=max(LIMIT_S, 2 * timeout_s),
            check_peer=stranger_check(arguments.qmp),
        )
        try:
            inventory = Inventory(stack.enter_context(client))
        except QmpTimeoutError as error:
            raise silence_of(arguments.qmp, timeout_s) from error
        return devices_of(inventory, kind, inventory.vm_name())


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else printable(str(value))
