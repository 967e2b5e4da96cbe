"""Specs: every key of the definition of an instance, with its type and limits.

Names are those of the field: QEMU's where it has one, else Ganeti's. brine-spec(5) explains each
key. A spec keeps nothing that Brine does not know: a misspelt key would be a wish that nobody
grants.
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
from brine.vm.slots import is_q35
from brine.vm.values import (
    AIO_MODES,
    BOOT_DEVICES,
    CACHE_MODES,
    FORMATS,
    LARGEST_MTU,
    MODELS,
    UUID,
    WHOLE,
    Mode,
    address_fault,
    like,
    line,
    listener_fault,
    machine_fault,
    tidy_path,
    vm_mac_fault,
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

QEMU_ITSELF_MIB = 256
"""What QEMU takes beside the guest's memory, without what grows with it or with disks."""

_LONGEST_WATCHDOG_S = 24 * 3600
_LARGEST_ID = (1 << 32) - 2  # of users and groups: the next one is none (chown(2))
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


class Interface(StrEnum):
    """The interface of a disk."""

    VIRTIO = "virtio"
    SCSI = "scsi"
    IDE = "ide"


class FormatSource(StrEnum):
    """How the format of a disk is known: the administrator gave it, a start found it (and what the
    disk holds since is the guest's), or nobody did."""

    ADMIN = "admin"
    START = "start"
    DEFAULT = "default"


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


def key(
    default: Any = dataclasses.MISSING,
    *,
    check: Callable[[str], str | None] | None = None,
    **limits: Any,
) -> Any:
    """A key, as :func:`brine.common.schema.key` has it, whose strings can be printed."""

    return schema.key(default, check=line(check), **limits)


def _path(
    default: Any = dataclasses.MISSING,
    pattern: str = "/.*",
    fault: str = "must be an absolute path",
) -> Any:
    return key(default, check=like(pattern, fault), tidy=tidy_path)


def _uuid() -> Any:
    return key("", check=like(UUID, "is no UUID"), tidy=str.lower)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackingSpec:
    """The image that another one has its unwritten parts from; it is only read."""

    path: str = _path()
    format: str = key(choices=FORMATS)
    backing: BackingSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """A disk.

    :param uuid: made from the path where it is not given.
    :param path: a block device, or an image file.
    :param serial: that the guest sees; empty is the beginning of the UUID.
    :param slot: where the guest has it since it was started first: of ``pci.0``, the root port's
        or the LUN; -1 is none yet.
    """

    OTHER_WORDS: ClassVar = {
        "file": "path",
        "device": "path",
        "driver": "format",
        "bus": "interface",
    }

    uuid: str = _uuid()
    path: str = _path()
    format: str = key("raw", choices=FORMATS)
    format_source: str = key("admin", choices=tuple(FormatSource))
    backing: BackingSpec | None = None
    interface: str = key("virtio", choices=tuple(Interface))
    cache: str = key("none", choices=tuple(CACHE_MODES))
    aio: str = key("threads", choices=AIO_MODES)
    discard: bool = key(True)
    read_only: bool = key(False)
    serial: str = key("", check=like("[ -~]{1,20}", "a serial has at most 20 characters of ASCII"))
    slot: int = key(-1, minimum=-1, maximum=255)


def backing_chain(disk: DiskSpec) -> list[BackingSpec]:
    """The backing files of a disk, the nearest first."""
    chain, next_one = [], disk.backing
    while next_one:
        chain.append(next_one)
        next_one = next_one.backing
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class NicSpec:
    """A network interface.

    :param uuid: made from the MAC address where it is not given, and that made at random.
    :param link: the bridge; of a routed NIC the routing table, empty for the main one.
    :param vlan: see brine-nic(1).
    :param ips: the guest's addresses; a routed NIC has one or more.
    :param mtu: in bytes; 0 is the link's.
    :param slot: as a disk's.
    """

    OTHER_WORDS: ClassVar = {
        **dict.fromkeys(("bridge", "network"), "link"),
        **dict.fromkeys(("ip", "address", "addresses"), "ips"),
        "mac_address": "mac",
    }

    uuid: str = _uuid()
    mac: str = key("", check=vm_mac_fault, tidy=str.lower)
    model: str = key("virtio", choices=tuple(MODELS))
    mode: str = key("bridged", choices=tuple(Mode))
    link: str = key("")
    vlan: str = key("")
    ips: tuple[str, ...] = key((), check=address_fault)
    queues: int = key(1, **WHOLE["queues"])
    vhost: bool = key(False)
    mtu: int = key(0, minimum=0, maximum=LARGEST_MTU)
    slot: int = key(-1, minimum=-1, maximum=255)


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
        "cpus": "vcpus",
        "drives": "disks",
    }

    version: int = key(VERSION, minimum=1)
    name: str = key(check=vm_name_fault)
    uuid: str = _uuid()
    hypervisor: str = key("kvm", choices=("kvm", "xen-pvm", "xen-pvh"))
    node: str = key("", check=like(_NODE, "is no name of a node, such as node1.example.com"))
    admin_state: str = key("down", choices=tuple(AdminState))
    admin_state_source: str = key("admin", choices=tuple(Source))
    tags: tuple[str, ...] = key(())
    qemu: str = _path("/usr/bin/qemu-system-x86_64")
    machine: str = key("pc", check=machine_fault)
    accel: str = key("kvm", choices=("kvm", "tcg"))
    cpu: str = key("")
    vcpus: int = key(1, **WHOLE["vcpus"])
    sockets: int = key(0, **WHOLE["topology"])
    cores: int = key(0, **WHOLE["topology"])
    threads: int = key(0, **WHOLE["topology"])
    memory_mib: int = key(1024, **WHOLE["memory_mib"])
    firmware: str = _path("", f"{UEFI}|/.*", f"is neither {UEFI} nor an absolute path")
    kernel: str = _path("")
    initrd: str = _path("")
    append: str = key("")
    boot_order: tuple[str, ...] = key(BOOT_DEVICES, choices=BOOT_DEVICES)
    disks: tuple[DiskSpec, ...] = key(())
    nics: tuple[NicSpec, ...] = key(())
    cdroms: tuple[str, ...] = _path((), "(/.*)?")
    hotplug_ports: int = key(_HOTPLUG_PORTS, minimum=0, maximum=24)
    vnc_bind: str = key("", check=listener_fault, tidy=tidy_path)
    vnc_port: int = key(0, **WHOLE["port"])
    vnc_password_file: str = _path("")
    serial_console: bool = key(True)
    usb_tablet: bool = key(False)
    guest_agent: bool = key(True)
    rtc: str = key("utc", choices=("utc", "localtime"))
    acpi: bool = key(True)
    reboot_behavior: str = key("reboot", choices=("reboot", "exit"))
    security_model: str = key("pool", choices=tuple(SecurityModel))
    security_user: str = key("")
    chroot: bool = key(True)
    huge_pages: str = _path("")
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
