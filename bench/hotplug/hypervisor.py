"""A node with libvirt, Brine's packages, and a guest that both can plug into.

libvirt's packages are fetched with the machine's own apt; they are installed in the node alone.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import packages
from lab.debian import host_release
from lab.guest import READY
from lab.guest_image import guest_image
from lab.images import node_image
from lab.machine import Machine
from lab.node import boot_node
from lab.packages import build_packages
from lab.progress import step
from lab.tree import TREE
from lab.waiting import wait_for

DOMAIN = "bench"
BRIDGE = "br0"
QMP = "/run/bench/qmp"
IMAGES = "/var/lib/bench"
CODE = "/srv/brine"
"""Where the node has the bench."""

_PEER = "libvirt-daemon-system"
_PEERS = (_PEER, "libvirt-daemon-driver-qemu", "libvirt-clients")
_OURS = ("brine-common", "brine-hotplug")
_DEBS = "/srv/packages"
_KERNEL = "/run/brine-lab"
_LOG = "/run/bench/log"
_BOOT_TIMEOUT_S = 60.0

# A monitor besides libvirt's own: each serves one client.
_DOMAIN_XML = f"""<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>{DOMAIN}</name>
<memory unit='MiB'>128</memory>
<vcpu>1</vcpu>
<os>
  <type arch='x86_64' machine='pc'>hvm</type>
  <kernel>{_KERNEL}/kernel</kernel>
  <initrd>{_KERNEL}/initramfs</initrd>
  <cmdline>console=ttyS0 panic=-1 quiet</cmdline>
</os>
<features><acpi/></features>
<devices>
  <emulator>/usr/bin/qemu-system-x86_64</emulator>
  <controller type='usb' model='none'/>
  <memballoon model='none'/>
  <serial type='unix'>
    <source mode='bind' path='/run/bench/serial'/>
    <log file='{_LOG}'/>
  </serial>
</devices>
<qemu:commandline>
  <qemu:arg value='-qmp'/>
  <qemu:arg value='unix:{QMP},server=on,wait=off'/>
</qemu:commandline>
</domain>
"""

# Where the kernel shares the processors out by group (sched(7)), these are as far ahead of the
# machine's other work as what measures; see machine.lead_own_group().
_PREPARE = f"""
dpkg --force-unsafe-io --install {_DEBS}/*.deb
systemctl start libvirtd.service
install --directory --owner=libvirt-qemu --group=libvirt-qemu {Path(QMP).parent}
install --directory {IMAGES}
ip link add {BRIDGE} type bridge
ip link set {BRIDGE} up
virsh --quiet create {_DEBS}/domain.xml
for process in $(pidof libvirtd virtlogd qemu-system-x86_64); do
    echo -20 >/proc/$process/autogroup
done 2>/dev/null || :
"""


@dataclass(frozen=True)
class Hypervisor:
    """The node, and what it runs."""

    node: Machine
    libvirt: str
    qemu: str
    system: str
    python: str


@contextlib.contextmanager
def hypervisor() -> Iterator[Hypervisor]:
    """The node with its guest, which is ready; gone when the block ends."""
    release = host_release()
    ours = [path for path in build_packages() if path.name.startswith(_OURS)]
    tree = node_image(release)
    peers = packages.archives(_PEERS, tree / "var/lib/dpkg/status", tree.parent.name)
    image = guest_image()
    with boot_node(release, name="bench") as node:
        with step("installing libvirt and Brine in a node, and starting a guest"):
            for archive in [*ours, *peers]:
                node.put(archive, f"{_DEBS}/{archive.name}")
            node.write(f"{_DEBS}/domain.xml", _DOMAIN_XML)
            node.put(image.folder, _KERNEL)
            node.put(TREE / "bench", f"{CODE}/bench")
            node.shell(_PREPARE, timeout_s=300)
            log = node.path(_LOG)
            wait_for(
                "the guest to be ready",
                lambda: log.exists() and READY in log.read_text(errors="replace"),
                timeout_s=_BOOT_TIMEOUT_S,
            )
        yield Hypervisor(
            node,
            libvirt=f"libvirt {packages.version(_PEER)}",
            qemu=f"QEMU {_version(node, 'qemu-system-x86')}",
            system=_said(node, '. /etc/os-release; echo "$PRETTY_NAME"'),
            python=_said(node, "/usr/bin/python3 --version"),
        )


def _version(node: Machine, package: str) -> str:
    return _said(node, f"dpkg-query --show --showformat='${{Version}}' {package}")


def _said(node: Machine, script: str) -> str:
    return node.shell(script).strip()
