"""Parameters that each component knows: hypervisors, back end, NICs, disks, nodes.

Names, types and defaults are Ganeti 3's, but for defaults that name what no longer exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from brine.common.errors import nearest
from brine.common.schema import KeySchema, SchemaError, key_schema

Component = Mapping[str, KeySchema]
"""The parameters of a component by name; a default is what holds where no level says anything."""

GLOBAL_HYPERVISOR = frozenset(
    {"migration_port", "migration_bandwidth", "migration_mode", "xen_cmd"}
)
"""Hypervisor parameters of the cluster alone (design-2.1, "Global hypervisor parameters")."""

_SIZE = {"noun": "a size in MiB, a positive whole number", "limits": {"minimum": 1}}


def _table(values: Mapping[str, Any], **special: KeySchema) -> Component:
    """A component whose parameters' types are those of their defaults, but for *special*."""
    return {name: key_schema(name, type(value), value) for name, value in values.items()} | special


def _maybe_text(name: str, default: str) -> KeySchema:
    return key_schema(name, str | None, default)


_KVM = _table(
    {
        "acpi": True,
        "boot_order": "disk",
        "cdrom2_image_path": "",
        "cdrom_disk_type": "",
        "cdrom_image_path": "",
        "cpu_cores": 0,
        "cpu_mask": "all",
        "cpu_sockets": 0,
        "cpu_threads": 0,
        "cpu_type": "",
        "debug_threads": False,
        "disk_aio": "threads",
        "disk_cache": "default",
        "disk_discard": "default",
        "disk_type": "paravirtual",
        "floppy_image_path": "",
        "initrd_path": "",
        "kernel_args": "ro",
        "kernel_path": "",
        "keymap": "",
        "kvm_extra": "",
        "kvm_flag": "",
        "kvm_path": "/usr/bin/kvm",
        "kvm_pci_reservations": 12,
        "machine_version": "",
        "mem_path": "",
        "migration_bandwidth": 32,
        "migration_caps": "",
        "migration_downtime": 30,
        "migration_mode": "live",
        "migration_port": 8102,
        "nic_type": "paravirtual",
        "reboot_behavior": "reboot",
        "scsi_controller_type": "lsi",
        "security_domain": "",
        "security_model": "none",
        "serial_console": True,
        "serial_speed": 38400,
        "soundhw": "",
        "spice_bind": "",
        "spice_image_compression": "",
        "spice_ip_version": 0,
        "spice_jpeg_wan_compression": "",
        "spice_password_file": "",
        "spice_playback_compression": True,
        "spice_streaming_video": "",
        "spice_tls_ciphers": "HIGH:-DES:-3DES:-EXPORT:-DH",
        "spice_use_tls": False,
        "spice_use_vdagent": True,
        "spice_zlib_glz_wan_compression": "",
        "usb_devices": "",
        "usb_mouse": "",
        "use_chroot": False,
        "use_guest_agent": False,
        "use_localtime": False,
        "user_shutdown": False,
        "vga": "",
        "vhost_net": False,
        "virtio_net_queues": 1,
        "vnc_bind_address": "",
        "vnc_password_file": "",
        "vnc_tls": False,
        "vnc_x509_path": "",
        "vnc_x509_verify": False,
        "vnet_hdr": True,
    },
    root_path=_maybe_text("root_path", "/dev/vda1"),
)

_XEN = {
    "cpu_cap": 0,
    "cpu_mask": "all",
    "cpu_weight": 256,
    "cpuid": "",
    "migration_port": 8002,
    "reboot_behavior": "reboot",
    "soundhw": "",
    # Ganeti has it for KVM alone, and goes by the cluster's enabled_user_shutdown on Xen.
    "user_shutdown": False,
    "vif_script": "",
    "xen_cmd": "xl",
}

_XEN_PVM = _table(
    _XEN
    | {
        "blockdev_prefix": "sd",
        "bootloader_args": "",
        "bootloader_path": "",
        "initrd_path": "",
        "kernel_args": "ro",
        "kernel_path": "",
        "migration_mode": "live",
        "use_bootloader": False,
    },
    root_path=_maybe_text("root_path", "/dev/xvda1"),
)

_XEN_HVM = _table(
    _XEN
    | {
        "acpi": True,
        "blockdev_prefix": "hd",
        "boot_order": "cd",
        "cdrom_image_path": "",
        "device_model": "/usr/lib/xen/bin/qemu-dm",
        "disk_type": "paravirtual",
        "kernel_path": "/usr/lib/xen/boot/hvmloader",
        "migration_mode": "non-live",
        "nic_type": "rtl8139",
        "pae": True,
        "pci_pass": "",
        "use_localtime": False,
        "vif_type": "ioemu",
        "viridian": False,
        "vnc_bind_address": "0.0.0.0",
        "vnc_password_file": "",
    }
)

_LXC = _table(
    {
        "cpu_mask": "",
        "devices": "c 1:3 rw,c 1:5 rw,c 1:7 rw,c 1:8 rw,c 1:9 rw,c 1:10 rw,"
        "c 5:0 rw,c 5:1 rw,c 5:2 rw,c 136:* rw",
        "drop_capabilities": "mac_override,sys_boot,sys_module,sys_time,sys_admin",
        "extra_cgroups": "",
        "extra_config": "",
        "num_ttys": 6,
        "startup_timeout": 30,
    }
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

_LEFT_OVER = frozenset(
    {
        "lxc_cgroup_use",
        "lxc_devices",
        "lxc_drop_capabilities",
        "lxc_extra_config",
        "lxc_startup_wait",
        "lxc_tty",
    }
)
"""What Ganeti's upgrades leave in files of old clusters; nothing reads it."""

BACKEND: Component = _table(
    {"always_failover": False, "auto_balance": True, "spindle_use": 1, "vcpus": 1},
    maxmem=key_schema("maxmem", int, 128, _SIZE),
    minmem=key_schema("minmem", int, 128, _SIZE),
)

NIC_MODES = ("bridged", "routed", "openvswitch")

NIC: Component = _table(
    {"link": "xen-br0", "vlan": ""},
    mode=key_schema("mode", str, "bridged", {"limits": {"choices": NIC_MODES}}),
)

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

DISKS: dict[str, Component] = {
    "plain": _table({"stripes": 1}),
    "drbd": _table(
        {
            "c-delay-target": 1,
            "c-fill-target": 0,
            "c-max-rate": 61440,
            "c-min-rate": 4096,
            "c-plan-ahead": 20,
            "data-stripes": 1,
            "disk-barriers": "n",
            "disk-custom": "",
            "dynamic-resync": False,
            "meta-barriers": False,
            "meta-stripes": 1,
            "metavg": "xenvg",
            "net-custom": "",
            "protocol": "C",
            "resync-rate": 61440,
        }
    ),
    "file": {},
    "sharedfile": {},
    "blockdev": {},
    "diskless": {},
    "rbd": _table({"access": "kernelspace", "pool": "rbd"}),
    "ext": _table({"access": "kernelspace"}),
    "gluster": _table(
        {"access": "kernelspace", "host": "127.0.0.1", "port": 24007, "volume": "gv0"}
    ),
}


_OF_DISKS: Component = _table({"default-metavg": "xenvg"})
"""What a disk of its own may have beside its kind's parameters: Ganeti's name for metavg there."""

_ANY_PARAMETER = frozenset({"ext"})
"""Kinds of disks whose parameters are their provider's, and strings."""


def validate_disk(kind: str, values: Mapping[str, Any], where: str) -> Iterator[Mistake]:
    """What is wrong with the parameters of one disk.

    :param kind: its dev_type; of one that is not known, that is said elsewhere.
    """
    component = DISKS.get("drbd" if kind == "drbd8" else kind)
    if component is None:
        return
    if kind == "drbd" or kind == "drbd8":
        component = {**component, **_OF_DISKS}
    if kind in _ANY_PARAMETER:
        values = {name: value for name, value in values.items() if name in component}
    yield from validate(component, values, where)


def defaults(component: Component) -> dict[str, Any]:
    """The built-in values of a component's parameters."""
    return {name: param.default for name, param in component.items()}


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that is wrong at one place.

    :param where: JSON pointer, from what was checked.
    :param text: what is wrong, and what would be right.
    :param kind: a word for the kind of mistake, for programs.
    """

    where: str
    text: str
    kind: str = "parameter"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def validate(
    component: Component, values: Mapping[str, Any], where: str, *, for_instance: bool = False
) -> Iterator[Mistake]:
    """What is wrong with the parameters *values* of one component.

    :param for_instance: global parameters are mistakes too.
    """
    for name, value in values.items():
        param = component.get(name)
        place = f"{where}/{name}"
        if name in _LEFT_OVER:
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


def validate_nic(values: Mapping[str, Any], where: str, *, has_address: bool) -> Iterator[Mistake]:
    """What is wrong with a NIC whose parameters, all levels together, are *values* (design-2.1,
    "Non bridged instances support").

    :param has_address: it has an IP address, or a network to get one of.
    """
    if values.get("mode") == "routed" and not has_address:
        yield Mistake(where, "a NIC in mode routed needs an ip", "nic")
    if values.get("mode") in ("bridged", "openvswitch") and not values.get("link"):
        yield Mistake(where, f"a NIC in mode {values['mode']} needs a link", "nic")


@lru_cache(maxsize=256)
def _known(name: str, known: tuple[str, ...]) -> str:
    return nearest(name, known) if known else "none is known here"
