"""The same guests, as specs of Brine's and as libvirt's domains."""

from pathlib import Path
from typing import Any

from bench.instance.results import Guest, Plan

QMP_FOLDER = Path("/run/bench")
LIBVIRTS_USER = "libvirt-qemu"
"""Whom libvirt has run QEMU."""

_IMAGE_BYTES = 64 * 2**20
_MEMORY_MIB = 128
_APPEND = "console=ttyS0 panic=-1 quiet"
_BRINES_MAC = "52:54:00:00:01:{number:02x}"
_LIBVIRTS_MAC = "52:54:00:00:02:{number:02x}"
_NAMES = {Guest.PLAIN: "plain", Guest.USUAL: "usual", Guest.CONFINED: "confined"}

_DOMAIN_XML = """<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>{name}</name>
<memory unit='MiB'>{memory_mib}</memory>
<vcpu>1</vcpu>
<os>
  <type arch='x86_64' machine='pc'>hvm</type>
  <kernel>{guest}/kernel</kernel>
  <initrd>{guest}/initramfs</initrd>
  <cmdline>{append}</cmdline>
</os>
<features><acpi/></features>
<cpu mode='maximum'/>
<devices>
  <emulator>/usr/bin/qemu-system-x86_64</emulator>
  <controller type='usb' model='none'/>
  <memballoon model='none'/>
  <serial type='unix'><source mode='bind' path='{serial}'/></serial>
  <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
  {devices}
</devices>
{arguments}
</domain>
"""
_DEVICES_XML = """<disk type='file' device='disk'>
<driver name='qemu' type='raw' cache='none' io='threads' discard='unmap'/>
<source file='{image}'/><target dev='vda' bus='virtio'/></disk>
<interface type='bridge'><mac address='{mac}'/><source bridge='{bridge}'/>
<model type='virtio'/><driver name='qemu'/></interface>
"""
_ARGUMENTS_XML = """<qemu:commandline>
<qemu:arg value='-qmp'/><qemu:arg value='unix:{qmp},server=on,wait=off'/></qemu:commandline>
"""


def name_of(guest: Guest) -> str:
    """The name of the instance, and of the domain."""
    return _NAMES[guest]


def qmp_of(guest: Guest) -> Path:
    """A QMP socket that nobody else has a use for: each serves one client."""
    return QMP_FOLDER / f"{name_of(guest)}.qmp"


def spec(plan: Plan, guest: Guest) -> dict[str, Any]:
    """As ``brine instance define`` takes it."""
    name = name_of(guest)
    data = _spec(plan, name)
    data["extra_arguments"] = ["-qmp", f"unix:{qmp_of(guest)},server=on,wait=off"]
    if guest is not Guest.PLAIN:
        mac = _BRINES_MAC.format(number=1 if guest is Guest.USUAL else 2)
        data["disks"] = [{"path": _image(plan, f"{name}-brine")}]
        data["nics"] = [{"link": plan.bridge, "mac": mac}]
    if guest is Guest.CONFINED:
        data |= {"security_model": "user", "security_user": LIBVIRTS_USER, "chroot": True}
    return data


def xml(plan: Plan, guest: Guest) -> str:
    """As ``virsh define`` takes it. libvirt's QEMU always has a user of its own."""
    devices = ""
    if guest is not Guest.PLAIN:
        image = _image(plan, f"{name_of(guest)}-libvirt")
        mac = _LIBVIRTS_MAC.format(number=1)
        devices = _DEVICES_XML.format(image=image, mac=mac, bridge=plan.bridge)
    return _xml(plan, name_of(guest), devices, _ARGUMENTS_XML.format(qmp=qmp_of(guest)))


def listed_name(number: int) -> str:
    """One of those that are only there to be listed."""
    return f"listed{number:04}"


def listed_spec(plan: Plan, number: int) -> dict[str, Any]:
    """Its spec: with a disk and a NIC. Its processor does not run, and needs none of ours."""
    name = listed_name(number)
    return {
        **_spec(plan, name),
        "extra_arguments": ["-S"],
        "admin_state": "up" if number < plan.running else "down",
        "disks": [{"path": _image(plan, f"{name}-brine")}],
        "nics": [{"link": plan.bridge}],
    }


def listed_xml(plan: Plan, number: int) -> str:
    """The same for libvirt, which is told at its start that its processor is not to run."""
    image = _image(plan, f"{listed_name(number)}-libvirt")
    mac = f"52:54:00:00:{3 + number // 256:02x}:{number % 256:02x}"
    devices = _DEVICES_XML.format(image=image, mac=mac, bridge=plan.bridge)
    return _xml(plan, listed_name(number), devices, "")


def _spec(plan: Plan, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "accel": "tcg",
        "memory_mib": _MEMORY_MIB,
        "kernel": f"{plan.guest}/kernel",
        "initrd": f"{plan.guest}/initramfs",
        "append": _APPEND,
        "shutdown_timeout": 1,
    }


def _xml(plan: Plan, name: str, devices: str, arguments: str) -> str:
    return _DOMAIN_XML.format(
        name=name,
        memory_mib=_MEMORY_MIB,
        guest=plan.guest,
        append=_APPEND,
        serial=QMP_FOLDER / f"{name}.serial",
        devices=devices,
        arguments=arguments,
    )


def _image(plan: Plan, name: str) -> str:
    image = Path(plan.images, f"{name}.img")
    with image.open("ab") as file:
        file.truncate(_IMAGE_BYTES)
    return str(image)
