"""Specs: every key of the definition of an instance, with its type and limits.

Names are those of the field: QEMU's where it has one, else Ganeti's. brine-spec(5) explains each
key. A spec keeps nothing that Brine does not know: a misspelt key would be a wish without
effect.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from brine.common import schema
from brine.common.schema import SchemaError, shape_of
from brine.vm.claim import Claim
from brine.vm.disk import Disk
from brine.vm.keys import key, path_key, uuid_key
from brine.vm.nic import Nic
from brine.vm.slots import is_q35
from brine.vm.values import (
    BOOT_DEVICES,
    WHOLE,
    like,
    listener_fault,
    machine_fault,
    tidy_path,
    vm_name_fault,
)

SpecError = SchemaError
"""A spec that can't be used."""
parse = schema.parse

VERSION = 1
"""Of the format of specs. Who changes it so that an older Brine can't read a spec as it is meant
raises it; an older Brine runs what it knows of a newer spec, and does not define it."""

MACHINE_VERSIONS = {"pc": "pc-i440fx-", "q35": "pc-q35-"}
"""The machine types that mean the newest version of QEMU's, and how all of their versions begin."""

UEFI = "uefi"
"""The firmware that the node has for a machine, and no image by its path."""

USUAL_QEMU = "/usr/bin/qemu-system-x86_64"
"""The program of specs that name no other."""

WHOLE_CPUS = {"kvm": "host", "tcg": "max"}
"""The processor models of QEMU's that have all that the node has, by accelerator."""

QEMU_ITSELF_MIB = 256
"""What QEMU takes beside the guest's memory, without what grows with it or with disks."""

_LONGEST_WATCHDOG_S = 24 * 3600
_LARGEST_ID = (1 << 32) - 2  # of users and groups: the next one is none (chown(2))
_LARGEST_SERIAL = (1 << 63) - 1
_LONGEST_S = 3600  # a unit waits no longer for a guest to shut down
_PAGE_TABLES = 256  # this part of the guest's memory: the kernel's, and those of the processor
_DISK_MIB = 32  # QEMU's largest cache of the clusters of an image
_TRANSLATED_MIB = 1024  # what an emulated processor may keep of translated code
_START_S_PER_GIB = 2  # to have huge pages cleared, or memory locked, by a slow machine
_NETWORK_S = 120
_HOTPLUG_PORTS = 8

_NODE = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,253}[A-Za-z0-9])?"
_SLICE = r"(-|[A-Za-z0-9:_.\\]+(-[A-Za-z0-9:_.\\]+)*)\.slice"  # systemd.slice(5)
_LONGEST_UNIT = 255


class AdminState(StrEnum):
    """The desired state of an instance."""

    UP = "up"
    DOWN = "down"
    OFFLINE = "offline"


class Source(StrEnum):
    """The party that set the admin state."""

    ADMIN = "admin"
    USER = "user"
    OWNER = "owner"
    """Its owner was gone, or has asked for its end."""


class SecurityModel(StrEnum):
    """As which user QEMU runs the guest."""

    NONE = "none"
    USER = "user"
    POOL = "pool"


AS_ROOT = 'security_model is "none": QEMU runs as root, and so does a guest that breaks out of it'
"""The warning about an instance that nothing confines."""

NOT_CONFINED = {"security_model": SecurityModel.NONE.value, "chroot": False}
"""The values of the keys that confine QEMU, for Xen domains."""


# What strings of a spec may be.


def _group_fault(text: str) -> str | None:
    if text.isdecimal() and not (re.fullmatch("[0-9]{1,10}", text) and int(text) <= _LARGEST_ID):
        return f"is no number of a group, which is at most {_LARGEST_ID}"
    return None


def _slice_fault(text: str) -> str | None:
    if not re.fullmatch(_SLICE, text) or len(text) > _LONGEST_UNIT:
        return "is no name of a slice, such as ci-job1.slice"
    return None


_ADMIN_STATES = {
    **dict.fromkeys(("on", "true", "yes", "running", "started", "start", "enabled"), "up"),
    **dict.fromkeys(("off", "false", "no", "stopped", "stop", "shutoff", "disabled"), "down"),
}
_FIRMWARES = dict.fromkeys(("efi", "uefi", "ovmf", "edk2"), UEFI)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSpec:
    """The owner of an instance, which does not run without it. See brine-lifecycle(7).

    :param watchdog_timeout: in seconds: how long the owner's watchdog may stay untouched.
    :param group: of the folder that owner and node share, its name or number; empty is root's.
    :param restart_with_owner: whether an instance that ended because its owner was gone, or had
        asked for that, starts again when an owner is back.
    """

    watchdog_timeout: int = key(15, minimum=2, maximum=_LONGEST_WATCHDOG_S)
    group: str = key("", check=_group_fault)
    restart_with_owner: bool = key(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An instance; brine-spec(5) explains each key.

    Timeouts are in seconds. Of the other numbers, and of strings, what is 0 or empty is left to
    Brine, QEMU or the node.
    """

    OTHER_WORDS: ClassVar = {
        **dict.fromkeys(("memory", "mem", "ram"), "memory_mib"),
        **dict.fromkeys(("interfaces", "networks"), "nics"),
        **dict.fromkeys(("cdrom", "iso"), "cdroms"),
        **dict.fromkeys(("autostart", "onboot"), "admin_state"),
        **dict.fromkeys(("cpus", "smp"), "vcpus"),
        **dict.fromkeys(("drives", "hdd"), "disks"),
        **dict.fromkeys(("bios", "uefi", "loader"), "firmware"),
    }

    version: int = key(VERSION, minimum=1)
    name: str = key(check=vm_name_fault)
    uuid: str = uuid_key()
    hypervisor: str = key("kvm", choices=("kvm", "xen-pvm", "xen-pvh"))
    node: str = key("", check=like(_NODE, "is no name of a node, such as node1.example.com"))
    claim_serial: int = key(0, minimum=0, maximum=_LARGEST_SERIAL)
    admin_state: str = key("down", choices=tuple(AdminState), meant=_ADMIN_STATES)
    admin_state_source: str = key("admin", choices=tuple(Source))
    tags: tuple[str, ...] = key(())
    qemu: str = path_key(USUAL_QEMU)
    machine: str = key("pc", check=machine_fault)
    accel: str = key("kvm", choices=("kvm", "tcg"))
    cpu: str = key("")
    vcpus: int = key(1, **WHOLE["vcpus"])
    sockets: int = key(0, **WHOLE["topology"])
    cores: int = key(0, **WHOLE["topology"])
    threads: int = key(0, **WHOLE["topology"])
    memory_mib: int = key(1024, **WHOLE["memory_mib"])
    firmware: str = path_key(
        "", f"{UEFI}|/.*", f"is neither {UEFI} nor an absolute path", meant=_FIRMWARES
    )
    kernel: str = path_key("")
    initrd: str = path_key("")
    append: str = key("")
    boot_order: tuple[str, ...] = key(BOOT_DEVICES, choices=BOOT_DEVICES)
    disks: tuple[Disk, ...] = key(())
    nics: tuple[Nic, ...] = key(())
    cdroms: tuple[str, ...] = path_key((), "(/.*)?")
    hotplug_ports: int = key(_HOTPLUG_PORTS, minimum=0, maximum=24)
    vnc_bind: str = key("", check=listener_fault, tidy=tidy_path)
    vnc_port: int = key(0, **WHOLE["port"])
    vnc_password_file: str = path_key("")
    serial_console: bool = key(True)
    usb_tablet: bool = key(False)
    guest_agent: bool = key(True)
    rtc: str = key("utc", choices=("utc", "localtime"))
    acpi: bool = key(True)
    reboot_behavior: str = key("reboot", choices=("reboot", "exit"))
    security_model: str = key("pool", choices=tuple(SecurityModel))
    security_user: str = key("")
    chroot: bool = key(True)
    huge_pages: str = path_key("")
    extra_arguments: tuple[str, ...] = key(())
    user_shutdown: str = key("stop", choices=("stop", "restart"))
    shutdown_timeout: int = key(120, minimum=1, maximum=_LONGEST_S)
    start_timeout: int = key(0, minimum=0, maximum=_LONGEST_S)
    wait_for_network: bool = key(False)
    memory_lock: bool = key(False)
    memory_max_mib: int = key(0, **{**WHOLE["memory_mib"], "minimum": 0})
    cpu_limit_percent: int = key(0, **WHOLE["cpu_limit_percent"])
    cpu_weight: int = key(0, **WHOLE["weight"])
    io_weight: int = key(0, **WHOLE["weight"])
    start_order: int = key(100, minimum=0, maximum=999)
    slice: str = key("", check=_slice_fault)
    owner: OwnerSpec | None = None
    ignored: tuple[str, ...] = key(())

    @property
    def claim(self) -> Claim:
        """The node that may run it."""
        return Claim(self.node, self.claim_serial)

    def is_xen(self) -> bool:
        """Whether it is a domain of Xen's."""
        return self.hypervisor != "kvm"

    def start_limit_s(self) -> int:
        """How many seconds its start may take."""
        if self.start_timeout:
            return self.start_timeout
        limit_s = 150 if self.is_xen() else 90
        limit_s += _START_S_PER_GIB * self.memory_mib // 1024
        return min(limit_s + (_NETWORK_S if self.wait_for_network else 0), _LONGEST_S)

    def least_memory_max_mib(self) -> int:
        """The smallest ``memory_max_mib`` with which its QEMU can do all that the spec has. Huge
        pages count in no limit."""
        guest_mib = 0 if self.huge_pages else self.memory_mib
        own_mib = QEMU_ITSELF_MIB + self.memory_mib // _PAGE_TABLES + _DISK_MIB * len(self.disks)
        return guest_mib + own_mib + (_TRANSLATED_MIB if self.accel == "tcg" else 0)

    def cpu_or_default(self) -> str:
        """The processor of its QEMU."""
        return self.cpu or WHOLE_CPUS[self.accel]

    def is_down_by_user(self) -> bool:
        """Whether it should be down, by its user's will."""
        return self.admin_state == AdminState.DOWN and self.admin_state_source == Source.USER

    def keys_without_effect(self) -> tuple[str, ...]:
        """The keys that are set, and that another key makes useless."""
        has_order = self.boot_order != BOOT_DEVICES and bool(self.kernel)
        has_ports = self.hotplug_ports != _HOTPLUG_PORTS and not self.is_q35()
        return ("boot_order",) * has_order + ("hotplug_ports",) * has_ports

    def is_q35(self) -> bool:
        """Whether it is a machine of PCI Express, where devices plug into ports."""
        return is_q35(self.machine)


def to_json(value: Any) -> dict[str, Any]:
    """The inverse of :func:`parse`, with all defaults filled in."""
    names, values_of, compound = _fields_of(value.__class__)
    found = dict(zip(names, values_of(value), strict=True))
    for name in compound:
        found[name] = _plain(found[name])
    return found


_PLAIN = frozenset({str, int, float, bool, type(None)})


@functools.cache
def _fields_of(
    kind: type,
) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]], tuple[str, ...]]:
    """The names of a class's fields, a function that reads them all from an object, and the names
    of those that hold lists or objects."""
    keys = shape_of(kind).by_key
    compound = tuple(name for name, key in keys.items() if not key.kinds <= _PLAIN)
    return tuple(keys), operator.attrgetter(*keys), compound  # of two or more, as all have here


def _plain(value: Any) -> Any:
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return to_json(value) if dataclasses.is_dataclass(value) else value


# Specs of a newer Brine.


def known_part(kind: type, data: Any) -> Any:
    """The keys of an object that *kind* has. Keys of a newer version are left out."""
    if isinstance(data, list):
        return [known_part(kind, one) for one in data]
    if not isinstance(data, dict):
        return data
    hints = typing.get_type_hints(kind)
    found = {name: value for name, value in data.items() if name in shape_of(kind).by_key}
    for name, value in found.items():
        inner = (*typing.get_args(hints[name]), None)[0]
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            found[name] = known_part(inner, value)
    return found


def with_unknown(data: Any, before: Any) -> Any:
    """A spec as JSON, with the keys that only *before* has. In lists of objects those of one UUID
    are the same."""
    if isinstance(data, dict) and isinstance(before, dict):
        return before | {key: with_unknown(value, before.get(key)) for key, value in data.items()}
    if isinstance(data, list) and isinstance(before, list):
        rows = {row.get("uuid"): row for row in before if isinstance(row, dict)}
        return [
            with_unknown(one, rows.get(one["uuid"])) if isinstance(one, dict) else one
            for one in data
        ]
    return data
