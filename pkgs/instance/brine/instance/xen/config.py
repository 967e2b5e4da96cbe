"""The configuration file of a domain. Source: :manpage:`xl.cfg(5)`,
:manpage:`xl-disk-configuration(5)` and
:manpage:`xl-network-configuration(5)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

from brine.common.files import write_whole
from brine.instance.xen.last_start import RUN, WRITER
from brine.vm import markers
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.instances import DOMAIN_SPEC
from brine.vm.nic import Nic
from brine.vm.spec import Spec, to_json
from brine.vm.values import Mode

TYPES = {"xen-pvm": "pv", "xen-pvh": "pvh"}
"""Xen's type of domain for each hypervisor of a spec."""

GRUBS = {
    "xen-pvm": "/usr/lib/grub-xen/grub-x86_64-xen.bin",
    "xen-pvh": "/usr/lib/grub-xen/grub-i386-xen_pvh.bin",
}
"""The GRUB for a spec without a kernel, which finds one on the guest's first disk. It runs in the
domain; pygrub would read the guest's file systems as root of the node."""

KEYS = frozenset(
    {
        *(
            "name",
            "node",
            "claim_serial",
            "version",
            "uuid",
            "hypervisor",
            "admin_state",
            "admin_state_source",
        ),
        *("tags", "vcpus", "memory_mib", "kernel", "initrd", "append", "disks", "nics"),
        *("reboot_behavior", "user_shutdown", "shutdown_timeout"),
        *("start_timeout", "wait_for_network", "extra_arguments", "cpu_weight"),
        *("cpu_limit_percent", "start_order", "slice", "owner", "ignored"),
    }
)
"""The keys of a spec that apply to a domain; the others are QEMU's."""

DISK_KEYS = frozenset(
    {
        *("uuid", "name", "unit", "size_mib", "path", "format", "format_source", "read_only"),
        *("discard", "by_hand"),
    }
)
NIC_KEYS = frozenset({"uuid", "mac", "mode", "link", "ips", "mtu", "by_hand"})
_ODD = frozenset("\"'\\\n\r\0")


def configuration(spec: Spec) -> str:
    """The content of the file for ``xl create``."""
    ended = "preserve"  # an ended domain stays: its state is the only record of how it ended
    settings: dict[str, str | int | list[str]] = {
        "name": spec.name,
        "uuid": spec.uuid,
        "type": TYPES[spec.hypervisor],
        "memory": spec.memory_mib,
        "vcpus": spec.vcpus,
        "kernel": kernel_of(spec),
        "ramdisk": spec.initrd,
        "cmdline": spec.append,
        "cpu_weight": spec.cpu_weight,
        "cap": spec.cpu_limit_percent,
        "disk": [_disk(disk, number) for number, disk in enumerate(spec.disks)],
        "vif": [_vif(nic) for nic in spec.nics],
        "on_poweroff": ended,
        "on_crash": ended,
        "on_watchdog": ended,
        "on_reboot": "restart" if spec.reboot_behavior == "reboot" else ended,
    }
    lines = [f"{key} = {_text(value)}" for key, value in settings.items() if value not in ("", 0)]
    return "".join(f"{line}\n" for line in (*lines, *spec.extra_arguments))


def kernel_of(spec: Spec) -> str:
    """The kernel of a domain, or GRUB."""
    return spec.kernel or GRUBS[spec.hypervisor]


def _disk(disk: Disk, number: int) -> str:
    access = "ro" if disk.read_only else "rw"
    options = [f"format={disk.format}", f"vdev=xvd{ascii_lowercase[number]}", f"access={access}"]
    if not disk.discard:
        options.append("no-discard")
    # Last, because it takes the rest of the line, commas included.
    return ",".join([*options, f"target={disk.path}"])


def _vif(nic: Nic) -> str:
    options = [f"mac={nic.mac}"]
    if nic.mode == Mode.BRIDGED:
        options += [f"bridge={nic.link}", "script=vif-bridge"]
    elif nic.mode == Mode.OPEN_VSWITCH:
        options += [f"bridge={nic.link}", "script=vif-openvswitch"]
    else:
        options.append("script=vif-route")
    if nic.ips:
        options.append(f"ip={' '.join(nic.ips)}")
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
    """A quoted string that xl reads completely."""
    return '"' + "".join(f"\\x{ord(c):02x}" if c in _ODD else c for c in text) + '"'


# The file of an instance's last start, which :mod:`brine.instance.xen.last_start` reads.

_MODE = 0o600
_FOLDER_MODE = 0o711  # who attaches to a console sees whether there is a domain, and no more


def write_config(spec: Spec) -> Path:
    """Write the configuration of an instance's domain; returns its file."""
    file = InstanceFiles(spec.name).domain
    file.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    file.parent.chmod(_FOLDER_MODE)
    heading = f"{WRITER}{os.getpid()}\n{RUN}{markers.this_run()}\n"
    text = f"{heading}{DOMAIN_SPEC}{json.dumps(to_json(spec))}\n{configuration(spec)}"
    write_whole(file, text.encode(), mode=_MODE, alone=True)
    return file
