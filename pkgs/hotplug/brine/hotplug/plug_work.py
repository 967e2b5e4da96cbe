"""What ``brine nic`` and ``brine disk`` do alike with a running VM: take out, list, and tell."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from brine.hotplug.device_names import Kind
from brine.hotplug.plug_options import runtime_file

if TYPE_CHECKING:
    from brine.hotplug.disk_operations import Done as DiskDone
    from brine.hotplug.nic_operations import Done as NicDone
    from brine.hotplug.plugged import Plugged
    from brine.hotplug.vm import Vm

# What takes long to load is loaded where it is used: --help has no need of it.

_PATIENCE_S = 2.0


class Removal(Protocol):
    """An operation of the library that takes a device out."""

    async def __call__(
        self, vm: Vm, device: Plugged, *, runtime: Path | None, timeout_s: float, dry_run: bool
    ) -> NicDone | DiskDone:
        """Take it out."""


def alone_with(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Vm]:
    """Have the VM that the options name to oneself."""
    from brine.hotplug.working import LIMIT_S, working_on

    return working_on(
        arguments.qmp,
        lock_timeout_s=arguments.lock_timeout,
        qmp_timeout_s=arguments.qmp_timeout,
        only_look=arguments.dry_run,
        # --timeout is how long the guest may take to let go of a device.
        limit_s=LIMIT_S + getattr(arguments, "timeout", 0),
    )


def run(work: Coroutine[Any, Any, int], kind: Kind) -> int:
    """Run a sub-command. SIGTERM, SIGINT and a lost terminal's SIGHUP have it undo what it began.

    :param kind: what it works on; it gives up what it does not need for that.
    """
    # One that has not begun when somebody interrupts us must not be told as forgotten.
    with contextlib.closing(work), contextlib.closing(_until_terminated(work)) as whole:
        import asyncio

        from brine.hotplug.messages import log_to_journal

        log_to_journal()
        _give_up_privileges(kind)
        return asyncio.run(whole)


def _give_up_privileges(kind: Kind) -> None:
    from brine.common.privileges import Capability, keep_only

    # Sockets, disks and runtime files may be anybody's, and stay so; who has a monitor can be
    # anybody. So can a script be that takes too long.
    network = (Capability.NET_ADMIN, Capability.KILL) if kind is Kind.NIC else ()
    keep_only(Capability.DAC_OVERRIDE, Capability.CHOWN, Capability.SYS_PTRACE, *network)


async def _until_terminated(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    told: list[int] = []

    def end(number: int) -> None:
        told.append(number)
        task.cancel()

    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup(1) has it
            loop.add_signal_handler(each, end, each)
    if sys.stderr.isatty():
        loop.call_later(_PATIENCE_S, _ask_for_patience)
    try:
        return await task
    except asyncio.CancelledError:
        if not told:
            raise
        return 128 + told[0]


def _ask_for_patience() -> None:
    print("brine: waiting for the VM ...", file=sys.stderr)


def remove(arguments: argparse.Namespace, kind: Kind, operation: Removal) -> int:
    """Take out the device that the options name.

    :param operation: of the library.
    """
    if arguments.no_hotplug:
        from brine.hotplug.recording_only import record_removal

        record_removal(arguments, kind)
        return 0
    return run(_remove(arguments, kind, operation), kind)


async def _remove(arguments: argparse.Namespace, kind: Kind, operation: Removal) -> int:
    async with alone_with(arguments) as vm:
        file = runtime_file(arguments)
        found = await vm.find(kind, arguments.device)
        if found is None:
            await _tell_unknown(vm, kind, arguments, file)
            return 0
        dry_run = arguments.dry_run
        done = await operation(
            vm, found, runtime=file, timeout_s=arguments.timeout, dry_run=dry_run
        )
    known_as = "MAC" if kind is Kind.NIC else "serial"
    text = f"{found.device_id}, {known_as} {found.value}"
    tell(arguments, done, ("unplugged", "would be unplugged"), text)
    return 0


async def _tell_unknown(
    vm: Vm, kind: Kind, arguments: argparse.Namespace, file: Path | None
) -> None:
    """Say that what is to be removed is not there; refuse what is there and can't be removed.

    :raises brine.hotplug.errors.HotplugError: if the VM was started with it.
    :raises UsageError: if it can't be the name of a device.
    """
    from brine.common.errors import UsageError
    from brine.hotplug.boot_devices import refuse_boot_device
    from brine.hotplug.references import is_like_ours

    reference = arguments.device
    await refuse_boot_device(vm.machine, kind, reference, file)
    if not is_like_ours(kind, reference):
        known = ", ".join(one.device_id for one in await vm.devices(kind)) or "none"
        raise UsageError(f"no {kind} is known as {reference}", hint=f"plugged in are: {known}")
    if arguments.json:
        result = {"device": reference, "changed": False, "dry_run": arguments.dry_run}
        print(json.dumps(result, indent=2))
    else:
        print(f"unchanged: {reference} is not plugged in")


def tell(
    arguments: argparse.Namespace, done: NicDone | DiskDone, words: tuple[str, str], text: str
) -> None:
    """Say what was done.

    :param words: for that, and for what would be.
    :param text: for people.
    """
    from brine.common.printable import printable

    if arguments.json:
        print(json.dumps({**asdict(done), "dry_run": arguments.dry_run}, indent=2))
    else:
        word = words[arguments.dry_run] if done.changed else "unchanged"
        print(f"{word}: {printable(text)}")


def list_devices(arguments: argparse.Namespace, kind: Kind) -> int:
    """Print the devices of ours that a VM has."""
    from brine.common.table import table

    _give_up_privileges(kind)
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


def _look(arguments: argparse.Namespace, kind: Kind) -> list[Plugged]:
    from brine.common.instance_units import stranger_check
    from brine.common.qmp_blocking import LIMIT_S, BlockingQmpClient, without_loop
    from brine.common.qmp_errors import QmpTimeoutError
    from brine.hotplug.inventory import Inventory
    from brine.hotplug.plugged import plugged

    timeout_s = arguments.qmp_timeout
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            signal.signal(signal.SIGALRM, lambda *_: _ask_for_patience())
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
        client = BlockingQmpClient.connect(
            arguments.qmp,
            timeout_s=timeout_s,
            answer_timeout_s=timeout_s,
            limit_s=max(LIMIT_S, 2 * timeout_s),
            check_peer=stranger_check(arguments.qmp),
        )
        try:
            inventory = Inventory(stack.enter_context(client))
        except QmpTimeoutError as error:
            from brine.hotplug.monitor_holder import silence_of

            raise silence_of(arguments.qmp, timeout_s) from error
        name = without_loop(inventory.vm_name())
        return without_loop(plugged(inventory, kind, name))


def _cell(value: Any) -> str:
    from brine.common.printable import printable

    return "-" if value is None else printable(str(value))
