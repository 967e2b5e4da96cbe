"""Parameters that each component knows: hypervisors, back end, NICs, disks, nodes.

Names, types and defaults are Ganeti 3's, but for defaults that name what no longer exists.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from brine.common.errors import nearest, printable
from brine.common.schema import KeySchema, SchemaError, key_schema
from brine.vm.connection import vlan_fault
from brine.vm.values import (
    AIO_MODES,
    BOOT_DEVICES,
    CACHE_MODES,
    REBOOTS,
    SECURITY_MODELS,
    WHOLE,
    like,
    line,
    link_fault,
    listener_fault,
    machine_fault,
    path_fault,
    volume_group_fault,
)

Component = Mapping[str, KeySchema]
"""The parameters of a component by name; a default is what holds where no level says anything."""

GLOBAL_HYPERVISOR = frozenset(
    {"migration_port", "migration_bandwidth", "migration_mode", "xen_cmd"}
)
"""Hypervisor parameters of the cluster alone (design-2.1, "Global hypervisor parameters")."""

_SIZE = {"noun": "a size in MiB, a positive whole number", "limits": WHOLE["memory_mib"]}

Limits = Mapping[str, Any]
"""Of a value, as :func:`brine.common.schema.key` takes them."""

_LINE: Limits = {"check": line()}  # ssconf has a parameter a line, and a spec what can be printed


def _table(
    values: Mapping[str, Any],
    empty: str = "",
    *,
    limits: Mapping[str, Limits] = MappingProxyType({}),
    **special: KeySchema,
) -> Component:
    """A component whose parameters' types are those of their defaults, but for *special*.

    :param empty: names of parameters that are strings, and empty where no level sets them.
    :param limits: of parameters' values, by name. All strings are of one line.
    """
    every = sorted({**values, **dict.fromkeys(empty.split(), "")}.items())
    return {
        name: key_schema(
            name,
            type(value),
            value,
            {"limits": limits.get(name, _LINE if type(value) is str else {})},
        )
        for name, value in every
    } | special


def _maybe_text(name: str, default: str) -> KeySchema:
    return key_schema(name, str | None, default, {"limits": _LINE})


def _unless_empty(check: Callable[[str], str | None]) -> Limits:
    return {"check": line(lambda text: check(text) if text else None)}


def _words_fault(text: str) -> str | None:
    """Why no shell could split *text* into words; None if one could."""
    try:
        shlex.split(text)
    except ValueError as error:
        return f"can't be split into words: {str(error).lower()}"
    return None


_PATH = _unless_empty(path_fault)
_TOPOLOGY = WHOLE["topology"]


DISK_INTERFACES = {"paravirtual": "virtio", "ide": "ide", "scsi": "scsi", "scsi-hd": "scsi"}
"""The interface that a spec has for a ``disk_type``."""

NIC_MODELS = {"paravirtual": "virtio", "e1000": "e1000", "rtl8139": "rtl8139"}
"""The model that a spec has for a ``nic_type``."""

_KVM = _table(
    {
        "acpi": True,
        "boot_order": "disk",
        "cpu_cores": 0,
        "cpu_mask": "all",
        "cpu_sockets": 0,
        "cpu_threads": 0,
        "debug_threads": False,
        "disk_aio": "threads",
        "disk_cache": "default",
        "disk_discard": "default",
        "disk_type": "paravirtual",
        "kernel_args": "ro",
        "kvm_path": "/usr/bin/kvm",
        "kvm_pci_reservations": 12,
        "migration_bandwidth": 32,
        "migration_downtime": 30,
        "migration_mode": "live",
        "migration_port": 8102,
        "nic_type": "paravirtual",
        "reboot_behavior": "reboot",
        "scsi_controller_type": "lsi",
        "security_model": "none",
        "serial_console": True,
        "serial_speed": 38400,
        "spice_ip_version": 0,
        "spice_playback_compression": True,
        "spice_tls_ciphers": "HIGH:-DES:-3DES:-EXPORT:-DH",
        "spice_use_tls": False,
        "spice_use_vdagent": True,
        "use_chroot": False,
        "use_guest_agent": False,
        "use_localtime": False,
        "user_shutdown": False,
        "vhost_net": False,
        "virtio_net_queues": 1,
        "vnc_tls": False,
        "vnc_x509_verify": False,
        "vnet_hdr": True,
    },
    """
        cdrom2_image_path cdrom_disk_type cdrom_image_path cpu_type
        floppy_image_path initrd_path kernel_path keymap kvm_extra kvm_flag
        machine_version mem_path migration_caps security_domain soundhw spice_bind
        spice_image_compression spice_jpeg_wan_compression spice_password_file
        spice_streaming_video spice_zlib_glz_wan_compression usb_devices usb_mouse
        vga vnc_bind_address vnc_password_file vnc_x509_path
    """,
    limits={
        "boot_order": {"choices": BOOT_DEVICES},
        **dict.fromkeys(("cpu_cores", "cpu_sockets", "cpu_threads"), _TOPOLOGY),
        "disk_aio": {"choices": AIO_MODES},
        "disk_cache": {"choices": ("default", *CACHE_MODES)},
        "disk_discard": {"choices": ("default", "ignore", "unmap")},
        "disk_type": {"choices": tuple(DISK_INTERFACES)},
        "kvm_extra": {"check": line(_words_fault)},
        "kvm_flag": {"choices": ("", "enabled", "disabled")},
        "kvm_path": {"check": line(path_fault)},
        "machine_version": _unless_empty(machine_fault),
        "nic_type": {"choices": tuple(NIC_MODELS)},
        "reboot_behavior": {"choices": REBOOTS},
        "security_model": {"choices": SECURITY_MODELS},
        "usb_mouse": {"choices": ("", "mouse", "tablet")},
        "virtio_net_queues": WHOLE["queues"],
        "vnc_bind_address": _unless_empty(listener_fault),
        **dict.fromkeys(
            (
                *("cdrom2_image_path", "cdrom_image_path", "floppy_image_path", "initrd_path"),
                *("kernel_path", "mem_path", "spice_password_file", "vnc_password_file"),
                "vnc_x509_path",
            ),
            _PATH,
        ),
    },
    root_path=_maybe_text("root_path", "/dev/vda1"),
)

_XEN = {
    "cpu_cap": 0,
    "cpu_mask": "all",
    "cpu_weight": 256,
    "migration_port": 8002,
    "reboot_behavior": "reboot",
    # Ganeti has it for KVM alone, and goes by the cluster's enabled_user_shutdown on Xen.
    "user_shutdown": False,
    "xen_cmd": "xl",
}

_XEN_PVM = _table(
    _XEN
    | {
        "blockdev_prefix": "sd",
        "kernel_args": "ro",
        "migration_mode": "live",
        "use_bootloader": False,
    },
    "bootloader_args bootloader_path cpuid initrd_path kernel_path soundhw vif_script",
    limits={
        "cpu_cap": WHOLE["cpu_limit_percent"],
        "cpu_weight": WHOLE["weight"],
        "initrd_path": _PATH,
        "kernel_path": _PATH,
        "reboot_behavior": {"choices": REBOOTS},
    },
    root_path=_maybe_text("root_path", "/dev/xvda1"),
)

_XEN_HVM = _table(
    _XEN
    | {
        "acpi": True,
        "blockdev_prefix": "hd",
        "boot_order": "cd",
        "device_model": "/usr/lib/xen/bin/qemu-dm",
        "disk_type": "paravirtual",
        "kernel_path": "/usr/lib/xen/boot/hvmloader",
        "migration_mode": "non-live",
        "nic_type": "rtl8139",
        "pae": True,
        "use_localtime": False,
        "vif_type": "ioemu",
        "viridian": False,
        "vnc_bind_address": "0.0.0.0",
    },
    "cdrom_image_path cpuid pci_pass soundhw vif_script vnc_password_file",
)

_LXC = _table(
    {
        "devices": "c 1:3 rw,c 1:5 rw,c 1:7 rw,c 1:8 rw,c 1:9 rw,c 1:10 rw,"
        "c 5:0 rw,c 5:1 rw,c 5:2 rw,c 136:* rw",
        "drop_capabilities": "mac_override,sys_boot,sys_module,sys_time,sys_admin",
        "num_ttys": 6,
        "startup_timeout": 30,
    },
    "cpu_mask extra_cgroups extra_config",
)

HYPERVISORS: dict[str, Component] = {
    "kvm": _KVM,
    "xen-pvm": _XEN_PVM,
    "xen-hvm": _XEN_HVM,
    # What a Ganeti cluster may have, and Brine runs nothing on.
    "lxc": _LXC,
    "chroot": _table({"init_script": "/ganeti-chroot"}),
    "fake": _table({"migration_mode": "live"}),
}

_LEFT_OVER = "lxc_"
"""The prefix of parameters that Ganeti's upgrades leave in files of old clusters; nothing reads
them."""

BACKEND: Component = _table(
    {"always_failover": False, "auto_balance": True, "spindle_use": 1, "vcpus": 1},
    limits={"vcpus": WHOLE["vcpus"]},
    maxmem=key_schema("maxmem", int, 128, _SIZE),
    minmem=key_schema("minmem", int, 128, _SIZE),
)

_MODES = {"limits": {"choices": ("bridged", "routed", "openvswitch")}}

NIC_OF_GANETI: Component = _table(
    {"link": "xen-br0", "vlan": ""},
    limits={"link": _unless_empty(link_fault), "vlan": {"check": line(vlan_fault)}},
    mode=key_schema("mode", str, "bridged", _MODES),
)
NIC: Component = {**NIC_OF_GANETI, **_table({"filter": False})}

NODE: Component = _table(
    {
        "cpu_speed": 1.0,
        "exclusive_storage": False,
        "oob_program": "",
        "ovs": False,
        "spindle_count": 1,
        "ssh_port": 22,
    },
    ovs_link=_maybe_text("ovs_link", ""),
    ovs_name=_maybe_text("ovs_name", "switch1"),
)

_MOST_STRIPES = 128
_STRIPE_KIB = (4, 1 << 20)


def _stripe_size_fault(size: int) -> str | None:
    """Why LVM has no stripes of *size* KiB; 0 is LVM's own size."""
    low, high = _STRIPE_KIB
    if size == 0 or (low <= size <= high and not size & (size - 1)):
        return None
    return f"must be 0, or a power of two from {low} to {high}, in KiB, but is {size}"


def _barriers_fault(text: str) -> str | None:
    """Why DRBD has no such barriers to be off; None if it has."""
    if text == "n" or (text and set(text) <= set("bdf") and len(text) == len(set(text))):
        return None
    return f"must be n, or letters of b, d and f, but is {text[:60]!a}"


_WORDS = {"check": line(_words_fault)}
_VOLUME_GROUP: Limits = {"check": line(volume_group_fault)}
_ACCESS: Limits = {"choices": ("kernelspace", "userspace")}
_RATE_KIB: Limits = {"minimum": 1, "maximum": 4 << 20}
_STRIPES: Limits = {"minimum": 1, "maximum": _MOST_STRIPES}

# The numbers of DRBD's are those of its own manual, drbd.conf(5) of version 8.4.
_DRBD: dict[str, Limits] = {
    "c-delay-target": {"minimum": 1, "maximum": 100},
    "c-fill-target": {"minimum": 0, "maximum": 1 << 20},
    "c-max-rate": _RATE_KIB,
    "c-min-rate": {**_RATE_KIB, "minimum": 0},
    "c-plan-ahead": {"minimum": 0, "maximum": 300},
    "data-stripes": _STRIPES,
    "disk-barriers": {"check": line(_barriers_fault)},
    "disk-custom": _WORDS,
    "meta-stripes": _STRIPES,
    "metavg": _VOLUME_GROUP,
    "net-custom": _WORDS,
    "protocol": {"choices": ("A", "B", "C")},
    "resync-rate": _RATE_KIB,
}
_RBD: dict[str, Limits] = {
    "access": _ACCESS,
    "pool": {"check": line(like(r"[^\s/@]+", "is no name of a pool"))},
}
_GLUSTER: dict[str, Limits] = {
    "access": _ACCESS,
    "host": {"check": like(r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*(:[0-9A-Fa-f.]*){2,}", "is no host")},
    "port": {"minimum": 1, "maximum": 65535},
    "volume": {"check": like(r"[A-Za-z0-9_-]+", "is no name of a volume")},
}

DISKS: dict[str, Component] = {
    # All but stripes are Brine's own.
    "plain": _table(
        {"stripes": 1, "stripesize": 0},
        "metavg vg",
        limits={
            "stripes": _STRIPES,
            "stripesize": {"check_number": _stripe_size_fault},
            **dict.fromkeys(("metavg", "vg"), _unless_empty(volume_group_fault)),
        },
    ),
    "drbd": _table(
        {
            "c-delay-target": 1,
            "c-fill-target": 0,
            "c-max-rate": 61440,
            "c-min-rate": 4096,
            "c-plan-ahead": 20,
            "data-stripes": 1,
            "disk-barriers": "n",
            "dynamic-resync": False,
            "meta-barriers": False,
            "meta-stripes": 1,
            "metavg": "xenvg",
            "protocol": "C",
            "resync-rate": 61440,
        },
        "disk-custom net-custom",
        limits=_DRBD,
    ),
    "file": {},
    "sharedfile": {},
    "blockdev": {},
    "diskless": {},
    "rbd": _table({"access": "kernelspace", "pool": "rbd"}, limits=_RBD),
    "ext": _table({"access": "kernelspace"}, limits={"access": _ACCESS}),
    "gluster": _table(
        {"access": "kernelspace", "host": "127.0.0.1", "port": 24007, "volume": "gv0"},
        limits=_GLUSTER,
    ),
}


DISK_PARAMETERS = {"plain": ("stripes", "stripesize", "vg")}
"""The parameters that a node goes by when it makes a volume, by the kind of its disk."""

_OF_DRBD_DISKS = _table({"default-metavg": "xenvg"})
"""Parameters of a single disk besides those of its kind: Ganeti's name for metavg there."""


def validate_disk(kind: str, values: Mapping[str, Any], where: str) -> Iterator[Mistake]:
    """The faults in the parameters of one disk, whose dev_type is *kind*."""
    component = DISKS.get(kind.replace("drbd8", "drbd"))
    if component is DISKS["drbd"]:
        component = {**component, **_OF_DRBD_DISKS}
    elif component is DISKS["ext"]:  # its provider has further ones, all strings
        values = {name: value for name, value in values.items() if name in component}
    if component is not None:
        yield from validate(component, values, where)


def defaults(component: Component) -> dict[str, Any]:
    """The built-in values of a component's parameters: a new mapping."""
    found = _DEFAULTS.get(id(component))
    if found is None:
        found = {name: param.default for name, param in component.items()}
        _DEFAULTS[id(component)] = found
    return dict(found)


_DEFAULTS: dict[int, dict[str, Any]] = {}
"""Of components, which are never changed and never go: each object of a configuration asks."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that is wrong at one place, a JSON pointer; *kind* is a word for programs."""

    where: str
    text: str
    kind: str = "parameter"

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.text}")


def validate(
    component: Component, values: Mapping[str, Any], where: str, *, for_instance: bool = False
) -> Iterator[Mistake]:
    """The faults in *values* of a component; *for_instance* global ones are mistakes too."""
    for name, value in values.items():
        param = component.get(name)
        place = f"{where}/{name}"
        if name.startswith(_LEFT_OVER):
            continue
        if param is None:
            text = f"there is no such parameter; {_known(name, tuple(component))}"
            yield Mistake(place, text, "unknown-parameter")
        elif for_instance and name in GLOBAL_HYPERVISOR:
            text = "is a parameter of the whole cluster, not of an instance"
            yield Mistake(place, text, "misplaced-parameter")
        else:
            try:
                param.check(value, place)
            except SchemaError as error:
                yield Mistake(place, error.text)


@lru_cache(maxsize=256)
def _known(name: str, known: tuple[str, ...]) -> str:
    return nearest(name, known) if known else "none is known here"
