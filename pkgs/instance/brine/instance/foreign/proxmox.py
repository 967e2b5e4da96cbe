"""A virtual machine of Proxmox VE as a spec. Source: qm.conf(5) of Proxmox VE.

Each line is ``KEY: VALUE``; many values are lists of ``NAME=VALUE``. The words that the spec takes
over are taken out of them, and the rest is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from brine.common.errors import BrineError
from brine.instance.foreign.fitting import (
    NO_BRIDGE_HINT,
    by_boot_order,
    fitted,
    known_machine,
    number_of,
    topology,
)
from brine.vm.connection import HIGHEST_VLAN
from brine.vm.values import AIO_MODES, CACHE_MODES, FORMATS

_LINE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):\s*(.*)")
_DISK = re.compile(r"(ide|sata|scsi|virtio)([0-9]{1,3})")
_NIC = re.compile(r"net([0-9]{1,3})")
_MOST_LINES = 10_000
_SECRETS = frozenset({"cipassword"})
_BOOKKEEPING = ("meta", "digest", "vmstatestorage", "bootdisk")
_INTERFACES = {"virtio": "virtio", "scsi": "scsi", "ide": "ide", "sata": "ide"}
_MODELS = {"virtio": "virtio", "e1000": "e1000", "e1000e": "e1000e", "rtl8139": "rtl8139"}
_OTHER_MODELS = frozenset(
    {"vmxnet3", "ne2k_pci", "ne2k_isa", "pcnet", "i82551", "i82557b", "i82559er"}
    | {"e1000-82540em", "e1000-82544gc", "e1000-82545em"}
)
_SSE = "+popcnt,+pni,+sse4.1,+sse4.2,+ssse3"
_V3 = f"+aes,{_SSE},+avx,+avx2,+bmi1,+bmi2,+f16c,+fma,+abm,+movbe,+xsave"
_V4 = f"{_V3},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
_CPUS = {
    "x86-64-v2": f"qemu64,{_SSE}",
    "x86-64-v2-AES": f"qemu64,+aes,{_SSE}",
    "x86-64-v3": f"qemu64,{_V3}",
    "x86-64-v4": f"qemu64,{_V4}",
}
"""Models of processors that Proxmox makes of QEMU's."""
_CPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FLAG = re.compile(r"[+-][A-Za-z0-9][A-Za-z0-9._-]*")
_LETTERS = {"c": "disk", "d": "cdrom", "n": "network"}
_STORAGES = {"local": "/var/lib/vz"}
"""The folder of the storage that each Proxmox has."""
_USUAL_WEIGHT = 1024
_MOST_WEIGHT = 10_000


@dataclass
class _Options:
    """A value that is a list: *rest* are its words NAME=VALUE that were not taken yet."""

    key: str
    first: str = ""
    rest: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, *usual: str) -> str:
        """A word's value; empty if it is not there, or one of the *usual*."""
        value = self.rest.pop(name, "")
        return "" if value in usual else value

    def left(self) -> Iterator[str]:
        """The words that were not taken."""
        yield from (f"{self.key} {name}={value}" for name, value in self.rest.items())


@dataclass
class _Machine:
    """A machine on its way to a spec.

    :param lines: the lines that were not taken yet.
    :param places: of each disk and NIC, its kind in the boot order, and its index.
    """

    lines: dict[str, str]
    link: str
    storages: Mapping[str, str]
    lost: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)

    def take(self, key: str, *usual: str) -> str:
        """The value of a line; empty if it is not there, or one of the *usual*."""
        value = self.lines.pop(key, "")
        return "" if value in usual else value

    def options(self, key: str, name: str = "") -> _Options:
        """The value of a line as a list; *name* is that of the word that needs none."""
        found = _Options(key)
        for word in filter(None, self.lines.pop(key, "").split(",")):
            before, equals, after = word.partition("=")
            if not equals or (not found.rest and before.startswith("/")):
                if found.first:
                    self.lost.append(f"{key} {word}")
                found.first = found.first or word
            else:
                found.rest[before.strip()] = after.strip()
        if name and name in found.rest:
            found.first = found.rest.pop(name)
        return found

    def number(self, key: str, usual: int) -> int:
        """The number of a line."""
        return number_of(self.lines.pop(key, str(usual)), key)

    def is_on(self, key: str, *, usual: bool) -> bool:
        value = self.lines.pop(key, "1" if usual else "0").lower()
        if value not in ("0", "1", "yes", "no", "on", "off", "true", "false"):
            self.lost.append(f"{key} {value}")
        return value in ("1", "yes", "on", "true")


def spec_of_config(
    text: str, *, number: str = "", link: str = "", storages: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The spec of a machine of Proxmox's, as people write it, and what has no counterpart.

    :param text: the content of its file, ``/etc/pve/qemu-server/NUMBER.conf``.
    :param number: the name of a machine that has none is ``vm-NUMBER``.
    :param link: the bridge for NICs that are on none.
    :param storages: the folder of each storage, by name.
    :raises BrineError: why Brine can't run it.
    """
    lines, lost = _lines(text)
    machine = _Machine(lines, link, _STORAGES | dict(storages or {}), lost)
    if "rootfs" in lines:
        raise BrineError("is the configuration of a container, and Brine runs machines")
    if machine.is_on("template", usual=False):
        text = "is a template: the disks of other machines are made from its disks"
        raise BrineError(text, hint="make a machine of it: qm clone NUMBER OTHER --full")
    if (architecture := machine.take("arch", "x86_64")) != "":
        raise BrineError(f"is a machine of {architecture} processors; Brine's are x86_64")
    machine.data["name"] = machine.take("name") or (f"vm-{number}" if number else "")
    for part in (_processors, _memory, _firmware, _devices, _nics, _disks, _boot, _times):
        part(machine)
    for key in _BOOKKEEPING:
        machine.take(key)
    for key, value in machine.lines.items():
        lost.append(key if key in _SECRETS else f"{key} {value}")
    data = {key: value for key, value in machine.data.items() if value not in ("", [])}
    data, unfit = fitted(data)
    return data, list(dict.fromkeys([*lost, *unfit]))


def _lines(text: str) -> tuple[dict[str, str], list[str]]:
    """The lines of the present machine, and what is beside it: notes and snapshots."""
    found: dict[str, str] = {}
    lost: list[str] = []
    section = ""
    rows = text.splitlines()
    if len(rows) > _MOST_LINES:
        raise BrineError(f"has more than {_MOST_LINES} lines")
    for number, row in enumerate(rows, 1):
        line = row.strip()
        if line.startswith("["):
            section = line.strip("[]")
            is_pending = section == "PENDING"
            lost.append("changes that are pending" if is_pending else f"the snapshot {section}")
        elif section or not line:
            continue
        elif line.startswith("#"):
            lost.append("the notes")
        elif not (match := _LINE.fullmatch(line)):
            hint = "give a file of /etc/pve/qemu-server"
            raise BrineError(f"line {number} is not KEY: VALUE", hint=hint)
        else:
            if match[1] in found:
                lost.append(f"{match[1]} {found[match[1]]}, which is there again")
            found[match[1]] = match[2]
    if not found:
        raise BrineError("has no line KEY: VALUE", hint="give a file of /etc/pve/qemu-server")
    return found, lost


def _processors(machine: _Machine) -> None:
    data = machine.data
    sockets, cores = machine.number("sockets", 1), machine.number("cores", 1)
    most = sockets * cores
    data["vcpus"] = vcpus = machine.number("vcpus", most)
    if vcpus != most:
        machine.lost.append(f"vcpus {vcpus}: the guest has so many, and never {most}")
    if keys := topology(vcpus, sockets, cores, 1):
        data |= keys
    else:
        machine.lost.append(f"sockets {sockets}, cores {cores}: they do not make {vcpus}")
    cpu = machine.options("cpu", "cputype")
    name = cpu.first or "kvm64"
    if not _CPU.fullmatch(name) or name.startswith("custom-"):
        machine.lost.append(f"cpu {name}")
        name = ""
    flags = list(filter(None, cpu.take("flags").split(";")))
    good = [one for one in flags if name and _FLAG.fullmatch(one)]
    machine.lost += [f"cpu flag {one}" for one in flags if one not in good]
    data["cpu"] = ",".join([_CPUS.get(name, name), *good])
    cpu.take("hidden", "0")
    machine.lost += cpu.left()
    if not machine.is_on("kvm", usual=True):
        data["accel"] = "tcg"
    limit = machine.take("cpulimit", "0")
    if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", limit):
        data["cpu_limit_percent"] = round(float(limit) * 100)
    elif limit:
        machine.lost.append(f"cpulimit {limit}")
    weight = machine.number("cpuunits", _USUAL_WEIGHT)
    if weight > _MOST_WEIGHT:
        machine.lost.append(f"cpuunits {weight}")
    elif weight != _USUAL_WEIGHT:
        data["cpu_weight"] = weight
    if numa := machine.take("numa", "0"):
        machine.lost.append(f"numa {numa}")


def _memory(machine: _Machine) -> None:
    memory = machine.options("memory", "current")
    machine.data["memory_mib"] = size = number_of(memory.first or "512", "memory")
    machine.lost += memory.left()
    if balloon := machine.take("balloon", "0", str(size)):
        machine.lost.append(f"balloon {balloon}: the guest has all of its memory")
    pages = machine.take("hugepages")
    if pages in ("any", "2"):
        machine.data["huge_pages"] = "/dev/hugepages"
    elif pages:
        machine.lost.append(f"hugepages {pages}")


def _firmware(machine: _Machine) -> None:
    data = machine.data
    bios = machine.take("bios", "seabios")
    if bios == "ovmf":
        data["firmware"] = "uefi"
    elif bios:
        machine.lost.append(f"bios {bios}")
    if variables := machine.take("efidisk0"):
        machine.lost.append(f"efidisk0 {variables}: the guest starts with new UEFI variables")
    kind = machine.options("machine", "type")
    given = re.sub(r"\+pve[0-9]+$", "", kind.first)
    data["machine"] = known_machine(given)
    if data["machine"] != given:
        machine.lost.append(f"machine {given}: the spec has {data['machine']}")
    machine.lost += kind.left()
    identity = machine.options("smbios1")
    data["uuid"] = identity.take("uuid")
    identity.take("base64")
    machine.lost += identity.left()
    if not machine.is_on("acpi", usual=True):
        data["acpi"] = False
    if not machine.is_on("reboot", usual=True):
        data["reboot_behavior"] = "exit"
    system = machine.take("ostype", "other", "l24", "l26", "solaris")
    is_windows = system.startswith("w")
    if system:
        what = ": QEMU has no Hyper-V extensions for it" if is_windows else ""
        machine.lost.append(f"ostype {system}{what}")
    if machine.is_on("localtime", usual=is_windows):
        data["rtc"] = "localtime"


def _devices(machine: _Machine) -> None:
    data = machine.data
    line = machine.take("serial0")
    if not line:
        data["serial_console"] = False
    elif line != "socket":
        machine.lost.append(f"serial0 {line}: it is the line of brine instance console")
    agent = machine.options("agent", "enabled")
    if agent.first != "1":
        data["guest_agent"] = False
        machine.lost += [f"agent {agent.first}"] if agent.first not in ("", "0") else []
    machine.lost += agent.left()
    screen = machine.take("vga") or "std"
    if screen != "none" and not (line and screen == "serial0"):
        why = 'the guest has no display until its spec has "vnc_bind"'
        machine.lost.append(f"vga {screen}: {why}")
    if "tablet" in machine.lines and machine.is_on("tablet", usual=True):
        data["usb_tablet"] = True
    words = [one for one in re.split("[;, ]", machine.take("tags")) if one]
    data["tags"] = list(dict.fromkeys(words))
    if protection := machine.take("protection", "0"):
        machine.lost.append(f"protection {protection}")


# Disks.


def _disks(machine: _Machine) -> None:
    data = machine.data
    data["disks"], data["cdroms"] = [], []
    found = [match for key in machine.lines if (match := _DISK.fullmatch(key))]
    scsi = machine.take("scsihw", "virtio-scsi-pci", "virtio-scsi-single")
    for match in sorted(found, key=lambda one: (one[1], int(one[2]))):
        key, disk = match[0], machine.options(match[0], "file")
        media = disk.take("media", "disk")
        if media == "cdrom":
            _cdrom(machine, disk)
            continue
        machine.lost += [f"{key} media={media}"] if media else []
        machine.places[key] = ("disk", len(data["disks"]))
        data["disks"].append(_disk(machine, disk, match[1]))
    if scsi:
        machine.lost.append(f"scsihw {scsi}: the spec has virtio-scsi")


def _cdrom(machine: _Machine, disk: _Options) -> None:
    cdroms, path = machine.data["cdroms"], ""
    machine.places[disk.key] = ("cdrom", len(cdroms))
    if disk.first not in ("none", ""):
        try:
            path, _ = _path(machine, disk.first)
        except BrineError:
            machine.lost.append(f"{disk.key} {disk.first}: the drive is empty")
    disk.take("size")
    machine.lost += disk.left()
    cdroms.append(path)


def _disk(machine: _Machine, disk: _Options, bus: str) -> dict[str, Any]:
    path, base = _path(machine, disk.first)
    kind = disk.take("format") or _format(path)
    if kind not in FORMATS:
        hint = f"qemu-img convert -O qcow2 {path} NEW, and have the configuration name that"
        raise BrineError(f"{disk.key} is an image of the format {kind}", hint=hint)
    found: dict[str, Any] = {"path": path, "format": kind}
    if base and kind != "raw":
        found["backing"] = {"path": base, "format": _format(base)}
    if bus != "virtio":
        found["interface"] = _INTERFACES[bus]
    if bus == "sata" and "q35" not in machine.data["machine"]:
        machine.lost.append(f"{disk.key}: its bus sata: the spec has ide")
    for name, key, known in (("cache", "cache", CACHE_MODES), ("aio", "aio", AIO_MODES)):
        if value := disk.take(name):
            if value in known:
                found[key] = value
            else:
                machine.lost.append(f"{disk.key} {name}={value}")
    discard = disk.take("discard", "ignore")
    if not discard:
        found["discard"] = False
    elif discard != "on":
        machine.lost.append(f"{disk.key} discard={discard}")
    if read_only := disk.take("ro", "0"):
        found["read_only"] = True  # whatever the word for it
        machine.lost += [f"{disk.key} ro={read_only}"] if read_only != "1" else []
    if serial := disk.take("serial"):
        found["serial"] = serial
    disk.take("size")
    machine.lost += disk.left()
    return found


def _format(path: str) -> str:
    name = path.rpartition("/")[2]
    return (
        name.rpartition(".")[2] if re.search(r"\.(qcow2|raw|vmdk|qcow|cow|vdi)$", name) else "raw"
    )


def _path(machine: _Machine, volume: str) -> tuple[str, str]:
    """The path of a volume, and that of its base image, or nothing.

    A storage of files has a folder for each machine; one of devices has the names of volumes.

    >>> "local:100/vm-100-disk-0.qcow2", "local-lvm:vm-100-disk-0", "local:iso/debian.iso"
    """
    if volume.startswith("/"):
        return volume, ""
    storage, _, name = volume.partition(":")
    folder = machine.storages.get(storage, "").rstrip("/")
    parts = name.split("/")
    if not folder or not name or ".." in parts:
        raise BrineError(
            f"{volume or 'nothing'} is on the storage {storage}, of which no folder is known",
            hint=f"--storage {storage}=FOLDER; pvesm path {volume} shows it on Proxmox",
        )
    if parts[0].isdecimal():
        base = f"{folder}/images/{'/'.join(parts[:2])}" if len(parts) == 4 else ""
        return f"{folder}/images/{'/'.join(parts[-2:])}", base
    if parts[0] == "iso":
        return f"{folder}/template/{name}", ""
    return f"{folder}/{parts[-1]}", ""


# NICs.


def _nics(machine: _Machine) -> None:
    found = [match for key in machine.lines if (match := _NIC.fullmatch(key))]
    nics: list[dict[str, Any]] = []
    machine.data["nics"] = nics
    for match in sorted(found, key=lambda one: int(one[1])):
        machine.places[match[0]] = ("network", len(nics))
        nics.append(_nic(machine, machine.options(match[0])))


def _nic(machine: _Machine, nic: _Options) -> dict[str, Any]:
    model, mac = nic.first or nic.take("model"), nic.take("macaddr")
    for name in [one for one in nic.rest if one in _MODELS or one in _OTHER_MODELS]:
        model, mac = name, nic.take(name)
    if model not in _MODELS:
        machine.lost.append(f"{nic.key} {model}: the spec has virtio")
    found: dict[str, Any] = {"mac": mac.lower(), "model": _MODELS.get(model, "virtio")}
    found["link"] = nic.take("bridge")
    if not found["link"]:
        if not machine.link:
            raise BrineError(f"{nic.key} is on no bridge", hint=NO_BRIDGE_HINT)
        machine.lost.append(f"{nic.key} is on no bridge: it is on {machine.link}")
        found["link"] = machine.link
    found["vlan"] = _vlan(machine, nic)
    if mtu := nic.take("mtu", "1"):  # 1 is the bridge's own
        found["mtu"] = number_of(mtu, f"{nic.key} mtu")
    if queues := nic.take("queues", "0"):
        found["queues"] = number_of(queues, f"{nic.key} queues")
    for name in ("firewall", "link_down"):
        if value := nic.take(name, "0"):
            machine.lost.append(f"{nic.key} {name}={value}")
    machine.lost += nic.left()
    return {key: value for key, value in found.items() if value}


def _vlan(machine: _Machine, nic: _Options) -> str:
    """The VLANs in Ganeti's notation."""
    tag, what = nic.take("tag"), f"{nic.key} trunks"
    words = [one for one in nic.take("trunks").split(";") if one]
    if len(words) > HIGHEST_VLAN:
        raise BrineError(f"{what}: more than {HIGHEST_VLAN} words")
    tagged: dict[int, None] = {}  # in their order
    for word in words:
        first, _, last = word.partition("-")
        low, high = number_of(first, what), number_of(last or first, what)
        if high > HIGHEST_VLAN:
            raise BrineError(f"{what} {word}: a VLAN is at most {HIGHEST_VLAN}")
        if low > high:
            raise BrineError(f"{what} {word}: the first VLAN is the larger one")
        tagged |= dict.fromkeys(range(low, high + 1))
    others = [str(one) for one in tagged if str(one) != tag]
    if not others:
        return tag
    return (f".{tag}" if tag else "") + "".join(f":{one}" for one in others)


# The order of boots and starts.


def _boot(machine: _Machine) -> None:
    text, data = machine.take("boot"), machine.data
    disk = machine.lines.get("bootdisk", "")
    order = text.removeprefix("order=")
    boots = []
    if text.startswith("order=") or ";" in text:
        for place, key in enumerate(filter(None, order.split(";")), 1):
            if key in machine.places:
                boots.append((place, *machine.places[key]))
            else:
                machine.lost.append(f"boot {key}")
    else:
        for place, letter in enumerate(order.removeprefix("legacy="), 1):
            kind = _LETTERS.get(letter)
            if kind is None:
                machine.lost.append(f"boot {letter}")
            else:
                index = machine.places.get(disk, ("", 0))[1] if kind == "disk" else 0
                boots.append((place, kind, index))
    if disk and disk not in machine.places:
        machine.lost.append(f"bootdisk {disk}")
    data["boot_order"], lost = by_boot_order(boots)
    machine.lost += lost


def _times(machine: _Machine) -> None:
    data = machine.data
    if machine.is_on("onboot", usual=False):
        machine.lost.append("onboot 1: brine instance start has it start with the node, too")
    startup = machine.options("startup", "order")
    for key, word, given, low, high in (
        ("start_order", "order", startup.first, 0, 999),
        ("shutdown_timeout", "down", startup.take("down"), 1, 3600),
    ):
        if given:
            number = number_of(given, f"startup {word}")
            data[key] = max(low, min(number, high))
            if data[key] != number:
                machine.lost.append(f"startup {word}={given}: the spec has {data[key]}")
    machine.lost += startup.left()
