"""``brine instance import``: a spec of a disk image, or of a libvirt domain's definition, as
``virsh dumpxml`` prints it.

Source: https://libvirt.org/formatdomain.html. Each element that this module reads is marked as
read; the rest has no counterpart in a spec, and is listed.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from brine.common.errors import BrineError, UsageError, printable, warn
from brine.common.vm_values import AIO_MODES, CACHE_MODES
from brine.hotplug.choices import FORMATS, MODELS
from brine.hotplug.disk import format_of
from brine.instance.definition import content_of, naming, print_spec
from brine.instance.messages import log_to_journal
from brine.instance.operations import define_instance

_MIB = 1 << 20
_XEN = {"linux": "xen-pvm", "xen": "xen-pvm", "xenpvh": "xen-pvh"}
_BOOT_DEVICES = {"hd": "disk", "cdrom": "cdrom", "network": "network"}
_INTERFACES = {"virtio": "virtio", "scsi": "scsi", "ide": "ide", "sata": "ide"}
_CPU_OF_MODE = {"host-passthrough": "host", "host-model": "host", "maximum": "max"}
_TEXTS = {"name": "name", "uuid": "uuid"}
_TEXTS |= {"kernel": "os/kernel", "initrd": "os/initrd", "append": "os/cmdline"}
_AGENT = "org.qemu.guest_agent.0"

# Addresses, names and controllers are libvirt's own bookkeeping: Brine gives devices their places.
# Each guest has a keyboard and a mouse, and the spec's own keys say what happens at its end.
_BOOKKEEPING = frozenset(
    {"address", "alias", "controller", "backenddomain", "seclabel", "resource"}
)
_QUIET_PATHS = frozenset({"metadata", "features/apic", "features/pae", "devices/emulator"})


class _Definition:
    """A definition that is being read."""

    def __init__(self, root: Element) -> None:
        self.root = root
        self.read: set[Element] = set()
        """The elements that the spec has taken over."""
        self.lost: list[str] = []
        """The elements that have no counterpart in a spec."""

    def all(self, path: str, below: Element | None = None) -> list[Element]:
        """All elements at *path*, which count as read from now on."""
        found = (self.root if below is None else below).findall(path)
        self.read.update(found)
        return found

    def get(self, path: str, attribute: str = "", below: Element | None = None) -> str:
        """An attribute of the first element at *path*, or its text; empty if there is none."""
        found = (self.root if below is None else below).find(path)
        if found is None:
            return ""
        self.read.add(found)
        return found.get(attribute, "") if attribute else (found.text or "").strip()

    def choice(self, value: str, known: dict[str, str], what: str) -> str:
        """The spec's word for *value*; a value that is not *known* is listed."""
        if value and value not in known:
            self.lost.append(f"{what} {value}")
        return known.get(value, "virtio")

    def unread(self, element: Element, path: str = "") -> Iterator[str]:
        """The paths of unread elements, without the elements below them."""
        for child in element:
            where = f"{path}{child.tag}"
            if child.tag in _BOOKKEEPING or where in _QUIET_PATHS:
                continue
            if self.read.isdisjoint(child.iter()):
                yield where + _described(child)
            else:
                yield from self.unread(child, f"{where}/")


class _NoDoctype(ElementTree.TreeBuilder):
    """A parser that refuses entities, which libvirt does not write: they can make a small file
    large."""

    def doctype(self, *_: str | None) -> None:
        raise BrineError("has a document type, which libvirt never writes")


def import_machine(arguments: argparse.Namespace) -> int:
    if (arguments.image is None) == (arguments.libvirt is None):
        raise UsageError("what is to be imported?", hint="name an image, or --libvirt FILE")
    log_to_journal("brine")
    ignored: list[str] = []
    if arguments.libvirt is None:
        data = _of_image(Path(arguments.image).absolute(), arguments.link)
    else:
        content = content_of(arguments.libvirt)
        with naming(arguments.libvirt, BrineError):
            data, ignored = spec_of_domain(content, link=arguments.link or "")
    for key in ("name", "memory_mib", "vcpus", "accel"):
        if (value := getattr(arguments, key)) is not None:
            data[key] = value
    if data.get("accel") == "tcg" and data.get("cpu") == "host":
        del data["cpu"]
        ignored.append("cpu host, as this processor is emulated: QEMU's own is the guest's")
    defined = define_instance(data, is_new=True, dry_run=arguments.dry_run)
    spec = defined.spec
    if arguments.json:
        print_spec(spec, dry_run=arguments.dry_run, changed=defined.changed, ignored=ignored)
        return 0
    for what in ignored:
        warn(f"{spec.name}: no counterpart: {printable(what)}")
    if arguments.dry_run:
        print(json.dumps(data, indent=2))
    else:
        print(f"defined: {spec.name}; brine instance start {spec.name}")
    return 0


def _of_image(image: Path, link: str | None) -> dict[str, Any]:
    found = format_of(image)
    if found not in FORMATS:
        hint = f"qemu-img convert -O qcow2 {image} {image.with_suffix('.qcow2')}"
        raise BrineError(f"{image}: is an image of the format {found}", hint=hint)
    disks = [{"path": str(image), "format": found}]
    data = {"name": image.name.split(".")[0], "disks": disks}
    return {**data, "nics": [{"link": link}]} if link else data


def spec_of_domain(xml: bytes, *, link: str = "") -> tuple[dict[str, Any], list[str]]:
    """The spec of a libvirt domain, as people write it, and the parts that have no counterpart.

    :param link: the bridge for NICs that libvirt connects to something else than a bridge.
    :raises BrineError: why Brine can't run the domain.
    """
    hint = "virsh dumpxml --inactive DOMAIN"
    try:
        root = ElementTree.fromstring(xml, ElementTree.XMLParser(target=_NoDoctype()))
    except ElementTree.ParseError as error:
        raise BrineError(f"is no XML: {error}", hint=hint) from error
    if root.tag != "domain":
        raise BrineError(f"is the XML of a {root.tag}, not of a domain", hint=hint)
    domain = _Definition(root)
    data: dict[str, Any] = {key: domain.get(path) for key, path in _TEXTS.items()}
    for part in (_hypervisor, _processors_and_memory, _boot, _ends, _devices, _disks):
        part(domain, data)
    data["nics"] = [_nic(domain, one, link) for one in domain.all("devices/interface")]
    # Keys with their default values are left out.
    data = {key: value for key, value in data.items() if value not in ("", [])}
    return data, [*domain.lost, *domain.unread(root)]


def _hypervisor(domain: _Definition, data: dict[str, Any]) -> None:
    kind, system = domain.root.get("type", ""), domain.get("os/type")
    if kind == "xen":
        if system not in _XEN:
            raise BrineError(
                f"is a Xen domain of the type {system}, which Brine does not run",
                hint="Brine runs Xen's PV and PVH domains",
            )
        data["hypervisor"] = _XEN[system]
        return
    if kind not in ("kvm", "qemu"):
        text = f"is a domain of {kind or 'no hypervisor'}, and Brine runs those of KVM and Xen"
        raise BrineError(text)
    data["hypervisor"] = "kvm"
    if kind == "qemu":
        data["accel"] = "tcg"
    data["machine"] = domain.get("os/type", "machine")
    emulator = domain.get("devices/emulator")
    if emulator != "/usr/bin/kvm":  # Debian's other name of the same program
        data["qemu"] = emulator


def _processors_and_memory(domain: _Definition, data: dict[str, Any]) -> None:
    for vcpu in domain.all("vcpu"):
        data["vcpus"] = _number(vcpu.text, "vcpu")
        if current := vcpu.get("current"):
            domain.lost.append(f"vcpu current={current}: all processors are there from the start")
        if vcpu.get("cpuset"):
            domain.lost.append("vcpu cpuset")
    mode = domain.get("cpu", "mode")
    if mode == "host-model":
        domain.lost.append("cpu mode host-model: the spec has host, the node's own processor")
    data["cpu"] = _CPU_OF_MODE.get(mode) or domain.get("cpu/model")
    for topology in domain.all("cpu/topology"):
        for key in ("sockets", "cores", "threads"):
            data[key] = _number(topology.get(key, "1"), f"cpu/topology {key}")
        if topology.get("dies", "1") != "1":
            domain.lost.append("cpu/topology dies")
    for memory in domain.all("memory"):
        data["memory_mib"] = _mib(memory)
    for current_memory in domain.all("currentMemory"):
        if _mib(current_memory) != data.get("memory_mib", _mib(current_memory)):
            domain.lost.append("currentMemory: the guest has all of its memory")
    for backing in domain.all("memoryBacking"):
        if domain.all("locked", backing):
            data["memory_lock"] = True


def _boot(domain: _Definition, data: dict[str, Any]) -> None:
    loader = domain.get("os/loader")
    if domain.get("os", "firmware") == "efi" or domain.get("os/loader", "type") == "pflash":
        loader = "uefi"
        if domain.all("os/nvram"):
            domain.lost.append("os/nvram: the UEFI variables begin anew")
    data["firmware"] = loader
    order = [one.get("dev", "") for one in domain.all("os/boot")]
    data["boot_order"] = [_BOOT_DEVICES[one] for one in order if one in _BOOT_DEVICES]
    domain.lost += [f"os/boot {one}" for one in order if one not in _BOOT_DEVICES]
    if not domain.all("features/acpi") and data["hypervisor"] == "kvm":
        data["acpi"] = False
    clock = domain.get("clock", "offset")
    if clock in ("utc", "localtime"):
        data["rtc"] = clock
    elif clock:
        domain.lost.append(f"clock {clock}")


def _ends(domain: _Definition, data: dict[str, Any]) -> None:
    if (poweroff := domain.get("on_poweroff")) == "restart":
        data["user_shutdown"] = "restart"
    elif poweroff not in ("", "destroy"):
        domain.lost.append(f"on_poweroff {poweroff}")
    if (reboot := domain.get("on_reboot")) == "destroy":
        data["reboot_behavior"] = "exit"
    elif reboot not in ("", "restart"):
        domain.lost.append(f"on_reboot {reboot}")
    if (crash := domain.get("on_crash")) not in ("", "restart"):
        domain.lost.append(f"on_crash {crash}: the watcher starts it again")


def _devices(domain: _Definition, data: dict[str, Any]) -> None:
    is_kvm = data["hypervisor"] == "kvm"
    for display in domain.root.findall("devices/graphics"):
        if display.get("type") != "vnc" or "vnc_bind" in data or not is_kvm:
            continue  # it is listed
        domain.read.add(display)
        address = domain.get("listen", "address", display)
        address = display.get("socket") or display.get("listen") or address
        data["vnc_bind"] = address or "127.0.0.1"
        port = display.get("port", "-1")
        if display.get("autoport") != "yes" and port.isdecimal():
            data["vnc_port"] = int(port)
        if display.get("passwd"):
            domain.lost.append("devices/graphics passwd: put it into a file, for vnc_password_file")
    ports = [*domain.root.findall("devices/serial"), *domain.root.findall("devices/console")]
    lines = [port for port in ports if port.get("type") == "pty"]
    for line in lines:
        domain.read.update(line.iter())
    if not is_kvm:
        return
    agents = domain.root.findall(f"devices/channel/target[@name='{_AGENT}']/..")
    for agent in agents:
        domain.read.update(agent.iter())
    if not lines:
        data["serial_console"] = False
    if not agents:
        data["guest_agent"] = False
    for pointer in domain.root.findall("devices/input"):
        is_tablet = pointer.get("type") == "tablet"
        if is_tablet or pointer.get("bus") == "ps2":
            domain.read.add(pointer)
        if is_tablet:
            data["usb_tablet"] = True


def _disks(domain: _Definition, data: dict[str, Any]) -> None:
    data["disks"], data["cdroms"] = [], []
    for disk in domain.root.findall("devices/disk"):
        kind, path = disk.get("device", "disk"), _source(disk)
        if kind == "cdrom":
            domain.read.update(disk.iter())
            data["cdroms"].append(path)
        elif kind == "disk" and path:
            domain.read.add(disk)
            data["disks"].append(_disk(domain, disk, path))
        # All else is listed: a floppy, or a disk of the network.


def _source(image: Element) -> str:
    """The file or device of a disk or backing file; empty if it is neither."""
    source = image.find("source")
    return "" if source is None else source.get("file") or source.get("dev") or ""


def _disk(domain: _Definition, disk: Element, path: str) -> dict[str, Any]:
    domain.all("source", disk)
    found: dict[str, Any] = {"path": path}
    found["format"] = domain.get("driver", "type", disk) or "raw"
    if (cache := domain.get("driver", "cache", disk)) in CACHE_MODES:
        found["cache"] = cache
    if (aio := domain.get("driver", "io", disk)) in AIO_MODES:
        found["aio"] = aio
    if domain.get("driver", "discard", disk) == "ignore":
        found["discard"] = False
    bus = domain.get("target", "bus", disk)
    interface = domain.choice(bus, _INTERFACES, f"the bus of {path},")
    if bus == "sata":
        domain.lost.append(f"the bus of {path}, sata: the spec has ide")
    if interface != "virtio":
        found["interface"] = interface
    if domain.all("readonly", disk):
        found["read_only"] = True
    if serial := domain.get("serial", below=disk):
        found["serial"] = serial
    return found | _backing(domain, disk)


def _backing(domain: _Definition, image: Element) -> dict[str, Any]:
    """The backing file of a disk or of a backing file. One that is no file or device is listed."""
    for store in image.findall("backingStore"):
        if path := _source(store):
            domain.all("source", store)
            kind = domain.get("format", "type", store) or "raw"
            return {"backing": {"path": path, "format": kind} | _backing(domain, store)}
        if not len(store):  # the end of a chain
            domain.read.add(store)
    return {}


def _nic(domain: _Definition, interface: Element, link: str) -> dict[str, Any]:
    nic: dict[str, Any] = {"mac": domain.get("mac", "address", interface)}
    nic["link"] = domain.get("source", "bridge", interface)
    kind = interface.get("type", "")
    if kind != "bridge" or not nic["link"]:
        source = interface.find("source")
        given = "" if source is None else next(iter(source.attrib.values()), "")
        what = f"{kind} {given}".rstrip()
        domain.lost.append(f"the NIC {nic['mac']}, of the {what}")
        if not link:
            raise BrineError(
                f"the NIC {nic['mac']} is on no bridge, but of the {what}",
                hint="name the bridge that it is to be on: --link BRIDGE",
            )
        nic["link"] = link
    if domain.get("virtualport", "type", interface) == "openvswitch":
        nic["mode"] = "openvswitch"
    tags = [tag.get("id", "") for tag in domain.all("vlan/tag", interface)]
    if tags:
        is_trunk = domain.get("vlan", "trunk", interface) == "yes" or len(tags) > 1
        nic["vlan"] = "".join(f":{tag}" for tag in tags) if is_trunk else tags[0]
    models = {name: name for name in MODELS}
    model = domain.get("model", "type", interface)
    nic["model"] = domain.choice(model, models, f"the model of the NIC {nic['mac']},")
    if mtu := domain.get("mtu", "size", interface):
        nic["mtu"] = _number(mtu, "mtu")
    if queues := domain.get("driver", "queues", interface):
        nic["queues"] = _number(queues, "queues")
    domain.all("target", interface)  # the tap's name, which Brine chooses
    return {key: value for key, value in nic.items() if value}


def _described(element: Element) -> str:
    """The attributes that distinguish an element from others of its name, or its text."""
    known = [
        f" {key}={element.get(key)}" for key in ("type", "device", "model") if element.get(key)
    ]
    text = (element.text or "").strip()
    return "".join(known) or (f" {text}" if text else "")


def _mib(element: Element) -> int:
    unit = element.get("unit", "KiB")
    power = "KMGT".find(unit[:1].upper()) + 1
    # KB is a thousand bytes, and both k and KiB are 1024.
    base = {"": 1024, "iB": 1024, "B": 1000}.get(unit[1:], 0)
    if unit in ("b", "bytes"):
        base, power = 1, 1
    if not (unit and base and power):
        raise BrineError(f"{element.tag} is in {unit}, which is no unit of memory")
    size: int = base**power
    return max(1, _number(element.text, element.tag) * size // _MIB)


def _number(text: str | None, what: str) -> int:
    text = (text or "").strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise BrineError(f"{what} is {text!r}, and should be a number")
    return int(text)
