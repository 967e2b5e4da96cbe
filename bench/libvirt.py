"""libvirt, and guests that are the same for it and for Brine, in the node of a benchmark."""

import os
from pathlib import Path

from bench.harness import timed

PACKAGES = ("libvirt-daemon-system", "libvirt-daemon-driver-qemu", "libvirt-clients")
VERSIONS_OF = ("libvirt-daemon-system", "qemu-system-x86")
USER = "libvirt-qemu"
"""The user that QEMU runs as under libvirt."""
BRIDGE = "br0"
IMAGES = Path("/var/lib/bench")
"""A folder for images of disks."""
SOCKETS = Path("/run/bench")
"""Where guests have their sockets that are ours."""
GUEST = "/run/brine-lab"
"""Where the kernel and the initramfs are."""
MEMORY_MIB = 128
APPEND = "console=ttyS0 panic=-1 quiet"

_IMAGE_BYTES = 64 * 2**20


def prepare() -> None:
    """Start libvirt's daemon, and make what guests need."""
    IMAGES.mkdir()
    SOCKETS.mkdir()
    # libvirt's QEMU makes its sockets as its own user, and ours as a root without privileges.
    SOCKETS.chmod(0o777)
    timed(
        ["systemctl", "start", "libvirtd.service"],
        ["ip", "link", "add", BRIDGE, "type", "bridge"],
        ["ip", "link", "set", BRIDGE, "up"],
    )


def make_image(name: str) -> Path:
    """An empty disk image."""
    image = IMAGES / f"{name}.img"
    image.touch()
    os.truncate(image, _IMAGE_BYTES)
    return image


# The emulated guest of both; a monitor besides libvirt's own, since each serves one client.
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
{processor}
<devices>
  <emulator>/usr/bin/qemu-system-x86_64</emulator>
  <controller type='usb' model='none'/>
  <memballoon model='none'/>
  {devices}
</devices>
{arguments}
</domain>
"""
_QMP_XML = """<qemu:commandline>
<qemu:arg value='-qmp'/><qemu:arg value='unix:{qmp},server=on,wait=off'/></qemu:commandline>
"""


def disk_xml(image: object) -> str:
    """A virtio disk, as libvirt has it described."""
    return f"""<disk type='file' device='disk'>
<driver name='qemu' type='raw' cache='none' io='threads' discard='unmap'/>
<source file='{image}'/><target dev='vda' bus='virtio'/></disk>
"""


def nic_xml(mac: str) -> str:
    """A virtio NIC, of which QEMU moves the frames itself, as it does for ours."""
    return f"""<interface type='bridge'><mac address='{mac}'/><source bridge='{BRIDGE}'/>
<model type='virtio'/><driver name='qemu'/></interface>
"""


def domain_xml(name: str, devices: str, *, qmp: Path | None, processor: str = "") -> str:
    """A domain, as libvirt has it described.

    :param qmp: a socket for a monitor that is ours.
    """
    return _DOMAIN_XML.format(
        name=name,
        memory_mib=MEMORY_MIB,
        guest=GUEST,
        append=APPEND,
        processor=processor,
        devices=devices,
        arguments=_QMP_XML.format(qmp=qmp) if qmp else "",
    )
