"""``brine nic``: plug NICs into running VMs, change them, take them out, list them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from brine.common.cli import Command, whole_number
from brine.common.errors import UsageError
from brine.hotplug.address import DeviceKind, new_mac, uuid_of_mac
from brine.hotplug.cli import (
    add_common,
    add_instance,
    add_reference,
    alone_with,
    list_devices,
    of_one_vm,
    remove,
    run,
    runtime_file,
    tell,
)

if TYPE_CHECKING:
    from brine.hotplug.nic import Wiring, Wish
    from brine.hotplug.plug_nic import NicChange
    from brine.hotplug.vm import Plugged, Vm


# The options of a command line that say how a NIC is connected.

_MODES = ("bridged", "routed", "openvswitch")


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
    told = parser.add_argument_group("what operators' scripts are told, see brine-nic.d(5)")
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


def changed_wiring(arguments: argparse.Namespace, old: Wiring) -> Wiring:
    """A wiring with what the options want otherwise. Another mode takes no link and VLAN along."""
    from brine.hotplug.choices import Mode

    given: dict[str, Any] = {
        "mode": arguments.mode and Mode(arguments.mode),
        "link": arguments.link,
        "vlan": arguments.vlan,
        "ips": None if arguments.ip is None else _addresses(ip for ip in arguments.ip if ip),
        "mac": arguments.mac,
        "mtu": arguments.mtu,
        "index": arguments.index,
        "tags": None if arguments.tag is None else tuple(arguments.tag),
        "network": None if arguments.network is None else _network(arguments.network),
    }
    if given["mode"] not in (None, old.mode):
        old = replace(old, link="", vlan="")
    return replace(old, **{key: value for key, value in given.items() if value is not None})


def wiring_of(arguments: argparse.Namespace, instance: str, nic: str) -> Wiring:
    """What the options want for that NIC."""
    from brine.hotplug.choices import Mode
    from brine.hotplug.nic import Wiring, usual_wiring

    mode, link = usual_wiring(arguments.mode, arguments.link)
    index = arguments.index
    if index is None and nic.isdigit():
        index = int(nic)
    return Wiring(
        instance=instance,
        nic=nic,
        mode=Mode(mode),
        link=link,
        vlan=arguments.vlan,
        ips=_addresses(arguments.ip),
        mac=arguments.mac,
        mtu=arguments.mtu,
        index=index,
        tags=tuple(arguments.tag),
        network=_network(arguments.network),
    )


def described(wiring: Wiring) -> str:
    """A wiring in words."""
    return connection(wiring.mode.value, wiring.link, wiring.vlan, wiring.ips)


def connection(mode: str, link: str, vlan: str, ips: Iterable[str]) -> str:
    """The same from its parts."""
    if mode == "routed":
        return f"routed to {', '.join(ips)} by table {link or 'main'}"
    return f"{mode} to {link}" + (f" VLAN {vlan}" if vlan else "")


def _unless(changes: bool, text: str) -> str:
    return "default: as it is" if changes else text


def _addresses(texts: Iterable[str]) -> tuple[str, ...]:
    """Addresses, each written in the one way that all are written."""
    from brine.hotplug.nic import parse_address

    return tuple(str(parse_address(text)) for text in texts)


def _network(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            hint = "such as --network NAME=blue --network SUBNET=192.0.2.0/24"
            raise UsageError(f"not KEY=VALUE of a network: {pair!r}", hint=hint)
        found[f"NETWORK_{key.removeprefix('NETWORK_')}"] = value
    return found


_MODELS = ("virtio", "e1000", "e1000e", "rtl8139")
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_NO_MAC = "00:00:00:00:00:00"
_NO_DIFFERENCE = frozenset(
    {
        "run",
        "noun",
        "qmp",
        "json",
        "timeout",
        "qmp_timeout",
        "lock_timeout",
        "no_hotplug",
        "dry_run",
    }
)


def _add(arguments: argparse.Namespace) -> int:
    from brine.hotplug.nic import recorded_nic
    from brine.hotplug.offline import record_addition

    if arguments.instance not in (None, arguments.qmp.stem):
        # What a VM says of its NICs leads to taps of that name, and must lead to no other's.
        raise UsageError(
            f"{arguments.qmp}: its VM is called {arguments.qmp.stem}, not {arguments.instance}",
            hint="a QMP socket has its VM's name, with .qmp after it",
        )
    request = _request("add", arguments)
    if not arguments.uuid:
        # A MAC stands for one NIC, so that it is not plugged in twice; a new one for a new NIC.
        arguments.mac = arguments.mac or new_mac()
    nic_uuid = arguments.uuid or uuid_of_mac(arguments.mac)
    if arguments.no_hotplug:
        wish = _wish(arguments, arguments.qmp.stem, nic_uuid)
        record_addition(arguments, DeviceKind.NIC, recorded_nic(wish))
        return 0
    return run(_add_nic(arguments, nic_uuid, request), DeviceKind.NIC)


async def _add_nic(arguments: argparse.Namespace, nic_uuid: str, request: dict[str, Any]) -> int:
    from brine.hotplug.plug_nic import NicChange, add_nic

    async with alone_with(arguments) as vm:
        wish = _wish(arguments, vm.name, nic_uuid)
        if finished := vm.was_finished(request):
            done = NicChange.of_pending(finished)
        else:
            done = await add_nic(
                vm,
                wish,
                reserved=arguments.reserved_slots,
                runtime=runtime_file(arguments),
                request=request,
                timeout_s=arguments.timeout,
                dry_run=arguments.dry_run,
            )
    _tell(arguments, done, ("plugged in", "would be plugged in"), wish.wiring)
    return 0


def _request(verb: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What tells this request from others, whatever MAC it is given."""
    given = {key: value for key, value in vars(arguments).items() if key not in _NO_DIFFERENCE}
    return {"verb": verb, **given, "runtime": str(arguments.runtime or "")}


def _modify(arguments: argparse.Namespace) -> int:
    if arguments.no_hotplug:
        from brine.hotplug.offline import record_nic_change

        instance = arguments.qmp.stem
        record_nic_change(arguments, partial(_with_options, arguments), instance=instance)
        return 0
    return run(_modify_nic(arguments), DeviceKind.NIC)


async def _modify_nic(arguments: argparse.Namespace) -> int:
    from brine.hotplug.nic import Wish
    from brine.hotplug.plug_nic import NicChange, modify_nic, refuse_taken_mac

    request = _request("modify", arguments)
    async with alone_with(arguments) as vm:
        if finished := vm.was_finished(request):
            done, wiring = NicChange.of_pending(finished), Wish.from_json(finished.device).wiring
        else:
            found = await _existing(vm, arguments)
            wish = _changed(arguments, found)
            wiring = wish.wiring
            if wish.nic.mac != found.value:
                await refuse_taken_mac(vm, wish.nic.mac)
            done = await modify_nic(
                vm,
                found,
                wish,
                runtime=runtime_file(arguments),
                request=request,
                timeout_s=arguments.timeout,
                dry_run=arguments.dry_run,
            )
    _tell(arguments, done, ("changed", "would be changed"), wiring)
    return 0


async def _existing(vm: Vm, arguments: argparse.Namespace) -> Plugged:
    from brine.hotplug.vm import refuse_boot_device

    reference = arguments.device
    found = await vm.find(DeviceKind.NIC, reference)
    if found is None:
        await refuse_boot_device(vm.machine, DeviceKind.NIC, reference, runtime_file(arguments))
        listed = ", ".join(one.device_id for one in await vm.devices(DeviceKind.NIC)) or "none"
        raise UsageError(f"no NIC is known as {reference}", hint=f"plugged in are: {listed}")
    return found


def _changed(arguments: argparse.Namespace, device: Plugged) -> Wish:
    from brine.hotplug.plug_nic import wish_of

    return _with_options(arguments, wish_of(device))


def _with_options(arguments: argparse.Namespace, old: Wish) -> Wish:
    """A NIC with what the command line wants otherwise."""
    from brine.hotplug.nic import Wish

    wiring = changed_wiring(arguments, old.wiring)
    nic = replace(old.nic, mac=wiring.mac, model=arguments.model or old.nic.model)
    queues = old.queues if arguments.queues is None else arguments.queues
    vhost = old.vhost if arguments.vhost is None else arguments.vhost
    return _checked(Wish(nic, wiring, queues, vhost))


def _remove(arguments: argparse.Namespace) -> int:
    from brine.hotplug.plug_nic import remove_nic

    return remove(arguments, DeviceKind.NIC, remove_nic)


def _wish(arguments: argparse.Namespace, instance: str, nic_uuid: str) -> Wish:
    from brine.hotplug.nic import Nic, Wish

    wiring = wiring_of(arguments, instance, nic_uuid)
    nic = Nic(nic_uuid, arguments.mac, arguments.model)
    return _checked(Wish(nic, wiring, queues=arguments.queues, vhost=arguments.vhost))


def _checked(wish: Wish) -> Wish:
    wish.wiring.check()
    if wish.nic.model != "virtio" and (wish.queues > 1 or wish.vhost):
        what = "vhost" if wish.vhost else "several queues"
        raise UsageError(f"{wish.nic.model} has no {what}", hint="--model virtio has")
    return wish


def _tell(
    arguments: argparse.Namespace, done: NicChange, words: tuple[str, str], wiring: Wiring
) -> None:
    text = f"{done.device_id}, MAC {done.mac}, tap {done.tap}, {described(wiring)}"
    tell(arguments, done, words, text)


def _list(arguments: argparse.Namespace) -> int:
    return list_devices(arguments, DeviceKind.NIC)


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
        help="have the kernel move the frames",
    )


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = verbs.add_parser("add", help="plug a NIC in", allow_abbrev=False)
    add_instance(add)
    add_common(add, changes=True, plugs=True)
    add.add_argument("--instance", help="whose NIC it is: as the socket is called")
    _add_nic_options(add)
    add.set_defaults(run=of_one_vm(_add))
    modify = verbs.add_parser(
        "modify",
        help="change a NIC: take it out, and plug it in again in the same slot",
        allow_abbrev=False,
    )
    add_instance(modify)
    add_reference(modify, "NIC", "its device id, UUID or MAC")
    add_common(modify, changes=True)
    _add_nic_options(modify, changes=True)
    modify.set_defaults(run=of_one_vm(_modify))
    remove = verbs.add_parser("remove", help="take a NIC out", allow_abbrev=False)
    add_instance(remove)
    add_reference(remove, "NIC", "its device id, UUID or MAC")
    add_common(remove, changes=True)
    remove.set_defaults(run=of_one_vm(_remove))
    listing = verbs.add_parser("list", help="list plugged NICs", allow_abbrev=False)
    add_instance(listing)
    add_common(listing)
    listing.set_defaults(run=of_one_vm(_list))


COMMAND = Command("plug NICs into running VMs, change them and take them out", _configure)
