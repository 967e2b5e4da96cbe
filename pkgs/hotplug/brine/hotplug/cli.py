"""The command lines of ``brine nic``, ``brine disk`` and ``brine tap``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from brine.common.cli import Command, add_verb, seconds, whole_number

_LOCK_TIMEOUT_S = 60.0
_UNPLUG_TIMEOUT_S = 30.0
_QMP_TIMEOUT_S = 15.0
_RESERVED_SLOTS = 12
_MODES = ("bridged", "routed", "openvswitch")
_MODELS = ("virtio", "e1000", "e1000e", "rtl8139")
_BUSES = ("pci", "scsi")
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_NO_MAC = "00:00:00:00:00:00"


# Options that say which VM, and how.


def _add_common(
    parser: argparse.ArgumentParser, *, changes: bool = False, plugs: bool = False
) -> None:
    """Give a sub-command the options that say which VM, and how.

    :param changes: it changes the VM.
    :param plugs: it plugs something in.
    """
    parser.add_argument(
        "--qmp", type=_path, metavar="SOCKET", help="the QMP socket of a VM that is not an instance"
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
        help=f"how long to wait for other commands on this VM (default: {_LOCK_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    if not changes:
        return
    parser.add_argument(
        "--runtime",
        type=_path,
        metavar="FILE",
        help="the VM's runtime file (default: that of the instance)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=_UNPLUG_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long the guest may take to release the device (default: {_UNPLUG_TIMEOUT_S:g})",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument(
        "--no-hotplug", action="store_true", help="change only the runtime file, not the VM"
    )
    if plugs:
        parser.add_argument("--uuid", type=_uuid, help="of the device, if it has one")
        parser.add_argument(
            "--reserved-slots",
            type=whole_number(0, 31),
            default=_RESERVED_SLOTS,
            metavar="N",
            help=f"slots of pci.0 that are not used (default: {_RESERVED_SLOTS})",
        )


def _add_instance(parser: argparse.ArgumentParser) -> None:
    """Give a sub-command the argument that says which VM, before all others."""
    parser.add_argument("vm", metavar="INSTANCE", nargs="?", help="an instance; or give --qmp")


def _add_reference(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Give a sub-command the argument that says which device."""
    parser.add_argument("device", metavar=name, help=text)
    parser.set_defaults(noun="NIC" if name == "NIC" else name.lower())


def _path(text: str) -> Path:
    """A type for paths: an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path can't be empty")
    return Path(text)


def _uuid(text: str) -> str:
    import uuid  # with it platform, and few commands are given one

    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a UUID: {text!r}") from None


# Options that say how a NIC is connected.


def add_wiring(parser: argparse.ArgumentParser, *, changes: bool = False) -> None:
    """The options for what the tap is connected to.

    :param changes: something there is to be changed: what is not given stays as it is.
    """
    wiring = parser.add_argument_group("wiring")
    wiring.add_argument(
        "--mode",
        choices=_MODES,
        default=None,
        help=_unless(changes, "default: the cluster's, or bridged"),
    )
    wiring.add_argument(
        "--link",
        default=None if changes else "",
        help="the bridge; or, routed, the table, by number or name; "
        + _unless(changes, "default: the cluster's, or the main table"),
    )
    wiring.add_argument(
        "--vlan",
        default=None if changes else "",
        metavar="VLANS",
        help="100 untagged, :100:200 tagged, .100:200 both",
    )
    wiring.add_argument(
        "--ip",
        action="append",
        default=None if changes else [],
        metavar="ADDRESS",
        help="the guest's address; may be repeated; routed needs one",
    )
    wiring.add_argument(
        "--mtu",
        type=whole_number(68, 65521),
        metavar="BYTES",
        help=_unless(changes, "default: the link's"),
    )


def add_told(
    parser: argparse.ArgumentParser, *, mac: Callable[[str], str] = str, changes: bool = False
) -> None:
    """The options for what operators' scripts are told.

    :param mac: checks a MAC address, where more than scripts are told of it.
    :param changes: as in :func:`add_wiring`.
    """
    several: list[str] | None = None if changes else []
    told = parser.add_argument_group("values for operators' scripts, see brine-nic.d(5)")
    told.add_argument(
        "--mac", default=None if changes else "", type=mac, help="the guest's MAC address"
    )
    told.add_argument("--index", type=whole_number(0, 999), metavar="N", help="the NIC's index")
    told.add_argument(
        "--tag", action="append", default=several, help="of the instance; may be repeated"
    )
    told.add_argument(
        "--network",
        action="append",
        default=several,
        metavar="KEY=VALUE",
        help="as NETWORK_KEY; may be repeated",
    )


def _unless(changes: bool, text: str) -> str:
    return "default: as it is" if changes else text


# ``brine nic``.


def _mac(text: str) -> str:
    mac = text.lower()
    # The one of zeros is no address to QEMU, which takes another one then.
    if text and (not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1 or mac == _NO_MAC):
        raise argparse.ArgumentTypeError(f"not the MAC address of one NIC: {text!r}")
    return mac


def _add_nic_options(parser: argparse.ArgumentParser, *, changes: bool = False) -> None:
    add_wiring(parser, changes=changes)
    add_told(parser, mac=_mac, changes=changes)
    device = parser.add_argument_group("the device")
    device.add_argument(
        "--model",
        choices=_MODELS,
        default=None if changes else "virtio",
        help="default: as it is" if changes else "default: virtio",
    )
    device.add_argument(
        "--queues",
        type=whole_number(1, 256),
        default=None if changes else 1,
        metavar="N",
        help="default: as it is" if changes else "default: 1",
    )
    device.add_argument(
        "--vhost",
        action=argparse.BooleanOptionalAction,
        default=None if changes else False,
        help="the kernel moves the frames",
    )


def _configure_nic(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = add_verb(verbs, "add", "brine.hotplug.commands:add_nic", "plug a NIC in")
    _add_instance(add)
    _add_common(add, changes=True, plugs=True)
    add.add_argument("--instance", help="the name of the VM, as in its socket")
    _add_nic_options(add)
    text = "change a NIC: unplug it, and plug it in again in the same slot"
    modify = add_verb(verbs, "modify", "brine.hotplug.commands:modify_nic", text)
    _add_instance(modify)
    _add_reference(modify, "NIC", "its device id, UUID or MAC")
    _add_common(modify, changes=True)
    _add_nic_options(modify, changes=True)
    remove = add_verb(verbs, "remove", "brine.hotplug.commands:remove_nic", "unplug a NIC")
    _add_instance(remove)
    _add_reference(remove, "NIC", "its device id, UUID or MAC")
    _add_common(remove, changes=True)
    listing = add_verb(verbs, "list", "brine.hotplug.device_list:list_nics", "list NICs")
    _add_instance(listing)
    _add_common(listing)


NIC = Command("plug NICs into running VMs, change them and take them out", _configure_nic)


# ``brine disk``.


def _serial(text: str) -> str:
    if not 0 < len(text) <= 20 or not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError("a serial has 1 to 20 characters")
    return text


def _configure_disk(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = add_verb(verbs, "add", "brine.hotplug.commands:add_disk", "plug a disk in")
    _add_instance(add)
    _add_common(add, changes=True, plugs=True)
    add.add_argument(
        "--path", type=_path, required=True, metavar="FILE", help="a block device or an image"
    )
    add.add_argument("--format", choices=("raw", "qcow2"), help="default: raw")
    add.add_argument(
        "--cache",
        choices=("none", "writeback", "writethrough", "directsync", "unsafe"),
        default="none",
        help="default: none",
    )
    add.add_argument(
        "--aio",
        choices=("threads", "native", "io_uring"),
        default="threads",
        help="default: threads",
    )
    add.add_argument("--read-only", action="store_true", help="the guest may only read")
    add.add_argument(
        "--no-discard", action="store_true", help="keep storage that the guest discards"
    )
    add.add_argument(
        "--serial", type=_serial, help="the serial number (default: the beginning of the UUID)"
    )
    add.add_argument("--bus", choices=_BUSES, default="pci", help="default: pci")
    add.add_argument(
        "--controller", metavar="ID", help="the SCSI controller (default: the first virtio-scsi)"
    )
    remove = add_verb(verbs, "remove", "brine.hotplug.commands:remove_disk", "unplug a disk")
    _add_instance(remove)
    _add_reference(remove, "DISK", "its path, device id, UUID or serial")
    _add_common(remove, changes=True)
    listing = add_verb(verbs, "list", "brine.hotplug.device_list:list_disks", "list disks")
    _add_instance(listing)
    _add_common(listing)


DISK = Command("plug disks into running VMs and take them out", _configure_disk)


# ``brine tap``.


def _add_whose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the tap; default: made from INSTANCE and NIC"
    )
    parser.add_argument("--instance", help="the instance of the NIC; default: NAME")
    parser.add_argument("--nic", default="0", help="the NIC's UUID, or its index; default: 0")


def _configure_tap(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, function: str, text: str, description: str) -> argparse.ArgumentParser:
        run = f"brine.hotplug.tap_commands:{function}"
        return add_verb(verbs, name, run, text, description=description)

    text = (
        "Makes a tap that stays, wires it, and puts it up, for any QEMU: "
        "-netdev tap,ifname=NAME,script=no,downscript=no."
    )
    up = verb("up", "make_tap", "make a persistent tap, and connect it", text)
    _add_whose(up)
    add_wiring(up)
    tap = up.add_argument_group("the tap")
    tap.add_argument(
        "--queues", type=whole_number(1, 256), default=1, metavar="N", help="default: 1"
    )
    tap.add_argument("--user", help="the user who may open it (default: root)")
    tap.add_argument("--group", help="the group that may open it")
    add_told(up)
    up.add_argument("--dry-run", action="store_true", help="only check, and print the name")
    text = "Disconnects a tap of ours, and removes it."
    down = verb("down", "remove_tap", "disconnect and remove a tap", text)
    _add_whose(down)
    down.add_argument("--force", action="store_true", help="also if a VM has the tap open")
    down.add_argument("--dry-run", action="store_true", help="only print the name")
    text = "Lists the taps that are ours, and whose they are."
    listing = verb("list", "print_taps", "list the taps of this node", text)
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    text = "Removes taps, routes, rules and ports of VMs that ended."
    gc = verb("gc", "collect_garbage", "remove what dead VMs have left", text)
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    which = gc.add_mutually_exclusive_group()
    which.add_argument(
        "--all",
        action="store_true",
        help="also taps of the last minute, or with a QMP socket of their instance",
    )
    which.add_argument(
        "--idle-for",
        type=whole_number(0, 10**8),
        metavar="SECONDS",
        help="keep taps that were open within so many seconds; for timers",
    )
    gc.add_argument("--json", action="store_true", help="print a JSON object")


TAP = Command("make, list and remove tap interfaces", _configure_tap)
