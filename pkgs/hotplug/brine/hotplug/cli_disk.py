"""``brine disk``: plug disks into running VMs, take them out, list them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from brine.common.cli import Command
from brine.common.errors import UsageError
from brine.hotplug.address import Bus, DeviceKind, uuid_of_path
from brine.hotplug.cli import (
    add_common,
    add_instance,
    add_reference,
    alone_with,
    instance_of,
    list_devices,
    of_one_vm,
    path,
    remove,
    run,
    runtime_file,
    tell,
)

if TYPE_CHECKING:
    from brine.hotplug.disk import Disk


_BUSES = tuple(bus.value for bus in Bus)


def _add(arguments: argparse.Namespace) -> int:
    from brine.hotplug.disk import (
        recorded_disk,
        refuse_disk_of_others,
        refuse_other_format,
        size_of,
    )
    from brine.hotplug.offline import record_addition

    disk = _disk(arguments)
    refuse_disk_of_others(disk, instance_of(arguments))
    if arguments.no_hotplug:
        if arguments.format is None:
            refuse_other_format(disk)
        device = recorded_disk(disk, size_of(disk))
        record_addition(arguments, DeviceKind.DISK, device, link=str(disk.path))
        return 0
    return run(_add_disk(arguments, disk), DeviceKind.DISK)


async def _add_disk(arguments: argparse.Namespace, disk: Disk) -> int:
    from brine.hotplug.plug_disk import add_disk

    async with alone_with(arguments) as vm:
        done = await add_disk(
            vm,
            disk,
            is_format_said=arguments.format is not None,
            bus=Bus(arguments.bus),
            controller=arguments.controller,
            reserved=arguments.reserved_slots,
            runtime=runtime_file(arguments),
            timeout_s=arguments.timeout,
            dry_run=arguments.dry_run,
        )
    text = f"{done.device_id}, serial {done.serial}"
    tell(arguments, done, ("plugged in", "would be plugged in"), text)
    return 0


def _disk(arguments: argparse.Namespace) -> Disk:
    from brine.hotplug.disk import Disk

    if arguments.aio == "native" and arguments.cache not in ("none", "directsync"):
        hint = "choose --cache none or directsync, or --aio threads"
        raise UsageError("--aio native needs a cache mode that is direct", hint=hint)
    if arguments.controller and arguments.bus != Bus.SCSI:
        raise UsageError("--controller is of SCSI", hint="give --bus scsi too")
    file = Path(os.path.abspath(arguments.path))
    # The same disk has the same UUID each time, so that it is not plugged in twice. What a symbolic
    # link such as /dev/vg/lv leads to is another one after a reboot.
    given = arguments.uuid or uuid_of_path(str(file))
    return Disk(
        uuid=given,
        path=file,
        format=arguments.format or "raw",
        cache=arguments.cache,
        aio=arguments.aio,
        read_only=arguments.read_only,
        discard=not arguments.no_discard,
        serial=arguments.serial,
    )


def _remove(arguments: argparse.Namespace) -> int:
    from brine.hotplug.plug_disk import remove_disk

    return remove(arguments, DeviceKind.DISK, remove_disk)


def _list(arguments: argparse.Namespace) -> int:
    return list_devices(arguments, DeviceKind.DISK)


def _serial(text: str) -> str:
    if not 0 < len(text) <= 20 or not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError("a serial has 1 to 20 characters")
    return text


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = verbs.add_parser("add", help="plug a disk in", allow_abbrev=False)
    add_instance(add)
    add_common(add, changes=True, plugs=True)
    add.add_argument(
        "--path", type=path, required=True, metavar="FILE", help="a block device or an image"
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
    add.add_argument("--read-only", action="store_true", help="the guest may not write")
    add.add_argument("--no-discard", action="store_true", help="keep what the guest discards")
    add.add_argument("--serial", type=_serial, help="that the guest sees, if not the UUID's start")
    add.add_argument("--bus", choices=_BUSES, default="pci", help="default: pci")
    add.add_argument("--controller", metavar="ID", help="of SCSI, if not the first virtio-scsi")
    add.set_defaults(run=of_one_vm(_add))
    remove = verbs.add_parser("remove", help="take a disk out", allow_abbrev=False)
    add_instance(remove)
    add_reference(remove, "DISK", "its path, device id, UUID or serial")
    add_common(remove, changes=True)
    remove.set_defaults(run=of_one_vm(_remove))
    listing = verbs.add_parser("list", help="list plugged disks", allow_abbrev=False)
    add_instance(listing)
    add_common(listing)
    listing.set_defaults(run=of_one_vm(_list))


COMMAND = Command("plug disks into running VMs and take them out", _configure)
