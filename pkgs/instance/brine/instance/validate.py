"""Validation: completing a spec from JSON, and checking it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from itertools import count
from typing import Any

from brine.common.errors import UsageError
from brine.hotplug.address import NoSlotError, default_serial, uuid_of_mac, uuid_of_path
from brine.hotplug.choices import CACHE_MODES, Mode
from brine.hotplug.disk import MOST_BACKING
from brine.hotplug.nic import usual_wiring
from brine.instance.devices import nic_of
from brine.instance.kvm.layout import MOST_PORTS, layout_of, on_pci
from brine.instance.spec import (
    NOT_CONFINED,
    VERSION,
    AdminState,
    DiskSpec,
    FormatSource,
    Interface,
    NicSpec,
    SecurityModel,
    Source,
    Spec,
    SpecError,
    backing_chain,
    parse,
)
from brine.instance.xen.config import DISK_KEYS, KEYS, MOST_DISKS, NIC_KEYS

BOOT_DEVICES = ("disk", "cdrom", "network")

_OF_NAMES = uuid.UUID("5c4a2a55-1d0f-5e0e-9c1a-6f6a0f9d7b12")
_UNSAID = FormatSource.DEFAULT.value
_ROOT = "root"
_NOT_ROOT = 'name another user; or leave it out with "security_model": "none", which is root'


def define(
    data: Any, *, before: Spec | None = None, cluster: str = "", taken: Container[str] = ()
) -> Spec:
    """Make a complete spec of an object as people write it.

    Missing UUIDs and MAC addresses are derived from the names of the cluster and the instance: the
    same object makes the same spec again.

    :param before: the present spec of that instance. UUIDs, MAC addresses and the admin_state that
        *data* leaves out stay.
    :param cluster: the name of the cluster; empty if there is none.
    :param taken: UUIDs and MAC addresses of other instances, which are not made again.
    :raises SpecError: what is wrong, where.
    """
    _refuse_newer(data, before)
    spec = parse(Spec, data)
    given = data.keys()
    spec = replace(spec, nics=tuple(_with_usual_wiring(spec.nics, data.get("nics", ()))))
    spec = replace(spec, disks=tuple(_with_source(spec.disks, data.get("disks", ()))))
    if before:
        spec = replace(spec, uuid=spec.uuid or before.uuid)
        if "admin_state" not in given:
            source = before.admin_state_source
            spec = replace(spec, admin_state=before.admin_state, admin_state_source=source)
    spec = replace(spec, **_confinement(spec, given, before))
    if spec.admin_state != AdminState.DOWN:
        # A user can only shut an instance down.
        spec = replace(spec, admin_state_source=Source.ADMIN.value)
    made = _made_macs(spec, cluster, taken)
    spec = replace(
        spec,
        uuid=spec.uuid or _made_uuid(spec.name, cluster, taken),
        disks=tuple(_whole_disks(spec.disks, before.disks if before else ())),
        nics=tuple(_whole_nics(spec.nics, before.nics if before else (), made)),
    )
    spec = _with_known_slots(spec, before)
    check(spec)
    _check_ports(spec)
    return spec


def check(spec: Spec) -> None:
    """Refuse a spec whose keys conflict.

    :raises SpecError: what is wrong, where.
    """
    _check_processors(spec)
    _check_boot(spec)
    _check_disks(spec)
    _check_nics(spec)
    _check_display(spec)
    _check_security(spec)
    if spec.is_xen():
        check_domain(spec)
    else:
        _check_room(spec)


def _with_usual_wiring(
    nics: Sequence[NicSpec], given: Sequence[Mapping[str, Any]]
) -> Iterator[NicSpec]:
    """The NICs, with the cluster's mode and link if they have none of their own."""
    for nic, said in zip(nics, given, strict=True):
        mode, link = usual_wiring(said.get("mode"), said.get("link"))
        yield replace(nic, mode=mode, link=link)


def _with_source(disks: Sequence[DiskSpec], given: Sequence[Any]) -> Iterator[DiskSpec]:
    """The disks, with the source of their format."""
    for disk, keys in zip(disks, given, strict=True):
        yield disk if "format" in keys else replace(disk, format_source=_UNSAID)


def _confinement(spec: Spec, given: Container[str], before: Spec | None) -> dict[str, Any]:
    """The defaults of the keys that confine QEMU.

    An existing instance keeps the values of its spec. Xen's domains don't use them.
    """
    if spec.is_xen():
        kept: dict[str, Any] = NOT_CONFINED
    elif before and not before.is_xen():
        kept = {key: getattr(before, key) for key in (*NOT_CONFINED, "security_user")}
        if "security_model" in given:
            kept.pop("security_user")
    else:
        kept = {}
    return {key: value for key, value in kept.items() if key not in given}


def _whole_disks(disks: Sequence[DiskSpec], before: Sequence[DiskSpec]) -> Iterator[DiskSpec]:
    known = {disk.path: disk.uuid for disk in before}
    # A disk that a start has found to be raw stays raw, whatever its guest writes to it.
    sources = {(disk.path, disk.format): disk.format_source for disk in before}
    for disk in disks:
        if disk.format_source == _UNSAID:
            source = sources.get((disk.path, disk.format), _UNSAID)
            disk = replace(disk, format_source=source)
        # The same each time, so that the same object defined twice is the same instance.
        made = known.get(disk.path) or uuid_of_path(disk.path)
        yield replace(disk, uuid=(disk.uuid or made).lower())


def _refuse_newer(data: Any, before: Spec | None) -> None:
    given = data.get("version") if isinstance(data, dict) else None
    hint = "upgrade brine-instance"
    if type(given) is int and given > VERSION:
        raise SpecError(f"is {given}, and this Brine knows {VERSION}", where="/version", hint=hint)
    if before and before.version > VERSION:
        text = f"the spec that there is has version {before.version}, of which this Brine knows"
        text += f" {VERSION}: what it does not know would be lost"
        raise SpecError(text, hint=f"{hint}; or undefine it first")


def _made_uuid(name: str, cluster: str, taken: Container[str]) -> str:
    return next(one for one in _made(f"instance {name} of {cluster}") if one not in taken)


def _made_macs(spec: Spec, cluster: str, taken: Container[str]) -> Callable[[int], str]:
    """A function that makes the MAC address of a NIC, by its index."""
    used = {nic.mac.lower() for nic in spec.nics}

    def made(index: int) -> str:
        for text in _made(f"NIC {index} of {spec.name} of {cluster}"):
            mac = f"52:54:00:{text[0:2]}:{text[2:4]}:{text[4:6]}"  # the prefix of QEMU's users
            if mac not in used and mac not in taken:
                used.add(mac)
                return mac
        raise AssertionError("count() does not end")

    return made


def _made(text: str) -> Iterator[str]:
    """UUIDs derived from a text, always the same."""
    for number in count():
        yield str(uuid.uuid5(_OF_NAMES, ascii(f"{text} {number}" if number else text)))


def _with_known_slots(spec: Spec, before: Spec | None) -> Spec:
    """The spec, with its devices in their former slots."""
    if before is None or before.is_q35() != spec.is_q35():
        return spec
    disks = {(disk.uuid, disk.interface): disk.slot for disk in before.disks}
    nics = {nic.uuid: nic.slot for nic in before.nics}
    return replace(
        spec,
        disks=tuple(
            replace(disk, slot=disks.get((disk.uuid, disk.interface), -1))
            if disk.slot < 0
            else disk
            for disk in spec.disks
        ),
        nics=tuple(
            replace(nic, slot=nics.get(nic.uuid, -1)) if nic.slot < 0 else nic for nic in spec.nics
        ),
    )


def _whole_nics(
    nics: Sequence[NicSpec], before: Sequence[NicSpec], new_mac: Callable[[int], str]
) -> Iterator[NicSpec]:
    """The NICs with UUIDs and MAC addresses.

    They are those of the former NIC with the same UUID or address; if neither is given, those of
    the former NIC at the same index.
    """
    named = [next((was for was in before if _is_named(nic, was)), None) for nic in nics]
    for index, nic in enumerate(nics):
        was = named[index]
        if not (nic.uuid or nic.mac) and index < len(before) and before[index] not in named:
            was = before[index]
        mac = nic.mac or (was.mac if was else new_mac(index))
        made = was.uuid if was else uuid_of_mac(mac)
        yield replace(nic, mac=mac.lower(), uuid=(nic.uuid or made).lower())


def _is_named(nic: NicSpec, was: NicSpec) -> bool:
    if nic.uuid:
        return nic.uuid.lower() == was.uuid.lower()
    return nic.mac.lower() == was.mac.lower()


def _check_processors(spec: Spec) -> None:
    given = [number for number in (spec.sockets, spec.cores, spec.threads) if number]
    product = 1
    for number in given:
        product *= number
    if len(given) == 3 and product != spec.vcpus:
        raise SpecError(
            f"sockets, cores and threads make {product} processors, not {spec.vcpus}",
            where="/vcpus",
        )
    if given and spec.vcpus % product:
        raise SpecError(f"can't be divided among {product}", where="/vcpus")


def _check_boot(spec: Spec) -> None:
    for index, name in enumerate(spec.boot_order):
        if name not in BOOT_DEVICES:
            text = f"must be one of {', '.join(BOOT_DEVICES)}, but is {name!r}"
            raise SpecError(text, where=f"/boot_order/{index}")
    _refuse_twice(spec.boot_order, "/boot_order", lambda name: name, "is there twice")
    for name in ("initrd", "append"):
        if getattr(spec, name) and not spec.kernel:
            raise SpecError("needs a kernel", where=f"/{name}")
    if spec.kernel and spec.firmware:
        raise SpecError("a kernel is started without a firmware of one's own", where="/firmware")


def _check_disks(spec: Spec) -> None:
    for index, disk in enumerate(spec.disks):
        _, direct, _ = CACHE_MODES[disk.cache]
        if disk.aio == "native" and not direct:
            raise SpecError(
                f"native needs a cache mode that is direct, not {disk.cache}",
                where=f"/disks/{index}/aio",
                hint="choose cache none or directsync, or aio threads",
            )
        if disk.read_only and disk.interface == Interface.IDE:
            raise SpecError(
                "a disk of the interface ide can't be",
                where=f"/disks/{index}/read_only",
                hint="give it the interface virtio or scsi",
            )
        if disk.backing and disk.format == "raw":
            raise SpecError(
                "a disk of the format raw can't have any",
                where=f"/disks/{index}/backing",
                hint="an overlay is of the format qcow2",
            )
        if len(backing_chain(disk)) > MOST_BACKING:
            text = f"has more than {MOST_BACKING} files"
            raise SpecError(text, where=f"/disks/{index}/backing")
        try:
            default_serial(disk.uuid)
        except ValueError as error:
            raise SpecError(str(error), where=f"/disks/{index}/uuid") from error
    _refuse_twice(spec.disks, "/disks", lambda disk: disk.path, "is the path of another disk too")
    _refuse_twice(spec.disks, "/disks", _short, "begins as another disk's UUID does")


def _check_nics(spec: Spec) -> None:
    for index, nic in enumerate(spec.nics):
        _check_connection(nic, f"/nics/{index}")
        try:
            nic_of(spec, nic).check()
        except UsageError as error:
            raise SpecError(str(error), where=f"/nics/{index}", hint=error.hint) from error
        if nic.queues > 1 and nic.model != "virtio":
            raise SpecError("only virtio has several", where=f"/nics/{index}/queues")
        if nic.vhost and nic.model != "virtio":
            raise SpecError("only virtio has it", where=f"/nics/{index}/vhost")
    _refuse_twice(spec.nics, "/nics", lambda nic: nic.mac, "is the MAC address of another NIC too")
    _refuse_twice(spec.nics, "/nics", _short, "begins as another NIC's UUID does")


def _check_connection(nic: NicSpec, where: str) -> None:
    """Refuse a NIC, with errors that name keys of a spec; the wiring's own check names options."""
    if nic.mode == Mode.ROUTED and not nic.ips:
        hint = 'give "ips": ["192.0.2.10"], or what it is'
        raise SpecError("a routed NIC needs its address", where=where, hint=hint)
    if nic.mode != Mode.ROUTED and not nic.link:
        hint = 'give "link": "br0", or what the bridge is called'
        raise SpecError(f"a NIC that is {nic.mode} needs its bridge", where=where, hint=hint)


def _check_display(spec: Spec) -> None:
    for name in ("vnc_port", "vnc_password_file"):
        if getattr(spec, name) and not spec.vnc_bind:
            hint = 'give "vnc_bind": "127.0.0.1", or another address of this node'
            raise SpecError("needs vnc_bind", where=f"/{name}", hint=hint)
    if spec.vnc_bind.startswith("/") and spec.vnc_port:
        raise SpecError("a VNC socket has no port", where="/vnc_port")
    if 0 < spec.vnc_port < 5900:
        raise SpecError(f"must be 5900 or more, but is {spec.vnc_port}", where="/vnc_port")


def _check_security(spec: Spec) -> None:
    model = spec.security_model
    if model == SecurityModel.USER and not spec.security_user:
        raise SpecError("the security model user needs it", where="/security_user")
    if spec.security_user == _ROOT:
        raise SpecError("must not be root", where="/security_user", hint=_NOT_ROOT)
    if model != SecurityModel.USER and spec.security_user:
        raise SpecError(f"is not used by the security model {model}", where="/security_user")


def _check_room(spec: Spec) -> None:
    try:
        layout_of(spec)
    except NoSlotError as error:
        raise SpecError(str(error), hint=error.hint) from error


def _check_ports(spec: Spec) -> None:
    left = MOST_PORTS - on_pci(spec)
    if spec.is_q35() and spec.hotplug_ports > left:
        text = f"beside the disks and NICs there is room for {left}, but it is {spec.hotplug_ports}"
        hint = "lower it, or give disks the interface scsi"
        raise SpecError(text, where="/hotplug_ports", hint=hint)


def _short(device: DiskSpec | NicSpec) -> str:
    """The part of a device's UUID in its QEMU id."""
    return device.uuid.replace("-", "")[:8]


def _refuse_twice(
    items: Sequence[Any], where: str, identity: Callable[[Any], str], text: str
) -> None:
    seen: set[str] = set()
    for index, item in enumerate(items):
        known_as = identity(item)
        if known_as in seen:
            raise SpecError(f"{known_as} {text}", where=f"{where}/{index}")
        seen.add(known_as)


# Keys that Xen does not support. The definition refuses them, as nothing else would.

# Brine relies on these: the fate of an ended domain, and its identity.
_OURS = re.compile(r"(?:^|[;\n])\s*(name|uuid|type|on_\w+)\s*\+?=")


def check_domain(spec: Spec) -> None:
    """Refuse keys that only QEMU has, or that Xen does not support.

    :raises SpecError: which key.
    """
    _refuse_others(spec, KEYS, "", spec.hypervisor)
    for index, disk in enumerate(spec.disks):
        _refuse_others(disk, DISK_KEYS, f"/disks/{index}", spec.hypervisor)
    for index, nic in enumerate(spec.nics):
        _refuse_others(nic, NIC_KEYS, f"/nics/{index}", spec.hypervisor)
    if len(spec.disks) > MOST_DISKS:
        text = f"has {len(spec.disks)}, and a domain may have {MOST_DISKS}"
        raise SpecError(text, where="/disks")
    if not spec.kernel and not spec.disks:
        raise SpecError("must be there, where no disk has one", where="/kernel")
    for index, line in enumerate(spec.extra_arguments):
        if match := _OURS.search(line):
            text = f"{match[1]} can't be set: Brine does"
            raise SpecError(text, where=f"/extra_arguments/{index}")


def _refuse_others(value: Any, known: Collection[str], where: str, hypervisor: str) -> None:
    """Refuse unknown keys that are set."""
    for one in fields(value):
        default = NOT_CONFINED.get(one.name, one.default)
        is_default = default is not MISSING and getattr(value, one.name) == default
        if one.name not in known and not is_default:
            raise SpecError(
                f"means nothing to the hypervisor {hypervisor}",
                where=f"{where}/{one.name}",
                hint="leave it out; brine-spec(5) says what Xen knows",
            )
