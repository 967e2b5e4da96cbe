"""What ``brine nic`` and ``brine disk`` do alike: run, take out, list, or record only."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from brine.common import paths
from brine.common.errors import UsageError
from brine.common.journal import printable
from brine.common.privileges import Capability, keep_only
from brine.common.table import table
from brine.hotplug.device_names import DeviceName, Kind
from brine.hotplug.messages import log_to_journal

if TYPE_CHECKING:
    from brine.hotplug.disk_operations import Done as DiskDone
    from brine.hotplug.nic_operations import Done as NicDone
    from brine.hotplug.vm import Plugged, Vm

_PATIENCE_S = 2.0

# A MAC, or at least the beginning of a UUID, which is what serials are made from.
_LIKE_OURS = re.compile(r"(?i)[0-9a-f]{8}(-|$)|([0-9a-f]{2}:){5}[0-9a-f]{2}$")


class Removal(Protocol):
    """An operation of the library that takes a device out."""

    async def __call__(
        self, vm: Vm, device: Plugged, *, runtime: Path | None, timeout_s: float, dry_run: bool
    ) -> NicDone | DiskDone:
        """Take it out."""


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
    is_changed, dry_run = new != old, arguments.dry_run
    if is_changed and not dry_run:
        new.save(file)
    if arguments.json:
        result = {"uuid": uuid, "recorded": not dry_run, "changed": is_changed, "dry_run": dry_run}
        print(json.dumps(result, indent=2))
        return
    word = "would be recorded" if dry_run else "recorded"
    print(f"{word if is_changed else 'unchanged'}: {said}")


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the one that is named, or that of an instance of Brine's own."""
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    socket = Path(arguments.qmp).resolve()
    own = paths.RUNTIME_DIR / f"{socket.stem}.json"
    return own if socket.parent == paths.CONTROL_DIR.resolve() and own.exists() else None


async def _tell_unknown(vm: Vm, kind: Kind, arguments: argparse.Namespace) -> None:
    """Say that what is to be removed is not there; refuse what can't be the name of a device.

    One that could be, and is not there, was taken out before: there is nothing to do.

    :raises UsageError: if it is no id, UUID, MAC or serial that we could have given.
    """
    reference = arguments.device
    if not DeviceName.parse(reference) and not _LIKE_OURS.match(reference):
        known = ", ".join(one.device_id for one in await vm.devices(kind)) or "none"
        raise UsageError(f"no {kind} is known as {reference}", hint=f"plugged in are: {known}")
    if arguments.json:
        result = {"device": reference, "changed": False, "dry_run": arguments.dry_run}
        print(json.dumps(result, indent=2))
    else:
        print(f"unchanged: {reference} is not plugged in")


def alone_with(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Vm]:
    """Have the VM that the options name to oneself."""
    from brine.hotplug.working import working_on

    return working_on(
        arguments.qmp,
        lock_timeout_s=arguments.lock_timeout,
        qmp_timeout_s=arguments.qmp_timeout,
        only_look=getattr(arguments, "dry_run", True),
    )


def run(work: Coroutine[Any, Any, int], kind: Kind) -> int:
    """Run a sub-command. SIGTERM and SIGINT have it undo what it began.

    :param kind: what it works on; it gives up what it does not need for that.
    """
    log_to_journal()
    # Sockets and disks may be anybody's, and who has a monitor can be anybody. So can a script be
    # that takes too long.
    network = (Capability.NET_ADMIN, Capability.KILL) if kind is Kind.NIC else ()
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


def remove(arguments: argparse.Namespace, kind: Kind, operation: Removal) -> int:
    """Take out the device that the options name.

    :param operation: of the library.
    """
    if arguments.no_hotplug:
        record_only(arguments, kind, None)
        return 0
    return run(_remove(arguments, kind, operation), kind)


async def _remove(arguments: argparse.Namespace, kind: Kind, operation: Removal) -> int:
    async with alone_with(arguments) as vm:
        found = await vm.find(kind, arguments.device)
        if found is None:
            await _tell_unknown(vm, kind, arguments)
            return 0
        file = runtime_file(arguments)
        dry_run = arguments.dry_run
        done = await operation(
            vm, found, runtime=file, timeout_s=arguments.timeout, dry_run=dry_run
        )
    known_as = "MAC" if kind is Kind.NIC else "serial"
    text = f"{found.device_id}, {known_as} {printable(found.value)}"
    tell(arguments, done, ("unplugged", "would be unplugged"), text)
    return 0


def tell(
    arguments: argparse.Namespace, done: NicDone | DiskDone, words: tuple[str, str], text: str
) -> None:
    """Say what was done.

    :param words: for that, and for what would be.
    :param text: for people.
    """
    if arguments.json:
        print(json.dumps({**asdict(done), "dry_run": arguments.dry_run}, indent=2))
    else:
        word = words[arguments.dry_run] if done.changed else "unchanged"
        print(f"{word}: {text}")


def list_devices(arguments: argparse.Namespace, kind: Kind) -> int:
    """Print the devices of ours that a VM has."""
    return run(_list_devices(arguments, kind), kind)


async def _list_devices(arguments: argparse.Namespace, kind: Kind) -> int:
    async with alone_with(arguments) as vm:
        devices = [device.described() for device in await vm.devices(kind)]
    if arguments.json:
        print(json.dumps(devices, indent=2))
    elif devices:
        heading = [key.upper().replace("_", " ") for key in devices[0]]
        rows = [[_cell(value) for value in one.values()] for one in devices]
        print(*table([heading, *rows]), sep="\n")
    else:
        print("nothing is plugged in")
    return 0


def _cell(value: Any) -> str:
    return "-" if value is None else printable(str(value))
