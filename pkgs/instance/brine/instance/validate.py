"""Validation: completing a spec from JSON, and checking it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import fields, replace
from itertools import count
from typing import Any

from brine.common import paths
from brine.common.errors import UsageError
from brine.instance.kvm.layout import layout_of, on_pci
from brine.instance.xen.config import DISK_KEYS, KEYS, NIC_KEYS
from brine.vm.address import default_serial, short_uuid, uuid_of_mac, uuid_of_path
from brine.vm.disk import MOST_BACKING, Disk, FormatSource
from brine.vm.nic import Nic, usual_filter, usual_wiring
from brine.vm.rules import (
    disk_faults,
    security_faults,
    topology_fault,
    vnc_port_fault,
    xen_nic_faults,
)
from brine.vm.slots import MOST_PORTS, MOST_XEN_DISKS, NoSlotError
from brine.vm.spec import (
    MACHINE_VERSIONS,
    NOT_CONFINED,
    UEFI,
    USUAL_QEMU,
    VERSION,
    AdminState,
    Source,
    Spec,
    SpecError,
    parse,
)
from brine.vm.stored_spec import as_this_version
from brine.vm.values import Mode
from brine.vm.vif import Vif

Fault = tuple[str, str, str | None]
"""The JSON pointer of a mistake, its description, and a hint."""

_OF_NAMES = uuid.UUID("5c4a2a55-1d0f-5e0e-9c1a-6f6a0f9d7b12")
# Brine relies on these: the fate of an ended domain, and its identity.
_OURS = re.compile(r"(?:^|[;\n])\s*(name|uuid|type|on_\w+)\s*\+?=")


_PART_OF_FIRMWARE = re.compile(r"/(OVMF|edk2)[^/]*[_-](CODE|VARS)(_4M)?\b[^/]*$", re.IGNORECASE)


def completed(
    data: Any,
    *,
    before: Spec | None = None,
    cluster: str = "",
    taken: Container[str] = (),
    by_hand: Container[str] | None = None,
) -> Spec:
    """Make a complete spec of an object as people write it.

    Missing UUIDs and MAC addresses are derived from the names of the cluster and the instance: the
    same object makes the same spec again.

    :param before: the present spec of that instance. What *data* leaves out of this stays: UUIDs,
        MAC addresses, slots, the machine's version, the admin_state, and how QEMU is confined.
    :param cluster: the name of the cluster; empty if there is none.
    :param taken: UUIDs and MAC addresses of other instances, which are not made again.
    :param by_hand: *data* is a declaration, and has devices with these UUIDs that were added by
        hand, of which limits say nothing. None for an operator's own spec.
    :raises SpecError: what is wrong, where.
    """
    data = as_this_version(data)
    _refuse_newer(data, before)
    spec = parse(Spec, data)
    spec = replace(spec, **_kept(spec, data, before))
    if "cpu" not in data and not spec.is_xen():
        spec = replace(spec, cpu=_usual_cpu(spec))
    if spec.admin_state != AdminState.DOWN:
        # A user can only shut an instance down.
        spec = replace(spec, admin_state_source=Source.ADMIN.value)
    new_uuids = _made(f"instance {spec.name} of {cluster}")
    spec = replace(
        spec,
        uuid=spec.uuid or next(one for one in new_uuids if one not in taken),
        nics=tuple(_whole_nics(spec, data.get("nics", ()), before, cluster, taken, by_hand)),
        disks=tuple(_whole_disks(spec, data.get("disks", ()), before)),
    )
    if spec.claim_serial and not spec.node:
        raise SpecError("goes with a node, which it is about", where="/claim_serial")
    check(spec)
    for where, text in _unsuitable(spec, before):
        raise SpecError(text, where=where)
    by_hand = by_hand or ()
    disks = tuple(one for one in spec.disks if one.uuid not in by_hand)
    nics = tuple(one for one in spec.nics if one.uuid not in by_hand)
    for where, text, hint in _limits(replace(spec, disks=disks, nics=nics)):
        raise SpecError(text, where=where, hint=hint)
    return spec


def _unsuitable(spec: Spec, before: Spec | None) -> Iterator[tuple[str, str]]:
    """Programs that a definition newly names, and that work with no instance or hardly any."""
    program = spec.qemu.rpartition("/")[2]
    is_new = before is None or before.qemu != spec.qemu
    if is_new and re.fullmatch(r"qemu-system-(?!x86_64|i386)[a-z0-9]+", program):
        yield "/qemu", f"{program} emulates another kind of machine: Brine runs {USUAL_QEMU}"
    is_new = before is None or before.firmware != spec.firmware
    if is_new and _PART_OF_FIRMWARE.search(spec.firmware):
        text = f'is one of the two files of a firmware: write "{UEFI}", and Brine uses the node\'s'
        yield "/firmware", text


def _usual_cpu(spec: Spec) -> str:
    """The cluster's processor model; empty if it has none, or this instance can't have it: only KVM
    has the node's own processor."""
    try:
        lines = (paths.SSCONF_DIR / "ssconf_hvparams_kvm").read_text(errors="replace").splitlines()
    except OSError:
        return ""  # no cluster
    model = dict(line.split("=", 1) for line in lines if "=" in line).get("cpu_type", "")
    return "" if spec.accel == "tcg" and model.partition(",")[0] == "host" else model


def _refuse_newer(data: Any, before: Spec | None) -> None:
    given = data.get("version") if isinstance(data, dict) else None
    hint = "upgrade brine-instance"
    if type(given) is int and given > VERSION:
        raise SpecError(f"is {given}, and this Brine knows {VERSION}", where="/version", hint=hint)
    if before and before.version > VERSION:
        text = f"the spec that there is has version {before.version}, of which this Brine knows"
        text += f" {VERSION}: unknown keys would be lost"
        raise SpecError(text, hint=f"{hint}; or undefine it first")


def _kept(spec: Spec, given: dict[str, Any], before: Spec | None) -> dict[str, Any]:
    """The keys that an existing instance keeps if the new spec does not give them. Xen's domains do
    not use the keys that confine QEMU."""
    kept: dict[str, Any] = {}
    if spec.is_xen():
        kept = dict(NOT_CONFINED)
    elif before and not before.is_xen():
        model = () if "security_model" in given else ("security_model", "security_user")
        kept = {key: getattr(before, key) for key in ("chroot", *model)}
    kept = {key: value for key, value in kept.items() if key not in given}
    versions = MACHINE_VERSIONS.get(spec.machine)
    if before and versions and not spec.is_xen() and before.machine.startswith(versions):
        kept["machine"] = before.machine  # that its first start has recorded
    if before:
        kept["uuid"] = spec.uuid or before.uuid
        if "claim_serial" not in given and spec.uuid in ("", before.uuid):
            kept["claim_serial"] = before.claim_serial
            if before.claim_serial and "node" not in given:
                kept["node"] = before.node
        if "admin_state" not in given:
            kept["admin_state"] = before.admin_state
            kept["admin_state_source"] = before.admin_state_source
    return kept


def _whole_disks(
    spec: Spec, given: Sequence[dict[str, Any]], before: Spec | None
) -> Iterator[Disk]:
    """The disks, with UUIDs, the sources of their formats, and their former slots."""
    old = before.disks if before else ()
    uuids = {disk.path: disk.uuid for disk in old}
    # A disk that a start has found to be raw stays raw, whatever its guest writes to it.
    sources = {(disk.path, disk.format): disk.format_source for disk in old}
    slots = {(disk.uuid, disk.interface): disk.slot for disk in old}
    for disk, keys in zip(spec.disks, given, strict=True):
        source = disk.format_source if "format" in keys else FormatSource.DEFAULT.value
        if source == FormatSource.DEFAULT:
            source = sources.get((disk.path, disk.format), source)
        # The same each time, so that the same object defined twice is the same instance.
        disk_uuid = disk.uuid or uuids.get(disk.path) or uuid_of_path(disk.path)
        slot = _slot(spec, before, disk.slot, slots.get((disk_uuid, disk.interface), -1))
        yield replace(disk, uuid=disk_uuid, format_source=source, slot=slot)


def _whole_nics(
    spec: Spec,
    given: Sequence[dict[str, Any]],
    before: Spec | None,
    cluster: str,
    taken: Container[str],
    by_hand: Container[str] | None,
) -> Iterator[Nic]:
    """The NICs, with the cluster's mode and link if they have none, and UUIDs, MAC addresses and
    slots.

    These are those of the former NIC with the same UUID or address; if neither is given, those of
    the former NIC at the same index.
    """
    old = before.nics if before else ()
    slots = {nic.uuid: nic.slot for nic in old}
    named = [next((was for was in old if _is_named(nic, was)), None) for nic in spec.nics]
    # What was added by hand has no index of the declared NICs, nor has what stays of it.
    is_declared = by_hand is not None
    indexed = [was for was in old if not (was.by_hand and (is_declared or was in named))]
    used = {nic.mac for nic in spec.nics}
    for index, (nic, keys) in enumerate(zip(spec.nics, given, strict=True)):
        mode, link = usual_wiring(keys.get("mode"), keys.get("link"))
        filtered = usual_filter(keys.get("filter"))
        was = named[index]
        if not (nic.uuid or nic.mac) and index < len(indexed) and indexed[index] not in named:
            was = indexed[index]
        mac = nic.mac or (was.mac if was else "")
        if not mac:
            texts = _made(f"NIC {index} of {spec.name} of {cluster}")
            # The prefix of QEMU's users.
            macs = (f"52:54:00:{text[0:2]}:{text[2:4]}:{text[4:6]}" for text in texts)
            mac = next(one for one in macs if one not in used and one not in taken)
            used.add(mac)
        nic_uuid = nic.uuid or (was.uuid if was else uuid_of_mac(mac))
        slot = _slot(spec, before, nic.slot, slots.get(nic_uuid, -1))
        found = replace(nic, mode=mode, link=link, filter=filtered)
        yield replace(found, mac=mac, uuid=nic_uuid, slot=slot)


def _is_named(nic: Nic, was: Nic) -> bool:
    return nic.uuid == was.uuid if nic.uuid else nic.mac == was.mac


def _slot(spec: Spec, before: Spec | None, given: int, former: int) -> int:
    """The slot of a device; its former one is none on a machine of another kind."""
    is_same_kind = before is not None and before.is_q35() == spec.is_q35()
    return former if given < 0 and is_same_kind else given


def _made(text: str) -> Iterator[str]:
    """UUIDs derived from a text, always the same."""
    for number in count():
        yield str(uuid.uuid5(_OF_NAMES, ascii(f"{text} {number}" if number else text)))


def check(spec: Spec) -> None:
    """Refuse a spec whose keys conflict."""
    for part in (_boot, _disks, _nics, _display_and_user):
        for where, text, hint in part(spec):
            raise SpecError(text, where=where, hint=hint)
    if spec.is_xen():
        _check_domain(spec)
        return
    try:
        layout_of(spec)
    except NoSlotError as error:
        raise SpecError(str(error), hint=error.hint) from error


def _boot(spec: Spec) -> Iterator[Fault]:
    """Mistakes in processors and in boot keys."""
    if fault := topology_fault(spec.vcpus, spec.sockets, spec.cores, spec.threads):
        yield "/vcpus", fault, None
    yield from _twice(spec.boot_order, "/boot_order", str, "is there twice")
    for name in ("initrd", "append"):
        if getattr(spec, name) and not spec.kernel:
            yield f"/{name}", "needs a kernel", None
    if spec.kernel and spec.firmware:
        yield "/firmware", "a kernel is started without a firmware of one's own", None


def _disks(spec: Spec) -> Iterator[Fault]:
    for index, disk in enumerate(spec.disks):
        where = f"/disks/{index}"
        faults = disk_faults(
            interface=disk.interface,
            cache=disk.cache,
            aio=disk.aio,
            is_read_only=disk.read_only,
        )
        for key, text, hint in faults:
            yield f"{where}/{key}", text, hint
        if disk.backing and disk.format == "raw":
            hint = "an overlay is of the format qcow2"
            yield f"{where}/backing", "a disk of the format raw can't have any", hint
        if len(disk.layers()) > MOST_BACKING:
            yield f"{where}/backing", f"has more than {MOST_BACKING} files", None
        try:
            default_serial(disk.uuid)
        except ValueError as error:
            yield f"{where}/uuid", str(error), None
    yield from _twice(spec.disks, "/disks", lambda one: one.path, "is the path of another disk too")
    named = [disk for disk in spec.disks if disk.name]
    yield from _twice(named, "/disks", lambda one: one.name, "is the name of another disk too")
    yield from _twice(spec.disks, "/disks", _short, "begins as another disk's UUID does")


def _nics(spec: Spec) -> Iterator[Fault]:
    for index, nic in enumerate(spec.nics):
        where = f"/nics/{index}"
        # The NIC's own check names options of a command, not keys of a spec.
        if nic.mode == Mode.ROUTED and not nic.ips:
            hint = 'give "ips": ["192.0.2.10"], or what it is'
            yield where, "a routed NIC needs its address", hint
        if nic.mode != Mode.ROUTED and not nic.link:
            hint = 'give "link": "br0", or what the bridge is called'
            yield where, f"a NIC that is {nic.mode} needs its bridge", hint
        if nic.queues > 1 and nic.model != "virtio":
            yield f"{where}/queues", "only virtio has several", None
        if nic.vhost and nic.model != "virtio":
            yield f"{where}/vhost", "only virtio has it", None
        try:
            Vif.of(spec, nic).check()
        except UsageError as error:
            yield where, str(error), error.hint
    yield from _twice(
        spec.nics, "/nics", lambda one: one.mac, "is the MAC address of another NIC too"
    )
    yield from _twice(spec.nics, "/nics", _short, "begins as another NIC's UUID does")


def _display_and_user(spec: Spec) -> Iterator[Fault]:
    for name in ("vnc_port", "vnc_password_file"):
        if getattr(spec, name) and not spec.vnc_bind:
            hint = 'give "vnc_bind": "127.0.0.1", or another address of this node'
            yield f"/{name}", "needs vnc_bind", hint
    if spec.vnc_bind.startswith("/") and spec.vnc_port:
        yield "/vnc_port", "a VNC socket has no port", None
    if fault := vnc_port_fault(spec.vnc_port):
        yield "/vnc_port", fault, None
    for key, text, advice in security_faults(spec.security_model, spec.security_user):
        yield f"/{key}", text, advice


def _limits(spec: Spec) -> Iterator[Fault]:
    """Mistakes that only a definition refuses. Devices that are plugged in may exceed these limits,
    and the next start has them all the same."""
    left = MOST_PORTS - len(on_pci(spec))
    if spec.is_q35() and spec.hotplug_ports > left:
        text = f"beside the disks and NICs there is room for {left}, but it is {spec.hotplug_ports}"
        yield "/hotplug_ports", text, "lower it, or give disks the interface scsi"
    least_mib = spec.least_memory_max_mib()
    if not spec.is_xen() and 0 < spec.memory_max_mib < least_mib:
        text = f"is {spec.memory_max_mib}, but the guest and QEMU may need {least_mib}"
        hint = "raise it, or leave it out: the kernel ends an instance that exceeds it"
        yield "/memory_max_mib", text, hint


def _short(device: Disk | Nic) -> str:
    return short_uuid(device.uuid)


def _twice(
    items: Sequence[Any], where: str, identity: Callable[[Any], str], text: str
) -> Iterator[Fault]:
    identities = [identity(item) for item in items]
    for index, one in enumerate(identities):
        if one in identities[:index]:
            yield f"{where}/{index}", f"{one} {text}", None


def _check_domain(spec: Spec) -> None:
    """Refuse keys that only QEMU has, or that Xen does not support."""
    parts: list[tuple[Any, frozenset[str], str]] = [(spec, KEYS, "")]
    parts += [(disk, DISK_KEYS, f"/disks/{index}") for index, disk in enumerate(spec.disks)]
    parts += [(nic, NIC_KEYS, f"/nics/{index}") for index, nic in enumerate(spec.nics)]
    for part, known, where in parts:
        for one in fields(part):
            default = NOT_CONFINED.get(one.name, one.default)
            if one.name not in known and getattr(part, one.name) != default:
                raise SpecError(
                    f"means nothing to the hypervisor {spec.hypervisor}",
                    where=f"{where}/{one.name}",
                    hint="leave it out; brine-spec(5) says what Xen knows",
                )
    for index, nic in enumerate(spec.nics):
        for key, text, advice in xen_nic_faults(mode=nic.mode, link=nic.link):
            raise SpecError(text, where=f"/nics/{index}/{key}", hint=advice)
    if len(spec.disks) > MOST_XEN_DISKS:
        text = f"has {len(spec.disks)}, and a domain may have {MOST_XEN_DISKS}"
        raise SpecError(text, where="/disks")
    if not spec.kernel and not spec.disks:
        raise SpecError("must be there, where no disk has one", where="/kernel")
    for index, line in enumerate(spec.extra_arguments):
        if match := _OURS.search(line):
            text = f"{match[1]} can't be set: Brine does"
            raise SpecError(text, where=f"/extra_arguments/{index}")
