"""A spec as xl reads it. Source: :manpage:`xl.cfg(5)`, :manpage:`xl-disk-configuration(5)` and
:manpage:`xl-network-configuration(5)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_lowercase

from brine.hotplug.choices import Mode
from brine.instance.spec import DiskSpec, NicSpec, Spec

TYPES = {"xen-pvm": "pv", "xen-pvh": "pvh"}
"""Xen's word for each hypervisor of a spec's that is Xen's."""

GRUBS = {
    "xen-pvm": "/usr/lib/grub-xen/grub-x86_64-xen.bin",
    "xen-pvh": "/usr/lib/grub-xen/grub-i386-xen_pvh.bin",
}
"""Where the spec has no kernel: the GRUB that finds one on the guest's first disk. It runs in the
domain; pygrub would read the guest's file systems as root of the node."""

KEYS = frozenset(
    {
        "name",
        "node",
        "version",
        "uuid",
        "hypervisor",
        "admin_state",
        "admin_state_source",
        "tags",
        "vcpus",
        "memory_mib",
        "kernel",
        "initrd",
        "append",
        "disks",
        "nics",
        "serial_console",
        "reboot_behavior",
        "user_shutdown",
        "shutdown_timeout",
        "start_timeout",
        "wait_for_network",
        "extra_arguments",
        "cpu_weight",
        "cpu_limit_percent",
        "start_order",
    }
)
"""What of a spec means something to a domain; the rest is QEMU's."""

DISK_KEYS = frozenset({"uuid", "path", "format", "format_source", "read_only", "discard"})
NIC_KEYS = frozenset({"uuid", "mac", "mode", "link", "ips", "mtu"})
_ODD = frozenset("\"'\\\n\r\0")
MOST_DISKS = len(ascii_lowercase)


def configuration(spec: Spec) -> str:
    """The file that ``xl create`` is given."""
    return "".join(f"{key} = {_text(value)}\n" for key, value in _settings(spec)) + "".join(
        f"{line}\n" for line in spec.extra_arguments
    )


def _settings(spec: Spec) -> Iterator[tuple[str, str | int | list[str]]]:
    yield "name", spec.name
    yield "uuid", spec.uuid
    yield "type", TYPES[spec.hypervisor]
    yield "memory", spec.memory_mib
    yield "vcpus", spec.vcpus
    yield "kernel", kernel_of(spec)
    if spec.initrd:
        yield "ramdisk", spec.initrd
    if spec.append:
        yield "cmdline", spec.append
    if spec.cpu_weight:
        yield "cpu_weight", spec.cpu_weight
    if spec.cpu_limit_percent:
        yield "cap", spec.cpu_limit_percent
    yield "disk", [_disk(disk, number) for number, disk in enumerate(spec.disks)]
    yield "vif", [_vif(nic) for nic in spec.nics]
    # An ended domain stays to be looked at: who ended it is known only from what is left of it.
    yield "on_poweroff", "preserve"
    yield "on_crash", "preserve"
    yield "on_watchdog", "preserve"
    yield "on_reboot", "restart" if spec.reboot_behavior == "reboot" else "preserve"


def kernel_of(spec: Spec) -> str:
    """What a domain starts with: its kernel, or GRUB."""
    return spec.kernel or GRUBS[spec.hypervisor]


def _disk(disk: DiskSpec, number: int) -> str:
    access = "ro" if disk.read_only else "rw"
    options = [f"format={disk.format}", f"vdev=xvd{ascii_lowercase[number]}", f"access={access}"]
    if not disk.discard:
        options.append("no-discard")
    # Last, as it is all that is left of the line, commas and all.
    return ",".join([*options, f"target={disk.path}"])


def _vif(nic: NicSpec) -> str:
    options = [f"mac={nic.mac}"]
    if nic.mode == Mode.BRIDGED:
        options += [f"bridge={nic.link}", "script=vif-bridge"]
    elif nic.mode == Mode.OPEN_VSWITCH:
        options += [f"bridge={nic.link}", "script=vif-openvswitch"]
    else:
        options += [f"ip={' '.join(nic.ips)}", "script=vif-route"]
    if nic.mtu:
        options.append(f"mtu={nic.mtu}")
    return ",".join(options)


def _text(value: str | int | Sequence[str]) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _quoted(value)
    return f"[{', '.join(map(_quoted, value))}]"


def _quoted(text: str) -> str:
    """A string that ends where it should, however xl looks for its end."""
    return '"' + "".join(f"\\x{ord(c):02x}" if c in _ODD else c for c in text) + '"'
