"""What ``brine nic`` and ``brine disk`` have in common: options, removal, lists."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from brine.common import paths
from brine.common.cli import seconds, whole_number
from brine.common.errors import BrineError, UsageError
from brine.common.files import read_regular
from brine.hotplug.address import DeviceKind

if TYPE_CHECKING:
    from brine.hotplug.plug_disk import DiskChange as DiskDone
    from brine.hotplug.plug_nic import NicChange as NicDone
    from brine.hotplug.vm import Plugged, Vm


# The options that ``brine nic`` and ``brine disk`` have in common.

_LOCK_TIMEOUT_S = 60.0
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
        "--qmp", type=path, metavar="SOCKET", help="the VM's QMP socket, if it is no instance's"
    )
    parser.add_argument(
        "--qmp-timeout",
        type=seconds,
        default=_QMP_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for the monitor (default: {_QMP_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--lock-timeout",
        type=seconds,
        default=_LOCK_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for others who change this VM (default: {_LOCK_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    if not changes:
        return
    parser.add_argument(
        "--runtime",
        type=path,
        metavar="FILE",
        help="the VM's runtime file, to be kept in step; default: that of an instance of Brine's",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=_UNPLUG_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long the guest may take to let go (default: {_UNPLUG_TIMEOUT_S:g})",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
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


def add_instance(parser: argparse.ArgumentParser) -> None:
    """Give a sub-command the argument that says which VM, before all others."""
    parser.add_argument(
        "vm", metavar="INSTANCE", nargs="?", help="an instance of Brine's; or give --qmp"
    )


def of_one_vm(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A sub-command that finds the socket of the VM that is meant in ``qmp``, however it was named.

    :raises UsageError: if it was not, or twice.
    """

    def found(arguments: argparse.Namespace) -> int:
        name = arguments.vm
        if name is None and arguments.qmp is None:
            _refuse_without_device(arguments)
        if (name is None) == (arguments.qmp is None):
            text = "which VM?" if name is None else f"{name} and --qmp are two names of a VM"
            raise UsageError(text, hint="give the name of an instance, or --qmp SOCKET")
        if name is not None:
            if not name or "/" in name:
                raise UsageError(f"not the name of an instance: {name!r}")
            arguments.qmp = paths.CONTROL_DIR / f"{name}.qmp"
            if not getattr(arguments, "no_hotplug", False):
                _refuse_down(name, arguments.qmp)
        return run(arguments)

    return found


def _refuse_without_device(arguments: argparse.Namespace) -> None:
    """Refuse the one name that was given where two are due, if it is that of an instance."""
    name = getattr(arguments, "device", None)
    if name and "/" not in name and (_is_defined(name) or _has_monitor(name)):
        noun = arguments.noun
        raise UsageError(f"which {noun}?", hint=f"brine {noun.lower()} list {name}")


def _refuse_down(name: str, qmp: Path) -> None:
    """Refuse an instance without a socket.

    :raises UsageError: if it may be none; as there is nobody who could be asked, another error if
        it is one.
    """
    try:
        qmp.stat()
    except PermissionError as error:
        hint = f"be root, or in the group {paths.CONTROL_GROUP}"
        raise BrineError(f"{qmp}: {error.strerror}", hint=hint) from error
    except OSError:
        if _is_xens(name):
            text = f"{name}: is a domain of Xen's, and nothing is plugged into those"
            raise BrineError(text, hint="its next start has what its spec has") from None
        if _is_defined(name):
            hint = f"brine instance start {name}"
            raise BrineError(f"{name}: does not run", hint=hint) from None
        hint = f"brine instance info {name}; or name its socket with --qmp"
        raise UsageError(f"{name}: does not run here, or is no instance", hint=hint) from None


def _is_defined(name: str) -> bool:
    return os.path.lexists(paths.SPECS_DIR / f"{name}.json")


def _is_xens(name: str) -> bool:
    try:
        spec = json.loads(read_regular(paths.SPECS_DIR / f"{name}.json"))
        return str(spec["hypervisor"]).startswith("xen-")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _has_monitor(name: str) -> bool:
    return os.path.lexists(paths.CONTROL_DIR / f"{name}.qmp")


def add_reference(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Give a sub-command the argument that says which device."""
    parser.add_argument("device", metavar=name, help=text)
    parser.set_defaults(noun="NIC" if name == "NIC" else name.lower())


def path(text: str) -> Path:
    """A type for paths: an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path can't be empty")
    return Path(text)


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the one that is named, or that of an instance of Brine's own.

    :raises HotplugError: if such an instance has none: what is changed would be lost at its next
        start, and nobody told.
    """
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    name = _instance_at(arguments.qmp)
    if name is None:
        return None
    own = paths.RUNTIME_DIR / f"{name}.json"
    if own.exists():
        return own
    if (paths.SPECS_DIR / f"{name}.json").exists():
        from brine.hotplug.errors import HotplugError

        text = f"{name}: there is no {own}, without which its next start does not know of changes"
        hint = f"brine instance reboot {name}, or start if it does not run, writes it"
        raise HotplugError(text, hint=hint)
    return None


def instance_of(arguments: argparse.Namespace) -> str | None:
    """The instance of Brine's own that is meant; None if it may be none."""
    if arguments.runtime:
        file = Path(os.path.realpath(arguments.runtime))
        if file.parent == Path(os.path.realpath(paths.RUNTIME_DIR)):
            return file.stem
    return _instance_at(arguments.qmp)


def _instance_at(qmp: Path) -> str | None:
    """Whose socket it is, if it is in the control directory."""
    # Unlike Path.resolve() this takes a loop of symbolic links.
    socket = Path(os.path.realpath(qmp))
    return socket.stem if socket.parent == Path(os.path.realpath(paths.CONTROL_DIR)) else None


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
    from brine.hotplug.session import LIMIT_S, working_on

    return working_on(
        arguments.qmp,
        lock_timeout_s=arguments.lock_timeout,
        qmp_timeout_s=arguments.qmp_timeout,
        only_look=arguments.dry_run,
        # --timeout is how long the guest may take to let go of a device.
        limit_s=LIMIT_S + getattr(arguments, "timeout", 0),
    )


def run(work: Coroutine[Any, Any, int], kind: DeviceKind) -> int:
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


def _give_up_privileges(kind: DeviceKind) -> None:
    from brine.common.privileges import Capability, keep_only

    # Sockets, disks and runtime files may be anybody's, and stay so; who has a monitor can be
    # anybody. So can a script be that takes too long.
    network = (Capability.NET_ADMIN, Capability.KILL) if kind is DeviceKind.NIC else ()
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


def remove(arguments: argparse.Namespace, kind: DeviceKind, operation: Removal) -> int:
    """Take out the device that the options name.

    :param operation: of the library.
    """
    if arguments.no_hotplug:
        from brine.hotplug.offline import record_removal

        record_removal(arguments, kind)
        return 0
    return run(_remove(arguments, kind, operation), kind)


async def _remove(arguments: argparse.Namespace, kind: DeviceKind, operation: Removal) -> int:
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
    known_as = "MAC" if kind is DeviceKind.NIC else "serial"
    text = f"{found.device_id}, {known_as} {found.value}"
    tell(arguments, done, ("unplugged", "would be unplugged"), text)
    return 0


async def _tell_unknown(
    vm: Vm, kind: DeviceKind, arguments: argparse.Namespace, file: Path | None
) -> None:
    """Say that what is to be removed is not there; refuse what is there and can't be removed.

    :raises brine.hotplug.errors.HotplugError: if the VM was started with it.
    :raises UsageError: if it can't be the name of a device.
    """
    from brine.common.errors import UsageError
    from brine.hotplug.address import is_like_ours
    from brine.hotplug.vm import refuse_boot_device

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
    from brine.common.errors import printable

    if arguments.json:
        print(json.dumps({**asdict(done), "dry_run": arguments.dry_run}, indent=2))
    else:
        word = words[arguments.dry_run] if done.changed else "unchanged"
        print(f"{word}: {printable(text)}")


def list_devices(arguments: argparse.Namespace, kind: DeviceKind) -> int:
    """Print the devices of ours that a VM has."""
    from brine.common.cli import table

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


def _look(arguments: argparse.Namespace, kind: DeviceKind) -> list[Plugged]:
    from brine.common.peer import stranger_check
    from brine.common.qmp.blocking import LIMIT_S, BlockingQmpClient, without_loop
    from brine.common.qmp.wire import QmpTimeoutError
    from brine.hotplug.qemu import Inventory
    from brine.hotplug.vm import plugged

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
            from brine.hotplug.session import silence_of

            raise silence_of(arguments.qmp, timeout_s) from error
        name = without_loop(inventory.vm_name())
        return without_loop(plugged(inventory, kind, name))


def _cell(value: Any) -> str:
    from brine.common.errors import printable

    return "-" if value is None else printable(str(value))
