"""What ``brine nic`` and ``brine disk`` have in common."""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common.errors import UsageError
from brine.hotplug.device_names import DeviceName, Kind

if TYPE_CHECKING:
    from brine.hotplug.vm import Vm

_UNPLUG_TIMEOUT_S = 30.0
_QMP_TIMEOUT_S = 15.0
_RESERVED_SLOTS = 12


def add_common(
    parser: argparse.ArgumentParser, *, changes: bool = False, plugs: bool = False
) -> None:
    """Give a sub-command the options that say which VM, and how.

    :param changes: it changes the VM.
    :param plugs: it plugs something in.
    """
    parser.add_argument(
        "--qmp", type=Path, metavar="SOCKET", required=True, help="the VM's QMP socket"
    )
    parser.add_argument(
        "--qmp-timeout",
        type=_seconds,
        default=_QMP_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for the monitor (default: {_QMP_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--runtime", type=Path, metavar="FILE", help="the VM's runtime file, to be kept in step"
    )
    if not changes:
        return
    parser.add_argument(
        "--no-hotplug", action="store_true", help="change the runtime file only, not the VM"
    )
    if plugs:
        parser.add_argument("--uuid", type=_uuid, help="of the device, if it has one")
        parser.add_argument(
            "--reserved-slots",
            type=_slot,
            default=_RESERVED_SLOTS,
            metavar="N",
            help=f"slots of pci.0 that are left alone (default: {_RESERVED_SLOTS})",
        )
    else:
        parser.add_argument(
            "--timeout",
            type=_seconds,
            default=_UNPLUG_TIMEOUT_S,
            metavar="SECONDS",
            help=f"how long the guest may take (default: {_UNPLUG_TIMEOUT_S:g})",
        )


def add_reference(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Give a sub-command the argument that says which device."""
    parser.add_argument("device", metavar=name, help=text)


def record_only(
    arguments: argparse.Namespace, kind: Kind, device: dict[str, Any] | None, *, link: str = ""
) -> None:
    """Do what ``--no-hotplug`` asks for: only the runtime file changes.

    :param device: to be added; None removes the one that the arguments name.
    :raises UsageError: if there is no runtime file, or nothing of that name in it.
    """
    from brine.hotplug.runtime import Runtime

    if arguments.runtime is None:
        hint = "name the VM's runtime file with --runtime"
        raise UsageError("--no-hotplug changes a runtime file, and none is named", hint=hint)
    runtime = Runtime.load(arguments.runtime)
    if device is not None:
        runtime.with_device(kind, device, link=link or None).save(arguments.runtime)
        print(f"recorded: {kind} {device['uuid']}, for the next start")
        return
    if runtime.find(kind, arguments.device) is None:
        raise UsageError(f"the runtime file has no {kind} with the UUID {arguments.device}")
    runtime.without_device(kind, arguments.device).save(arguments.runtime)
    print(f"recorded: no {kind} {arguments.device} at the next start")


async def refuse_unknown(vm: Vm, kind: Kind, reference: str) -> None:
    """Refuse what can't be the name of a device of ours.

    One that could be, and is not there, was taken out before: there is nothing to do.

    :raises UsageError: if it is no id, UUID, MAC or serial that we could have given.
    """
    if DeviceName.parse(reference) or _is_uuid(reference):
        return
    known = [name for name in await vm.machine.devices() if DeviceName.parse(name)]
    listed = ", ".join(sorted(known)) or "none"
    raise UsageError(f"no {kind} is known as {reference}", hint=f"plugged in are: {listed}")


async def plugged_devices(arguments: argparse.Namespace, kind: Kind) -> list[dict[str, Any]]:
    """The devices of ours that a VM has."""
    from brine.hotplug.vm import working_on

    async with working_on(arguments.qmp, qmp_timeout_s=arguments.qmp_timeout) as vm:
        return [device.described() for device in await vm.devices(kind)]


def print_devices(devices: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print what :func:`plugged_devices` found."""
    if as_json:
        print(json.dumps(devices, indent=2))
        return
    if not devices:
        print("nothing is plugged in")
        return
    keys = list(devices[0])
    rows = [[key.upper().replace("_", " ") for key in keys]]
    rows += [[str(device[key]) for key in keys] for device in devices]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _uuid(text: str) -> str:
    if not _is_uuid(text):
        raise argparse.ArgumentTypeError(f"not a UUID: {text!r}")
    return str(uuid.UUID(text))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def _slot(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 31:
        raise argparse.ArgumentTypeError("must be 0 to 31")
    return value
