"""Specs: every key of the definition of an instance, with its type and limits.

Names are those of the field: QEMU's where it has one, else Ganeti's. The manual page brine-spec(5)
tells the same to people. A spec keeps nothing that Brine does not know: a misspelt key would be a
wish that nobody grants.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from brine.common import schema
from brine.common.schema import SchemaError, shape_of, shown
from brine.hotplug.choices import (
    AIO_MODES,
    CACHE_MODES,
    FORMATS,
    LARGEST_MTU,
    MODELS,
    MOST_QUEUES,
    Mode,
)

T = TypeVar("T")


class SpecError(SchemaError):
    """A spec that can't be used."""


def key(
    default: Any = dataclasses.MISSING,
    *,
    check: Callable[[str], str | None] | None = None,
    **limits: Any,
) -> Any:
    """A key of an object, with what its value may be, as :func:`brine.common.schema.key` has it.

    :param default: none means that it must be there.
    :param check: says what is wrong with a string, or None; of a list of strings with each of
        them. An empty one is not checked where that is the default.
    """

    def fault(text: str) -> str | None:
        if not text.isprintable():
            return f"has characters that can't be printed: {shown(text)}"
        return check(text) if check and (text or default != "") else None

    return schema.key(default, check=fault, **limits)


def parse(kind: type[T], data: Any, where: str = "") -> T:
    """Make an object of *kind*, a dataclass, of what JSON had.

    :param where: JSON pointer of *data*, for errors.
    :raises SpecError: what is wrong, where.
    """
    try:
        return schema.parse(kind, data, where)
    except SchemaError as error:
        raise SpecError(error.text, where=error.where, hint=error.hint) from None


def known_part(kind: type, data: Any) -> Any:
    """What of an object a *kind* has keys for: what a newer one says more is left out."""
    if not isinstance(data, dict):
        return data
    found = {}
    hints = typing.get_type_hints(kind)
    for name in data.keys() & shape_of(kind).by_key.keys():
        value, inner = data[name], _object_in(hints[name])
        if inner and isinstance(value, list):
            value = [known_part(inner, one) for one in value]
        elif inner:
            value = known_part(inner, value)
        found[name] = value
    return found


def with_unknown(kind: type, data: dict[str, Any], before: Any) -> dict[str, Any]:
    """An object with what *before* says and a *kind* has no keys for. In lists of objects those of
    one UUID are the same."""
    if not isinstance(before, dict):
        return data
    hints = typing.get_type_hints(kind)
    known = shape_of(kind).by_key
    found = {**{name: value for name, value in before.items() if name not in known}, **data}
    for name in known:
        inner, value, old = _object_in(hints[name]), data[name], before.get(name)
        if inner and isinstance(value, list):
            rows = old if isinstance(old, list) else []
            by_uuid = {row.get("uuid"): row for row in rows if isinstance(row, dict)}
            found[name] = [with_unknown(inner, one, by_uuid.get(one["uuid"])) for one in value]
        elif inner and value is not None:
            found[name] = with_unknown(inner, value, old)
    return found


def _object_in(hint: Any) -> type | None:
    """The class of the objects of an annotation; None if it has none."""
    inner = (*typing.get_args(hint), None)[0]
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def to_json(value: Any) -> dict[str, Any]:
    """The inverse of :func:`parse`, with all defaults filled in."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return to_json(value) if dataclasses.is_dataclass(value) else value


# What strings of a spec may be.

LONGEST_NAME = 63
UEFI = "uefi"
"""The firmware that the node has for a machine, and no image by its path."""

# It becomes part of the names of a unit, of sockets and of files: no character of it needs an
# escape there. (A dash would, where systemd reads a unit's instance as a path; %i does not.)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,253}[A-Za-z0-9])?")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")
_LONGEST_SERIAL = 20


def name_fault(text: str) -> str | None:
    """Why *text* cannot be the name of an instance; empty if it can."""
    if len(text) > LONGEST_NAME:
        return f"a name has at most {LONGEST_NAME} characters"
    if not _NAME.fullmatch(text):
        return "a name begins with a letter or digit, and has letters, digits, '.', '_' and '-'"
    return None


def node_fault(text: str) -> str | None:
    """Why *text* cannot be the name of a node; empty if it can."""
    return None if _NODE.fullmatch(text) else "is no name of a node, such as node1.example.com"


def uuid_fault(text: str) -> str | None:
    """Why *text* is not a UUID in its usual form; empty if it is."""
    return None if _UUID.fullmatch(text.lower()) else "is no UUID"


def machine_fault(text: str) -> str | None:
    """Why *text* is not a machine type of QEMU; empty if it is."""
    if not _NAME.fullmatch(text):
        return "is no machine type, such as pc or q35; its options go into extra_arguments"
    return None


def mac_fault(text: str) -> str | None:
    """Why *text* is not the MAC address of a NIC; empty if it is."""
    if not _MAC.fullmatch(text):
        return "is no MAC address, such as 52:54:00:12:34:56"
    if int(text[:2], 16) & 1:
        return "is the MAC address of a group, which no NIC can have"
    if not text.strip("0:"):
        return "is what QEMU takes for none"
    return None


def address_fault(text: str) -> str | None:
    """Why *text* is not an IP address; empty if it is."""
    import ipaddress  # most specs have none

    try:
        ipaddress.ip_address(text)
    except ValueError:
        address, slash, _ = text.partition("/")
        if slash and not address_fault(address):
            return f"is an address with a length, and is to be without: {address}"
        return "is no IP address"
    return None


def path_fault(text: str) -> str | None:
    """Why *text* is not the path of a file; empty if it is."""
    return None if text.startswith("/") else "must be an absolute path"


def medium_fault(text: str) -> str | None:
    """Why *text* cannot be the medium of a CD-ROM drive; empty if it can."""
    return path_fault(text) if text else None


def tidy_path(text: str) -> str:
    """An absolute path without what means nothing in it, ``//`` and ``/./``; all else as it is.
    ``..`` stays: links may lead it elsewhere."""
    if not text.startswith("/"):
        return text
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def firmware_fault(text: str) -> str | None:
    """Why *text* is not a firmware (``uefi`` or a path); empty if it is."""
    if text == UEFI or text.startswith("/"):
        return None
    return f"is neither {UEFI} nor an absolute path"


def address_or_path_fault(text: str) -> str | None:
    """Why *text* is not a listening address or the path of a socket; empty if it is."""
    if text.startswith("/"):
        return None
    return "is neither an IP address nor an absolute path" if address_fault(text) else None


def serial_fault(text: str) -> str | None:
    """Why *text* cannot be a disk's serial number; empty if it can."""
    if len(text) > _LONGEST_SERIAL or not text.isascii():
        return f"a serial has at most {_LONGEST_SERIAL} characters of ASCII"
    return None


VERSION = 1
"""Of the format of specs. Who changes it so that an older Brine can't read a spec as it is meant
raises it; an older Brine runs what it knows of a newer spec, and does not define it."""

LONGEST_START_S = 3600
LONGEST_SHUTDOWN_S = 3600
"""A unit waits no longer for a guest to shut down."""

_LEAST_START_S = 90
_LEAST_XEN_START_S = 150
_START_S_PER_GIB = 2  # to have huge pages cleared, or memory locked, by a slow machine
_NETWORK_S = 120
_MOST_VCPUS = 1024
_MOST_MEMORY_MIB = 1 << 32  # all that an x86-64 processor can address: 52 bits
_MOST_CPU_PERCENT = 8192 * 100  # as many processors as Linux can have there
_LARGEST_WEIGHT = 10_000
_MOST_PORTS = 24


class AdminState(StrEnum):
    """The desired state of an instance."""

    UP = "up"
    DOWN = "down"
    OFFLINE = "offline"


class Source(StrEnum):
    """Who set the admin state."""

    ADMIN = "admin"
    USER = "user"


class Interface(StrEnum):
    """The interface of a disk."""

    VIRTIO = "virtio"
    SCSI = "scsi"
    IDE = "ide"


class FormatSource(StrEnum):
    """How the format of a disk is known."""

    ADMIN = "admin"
    START = "start"
    DEFAULT = "default"


class SecurityModel(StrEnum):
    """As which user QEMU runs the guest."""

    NONE = "none"
    USER = "user"
    POOL = "pool"


NOT_CONFINED = {"security_model": SecurityModel.NONE.value, "chroot": False}
"""The values of the keys that confine QEMU, for Xen domains."""


def _choices(kind: type[StrEnum]) -> tuple[str, ...]:
    return tuple(item.value for item in kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackingSpec:
    """The image that another one has its unwritten parts from; it is only read."""

    path: str = key(check=path_fault, tidy=tidy_path)
    format: str = key(choices=FORMATS)
    backing: BackingSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """A disk.

    :param uuid: made from the path where it is not given.
    :param path: a block device, or an image file.
    :param format_source: of :class:`FormatSource`. ``default`` means that nobody said the format;
        ``start``, that a start has found it since, and what the disk holds is the guest's.
    :param backing: of an image that has one.
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

    uuid: str = key("", check=uuid_fault)
    path: str = key(check=path_fault, tidy=tidy_path)
    format: str = key("raw", choices=FORMATS)
    format_source: str = key(FormatSource.ADMIN.value, choices=_choices(FormatSource))
    backing: BackingSpec | None = None
    interface: str = key(Interface.VIRTIO.value, choices=_choices(Interface))
    cache: str = key("none", choices=tuple(CACHE_MODES))
    aio: str = key("threads", choices=AIO_MODES)
    discard: bool = key(True)
    read_only: bool = key(False)
    serial: str = key("", check=serial_fault)
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
        "bridge": "link",
        "network": "link",
        "mac_address": "mac",
        "ip": "ips",
        "address": "ips",
        "addresses": "ips",
    }

    uuid: str = key("", check=uuid_fault)
    mac: str = key("", check=mac_fault)
    model: str = key("virtio", choices=tuple(MODELS))
    mode: str = key(Mode.BRIDGED.value, choices=_choices(Mode))
    link: str = key("")
    vlan: str = key("")
    ips: tuple[str, ...] = key((), check=address_fault)
    queues: int = key(1, minimum=1, maximum=MOST_QUEUES)
    vhost: bool = key(False)
    mtu: int = key(0, minimum=0, maximum=LARGEST_MTU)
    slot: int = key(-1, minimum=-1, maximum=255)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An instance.

    :param version: of the format of specs: :data:`VERSION` is this one.
    :param node: the only one that it may be defined and started on; empty is any.
    :param admin_state: of :class:`AdminState`; *admin_state_source* is who said so, of
        :class:`Source`.
    :param machine: QEMU's machine type: ``pc`` and ``q35``, or a version of either.
    :param accel: ``kvm``, or ``tcg`` for a machine that is emulated.
    :param cpu: QEMU's model; empty is ``host`` with KVM and ``max`` without.
    :param sockets: of processors, *cores* each and *threads* each of those; 0 leaves it to QEMU.
    :param firmware: ``uefi``, or an image; empty is QEMU's own BIOS.
    :param kernel: started in the firmware's stead, with *initrd* and the command line *append*.
    :param boot_order: of ``disk``, ``cdrom`` and ``network``.
    :param cdroms: what is in each CD-ROM drive; empty is nothing.
    :param hotplug_ports: of a ``q35`` machine: how many devices there is room for beside its own.
    :param vnc_bind: an address, or the path of a socket; empty is no VNC.
    :param vnc_port: a TCP port; 0 takes a free one.
    :param vnc_password_file: whose first line is the password, of at most eight characters.
    :param reboot_behavior: whether a guest that reboots does, or ends.
    :param security_user: of the security model ``user``.
    :param chroot: QEMU sees an empty folder as its root.
    :param huge_pages: a mounted hugetlbfs.
    :param extra_arguments: go to QEMU as they are, last.
    :param user_shutdown: whether an instance that its user shut down stays so, or starts again.
    :param shutdown_timeout: in seconds: how long a guest may take to shut down.
    :param start_timeout: in seconds: how long QEMU may take to answer, or a domain to run; 0 is a
        limit that grows with the memory.
    :param wait_for_network: whether a start waits until the node's network is up.
    :param memory_lock: keep the guest's memory out of the swap.
    :param memory_max_mib: of QEMU as a whole, past which the kernel ends it; 0 is no limit.
    :param cpu_limit_percent: of one processor's time; 0 is no limit.
    :param cpu_weight: against other units; 0 leaves it as it is; so does *io_weight*.
    :param start_order: at the node's start lower ones come first.
    """

    OTHER_WORDS: ClassVar = {
        "memory": "memory_mib",
        "mem": "memory_mib",
        "ram": "memory_mib",
        "cpus": "vcpus",
        "interfaces": "nics",
        "networks": "nics",
        "drives": "disks",
        "cdrom": "cdroms",
        "iso": "cdroms",
    }

    version: int = key(VERSION, minimum=1)
    name: str = key(check=name_fault)
    uuid: str = key("", check=uuid_fault, tidy=str.lower)
    hypervisor: str = key("kvm", choices=("kvm", "xen-pvm", "xen-pvh"))
    node: str = key("", check=node_fault)
    admin_state: str = key(AdminState.DOWN.value, choices=_choices(AdminState))
    admin_state_source: str = key(Source.ADMIN.value, choices=_choices(Source))
    tags: tuple[str, ...] = key(())
    qemu: str = key("/usr/bin/qemu-system-x86_64", check=path_fault, tidy=tidy_path)
    machine: str = key("pc", check=machine_fault)
    accel: str = key("kvm", choices=("kvm", "tcg"))
    cpu: str = key("")
    vcpus: int = key(1, minimum=1, maximum=_MOST_VCPUS)
    sockets: int = key(0, minimum=0, maximum=_MOST_VCPUS)
    cores: int = key(0, minimum=0, maximum=_MOST_VCPUS)
    threads: int = key(0, minimum=0, maximum=_MOST_VCPUS)
    memory_mib: int = key(1024, minimum=1, maximum=_MOST_MEMORY_MIB)
    firmware: str = key("", check=firmware_fault, tidy=tidy_path)
    kernel: str = key("", check=path_fault, tidy=tidy_path)
    initrd: str = key("", check=path_fault, tidy=tidy_path)
    append: str = key("")
    boot_order: tuple[str, ...] = key(("disk", "cdrom", "network"))
    disks: tuple[DiskSpec, ...] = key(())
    nics: tuple[NicSpec, ...] = key(())
    cdroms: tuple[str, ...] = key((), check=medium_fault, tidy=tidy_path)
    hotplug_ports: int = key(8, minimum=0, maximum=_MOST_PORTS)
    vnc_bind: str = key("", check=address_or_path_fault, tidy=tidy_path)
    vnc_port: int = key(0, minimum=0, maximum=65535)
    vnc_password_file: str = key("", check=path_fault, tidy=tidy_path)
    serial_console: bool = key(True)
    usb_tablet: bool = key(False)
    guest_agent: bool = key(True)
    rtc: str = key("utc", choices=("utc", "localtime"))
    acpi: bool = key(True)
    reboot_behavior: str = key("reboot", choices=("reboot", "exit"))
    security_model: str = key(SecurityModel.POOL.value, choices=_choices(SecurityModel))
    security_user: str = key("")
    chroot: bool = key(True)
    huge_pages: str = key("", check=path_fault, tidy=tidy_path)
    extra_arguments: tuple[str, ...] = key(())
    user_shutdown: str = key("stop", choices=("stop", "restart"))
    shutdown_timeout: int = key(120, minimum=1, maximum=LONGEST_SHUTDOWN_S)
    start_timeout: int = key(0, minimum=0, maximum=LONGEST_START_S)
    wait_for_network: bool = key(False)
    memory_lock: bool = key(False)
    memory_max_mib: int = key(0, minimum=0, maximum=_MOST_MEMORY_MIB)
    cpu_limit_percent: int = key(0, minimum=0, maximum=_MOST_CPU_PERCENT)
    cpu_weight: int = key(0, minimum=0, maximum=_LARGEST_WEIGHT)
    io_weight: int = key(0, minimum=0, maximum=_LARGEST_WEIGHT)
    start_order: int = key(100, minimum=0, maximum=999)

    def is_xen(self) -> bool:
        """Whether it is a domain of Xen's."""
        return self.hypervisor != "kvm"

    def start_limit_s(self) -> int:
        """How many seconds its start may take."""
        if self.start_timeout:
            return self.start_timeout
        limit_s = _LEAST_XEN_START_S if self.is_xen() else _LEAST_START_S
        limit_s += _START_S_PER_GIB * self.memory_mib // 1024
        return min(limit_s + (_NETWORK_S if self.wait_for_network else 0), LONGEST_START_S)

    def is_down_by_user(self) -> bool:
        """Whether it should be down, by its user's will."""
        return self.admin_state == AdminState.DOWN and self.admin_state_source == Source.USER

    def is_q35(self) -> bool:
        """Whether it is a machine of PCI Express, where devices plug into ports."""
        return "q35" in self.machine
