"""A spec from a libvirt domain's definition, as ``virsh dumpxml`` prints it.

Source: https://libvirt.org/formatdomain.html. Each element that this module reads is marked as
read; the rest has no counterpart in a spec, and is listed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import Element

from brine.common.errors import BrineError
from brine.hotplug.choices import AIO_MODES, CACHE_MODES, MODELS
from brine.instance.from_config import Imported

_UNITS = {"k": 1, "M": 2, "G": 3, "T": 4}
_MIB = 1 << 20
_HYPERVISORS = {"kvm": ("kvm", "kvm"), "qemu": ("kvm", "tcg")}
_XEN = {"linux": "xen-pvm", "xen": "xen-pvm", "xenpvh": "xen-pvh"}
_BOOT_DEVICES = {"hd": "disk", "cdrom": "cdrom", "network": "network"}
_INTERFACES = {"virtio": "virtio", "scsi": "scsi", "ide": "ide", "sata": "ide"}
_CPU_OF_MODE = {"host-passthrough": "host", "host-model": "host", "maximum": "max"}
_CLOCKS = ("utc", "localtime")
_AGENT = "org.qemu.guest_agent.0"

# Addresses, names and controllers are libvirt's own bookkeeping: Brine gives devices their places.
# Each guest has a keyboard and a mouse, and the spec's own keys say what happens at its end.
_BOOKKEEPING = frozenset(
    {"address", "alias", "controller", "backenddomain", "seclabel", "resource"}
)
_QUIET_PATHS = frozenset({"/metadata", "/features/apic", "/features/pae", "/devices/emulator"})


@dataclass
class _Definition:
    """A definition that is being read; `read` are the elements that the spec has taken over."""

    root: Element
    read: set[Element] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)

    def find(self, path: str, below: Element | None = None) -> Element | None:
        """The first element at *path*, which counts as read from now on."""
        found = (self.root if below is None else below).find(path)
        if found is not None:
            self.read.add(found)
        return found

    def all(self, path: str, below: Element | None = None) -> list[Element]:
        """All elements at *path*, which count as read from now on."""
        found = (self.root if below is None else below).findall(path)
        self.read.update(found)
        return found

    def text(self, path: str, below: Element | None = None) -> str:
        """The text of the element at *path*; empty if there is none."""
        found = self.find(path, below)
        return (found.text or "").strip() if found is not None else ""

    def attribute(self, path: str, name: str, below: Element | None = None) -> str:
        """An attribute of the element at *path*; empty if there is none."""
        found = self.find(path, below)
        return found.get(name, "") if found is not None else ""

    def lose(self, what: str) -> None:
        """List *what* as having no counterpart in a spec."""
        self.lost.append(what)

    def choice(self, value: str, known: dict[str, str], what: str, otherwise: str) -> str:
        """The spec's word for *value*; a value that is not *known* is listed."""
        if value and value not in known:
            self.lose(f"{what} {value}")
        return known.get(value, otherwise)

    def unread(self) -> list[str]:
        """The paths of unread elements, without the elements below them."""
        found: list[str] = []

        def visit(element: Element, path: str) -> None:
            for child in element:
                where = f"{path}/{child.tag}"
                if child.tag in _BOOKKEEPING or where in _QUIET_PATHS:
                    continue
                if child in self.read or _any_read(child, self.read):
                    visit(child, where)
                else:
                    found.append(where.removeprefix("/") + _described(child))

        visit(self.root, "")
        return found


class _NoDoctype(ElementTree.TreeBuilder):
    """A parser that refuses entities, which libvirt does not write: they can make a small file
    large."""

    def doctype(self, *_: str | None) -> None:
        raise BrineError("has a document type, which libvirt never writes")


def spec_of_domain(xml: bytes, *, link: str = "") -> Imported:
    """The spec of a libvirt domain, as people write it, and the parts that have no counterpart.

    :param link: the bridge for NICs that libvirt connects to something else than a bridge.
    :raises BrineError: why Brine can't run the domain.
    """
    try:
        root = ElementTree.fromstring(xml, ElementTree.XMLParser(target=_NoDoctype()))
    except ElementTree.ParseError as error:
        raise BrineError(f"is no XML: {error}", hint="virsh dumpxml --inactive DOMAIN") from error
    if root.tag != "domain":
        text = f"is the XML of a {root.tag}, not of a domain"
        raise BrineError(text, hint="virsh dumpxml --inactive DOMAIN")
    domain = _Definition(root)
    data: dict[str, Any] = {}
    for part in (_identity, _hypervisor, _processors, _memory, _boot, _ends, _devices):
        part(domain, data)
    data["disks"] = _disks(domain, data)
    data["nics"] = _nics(domain, link)
    # Keys with their default values are left out.
    data = {key: value for key, value in data.items() if value not in ("", [], None)}
    return Imported(data, (*domain.lost, *domain.unread()))


def _identity(domain: _Definition, data: dict[str, Any]) -> None:
    data["name"] = domain.text("name")
    data["uuid"] = domain.text("uuid")


def _hypervisor(domain: _Definition, data: dict[str, Any]) -> None:
    kind = domain.root.get("type", "")
    system = domain.find("os/type")
    what = (system.text or "").strip() if system is not None else ""
    if kind == "xen":
        if what not in _XEN:
            raise BrineError(
                f"is a Xen domain of the type {what}, which Brine does not run",
                hint="Brine runs Xen's PV and PVH domains",
            )
        data["hypervisor"] = _XEN[what]
        return
    if kind not in _HYPERVISORS:
        text = f"is a domain of {kind or 'no hypervisor'}, and Brine runs those of KVM and Xen"
        raise BrineError(text)
    data["hypervisor"], accel = _HYPERVISORS[kind]
    if accel != "kvm":
        data["accel"] = accel
    if system is not None and (machine := system.get("machine")):
        data["machine"] = machine
    emulator = domain.text("devices/emulator")
    if emulator and emulator != "/usr/bin/kvm":  # Debian's other name of the same program
        data["qemu"] = emulator


def _processors(domain: _Definition, data: dict[str, Any]) -> None:
    vcpu = domain.find("vcpu")
    if vcpu is not None:
        data["vcpus"] = _number(vcpu.text, "vcpu")
        if current := vcpu.get("current"):
            domain.lose(f"vcpu current={current}: all processors are there from the start")
        if vcpu.get("cpuset"):
            domain.lose("vcpu cpuset")
    cpu = domain.find("cpu")
    if cpu is None:
        return
    mode = cpu.get("mode", "custom")
    if mode == "host-model":
        domain.lose("cpu mode host-model: the spec has host, the node's own processor")
    data["cpu"] = _CPU_OF_MODE.get(mode) or domain.text("model", cpu)
    topology = domain.find("topology", cpu)
    if topology is not None:
        for key in ("sockets", "cores", "threads"):
            data[key] = _number(topology.get(key, "1"), f"cpu/topology {key}")
        if _number(topology.get("dies", "1"), "cpu/topology dies") != 1:
            domain.lose("cpu/topology dies")


def _memory(domain: _Definition, data: dict[str, Any]) -> None:
    memory = domain.find("memory")
    if memory is not None:
        data["memory_mib"] = _mib(memory)
    current = domain.find("currentMemory")
    if memory is not None and current is not None and _mib(current) != _mib(memory):
        domain.lose("currentMemory: the guest has all of its memory")
    backing = domain.find("memoryBacking")
    if backing is not None and domain.find("locked", backing) is not None:
        data["memory_lock"] = True


def _boot(domain: _Definition, data: dict[str, Any]) -> None:
    system = domain.find("os")
    if system is None:
        return
    loader = domain.find("loader", system)
    is_uefi = system.get("firmware") == "efi" or (
        loader is not None and loader.get("type") == "pflash"
    )
    if is_uefi:
        data["firmware"] = "uefi"
        nvram = domain.find("nvram", system)
        if nvram is not None:
            domain.lose("os/nvram: the UEFI variables begin anew")
    elif loader is not None:
        data["firmware"] = (loader.text or "").strip()
    for key, tag in (("kernel", "kernel"), ("initrd", "initrd"), ("append", "cmdline")):
        data[key] = domain.text(tag, system)
    order = []
    for boot in domain.all("boot", system):
        device = boot.get("dev", "")
        if device in _BOOT_DEVICES:
            order.append(_BOOT_DEVICES[device])
        else:
            domain.lose(f"os/boot {device}")
    data["boot_order"] = order
    if domain.find("features/acpi") is None and data.get("hypervisor") == "kvm":
        data["acpi"] = False
    clock = domain.attribute("clock", "offset")
    if clock in _CLOCKS:
        data["rtc"] = clock
    elif clock:
        domain.lose(f"clock {clock}")


def _ends(domain: _Definition, data: dict[str, Any]) -> None:
    if (poweroff := domain.text("on_poweroff")) == "restart":
        data["user_shutdown"] = "restart"
    elif poweroff not in ("", "destroy"):
        domain.lose(f"on_poweroff {poweroff}")
    if (reboot := domain.text("on_reboot")) == "destroy":
        data["reboot_behavior"] = "exit"
    elif reboot not in ("", "restart"):
        domain.lose(f"on_reboot {reboot}")
    if (crash := domain.text("on_crash")) not in ("", "restart"):
        domain.lose(f"on_crash {crash}: the watcher starts it again")


def _devices(domain: _Definition, data: dict[str, Any]) -> None:
    is_kvm = data["hypervisor"] == "kvm"
    for display in domain.all("devices/graphics"):
        if display.get("type") != "vnc" or "vnc_bind" in data or not is_kvm:
            domain.read.discard(display)
            continue
        listen = domain.find("listen", display)
        address = display.get("listen") or (listen.get("address") if listen is not None else "")
        data["vnc_bind"] = display.get("socket") or address or "127.0.0.1"
        port = display.get("port", "-1")
        if display.get("autoport") != "yes" and port.isdecimal():
            data["vnc_port"] = int(port)
        if display.get("passwd"):
            domain.lose("devices/graphics passwd: put it into a file, for vnc_password_file")
    ports = [*domain.root.findall("devices/serial"), *domain.root.findall("devices/console")]
    lines = [port for port in ports if port.get("type") == "pty"]
    for line in lines:
        domain.read.update(line.iter())
    if not is_kvm:
        return
    if not lines:
        data["serial_console"] = False
    channels = domain.root.findall("devices/channel")
    agents = [one for one in channels if _target_name(one) == _AGENT]
    for agent in agents:
        domain.read.update(agent.iter())
    if not agents:
        data["guest_agent"] = False
    for pointer in domain.root.findall("devices/input"):
        if pointer.get("type") == "tablet":
            data["usb_tablet"] = True
            domain.read.add(pointer)
        elif pointer.get("bus") == "ps2":
            domain.read.add(pointer)


def _disks(domain: _Definition, data: dict[str, Any]) -> list[dict[str, Any]]:
    disks = []
    cdroms = data.setdefault("cdroms", [])
    for disk in domain.root.findall("devices/disk"):
        source = disk.find("source")
        path = "" if source is None else source.get("file") or source.get("dev") or ""
        kind = disk.get("device", "disk")
        if kind == "cdrom":
            domain.read.update(disk.iter())
            cdroms.append(path)
            continue
        if kind != "disk" or not path:
            continue  # it is listed: a floppy, or a disk of the network
        domain.read.add(disk)
        domain.find("source", disk)
        disks.append(_disk(domain, disk, path))
    return disks


def _disk(domain: _Definition, disk: Element, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"path": path, "format": "raw"}
    driver = domain.find("driver", disk)
    if driver is not None:
        found["format"] = driver.get("type", "raw")
        cache = driver.get("cache", "")
        if cache in CACHE_MODES:
            found["cache"] = cache
        if (aio := driver.get("io", "")) in AIO_MODES:
            found["aio"] = aio
        if driver.get("discard") == "ignore":
            found["discard"] = False
    bus = domain.attribute("target", "bus", disk)
    interface = domain.choice(bus, _INTERFACES, f"the bus of {path},", "virtio")
    if bus == "sata":
        domain.lose(f"the bus of {path}, sata: the spec has ide")
    if interface != "virtio":
        found["interface"] = interface
    if domain.find("readonly", disk) is not None:
        found["read_only"] = True
    if serial := domain.text("serial", disk):
        found["serial"] = serial
    if backing := _backing(domain, disk):
        found["backing"] = backing
    return found


def _backing(domain: _Definition, image: Element) -> dict[str, Any] | None:
    """The backing file of a disk or of a backing file. One that is no file or device is listed."""
    store = domain.find("backingStore", image)
    source = None if store is None else store.find("source")
    path = "" if source is None else source.get("file") or source.get("dev") or ""
    if store is None or not path:
        if store is not None and len(store):
            domain.read.discard(store)
        return None
    driver = domain.find("format", store)
    domain.find("source", store)
    found = {"path": path, "format": "raw" if driver is None else driver.get("type", "raw")}
    inner = _backing(domain, store)
    return {**found, "backing": inner} if inner else found


def _nics(domain: _Definition, link: str) -> list[dict[str, Any]]:
    nics = []
    for interface in domain.all("devices/interface"):
        nic: dict[str, Any] = {"mac": domain.attribute("mac", "address", interface)}
        source = domain.find("source", interface)
        bridge = "" if source is None else source.get("bridge", "")
        kind = interface.get("type", "")
        if kind != "bridge" or not bridge:
            given = "" if source is None else next(iter(source.attrib.values()), "")
            domain.lose(f"the NIC {nic['mac']}, of the {kind} {given}".rstrip())
            if not link:
                raise BrineError(
                    f"the NIC {nic['mac']} is on no bridge, but of the {kind} {given}".rstrip(),
                    hint="name the bridge that it is to be on: --link BRIDGE",
                )
            bridge = link
        nic["link"] = bridge
        if domain.attribute("virtualport", "type", interface) == "openvswitch":
            nic["mode"] = "openvswitch"
        tags = [tag.get("id", "") for tag in domain.all("vlan/tag", interface)]
        if tags:
            domain.find("vlan", interface)
            is_trunk = domain.attribute("vlan", "trunk", interface) == "yes" or len(tags) > 1
            nic["vlan"] = "".join(f":{tag}" for tag in tags) if is_trunk else tags[0]
        model = domain.attribute("model", "type", interface)
        nic["model"] = domain.choice(
            model, {name: name for name in MODELS}, f"the model of the NIC {nic['mac']},", "virtio"
        )
        if mtu := domain.attribute("mtu", "size", interface):
            nic["mtu"] = _number(mtu, "mtu")
        if queues := domain.attribute("driver", "queues", interface):
            nic["queues"] = _number(queues, "queues")
        domain.find("target", interface)  # the tap's name, which Brine chooses
        nics.append({key: value for key, value in nic.items() if value})
    return nics


def _target_name(channel: Element) -> str:
    target = channel.find("target")
    return "" if target is None else target.get("name", "")


def _any_read(element: Element, read: set[Element]) -> bool:
    return any(child in read for child in element.iter())


def _described(element: Element) -> str:
    """The attributes that distinguish an element from others of its name."""
    shown: Callable[[str], str | None] = element.get
    known = [f"{key}={value}" for key in ("type", "device", "model") if (value := shown(key))]
    text = (element.text or "").strip()
    return "".join(f" {one}" for one in known) or (f" {text}" if text else "")


def _mib(element: Element) -> int:
    number = _number(element.text, element.tag)
    unit = element.get("unit", "KiB")
    if unit in ("b", "bytes"):
        return max(1, number // _MIB)
    # KB is a thousand bytes, and both k and KiB are 1024.
    base = 1000 if unit.endswith("B") and not unit.endswith("iB") else 1024
    if unit.replace("K", "k").removesuffix("B").removesuffix("i") not in _UNITS:
        raise BrineError(f"{element.tag} is in {unit}, which is no unit of memory")
    size: int = base ** _UNITS[unit[0].replace("K", "k")]
    return max(1, number * size // _MIB)


def _number(text: str | None, what: str) -> int:
    text = (text or "").strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise BrineError(f"{what} is {text!r}, and should be a number")
    return int(text)
