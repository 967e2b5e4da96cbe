"""The command lines of ``brine nic``, ``brine disk`` and ``brine tap``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brine.common.cli import Command, add_verb, seconds, whole_number
from brine.hotplug.timeouts import LOCK_TIMEOUT_S, QMP_TIMEOUT_S, UNPLUG_TIMEOUT_S
from brine.vm.arguments import instance_name
from brine.vm.values import (
    AIO_MODES,
    CACHE_MODES,
    FORMATS,
    LARGEST_MTU,
    LONGEST_SERIAL,
    MODELS,
    MOST_QUEUES,
    RESERVED_SLOTS,
    SMALLEST_MTU,
    Mode,
)

_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_NO_MAC = "00:00:00:00:00:00"
_AS_IT_IS = "default: as it is"

Parser = argparse.ArgumentParser


def _flag(group: Any, name: str, text: str) -> None:
    group.add_argument(name, action="store_true", help=text)


def _number(
    group: Any, name: str, low: int, high: int, text: str, *, unit: str = "N", default: Any = None
) -> None:
    kind = whole_number(low, high)
    group.add_argument(name, type=kind, default=default, metavar=unit, help=text)


def _seconds(group: Any, name: str, default: float, text: str) -> None:
    text = f"{text} (default: {default:g})"
    group.add_argument(name, type=seconds, default=default, metavar="SECONDS", help=text)


def _repeated(group: Any, name: str, unit: str | None, text: str, *, changes: bool) -> None:
    default: list[str] | None = None if changes else []
    kind = str if changes else None  # an empty one takes away what was there
    group.add_argument(name, action="append", default=default, metavar=unit, help=text, type=kind)


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


def _add_looking(
    verbs: Any, name: str, function: str, text: str, *, device: tuple[str, str] | None = None
) -> Parser:
    """A verb with the options that say which VM, and how to wait for it.

    :param device: the name of the argument that says which device, and what that can be.
    """
    parser = add_verb(verbs, name, f"brine.hotplug.{function}", text)
    parser.add_argument(
        "vm",
        metavar="INSTANCE",
        nargs="?",
        type=instance_name,
        help="an instance; or give --qmp",
    )
    if device:
        noun, known_by = device
        parser.add_argument("device", metavar=noun, help=known_by)
        parser.set_defaults(noun="NIC" if noun == "NIC" else noun.lower())
    text = "the QMP socket of a VM that is not an instance"
    parser.add_argument("--qmp", type=_path, metavar="SOCKET", help=text)
    _seconds(parser, "--qmp-timeout", QMP_TIMEOUT_S, "how long to wait for the monitor")
    text = "how long to wait for other commands on this VM"
    _seconds(parser, "--lock-timeout", LOCK_TIMEOUT_S, text)
    _flag(parser, "--json", "print JSON, for programs")
    return parser


def _add_changing(
    verbs: Any, name: str, function: str, text: str, *, device: tuple[str, str] | None = None
) -> Parser:
    """A verb that changes the VM: with *device* one that it has; otherwise it plugs one in."""
    parser = _add_looking(verbs, name, f"commands:{function}", text, device=device)
    text = "the VM's runtime file (default: that of the instance)"
    parser.add_argument("--runtime", type=_path, metavar="FILE", help=text)
    text = "how long the guest may take to release the device"
    _seconds(parser, "--timeout", UNPLUG_TIMEOUT_S, text)
    _flag(parser, "--dry-run", "only say what would be done")
    _flag(parser, "--no-hotplug", "change only the runtime file, not the VM")
    if not device:
        parser.add_argument("--uuid", type=_uuid, help="of the device, if it has one")
        text = f"slots of pci.0 that are not used (default: {RESERVED_SLOTS})"
        _number(parser, "--reserved-slots", 0, 31, text, default=RESERVED_SLOTS)
    return parser


# Options that say how a NIC is connected.


def add_wiring(parser: Parser, *, changes: bool = False) -> None:
    """The options for what the tap is connected to.

    :param changes: something there is to be changed: what is not given stays as it is.
    """
    wiring: Any = parser.add_argument_group("wiring")
    nothing = None if changes else ""
    text = _AS_IT_IS if changes else "default: the cluster's, or bridged"
    wiring.add_argument("--mode", choices=[mode.value for mode in Mode], help=text)
    text = "the bridge; or, routed, the table, by number or name; "
    text += _AS_IT_IS if changes else "default: the cluster's, or the main table"
    kind = str if changes else None  # an empty one takes away what was there
    wiring.add_argument("--link", default=nothing, type=kind, help=text)
    text = "100 untagged, :100:200 tagged, .100:200 both"
    wiring.add_argument("--vlan", default=nothing, type=str, metavar="VLANS", help=text)
    text = "the guest's address; may be repeated; routed needs one"
    _repeated(wiring, "--ip", "ADDRESS", text, changes=changes)
    text = "the guest sends only from its MAC address, and its addresses if any; "
    text += _AS_IT_IS if changes else "default: the cluster's, or not"
    wiring.add_argument("--filter", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = _AS_IT_IS if changes else "default: the link's"
    _number(wiring, "--mtu", SMALLEST_MTU, LARGEST_MTU, text, unit="BYTES")


def add_told(parser: Parser, *, mac: Callable[[str], str] = str, changes: bool = False) -> None:
    """The options for what operators' scripts are told.

    :param mac: checks a MAC address, where more than scripts are told of it.
    :param changes: as in :func:`add_wiring`.
    """
    told = parser.add_argument_group("values for operators' scripts, see brine-nic.d(5)")
    nothing = None if changes else ""
    told.add_argument("--mac", default=nothing, type=mac, help="the guest's MAC address")
    _number(told, "--index", 0, 999, "the NIC's index")
    _repeated(told, "--tag", None, "of the instance; may be repeated", changes=changes)
    text = "as NETWORK_KEY; may be repeated"
    _repeated(told, "--network", "KEY=VALUE", text, changes=changes)


def _add_queues(group: Any, *, changes: bool = False) -> None:
    default, text = (None, _AS_IT_IS) if changes else (1, "default: 1")
    _number(group, "--queues", 1, MOST_QUEUES, text, default=default)


# ``brine nic``.


def _mac(text: str) -> str:
    mac = text.lower()
    # The one of zeros is no address to QEMU, which takes another one then.
    if text and (not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1 or mac == _NO_MAC):
        raise argparse.ArgumentTypeError(f"not the MAC address of one NIC: {text!r}")
    return mac


def _add_nic_options(parser: Parser, *, changes: bool = False) -> None:
    add_wiring(parser, changes=changes)
    add_told(parser, mac=_mac, changes=changes)
    device = parser.add_argument_group("the device")
    default, text = (None, _AS_IT_IS) if changes else ("virtio", "default: virtio")
    device.add_argument("--model", choices=MODELS, default=default, help=text)
    _add_queues(device, changes=changes)
    device.add_argument(
        "--vhost",
        action=argparse.BooleanOptionalAction,
        default=None if changes else False,
        help="the kernel moves the frames",
    )


def _configure_nic(parser: Parser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    nic = ("NIC", "its device id, UUID or MAC")
    add = _add_changing(verbs, "add", "add_nic", "plug a NIC in")
    add.add_argument("--instance", help="the name of the VM, as in its socket")
    _add_nic_options(add)
    text = "change a NIC: unplug it, and plug it in again in the same slot"
    _add_nic_options(_add_changing(verbs, "modify", "modify_nic", text, device=nic), changes=True)
    _add_changing(verbs, "remove", "remove_nic", "unplug a NIC", device=nic)
    _add_looking(verbs, "list", "list_commands:list_nics", "list NICs")


NIC = Command("plug NICs into running VMs, change them and take them out", _configure_nic)


# ``brine disk``.


def _serial(text: str) -> str:
    if not 0 < len(text) <= LONGEST_SERIAL or not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"a serial has 1 to {LONGEST_SERIAL} characters of ASCII that can be printed"
        )
    return text


def _configure_disk(parser: Parser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = _add_changing(verbs, "add", "add_disk", "plug a disk in")
    text = "a block device or an image"
    add.add_argument("--path", type=_path, metavar="FILE", help=text)
    add.add_argument("--format", choices=FORMATS, help="default: raw")
    add.add_argument("--cache", choices=CACHE_MODES, default="none", help="default: none")
    add.add_argument("--aio", choices=AIO_MODES, default="threads", help="default: threads")
    _flag(add, "--read-only", "the guest may only read")
    _flag(add, "--no-discard", "keep storage that the guest discards")
    text = "the serial number (default: the beginning of the UUID)"
    add.add_argument("--serial", type=_serial, help=text)
    add.add_argument("--bus", choices=("pci", "scsi"), default="pci", help="default: pci")
    text = "the SCSI controller (default: the first virtio-scsi)"
    add.add_argument("--controller", metavar="ID", help=text)
    disk = ("DISK", "its path, device id, UUID or serial")
    _add_changing(verbs, "remove", "remove_disk", "unplug a disk", device=disk)
    _add_looking(verbs, "list", "list_commands:list_disks", "list disks")


DISK = Command("plug disks into running VMs and take them out", _configure_disk)


# ``brine tap``.


def _add_whose(parser: Parser) -> None:
    text = "the tap; default: made from INSTANCE and NIC"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    parser.add_argument("--instance", help="the instance of the NIC; default: NAME")
    parser.add_argument("--nic", default="0", help="the NIC's UUID, or its index; default: 0")


def _configure_tap(parser: Parser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, function: str, text: str, description: str) -> Parser:
        run = f"brine.hotplug.tap_commands:{function}"
        return add_verb(verbs, name, run, text, description=description)

    text = "Makes a tap that stays, wires it, and puts it up, for any QEMU: "
    text += "-netdev tap,ifname=NAME,script=no,downscript=no."
    up = verb("up", "make_tap", "make a persistent tap, and connect it", text)
    _add_whose(up)
    add_wiring(up)
    tap = up.add_argument_group("the tap")
    _add_queues(tap)
    tap.add_argument("--user", help="the user who may open it (default: root)")
    tap.add_argument("--group", help="the group that may open it")
    add_told(up)
    _flag(up, "--dry-run", "only check, and print the name")
    text = "Disconnects a tap of ours, and removes it."
    down = verb("down", "remove_tap", "disconnect and remove a tap", text)
    _add_whose(down)
    _flag(down, "--force", "also if a VM has the tap open")
    _flag(down, "--dry-run", "only print the name")
    text = "Lists the taps that are ours, and whose they are."
    listing = verb("list", "print_taps", "list the taps of this node", text)
    _flag(listing, "--wide", "also show filters, and how many packets they have dropped")
    _flag(listing, "--json", "print a JSON list")
    text = (
        "Restores the filters of taps that another program has removed, as nft flush ruleset does."
    )
    verb("filter", "restore_taps_filters", "restore the filters of taps", text)
    text = "Removes taps, routes, rules and ports of VMs that ended."
    gc = verb("gc", "collect_garbage", "remove what dead VMs have left", text)
    _flag(gc, "--dry-run", "only say what would be removed")
    which = gc.add_mutually_exclusive_group()
    _flag(which, "--all", "also taps of the last minute, or with a QMP socket of their instance")
    text = "keep taps that were open within so many seconds; for timers"
    _number(which, "--idle-for", 0, 10**8, text, unit="SECONDS")
    _flag(gc, "--json", "print a JSON object")


TAP = Command("make, list and remove tap interfaces", _configure_tap)
