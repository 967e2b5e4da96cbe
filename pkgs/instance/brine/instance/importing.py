"""``brine instance import``: an instance from a disk image, or from another program's definition.

A definition of another origin decides neither which program root runs nor which of the node's own
files the guest writes: such parts are named, or refused.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brine.common.errors import BrineError, UsageError, printable, warn
from brine.instance.definition import content_of, naming, print_spec
from brine.instance.foreign.image import spec_of_image
from brine.instance.foreign.libvirt import spec_of_domain
from brine.instance.foreign.parts import MOST_BYTES
from brine.instance.foreign.proxmox import spec_of_config
from brine.instance.messages import log_to_journal
from brine.instance.registry import define_instance
from brine.vm.spec import UEFI
from brine.vm.values import new_name_fault

IMAGE_FOLDERS = (
    *("/var/lib/libvirt/images/", "/var/lib/libvirt/boot/", "/var/lib/xen/images/"),
    *("/var/lib/vz/", "/var/lib/nova/instances/", "/srv/", "/mnt/", "/media/", "/data/", "/rhev/"),
    *("/vm/", "/images/", "/dev/mapper/", "/dev/zvol/", "/dev/drbd/", "/dev/rbd/"),
)
"""Folders of images, and of nothing that a program keeps for itself, such as its keys."""

_READ_FOLDERS = ("/boot/", "/usr/lib/", "/usr/share/", "/usr/local/share/", "/opt/")
_SOCKET_FOLDERS = ("/run/", "/var/lib/libvirt/")
_VOLUME = re.compile("/dev/([^/]+)/[^/]+")  # of LVM: its group, and its name
_NO_GROUPS = frozenset({"block", "bus", "char", "disk", "input", "net", "shm"})
_DEVICE = re.compile("/dev/(dm-|zd|drbd|rbd)[0-9]+")  # that links to volumes lead to
_FIRST_PERSON = 1000  # of user ids: smaller ones are the system's


def import_machine(arguments: argparse.Namespace) -> int:
    sources = (arguments.image, arguments.libvirt, arguments.proxmox)
    if sum(one is not None for one in sources) != 1:
        hint = "name an image, or --libvirt FILE, or --proxmox FILE"
        raise UsageError("no source to import from", hint=hint)
    log_to_journal("brine")
    data, ignored = _read(arguments)
    for key in ("name", "memory_mib", "vcpus", "accel"):
        if (value := getattr(arguments, key)) is not None:
            data[key] = value
    _check_name(data.get("name", ""))
    if data.get("accel") == "tcg" and data.get("cpu", "").split(",")[0] == "host":
        del data["cpu"]
        ignored.append("cpu host, as this processor is emulated: QEMU's own is the guest's")
    _fit_vcpus(data, ignored)
    defined = define_instance(data, is_new=True, dry_run=arguments.dry_run)
    spec = defined.spec
    odd = [] if arguments.image else list(odd_places(data))
    if arguments.json:
        ignored += odd
        print_spec(spec, dry_run=arguments.dry_run, changed=defined.changed, ignored=ignored)
        return 0
    for what in ignored:
        warn(f"{spec.name}: no counterpart: {printable(what)}")
    for what in odd:
        warn(f"{spec.name}: {printable(what)}")
    if arguments.image and not spec.nics:
        hint = f"--link BRIDGE gives it one, or brine nic add {spec.name} --link BRIDGE later"
        warn(f"{spec.name} has no NIC", hint=hint)
    if arguments.dry_run:
        print(json.dumps(data, indent=2))
    else:
        print(f"defined: {spec.name}; brine instance start {spec.name}")
    return 0


def _read(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The spec of what is to be imported, and what has no counterpart."""
    link, storages = arguments.link or "", dict(arguments.storage)
    if arguments.image is not None:
        return spec_of_image(Path(arguments.image).absolute(), link=link), []
    file = arguments.libvirt if arguments.proxmox is None else arguments.proxmox
    content = content_of(file, most=MOST_BYTES + 1)
    with naming(file, BrineError):
        if arguments.proxmox is None:
            return spec_of_domain(content, link=link, storages=storages)
        number = Path(file).stem if Path(file).stem.isdecimal() else ""
        text = content[:MOST_BYTES].decode(errors="replace")
        return spec_of_config(text, number=number, link=link, storages=storages)


def _check_name(name: str) -> None:
    if fault := new_name_fault(name):
        raise BrineError(f"{printable(name)!r}: {fault}", hint="give it another one: --name NAME")


def _fit_vcpus(data: dict[str, Any], ignored: list[str]) -> None:
    """Leave out a topology that makes another number of processors than the command asks for."""
    keys = ("sockets", "cores", "threads")
    if all(key in data for key in keys):
        sockets, cores, threads = (data[key] for key in keys)
        if sockets * cores * threads != data.get("vcpus", 1):
            for key in keys:
                del data[key]
            ignored.append(
                f"{sockets} sockets, {cores} cores, {threads} threads: not so many vcpus"
            )


def odd_places(data: dict[str, Any]) -> Iterator[str]:
    """The files of a spec that are where images are not, or that a person owns, in words.

    QEMU gets them from root, so the guest would read or write what its definition's author could
    not.
    """
    disks = list(data.get("disks", ()))
    for disk in disks:
        can = "read" if disk.get("read_only") else "write"
        folders = IMAGE_FOLDERS + (_READ_FOLDERS if can == "read" else ())
        yield from _oddity(disk["path"], can, folders)
        while disk := disk.get("backing"):
            yield from _oddity(disk["path"], "read", IMAGE_FOLDERS + _READ_FOLDERS)
    others = [data.get(key, "") for key in ("firmware", "kernel", "initrd")]
    for path in (*data.get("cdroms", ()), *others):
        if not path or path == UEFI:
            continue
        yield from _oddity(path, "read", IMAGE_FOLDERS + _READ_FOLDERS)
    bind = data.get("vnc_bind", "")
    if bind.startswith("/") and not os.path.realpath(bind).startswith(_SOCKET_FOLDERS):
        yield f"the socket of VNC is {bind}, which is in no folder of sockets"


def _oddity(path: str, can: str, folders: tuple[str, ...]) -> Iterator[str]:
    real = os.path.realpath(path)
    shown = path if real == path else f"{path}, which is {real}"
    if not (_is_known(path, folders) and (_is_known(real, folders) or _DEVICE.fullmatch(real))):
        yield f"the guest can {can} {shown}, which is in no folder of images"
        return
    try:
        owner = os.stat(real).st_uid
    except OSError:
        return  # a start tells
    if owner >= _FIRST_PERSON and owner != 65534:
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = str(owner)
        yield f"the guest can {can} {shown}, which is a file of the user {name}"


def _is_known(path: str, folders: tuple[str, ...]) -> bool:
    volume = _VOLUME.fullmatch(path)
    return path.startswith(folders) or bool(volume and volume[1] not in _NO_GROUPS)
