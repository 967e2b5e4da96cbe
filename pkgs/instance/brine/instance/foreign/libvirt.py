"""A libvirt domain as a spec. Source: https://libvirt.org/formatdomain.html.

Each element is read attribute by attribute. All that the spec does not take over is named, and so
is a value that this module does not know.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Any

from brine.common.errors import BrineError
from brine.instance.foreign.fitting import (
    by_boot_order,
    fitted,
    known_machine,
    number_of,
    topology,
)
from brine.instance.foreign.libvirt_devices import LibvirtDomain, read_disks, read_nics
from brine.instance.foreign.parts import Definition, Part
from brine.vm.spec import UEFI

_MIB = 1 << 20
_XEN = {"linux": "xen-pvm", "xen": "xen-pvm", "xenpvh": "xen-pvh"}
_BOOT_DEVICES = {"hd": "disk", "cdrom": "cdrom", "network": "network"}
_CPU_OF_MODE = {"host-passthrough": "host", "host-model": "host", "maximum": "max"}
_ON = {"require": "+", "force": "+", "optional": "+", "disable": "-", "forbid": "-"}
_FEATURE = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CPU_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_QEMU_FEATURES = {"pclmuldq": "pclmulqdq"}
"""libvirt's names of processor features that QEMU calls otherwise."""
_EMULATORS = {
    *("/usr/bin/kvm", "/usr/bin/kvm-spice", "/usr/bin/qemu-kvm", "/usr/libexec/qemu-kvm"),
    *("/usr/bin/qemu-system-x86_64", "/usr/lib/xen/bin/qemu-system-i386"),
}
"""The programs of distributions in the place of which the spec's default is used. A definition of
another origin does not choose a program that root runs."""
_AGENT = "org.qemu.guest_agent.0"
_LIBVIRTS_SOCKETS = ("/var/lib/libvirt/", "/run/libvirt/", "/var/run/libvirt/")
_CONTROLLERS = frozenset({"usb", "pci", "ide", "sata", "fdc", "virtio-serial", "xenbus", "isa"})
_PLACES = ("chassis", "port", "chassisNr", "busNr", "index")
# Places, names and labels that libvirt gives: Brine has its own.
_BOOKKEEPING = frozenset({"address", "alias", "seclabel"})
_LOCALHOST = "127.0.0.1"


def spec_of_domain(
    xml: bytes, *, link: str = "", storages: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The spec of a libvirt domain, as people write it, and the parts that have no counterpart.

    :param link: the bridge for NICs that libvirt connects to something else than a bridge.
    :param storages: the folder of each storage pool, by name.
    :raises BrineError: why Brine can't run the domain.
    """
    hint = "virsh dumpxml --inactive DOMAIN"
    try:
        definition = Definition(xml)
    except BrineError as error:
        raise BrineError(str(error), hint=hint) from error
    if definition.tag != "domain":
        raise BrineError(f"is the XML of a {definition.tag}, not of a domain", hint=hint)
    root = definition.root
    domain = LibvirtDomain(root, link, storages or {}, definition.named)
    domain.data = {"name": root.first("name").text(), "uuid": root.first("uuid").text()}
    root.get("id")  # of a running domain
    if metadata := root.first("metadata"):
        metadata.skip()
        domain.named.append("metadata: the notes of other programs")
    for part in (
        _hypervisor,
        _processors,
        _memory,
        _boot,
        _ends,
        _display,
        _lines,
        read_disks,
        read_nics,
    ):
        part(domain)
    _controllers(domain)
    _boot_order(domain)
    # Keys with their default values are left out.
    data = {key: value for key, value in domain.data.items() if value not in ("", [])}
    data, unfit = fitted(data)
    return data, [*definition.lost(_BOOKKEEPING), *unfit]


def _hypervisor(domain: LibvirtDomain) -> None:
    kind, system, data = domain.root.get("type"), domain.root.first("os/type"), domain.data
    word, emulator = system.text(), domain.root.first("devices/emulator")
    if emulator.text() not in ("", *_EMULATORS):
        emulator.lose(why="a QEMU of the distribution runs the guest")
    if kind == "xen":
        if word not in _XEN:
            raise BrineError(
                f"is a Xen domain of the type {word}, which Brine does not run",
                hint="Brine runs Xen's PV and PVH domains",
            )
        data["hypervisor"] = _XEN[word]
        system.expect("arch", "x86_64", "i686")
        system.expect("machine", "xenpv", "xenpvh", "xenner")
        return
    if kind not in ("kvm", "qemu"):
        text = f"is a domain of {kind or 'no hypervisor'}, and Brine runs those of KVM and Xen"
        raise BrineError(text)
    if word not in ("", "hvm"):
        raise BrineError(f"is a domain of the type {word}, which KVM does not run")
    architecture = system.get("arch")
    if architecture not in ("", "x86_64", "i686"):
        raise BrineError(f"is a machine of {architecture} processors; Brine's are x86_64")
    if architecture == "i686":
        system.lose("arch", "the processor is one of x86_64")
    data["hypervisor"] = "kvm"
    if kind == "qemu":
        data["accel"] = "tcg"
    given = system.get("machine")
    data["machine"] = known_machine(given)
    if data["machine"] != given:
        system.lose("machine", f"the spec has {data['machine']}")


def _processors(domain: LibvirtDomain) -> None:
    data, vcpu, cpu = domain.data, domain.root.first("vcpu"), domain.root.first("cpu")
    if vcpu:
        data["vcpus"] = most = number_of(vcpu.text(), "vcpu")
        vcpu.expect("placement", "static")
        if current := vcpu.get("current"):
            data["vcpus"] = number_of(current, "vcpu current")
            if data["vcpus"] != most:
                vcpu.lose("current", f"the guest has so many processors, and never {most}")
    if cpu:
        data["cpu"] = _cpu_model(cpu)
    if element := cpu.first("topology"):
        _topology(element, data)


def _cpu_model(cpu: Part) -> str:
    """The processor's model with its features, as QEMU has them."""
    mode, model = cpu.get("mode"), cpu.first("model")
    name = model.text()
    model.expect("fallback", "allow", "forbid")
    cpu.expect("match", "exact")
    cpu.expect("check", "none", "partial", "full")
    cpu.expect("migratable", "on")
    if mode == "host-model":
        cpu.lose("mode", "the spec has host, the node's own processor")
    elif mode not in ("", "custom", *_CPU_OF_MODE):
        cpu.lose("mode")
    found = _CPU_OF_MODE.get(mode, name)
    if name and found != name:
        model.lose()
    elif name and not _CPU_MODEL.fullmatch(name):
        model.lose()
        found = ""
    flags = []
    for feature in cpu.all("feature"):
        sign, word = _ON.get(feature.get("policy") or "require"), feature.get("name")
        if found and sign and _FEATURE.fullmatch(word):
            flags.append(f",{sign}{_QEMU_FEATURES.get(word, word)}")
        else:
            feature.lose()
    return found + "".join(flags)


def _topology(element: Part, data: dict[str, Any]) -> None:
    """Take over sockets, cores and threads. Dies and clusters are more cores of a socket."""
    names = ("sockets", "dies", "clusters", "cores", "threads")
    found = {name: number_of(element.get(name) or "1", f"cpu/topology {name}") for name in names}
    for name in ("dies", "clusters"):
        if found[name] != 1:
            element.lose(name, "they are cores of the socket")
    cores = found["dies"] * found["clusters"] * found["cores"]
    vcpus = data.get("vcpus", 1)
    if keys := topology(vcpus, found["sockets"], cores, found["threads"]):
        data |= keys
    else:
        element.lose(why=f"it does not make {vcpus} processors")


def _memory(domain: LibvirtDomain) -> None:
    root, data = domain.root, domain.data
    if memory := root.first("memory"):
        data["memory_mib"] = _mib(memory)
    current = root.first("currentMemory")
    if current and _mib(current) != data.get("memory_mib"):
        current.lose(why="the guest has all of its memory")
    backing = root.first("memoryBacking")
    if backing.first("locked"):
        data["memory_lock"] = True
    if huge := backing.first("hugepages"):
        if huge.first("page"):
            huge.lose()
        else:
            data["huge_pages"] = "/dev/hugepages"


def _boot(domain: LibvirtDomain) -> None:
    root, data = domain.root, domain.data
    system, loader, nvram = root.first("os"), root.first("os/loader"), root.first("os/nvram")
    image, kind = loader.text(), loader.get("type")
    firmware = system.choice("firmware", {"efi": UEFI, "bios": ""})
    loader.expect("type", "pflash", "rom")
    loader.expect("readonly", "yes")
    if loader.get("secure") not in ("", "no"):
        loader.lose("secure", "the guest starts without Secure Boot")
    if firmware == UEFI or kind == "pflash":
        data["firmware"] = UEFI
        if image and not image.startswith("/usr/share/"):
            loader.lose(why="the guest has the node's own UEFI")
        if nvram:
            nvram.lose(why="the guest starts with new UEFI variables")
    elif image.startswith("/"):
        data["firmware"] = image
    elif loader:
        loader.lose()
    data["kernel"] = system.first("kernel").text()
    data["initrd"] = system.first("initrd").text()
    data["append"] = system.first("cmdline").text()
    system.first("bootmenu").expect("enable", "no")
    if program := root.first("bootloader"):
        program.lose(why="the GRUB of Xen's domains boots the first disk")
    _features(root.first("features"), domain)
    _clock(root.first("clock"), data)


def _features(features: Part, domain: LibvirtDomain) -> None:
    features.first("apic")
    features.first("pae")  # each processor of Brine's has both
    if not features.first("acpi") and domain.is_kvm():
        domain.data["acpi"] = False


def _clock(clock: Part, data: dict[str, Any]) -> None:
    offset = clock.get("offset")
    if offset == "variable":  # the seconds that the guest has set its clock by
        offset = clock.get("basis") or "utc"
        clock.expect("adjustment", "0")
    if offset in ("utc", "localtime"):
        data["rtc"] = offset
    elif offset:
        clock.lose("offset")


def _ends(domain: LibvirtDomain) -> None:
    root, data = domain.root, domain.data
    poweroff, reboot = root.first("on_poweroff"), root.first("on_reboot")
    if poweroff.text() == "restart":
        data["user_shutdown"] = "restart"
    elif poweroff.text() not in ("", "destroy"):
        poweroff.lose()
    if reboot.text() == "destroy":
        data["reboot_behavior"] = "exit"
    elif reboot.text() not in ("", "restart"):
        reboot.lose()
    crash = root.first("on_crash")
    if crash.text() not in ("", "restart"):
        crash.lose(why="the watcher starts it again")


# The display, and the lines to the guest.


def _display(domain: LibvirtDomain) -> None:
    displays = domain.root.all("devices/graphics")
    screens = [one for one in displays if one.get("type") == "vnc"] if domain.is_kvm() else []
    for other in displays:
        if other not in screens[:1]:
            other.lose()
    if screens:
        _vnc(screens[0], domain)
    for video in domain.root.all("devices/video"):
        model = video.first("model")
        if "vnc_bind" not in domain.data or model.get("type") != "vga":
            video.lose()
        model.expect("heads", "1")
        model.expect("primary", "yes")


def _vnc(display: Part, domain: LibvirtDomain) -> None:
    data, named = domain.data, domain.named
    listens = display.all("listen")
    for other in listens[1:]:
        other.lose()
    listen = listens[0] if listens else display.first("listen")
    kind, path = listen.get("type"), listen.get("socket") or display.get("socket")
    address = listen.get("address") or display.get("listen")
    display.expect("socket", path)
    display.expect("listen", address)
    listen.expect("type", "address", "socket", "network", "none")
    if kind == "none" or (kind == "socket" and not path):
        display.lose(why='the guest has no display until its spec has "vnc_bind"')
        return
    if path:
        data["vnc_bind"] = path
    elif kind == "network" and not address:
        listen.lose(why=f"VNC listens at {_LOCALHOST}")
        data["vnc_bind"] = _LOCALHOST
    else:
        found = _address(address or _LOCALHOST)
        data["vnc_bind"] = found or _LOCALHOST
        if not found:
            text = f"{display.path} listen={address}: VNC listens at {_LOCALHOST}"
            named.append(text)
    if display.get("passwd"):
        why = "put it into a file, for vnc_password_file"
        if not (path or ipaddress.ip_address(data["vnc_bind"]).is_loopback):
            data["vnc_bind"] = _LOCALHOST
            why += f"; without it, VNC listens at {_LOCALHOST}"
        display.lose("passwd", why)
    _vnc_port(display, data)


def _vnc_port(display: Part, data: dict[str, Any]) -> None:
    port, is_free = display.get("port"), display.get("autoport") == "yes"
    display.expect("autoport", "yes", "no")
    is_number = port.isascii() and port.isdecimal() and len(port) < 6
    if port in ("", "-1") or (is_free and is_number):
        return
    if is_number and 5900 <= int(port) <= 65535 and not data["vnc_bind"].startswith("/"):
        data["vnc_port"] = int(port)
    else:
        display.lose("port")


def _address(text: str) -> str:
    """The IP address that *text* means to resolvers; empty if it is none."""
    if text == "localhost":
        return _LOCALHOST
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not re.fullmatch(r"[0-9.]{1,15}", text):
        return ""
    try:
        return socket.inet_ntoa(socket.inet_aton(text))  # 0 is 0.0.0.0
    except OSError:
        return ""


def _lines(domain: LibvirtDomain) -> None:
    serials = domain.root.all("devices/serial")
    consoles = domain.root.all("devices/console")
    if not domain.is_kvm():
        for port in (*serials, *consoles):
            if port in serials or not _is_plain(port, ("xen",)):
                port.lose()
        return
    usual = ("", "serial", "isa-serial")
    for port in serials:
        if port is not serials[0] or not _is_plain(port, usual):
            port.lose()
    has_console = False
    for port in consoles:
        # One is the serial line by another name.
        is_line = not has_console and _is_plain(port, usual)
        has_console = has_console or is_line
        if not is_line:
            port.lose()
    if not (serials or has_console):
        domain.data["serial_console"] = False
    domain.data["guest_agent"] = False
    for channel in domain.root.all("devices/channel"):
        if not domain.data["guest_agent"] and _is_agent(channel, channel.first("target")):
            domain.data["guest_agent"] = True
        else:
            channel.lose()
    if domain.data["guest_agent"]:
        del domain.data["guest_agent"]
    _inputs(domain)


def _is_plain(port: Part, targets: tuple[str, ...]) -> bool:
    """Whether a serial line or console is one that the spec has: a terminal."""
    target, source = port.first("target"), port.first("source")
    port.get("tty")  # of a running domain
    path = source.get("path")
    if port.get("type") != "pty" or target.get("type") not in targets:
        return False
    if path and not path.startswith("/dev/"):
        source.lose("path")
    target.expect("port", "0")
    target.first("model").expect("name", "isa-serial")
    return True


def _is_agent(channel: Part, target: Part) -> bool:
    """Whether a channel is that of the guest agent."""
    if target.get("name") != _AGENT:
        return False
    channel.label(_AGENT)
    source = channel.first("source")
    channel.expect("type", "unix")
    target.expect("type", "virtio")
    target.get("state")  # of a running domain
    source.expect("mode", "bind")
    path = source.get("path")
    if path and not path.startswith(_LIBVIRTS_SOCKETS):
        source.lose("path", "the agent's socket is Brine's own")
    return True


def _inputs(domain: LibvirtDomain) -> None:
    """Read pointers and keyboards: each guest has those of the PS/2 port."""
    for device in domain.root.all("devices/input"):
        kind, bus = device.get("type"), device.get("bus")
        if kind == "tablet" and bus in ("", "usb"):
            domain.data["usb_tablet"] = True
        elif kind not in ("mouse", "keyboard") or bus not in ("ps2", ""):
            device.lose()


def _controllers(domain: LibvirtDomain) -> None:
    """Read the controllers that Brine has by itself, and devices that are none."""
    for controller in domain.root.all("devices/controller"):
        kind = controller.get("type")
        controller.label(kind)
        controller.get("index")
        controller.first("model").get("name")
        for name in _PLACES:
            controller.first("target").get(name)
        if kind == "scsi":
            controller.expect("model", "virtio-scsi", "auto")
        elif kind in _CONTROLLERS:
            controller.get("model")
        else:
            controller.lose()
    for balloon in domain.root.all("devices/memballoon"):
        if balloon.get("model") != "none":
            balloon.lose()
    for panic in domain.root.all("devices/panic"):
        panic.expect("model", "isa", "pvpanic")
    label = domain.root.first("seclabel")
    if label.get("type") not in ("", "dynamic"):
        label.lose()
    else:
        label.skip()
    partition = domain.root.first("resource/partition")
    if partition.text() not in ("", "/machine"):
        partition.lose()


# The boot order.


def _boot_order(domain: LibvirtDomain) -> None:
    """Take over the order of the devices, or else that of the kinds."""
    data, order = domain.data, []
    for boot in domain.root.all("os/boot"):
        kind = boot.choice("dev", _BOOT_DEVICES)
        if kind in order:
            boot.lose("dev", "it is there twice")
        elif kind:
            order.append(kind)
    if domain.boots and not order:
        order, moved = by_boot_order(domain.boots)
        domain.named += moved
    elif domain.boots:
        domain.named.append("the boot order of single devices: os/boot counts")
    data["boot_order"] = order


def _mib(element: Part) -> int:
    unit, what = element.get("unit") or "KiB", element.path
    power = "KMGT".find(unit[:1].upper()) + 1
    # KB is a thousand bytes, and both k and KiB are 1024.
    base = {"": 1024, "iB": 1024, "B": 1000}.get(unit[1:], 0)
    if unit in ("b", "bytes"):
        base, power = 1, 1
    if not (unit and base and power):
        raise BrineError(f"{what} is in {unit}, which is no unit of memory")
    size: int = base**power
    return max(1, -(-number_of(element.text(), what) * size // _MIB))
