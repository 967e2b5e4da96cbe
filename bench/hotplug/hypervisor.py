"""A guest of libvirt's that both can plug into."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bench.libvirt_node import GUEST, LibvirtNode, libvirt_node
from lab.guest import READY
from lab.progress import step
from lab.waiting import wait_for

DOMAIN = "bench"
QMP = "/run/bench/qmp"

_OURS = ("brine-common", "brine-hotplug")
_XML = "/srv/domain.xml"
_LOG = "/run/bench/log"
_BOOT_TIMEOUT_S = 60.0

# A monitor besides libvirt's own: each serves one client.
_DOMAIN_XML = f"""<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>{DOMAIN}</name>
<memory unit='MiB'>128</memory>
<vcpu>1</vcpu>
<os>
  <type arch='x86_64' machine='pc'>hvm</type>
  <kernel>{GUEST}/kernel</kernel>
  <initrd>{GUEST}/initramfs</initrd>
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
_START = f"""
install --directory --owner=libvirt-qemu --group=libvirt-qemu {Path(QMP).parent}
virsh --quiet create {_XML}
for process in $(pidof libvirtd virtlogd qemu-system-x86_64); do
    echo -20 >/proc/$process/autogroup
done 2>/dev/null || :
"""


@contextlib.contextmanager
def hypervisor() -> Iterator[LibvirtNode]:
    """The node with its guest, which is ready; gone when the block ends."""
    with libvirt_node(_OURS) as found:
        node = found.node
        with step("starting a guest"):
            node.write(_XML, _DOMAIN_XML)
            node.shell(_START)
            log = node.path(_LOG)
            wait_for(
                "the guest to be ready",
                lambda: log.exists() and READY in log.read_text(errors="replace"),
                timeout_s=_BOOT_TIMEOUT_S,
            )
        yield found
