"""A spec that was made of another program's definition, without what Brine does not run.

Each key that goes is named. A key without which the guest would run otherwise stays, and is an
error at definition.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from brine.common.errors import BrineError
from brine.instance.xen.config import DISK_KEYS, KEYS, NIC_KEYS
from brine.vm.disk import Disk
from brine.vm.nic import Nic
from brine.vm.slots import LAST_SLOT, MOST_PORTS, ide_units, is_q35
from brine.vm.spec import NOT_CONFINED, Spec
from brine.vm.values import CACHE_MODES, LONGEST_SERIAL, RESERVED_SLOTS

NO_BRIDGE_HINT = "name the bridge that it is to be on: --link BRIDGE"

_MACHINE = re.compile(r"pc|q35|pc-(i440fx|q35)-([2-9]|[1-9][0-9])\.[0-9]{1,2}")
_USUAL_SPARE_PORTS = 8  # a spec's hotplug_ports
_SERIAL = re.compile(rf"[ -~]{{1,{LONGEST_SERIAL}}}")


def number_of(text: str, what: str) -> int:
    """The whole number that *text* is.

    :raises BrineError: if it is none; *what* is what it would be.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise BrineError(f"{what} is {text!r}, and should be a number")
    return int(text)


def known_machine(text: str) -> str:
    """The machine type of *text*, if QEMU's own programs have it, or the newest of its kind.

    Distributions have types of their own, such as ``pc-q35-rhel9.2.0``; Debian's QEMU has none.
    """
    if not text or _MACHINE.fullmatch(text):
        return text
    return "q35" if "q35" in text else "pc"


def by_boot_order(boots: Iterable[tuple[int, str, int]]) -> tuple[list[str], list[str]]:
    """The boot order of a spec for devices that have places in one, and what it does not have.

    :param boots: the place, the kind (of the spec's boot order), and the index of each device.
    """
    order: list[str] = []
    lost = []
    for place, kind, index in sorted(boots):
        if kind not in order:
            order.append(kind)
            if index:
                what = f"{kind} {index} is the first one of its kind"
                lost.append(f"boot order {place}: {what}; the guest tries {kind} 0 first")
    return order, lost


def topology(vcpus: int, sockets: int, cores: int, threads: int) -> dict[str, int] | None:
    """The keys of a topology with *vcpus* processors; None if there is none. A guest with some of
    its processors has the first sockets, or the first cores of one."""
    of_socket = cores * threads
    if not of_socket or vcpus % threads:
        return None
    if sockets * of_socket != vcpus:
        if vcpus < of_socket:
            sockets, cores = 1, vcpus // threads
        elif vcpus % of_socket:
            return None
        else:
            sockets = vcpus // of_socket
    return {"sockets": sockets, "cores": cores, "threads": threads}


def fitted(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A spec as people write it, without keys that Brine does not have beside others, and what
    went."""
    lost: list[str] = []
    data = dict(data)
    if data.get("hypervisor", "kvm") != "kvm":
        return _of_xen(data, lost), lost
    if data.get("kernel"):
        _drop(data, ("firmware", "boot_order"), "a kernel starts without", lost)
    else:
        _drop(data, ("initrd", "append"), "there is no kernel for", lost)
    data["disks"] = [_disk(dict(one), lost) for one in data.get("disks", ())]
    data["nics"] = [_nic(dict(one), lost) for one in data.get("nics", ())]
    _find_places(data, lost)
    return {key: value for key, value in data.items() if value != []}, lost


def _find_places(data: dict[str, Any], lost: list[str]) -> None:
    """Make SCSI disks of those for which a machine has no place on another bus. SCSI has room for
    all."""
    machine = data.get("machine", "pc")
    ide_places = math.prod(ide_units(machine))
    drives, disks = data.get("cdroms", []), data["disks"]
    lost += [f"the CD-ROM {path or 'drive'}: no place is left" for path in drives[ide_places:]]
    if drives:
        data["cdroms"] = drives[:ide_places]
    places = MOST_PORTS if is_q35(machine) else LAST_SLOT + 1 - RESERVED_SLOTS
    rooms = {"ide": ide_places - len(drives), "virtio": places - len(data["nics"])}
    for disk in disks:
        bus = disk.get("interface", "virtio")
        if bus in rooms:
            rooms[bus] -= 1
            if rooms[bus] < 0:
                disk["interface"] = "scsi"
                lost.append(f"{disk['path']}: its interface {bus} has no place left: scsi")
    if is_q35(machine) and rooms["virtio"] < _USUAL_SPARE_PORTS:
        data["hotplug_ports"] = max(0, rooms["virtio"])


def _drop(data: dict[str, Any], keys: Iterable[str], why: str, lost: list[str]) -> None:
    for key in keys:
        if (value := data.pop(key, None)) is not None:
            lost.append(f"{why} {key}: {value}")


def _disk(disk: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    path = disk["path"]
    serial = disk.get("serial", "")
    if serial and not _SERIAL.fullmatch(serial):
        short = serial[:LONGEST_SERIAL]
        if _SERIAL.fullmatch(short):
            disk["serial"] = short
            lost.append(f"{path}: of its serial {serial} the guest sees {short}")
        else:
            del disk["serial"]
            lost.append(f"{path}: its serial {serial}")
    _, direct, _ = CACHE_MODES[disk.get("cache", "none")]
    if disk.get("aio") == "native" and not direct:
        del disk["aio"]
        lost.append(f"{path}: aio native, as its cache is {disk['cache']}")
    if disk.get("read_only") and disk.get("interface") == "ide":
        disk["interface"] = "scsi"
        lost.append(f"{path}: its interface ide, as it is read-only: the spec has scsi")
    if disk.get("format", "raw") == "raw" and "backing" in disk:
        del disk["backing"]
        lost.append(f"{path}: its backing file, as it is a raw image")
    return disk


def _nic(nic: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    for key in ("queues", "vhost"):
        if key in nic and nic.get("model", "virtio") != "virtio":
            lost.append(f"the NIC {nic.get('mac', '')}: {key} of the model {nic['model']}")
            del nic[key]
    return nic


def _of_xen(data: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """The spec of a Xen domain, without keys that only QEMU has.

    A NIC keeps its VLAN, which is an error at definition: without it, the guest would be in
    another network.
    """
    found = dict(_known(Spec, data, KEYS, "", lost))
    disks, nics = data.get("disks", []), data.get("nics", [])
    found["disks"] = [dict(_known(Disk, one, DISK_KEYS, one["path"], lost)) for one in disks]
    known = NIC_KEYS | {"vlan"}
    found["nics"] = [
        dict(_known(Nic, one, known, f"the NIC {one.get('mac', '')}", lost)) for one in nics
    ]
    return {key: value for key, value in found.items() if value != []}


def _known(
    kind: type, data: Mapping[str, Any], keys: frozenset[str], what: str, lost: list[str]
) -> Iterator[tuple[str, Any]]:
    """The keys that a Xen domain has; others are named, unless they say what is usual."""
    usual = {one.name: NOT_CONFINED.get(one.name, one.default) for one in dataclasses.fields(kind)}
    for key, value in data.items():
        if key in keys:
            yield key, value
        elif value != usual[key]:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            lost.append(f"{what + ': ' if what else ''}{key} {shown}, which Xen's domains lack")
