"""The options that ``brine nic`` and ``brine disk`` have in common."""

from __future__ import annotations

import argparse
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, UsageError
from brine.common.option_types import seconds, whole_number
from brine.common.regular_file import read_regular

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
