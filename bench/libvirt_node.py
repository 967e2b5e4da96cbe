"""A node with libvirt, Brine's packages, and files that a guest boots from.

libvirt's packages are fetched with the machine's own apt; they are installed in the node alone.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.harness import PYTHON
from lab import peer_packages
from lab.debian import host_release
from lab.guest_image import guest_image
from lab.images import node_image
from lab.machine import Machine
from lab.node import boot_node
from lab.packages import build_packages
from lab.progress import step

BRIDGE = "br0"
IMAGES = "/var/lib/bench"
"""A folder for images of disks."""
GUEST = "/run/brine-lab"
"""Where the kernel and the initramfs are."""
MEMORY_MIB = 128
APPEND = "console=ttyS0 panic=-1 quiet"

_PEER = "libvirt-daemon-system"
_PEERS = (_PEER, "libvirt-daemon-driver-qemu", "libvirt-clients")
_DEBS = "/srv/packages"

_PREPARE = f"""
dpkg --force-unsafe-io --install {_DEBS}/*.deb
systemctl start libvirtd.service
install --directory {IMAGES}
ip link add {BRIDGE} type bridge
ip link set {BRIDGE} up
"""


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


def nic_xml(mac: str, bridge: str) -> str:
    """A virtio NIC, of which QEMU moves the frames itself, as it does for ours."""
    return f"""<interface type='bridge'><mac address='{mac}'/><source bridge='{bridge}'/>
<model type='virtio'/><driver name='qemu'/></interface>
"""


def domain_xml(
    name: str, devices: str, *, guest: str, qmp: object = "", processor: str = ""
) -> str:
    """A domain, as libvirt has it described.

    :param qmp: a socket for a monitor that is ours.
    """
    return _DOMAIN_XML.format(
        name=name,
        memory_mib=MEMORY_MIB,
        guest=guest,
        append=APPEND,
        processor=processor,
        devices=devices,
        arguments=_QMP_XML.format(qmp=qmp) if qmp else "",
    )


@dataclass(frozen=True)
class LibvirtNode:
    """The node, and a line about what it has."""

    node: Machine
    versions: str


@contextlib.contextmanager
def libvirt_node(ours: Sequence[str]) -> Iterator[LibvirtNode]:
    """The node, in which libvirt's daemon runs; gone when the block ends.

    :param ours: the packages of Brine's that it has.
    """
    release = host_release()
    debs = [path for path in build_packages() if path.name.partition("_")[0] in ours]
    tree = node_image(release)
    peers = peer_packages.archives(_PEERS, tree / "var/lib/dpkg/status", tree.parent.name)
    image = guest_image()
    with boot_node(release, name="bench") as node:
        with step("installing libvirt and Brine in a node"):
            for archive in [*debs, *peers]:
                node.put(archive, f"{_DEBS}/{archive.name}")
            node.put(image.folder, GUEST)
            node.shell(_PREPARE, timeout_s=300)
        system = _said(node, '. /etc/os-release; echo "$PRETTY_NAME"')
        python = _said(node, f"{PYTHON} --version")
        query = "dpkg-query --show --showformat='${Version}' qemu-system-x86"
        has = f"libvirt {peer_packages.version(_PEER)}, QEMU {_said(node, query)}"
        yield LibvirtNode(node, f"{system}, {python}, {has}")


def _said(node: Machine, script: str) -> str:
    return node.shell(script).strip()
