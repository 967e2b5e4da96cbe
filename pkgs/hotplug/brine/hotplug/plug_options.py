"""The options that ``brine nic`` and ``brine disk`` have in common."""

from __future__ import annotations

import argparse
import os
import uuid
from pathlib import Path

from brine.common import paths
from brine.hotplug.wiring_options import whole_number

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


def add_reference(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Give a sub-command the argument that says which device."""
    parser.add_argument("device", metavar=name, help=text)


def runtime_file(arguments: argparse.Namespace) -> Path | None:
    """The VM's runtime file: the one that is named, or that of an instance of Brine's own."""
    if arguments.runtime:
        return Path(arguments.runtime).absolute()
    # Unlike Path.resolve() this takes a loop of symbolic links.
    socket = Path(os.path.realpath(arguments.qmp))
    own = paths.RUNTIME_DIR / f"{socket.stem}.json"
    control = Path(os.path.realpath(paths.CONTROL_DIR))
    return own if socket.parent == control and own.exists() else None


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
