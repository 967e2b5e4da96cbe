"""``brine nic``: plug NICs into running VMs, change them, take them out, list them."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING

from brine.common.command import Command
from brine.common.errors import UsageError
from brine.hotplug.device_names import Kind
from brine.hotplug.plug_options import (
    add_common,
    add_reference,
    plugged_devices,
    print_devices,
    record_only,
    refuse_unknown,
)
from brine.hotplug.wiring_options import add_told, add_wiring, described, whole_number, wiring_of

if TYPE_CHECKING:
    from brine.hotplug.nic_operations import Done, Wish
    from brine.hotplug.vm import Vm

_MODELS = ("virtio", "e1000", "e1000e", "rtl8139")
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_QEMU_PREFIX = "52:54:00"


def _add(arguments: argparse.Namespace) -> int:
    return asyncio.run(_add_nic(arguments))


async def _add_nic(arguments: argparse.Namespace) -> int:
    from brine.hotplug.nic_operations import add_nic, recorded_nic
    from brine.hotplug.vm import working_on

    arguments.mac = arguments.mac or _new_mac()
    # A MAC stands for one NIC, so that it is not plugged in twice; a new one for a new NIC.
    nic_uuid = arguments.uuid or str(uuid.uuid5(uuid.NAMESPACE_OID, arguments.mac))
    if arguments.no_hotplug:
        wish = _wish(arguments, arguments.instance or "instance", nic_uuid)
        record_only(arguments, Kind.NIC, recorded_nic(wish))
        return 0
    async with working_on(arguments.qmp, qmp_timeout_s=arguments.qmp_timeout) as vm:
        wish = _wish(arguments, arguments.instance or await vm.name(), nic_uuid)
        done = await add_nic(vm, wish, reserved=arguments.reserved_slots, runtime=arguments.runtime)
    _tell(arguments, "plugged in" if done.changed else "unchanged", done, wish)
    return 0


def _modify(arguments: argparse.Namespace) -> int:
    return asyncio.run(_modify_nic(arguments))


async def _modify_nic(arguments: argparse.Namespace) -> int:
    from brine.hotplug.nic_operations import modify_nic
    from brine.hotplug.vm import working_on

    async with working_on(arguments.qmp, qmp_timeout_s=arguments.qmp_timeout) as vm:
        found = await vm.find(Kind.NIC, arguments.device, runtime=arguments.runtime)
        if found is None:
            listed = ", ".join(one.device_id for one in await vm.devices(Kind.NIC)) or "none"
            message = f"no NIC is known as {arguments.device}"
            raise UsageError(message, hint=f"plugged in are: {listed}")
        arguments.mac = arguments.mac or found.value
        wish = _wish(arguments, arguments.instance or await vm.name(), found.uuid)
        done = await modify_nic(
            vm,
            found.device_id,
            wish,
            tap=await _tap_of(vm, found.name.part),
            runtime=arguments.runtime,
            timeout_s=arguments.timeout,
        )
    _tell(arguments, "changed", done, wish)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    return asyncio.run(_remove_nic(arguments))


async def _remove_nic(arguments: argparse.Namespace) -> int:
    from brine.hotplug.nic_operations import remove_nic
    from brine.hotplug.vm import working_on

    if arguments.no_hotplug:
        record_only(arguments, Kind.NIC, None)
        return 0
    async with working_on(arguments.qmp, qmp_timeout_s=arguments.qmp_timeout) as vm:
        found = await vm.find(Kind.NIC, arguments.device, runtime=arguments.runtime)
        if found is None:
            await refuse_unknown(vm, Kind.NIC, arguments.device)
            print(f"unchanged: {arguments.device} is not plugged in")
            return 0
        done = await remove_nic(
            vm,
            found.device_id,
            found.uuid,
            tap=await _tap_of(vm, found.name.part),
            runtime=arguments.runtime,
            timeout_s=arguments.timeout,
        )
    _tell(arguments, "unplugged", done, None)
    return 0


async def _tap_of(vm: Vm, part: str) -> str | None:
    """The tap of a NIC whose UUID begins so: taps know whose they are."""
    from brine.hotplug import tap_records

    instance = await vm.name()
    records = tap_records.load_all(tap_records.PLACES)
    of_nic = [one for one in records.values() if one.wiring.nic.replace("-", "").startswith(part)]
    of_vm = [one for one in of_nic if one.wiring.instance == instance]
    found = of_vm or of_nic
    return found[0].name if len(found) == 1 else None


def _wish(arguments: argparse.Namespace, instance: str, nic_uuid: str) -> Wish:
    from brine.hotplug.nic_operations import Wish
    from brine.hotplug.nics import Nic

    wiring = wiring_of(arguments, instance, nic_uuid)
    wiring.check()
    if arguments.model != "virtio" and arguments.queues > 1:
        raise UsageError(f"{arguments.model} has one queue only", hint="--model virtio has more")
    nic = Nic(nic_uuid, arguments.mac, arguments.model)
    return Wish(nic, wiring, queues=arguments.queues, vhost=arguments.vhost)


def _tell(arguments: argparse.Namespace, word: str, done: Done, wish: Wish | None) -> None:
    if arguments.json:
        print(json.dumps(asdict(done), indent=2))
    elif wish:
        how = described(wish.wiring)
        print(f"{word}: {done.device_id}, MAC {wish.nic.mac}, tap {done.tap}, {how}")
    else:
        print(f"{word}: {done.device_id}")


def _list(arguments: argparse.Namespace) -> int:
    devices = asyncio.run(plugged_devices(arguments, Kind.NIC))
    print_devices(devices, as_json=arguments.json)
    return 0


def _new_mac() -> str:
    return ":".join([_QEMU_PREFIX, *(f"{byte:02x}" for byte in secrets.token_bytes(3))])


def _mac(text: str) -> str:
    mac = text.lower()
    if text and (not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1):
        raise argparse.ArgumentTypeError(f"not the MAC address of one NIC: {text!r}")
    return mac


def _add_nic_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", help="whose NIC it is; default: QEMU's own -name")
    add_wiring(parser)
    add_told(parser, mac=_mac)
    device = parser.add_argument_group("the device")
    device.add_argument("--model", choices=_MODELS, default="virtio", help="default: virtio")
    device.add_argument(
        "--queues", type=whole_number(1, 256), default=1, metavar="N", help="default: 1"
    )
    device.add_argument("--vhost", action="store_true", help="have the kernel move the frames")


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = verbs.add_parser("add", help="plug a NIC in", allow_abbrev=False)
    add_common(add, changes=True, plugs=True)
    _add_nic_options(add)
    add.set_defaults(run=_add)
    modify = verbs.add_parser(
        "modify",
        help="change a NIC: take it out, and plug it in again in the same slot",
        allow_abbrev=False,
    )
    add_reference(modify, "NIC", "its device id, UUID or MAC")
    add_common(modify, changes=True)
    _add_nic_options(modify)
    modify.set_defaults(run=_modify)
    remove = verbs.add_parser("remove", help="take a NIC out", allow_abbrev=False)
    add_reference(remove, "NIC", "its device id, UUID or MAC")
    add_common(remove, changes=True)
    remove.set_defaults(run=_remove)
    listing = verbs.add_parser("list", help="list plugged NICs", allow_abbrev=False)
    add_common(listing)
    listing.set_defaults(run=_list)


COMMAND = Command("plug NICs into running VMs, change them and take them out", _configure)
