"""What ``brine nic`` and ``brine disk`` have in common."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import paths
from brine.common.errors import UsageError
from brine.common.privileges import Capability, keep_only
from brine.hotplug.device_names import DeviceName, Kind
from brine.hotplug.wiring_options import whole_number

if TYPE_CHECKING:
    from brine.hotplug.vm import Vm

_LOCK_TIMEOUT_S = 60.0
_UNPLUG_TIMEOUT_S = 30.0
_QMP_TIMEOUT_S = 15.0
_RESERVED_SLOTS = 12
_PATIENCE_S = 2.0

# A MAC, or at least the beginning of a UUID, which is what serials are made from.
_LIKE_OURS = re.compile(r"(?i)[0-9a-f]{8}(-|$)|([0-9a-f]{2}:){5}[0-9a-f]{2}$")


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
    parser.add_argument(
        "--lock-timeout",
        type=_seconds,
        default=_LOCK_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for others who change this VM (default: {_LOCK_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    if not changes:
        return
    parser.add_argument(
        "--runtime",
        type=Path,
        metavar="FILE",
        help="the VM's runtime file, to be kept in step; default: that of an instance of Brine's",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=_UNPLUG_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long the guest may take to let go (default: {_UNPLUG_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--no-hotplug", action="store_true", help="change the runtime file only, not the VM"
    )
    if plugs:
        parser.add_argument("--uuid", type=_uuid, help="of the device, if it has one")
        parser.add_argument(
            "--reserved-slots",
            type=whole_number(0, 31),
            default=_RESERVED_SLOTS,
            metavar="N",
            help=f"slots of pci.0 that are left alone (default: {_RESERVED_SLOTS})",
        )


def add_reference(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Give a sub-command the argument that says which device."""
    parser.add_argument("device", metavar=name, help=text)


def record_only(
    arguments: argparse.Namespace, kind: Kind, device: dict[str, Any] | None, *, link: str = ""
) -> None:
    """Do what ``--no-hotplug`` asks for: only the runtime file changes.

    :param device: to be added; None removes the one that the arguments name.
    :raises UsageError: if there is no runtime file.
    """
    from brine.hotplug.runtime import Runtime

    file = runtime_file(arguments)
    if file is None:
        hint = "name the VM's runtime file with --runtime"
        raise UsageError("--no-hotplug changes a runtime file, and none is named", hint=hint)
    runtime = Runtime.load(file)
    old = runtime
    if device is not None:
        uuid = str(device["uuid"])
        new = runtime.with_device(kind, device, link=link or None)
        said = f"{kind} {uuid} is there at the next start"
    else:
        uuid = runtime.uuid_of(kind, arguments.device)
        new = runtime.without_device(kind, uuid)
        said = f"{kind} {uuid} is not there at the next start"
    is_changed = new != old
    if is_changed:
        new.save(file)
    if arguments.json:
        print(json.dumps({"uuid": uuid, "recorded": True, "changed": is_changed}, indent=2))
    else:
        print(f"{'recorded' if is_changed else 'unchanged'}: {said}")


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the one that is named, or that of an instance of Brine's own."""
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    socket = Path(arguments.qmp).resolve()
    own = paths.RUNTIME_DIR / f"{socket.stem}.json"
    return own if socket.parent == paths.CONTROL_DIR.resolve() and own.exists() else None


async def tell_unknown(vm: Vm, kind: Kind, arguments: argparse.Namespace) -> None:
    """Say that what is to be removed is not there; refuse what can't be the name of a device.

    One that could be, and is not there, was taken out before: there is nothing to do.

    :raises UsageError: if it is no id, UUID, MAC or serial that we could have given.
    """
    reference = arguments.device
    if not DeviceName.parse(reference) and not _LIKE_OURS.match(reference):
        known = ", ".join(one.device_id for one in await vm.devices(kind)) or "none"
        raise UsageError(f"no {kind} is known as {reference}", hint=f"plugged in are: {known}")
    if arguments.json:
        print(json.dumps({"device": reference, "changed": False}, indent=2))
    else:
        print(f"unchanged: {reference} is not plugged in")


def alone_with(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Vm]:
    """Have the VM that the options name to oneself."""
    from brine.hotplug.working import working_on

    return working_on(
        arguments.qmp,
        lock_timeout_s=arguments.lock_timeout,
        qmp_timeout_s=arguments.qmp_timeout,
    )


def run(work: Coroutine[Any, Any, int], kind: Kind) -> int:
    """Run a sub-command. SIGTERM and SIGINT have it undo what it began.

    :param kind: what it works on; it gives up what it does not need for that.
    """
    # Sockets and disks may be anybody's, and who has a monitor can be anybody.
    network = (Capability.NET_ADMIN,) if kind is Kind.NIC else ()
    keep_only(Capability.DAC_OVERRIDE, Capability.SYS_PTRACE, *network)
    try:
        return asyncio.run(_until_terminated(work))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


async def _until_terminated(work: Coroutine[Any, Any, int]) -> int:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if sys.stderr.isatty():
        loop.call_later(_PATIENCE_S, _ask_for_patience)
    return await task


def _ask_for_patience() -> None:
    print("brine: waiting for the VM ...", file=sys.stderr)


async def plugged_devices(arguments: argparse.Namespace, kind: Kind) -> int:
    """Print the devices of ours that a VM has."""
    async with alone_with(arguments) as vm:
        devices = [device.described() for device in await vm.devices(kind)]
    print_devices(devices, as_json=arguments.json)
    return 0


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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")
    return value
