"""A whole configuration in memory: its objects by UUID, and how they are found."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import jsonpointer

from brine.common.errors import nearest
from brine.common.schema import member, shown
from brine.common.uids import uid_pool_fault
from brine.config import params
from brine.config.schema import (
    ConfigError,
    ConfigObject,
    JsonObject,
    ip_fault,
    ip_network_fault,
    is_uuid,
    label_fault,
    mac_fault,
    mac_prefix_fault,
    name_fault,
    parse_json,
    rule,
    shallow,
)
from brine.vm.values import LARGEST_PORT, volume_group_fault

# The objects of a cluster, as a Ganeti 2.16 to 3.1 configuration has them. Each key has what is
# expected of its value; more than that is in brine.config.verify.

Params = dict[str, Any]
"""Parameters of a component: a flat mapping."""

Groups = dict[str, dict[str, Any]]
"""Parameters by group: by hypervisor, by disk template, or under ``default``."""

_HOST: Params = {"fault": name_fault, "kind": "name"}
_LABEL: Params = {"fault": label_fault, "kind": "name"}
_IP: Params = {"fault": ip_fault, "kind": "ip"}
_MAC_PREFIX: Params = {"fault": mac_prefix_fault, "kind": "mac"}
_NETWORK: Params = {"fault": ip_network_fault, "kind": "ip"}


IPV4, IPV6 = 2, 10
"""Families of addresses, in Linux's numbers."""


def _ip_family_fault(value: int) -> str | None:
    return None if value in (IPV4, IPV6) else f"must be 2 (IPv4) or 10 (IPv6), but is {value}"


def _group_fault(name: str | None) -> str | None:
    return volume_group_fault(name) if name else None


def _negative_fault(value: int) -> str | None:
    return f"must not be negative, but is {value}" if value < 0 else None


def _number(low: int, high: int = (1 << 31) - 1) -> Params:
    """The rule of a whole number, of each in a list, or of null."""

    def fault(value: int | list[int] | None) -> str | None:
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [one for one in numbers if not low <= one <= high]
        return f"must be {low} to {high}, but is {shown(wrong[0])}" if wrong else None

    return {"fault": fault, "kind": "value"}


_PORT = _number(0, LARGEST_PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamped(ConfigObject):
    """An object with a serial number, which each change raises, and times in seconds since 1970."""

    serial_no: int = 1
    ctime: float = 0.0
    mtime: float = 0.0
    tags: list[str] = rule(list, lines=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Stamped):
    """The cluster; its nicparams and beparams are under ``default``."""

    name: str = rule(key="cluster_name", **_LABEL)
    master_node: str = rule("", refers="nodes")
    master_ip: str = rule("", **_IP)
    master_netdev: str = ""
    master_netmask: int = rule(32, **_number(0, 128))
    use_external_mip_script: bool = False
    primary_ip_family: int = rule(2, fault=_ip_family_fault, kind="value")
    rsahostkeypub: str = ""
    dsahostkeypub: str = ""
    highest_used_port: int = rule(11000, **_PORT)
    tcpudp_port_pool: list[int] = rule(list, **_PORT)
    mac_prefix: str = rule("aa:00:00", **_MAC_PREFIX)
    volume_group_name: str | None = rule(None, fault=_group_fault, kind="value")
    reserved_lvs: list[str] = rule(list)
    drbd_usermode_helper: str | None = None
    default_bridge: str | None = None
    default_hypervisor: str | None = None
    file_storage_dir: str = ""
    shared_file_storage_dir: str = ""
    gluster_storage_dir: str = ""
    enabled_hypervisors: list[str] = rule(lambda: ["kvm"], choices=params.HYPERVISORS)
    hvparams: Groups = rule(dict, groups=params.HYPERVISORS)
    ipolicy: Params = rule(dict)
    os_hvp: dict[str, Groups] = rule(dict)
    beparams: Groups = rule(dict, groups={"default": params.BACKEND})
    osparams: Groups = rule(dict, texts=2)
    osparams_private_cluster: Groups = rule(dict, secret=True, texts=2)
    nicparams: Groups = rule(dict, groups={"default": params.NIC})
    ndparams: Params = rule(dict, params=params.NODE)
    diskparams: Groups = rule(dict, groups=params.DISKS)
    candidate_pool_size: int = rule(10, **_number(1))
    modify_etc_hosts: bool = True
    modify_ssh_setup: bool = True
    maintain_node_health: bool = False
    uid_pool: list[list[int]] = rule(list, fault=uid_pool_fault, kind="value")
    default_iallocator: str = ""
    default_iallocator_params: Params = rule(dict)
    hidden_os: list[str] = rule(list)
    blacklisted_os: list[str] = rule(list)
    prealloc_wipe_disks: bool = False
    hv_state_static: Params = rule(dict)
    disk_state_static: Params = rule(dict)
    enabled_disk_templates: list[str] = rule(list)
    candidate_certs: dict[str, str] = rule(dict)
    max_running_jobs: int = rule(20, **_number(1))
    max_tracked_jobs: int = rule(25, **_number(1))
    install_image: str = ""
    instance_communication_network: str = ""
    zeroing_image: str = ""
    compression_tools: list[str] = rule(list)
    enabled_user_shutdown: bool = False
    data_collectors: Groups = rule(dict)
    diagnose_data_collector_filename: str = ""
    maint_round_delay: int = rule(300, **_number(0))
    maint_balance: bool = False
    maint_balance_threshold: float = 0.1
    enabled_predictive_queue: bool = True
    ssh_key_type: str = "rsa"
    ssh_key_bits: int = rule(2048, **_number(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Stamped):
    """A node."""

    name: str = rule(**_HOST)
    primary_ip: str = rule(**_IP)
    secondary_ip: str = rule("", **_IP)
    master_candidate: bool = False
    offline: bool = False
    drained: bool = False
    group: str = rule("", refers="nodegroups")
    master_capable: bool = True
    vm_capable: bool = True
    ndparams: Params = rule(dict, params=params.NODE)
    powered: bool = True
    hv_state: Params = rule(dict)
    hv_state_static: Params = rule(dict)
    disk_state: Params = rule(dict)
    disk_state_static: Params = rule(dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup(Stamped):
    """A group of nodes; *networks* has the NIC parameters of NICs by the UUID of their network."""

    name: str = rule(**_LABEL)
    ndparams: Params = rule(dict, params=params.NODE)
    diskparams: Groups = rule(dict, groups=params.DISKS)
    ipolicy: Params = rule(dict)
    alloc_policy: str = rule("preferred", choices=("preferred", "last_resort", "unallocable"))
    networks: Groups = rule(dict)
    hv_state_static: Params = rule(dict)
    disk_state_static: Params = rule(dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Stamped):
    """An IP network.

    :param network: with its prefix length, as ``192.0.2.0/24``.
    :param reservations: a string of ``0`` and ``1``, one for each address.
    """

    name: str = rule(**_LABEL)
    network: str = rule("", **_NETWORK)
    network6: str | None = rule(None, **_NETWORK)
    gateway: str | None = rule(None, **_IP)
    gateway6: str | None = rule(None, **_IP)
    mac_prefix: str | None = rule(None, **_MAC_PREFIX)
    reservations: str | None = None
    ext_reservations: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigNic(ConfigObject):
    """A network interface of an instance."""

    name: str | None = None
    mac: str = rule("", fault=mac_fault, kind="mac")
    ip: str | None = rule(None, **_IP)
    network: str | None = rule(None, refers="networks")
    nicparams: Params = rule(dict, params=params.NIC)
    netinfo: Params | None = None
    pci: int | None = None
    hvinfo: Params | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDisk(Stamped):
    """A disk, or a part of one.

    :param logical_id: what it is, in ``dev_type``'s way: ``[volume group, volume]`` for ``plain``,
        ``[node, node, port, minor, minor, secret]`` for ``drbd``.
    :param size: MiB.
    """

    name: str | None = None
    dev_type: str = ""
    logical_id: list[Any] = rule(list, secret=True)
    children: tuple[ConfigDisk, ...] = ()
    nodes: list[str] = rule(list)
    iv_name: str = ""
    size: int = rule(0, fault=_negative_fault, kind="value")
    mode: str = rule("rw", choices=("rw", "ro"))
    params: Params = rule(dict)
    spindles: int | None = None
    pci: int | None = None
    hvinfo: Params | None = None
    dynamic_params: Params | None = None
    forthcoming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance(Stamped):
    """A virtual machine; *admin_state* is its desired state, and *disks* are UUIDs."""

    name: str = rule(**_HOST)
    primary_node: str = rule("", refers="nodes")
    secondary_nodes: list[str] = rule(list, refers="nodes")
    os: str = ""
    hypervisor: str = rule("kvm", choices=params.HYPERVISORS)
    hvparams: Params = rule(dict)
    beparams: Params = rule(dict, params=params.BACKEND)
    osparams: Params = rule(dict, texts=1)
    osparams_private: Params = rule(dict, secret=True, texts=1)
    admin_state: str = rule("down", choices=("up", "down", "offline"))
    admin_state_source: str = rule("admin", choices=("admin", "user"))
    nics: tuple[ConfigNic, ...] = ()
    disks: tuple[str, ...] = ()
    disks_info: list[Any] | None = None
    disk_template: str = ""
    disks_active: bool = False
    network_port: int | None = rule(None, **_PORT)
    forthcoming: bool = False


VERSION = 3000000
"""The format's version where nothing else says one: Ganeti 3.0's."""

MOVED_TAG = "brine:moved-from:"
"""With a node's name, a tag of an instance that a move has taken away from that node, so that a
declaration which still names the node is told."""

KINDS: dict[str, type[Stamped]] = {
    "nodes": Node,
    "nodegroups": NodeGroup,
    "instances": Instance,
    "disks": ConfigDisk,
    "networks": Network,
}
"""The sections of objects, by their JSON key."""

NOUNS = {section: section[:-1] for section in KINDS if section != "disks"}
NOUNS["nodegroups"] = "node group"
"""The noun for a named object, by section."""

HOSTS = frozenset({"nodes", "instances"})
"""The sections whose names are host names: case does not count in these."""


class Names:
    """Finds the UUIDs of one section's objects by UUID, name, or a short name that only one has.
    Case does not count in UUIDs, nor in names of hosts.

    :param section: a key of :data:`NOUNS`; empty if there is none to be found.
    :param names: by UUID.
    """

    def __init__(self, section: str, names: Mapping[str, str]) -> None:
        self._noun = NOUNS.get(section, "object")
        self._names = names
        self._is_folded = section in HOSTS

    @cached_property
    def _by_name(self) -> dict[str, str]:
        """UUIDs by whole name; of several that have the same, the first."""
        return {self._fold(name): key for key, name in reversed([*self._names.items()])}

    @cached_property
    def _by_short_name(self) -> dict[str, list[str]]:
        """UUIDs by the first part of a name, by its first two, and so on."""
        found: dict[str, list[str]] = {}
        for key, name in self._names.items():
            name = self._fold(name)
            end = name.find(".")
            while end > 0:
                found.setdefault(name[:end], []).append(key)
                end = name.find(".", end + 1)
        return found

    def _fold(self, name: str) -> str:
        return name.lower() if self._is_folded else name

    def named(self, name: str) -> str | None:
        """The UUID of the object of that whole name."""
        return self._by_name.get(self._fold(name))

    def short(self, name: str) -> list[str]:
        """The UUIDs of objects of whose names this is the first part, or are the first parts."""
        return self._by_short_name.get(self._fold(name), [])

    def exact(self, reference: str) -> str | None:
        """The UUID of the object of that UUID or whole name."""
        if (found := self.named(reference)) is not None:
            return found
        return next((one for one in (reference, reference.lower()) if one in self._names), None)

    def every(self) -> list[str]:
        """The names of all objects."""
        return list(self._names.values())

    def get(self, reference: str, *, hint: bool = True) -> str:
        """The UUID of the object.

        :param hint: say which name was meant; that takes a while on a large cluster.
        :raises ConfigError: if there is none, or several have that short name.
        """
        if (found := self.exact(reference)) is not None:
            return found
        several = self.short(reference)
        if len(several) > 1:
            first = ", ".join(sorted(self._names[uuid] for uuid in several)[:5])
            text = f"{len(several)} {self._noun}s are named {reference}"
            raise ConfigError(text, hint=f"give the whole name: {first}")
        if several:
            return several[0]
        meant = None
        if hint:
            meant = f"there are no {self._noun}s at all"
            if self._names:
                meant = nearest(reference, self.every())
        text = f"there is no {self._noun} {shown(reference)}"
        raise ConfigError(text, hint=meant if meant and len(meant) < 200 else None)


@dataclass(frozen=True, kw_only=True)
class Configuration(JsonObject):
    """A configuration. Its objects are not to be changed: make another configuration of it.

    :param version: of the format, as Ganeti counts it: 3000000 is 3.0.
    :param serial_no: raised at each change of anything.
    :param ctime: when it was made, seconds since 1970; mtime when it was changed last.
    :param nodes: by UUID, in the file's order, as all objects are.
    :param misplaced: where the file had parameters of the whole cluster on instances; they are
        dropped (design-2.1, "Global hypervisor parameters").
    """

    cluster: Cluster
    version: int = VERSION
    serial_no: int = 1
    ctime: float = 0.0
    mtime: float = 0.0
    nodes: dict[str, Node] = rule(dict)
    nodegroups: dict[str, NodeGroup] = rule(dict)
    instances: dict[str, Instance] = rule(dict)
    disks: dict[str, ConfigDisk] = rule(dict)
    networks: dict[str, Network] = rule(dict)
    misplaced: list[str] = field(
        default_factory=list, compare=False, repr=False, metadata={"apart": True}
    )

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """A configuration from the bytes of a file; raises ConfigError."""
        return cls.from_json(parse_json(data))

    @classmethod
    @shallow()
    def from_json(cls, data: Any, where: str = "") -> Self:
        """A configuration from its JSON, with the upgrades that loading does: objects without UUID
        get one, and global hypervisor parameters are dropped from instances.

        :raises ConfigError: if it is no configuration, or something in it has the wrong type.
        """
        if type(data) is not dict or type(data.get("cluster")) is not dict:
            raise ConfigError(
                "this is no configuration: it has no cluster",
                hint="a configuration is an object with the keys cluster, nodes, instances, ...",
            )
        made = super().from_json(data, where)
        misplaced: list[str] = []
        sections: dict[str, Any] = {
            section: _section(getattr(made, section), misplaced) for section in KINDS
        }
        return dataclasses.replace(made, **sections, misplaced=misplaced)

    def to_json(self) -> dict[str, Any]:
        """The whole as JSON: a new object, whose parts may be those of this configuration."""
        made = super().to_json()
        always = {key: getattr(self, key) for key in ("version", "serial_no", "ctime", "mtime")}
        return made | {
            key: value for key, value in (always | _NO_OBJECTS).items() if key not in made
        }

    @shallow()
    def format(self) -> bytes:
        """The bytes of a file that :meth:`parse` reads."""
        text = json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False)
        return text.encode() + b"\n"

    @cached_property
    def _names(self) -> dict[str, Names]:
        return {}

    def names(self, section: str) -> Names:
        """Finds the objects of a section other than disks."""
        if section not in self._names:
            objects = getattr(self, section)
            names = {key: item.name for key, item in objects.items()}
            self._names[section] = Names(section, names)
        return self._names[section]

    def node(self, reference: str) -> Node:
        """The node of that UUID, name, or short name; raises ConfigError, without a hint."""
        return self.nodes[self.names("nodes").get(reference, hint=False)]

    def instance(self, reference: str) -> Instance:
        """The instance of that UUID, name, or short name; raises ConfigError, without a hint."""
        return self.instances[self.names("instances").get(reference, hint=False)]

    def nic_params(self, nic: ConfigNic) -> dict[str, Any]:
        """mode, link and vlan of a NIC: built-in < cluster < NIC."""
        of_cluster = self.cluster.nicparams.get("default", {})
        return params.defaults(params.NIC) | of_cluster | nic.nicparams

    def be_params(self, instance: Instance) -> dict[str, Any]:
        """Memory, CPUs and the like of an instance: built-in < cluster < instance."""
        of_cluster = self.cluster.beparams.get("default", {})
        return params.defaults(params.BACKEND) | of_cluster | instance.beparams

    def hv_params(self, instance: Instance) -> dict[str, Any]:
        """Hypervisor parameters: built-in < cluster < operating system < instance."""
        hypervisor = instance.hypervisor
        of_cluster = self.cluster.hvparams.get(hypervisor, {})
        of_system = self.cluster.os_hvp.get(instance.os, {}).get(hypervisor, {})
        built_in = params.defaults(params.HYPERVISORS.get(hypervisor, {}))
        return built_in | of_cluster | of_system | instance.hvparams

    def disk_params(self, kind: str, node: Node) -> dict[str, Any]:
        """Parameters of the new disks of a kind on a node: built-in < cluster < group. The volume
        group is the cluster's where no level names one."""
        group = self.names("nodegroups").exact(node.group)
        of_group = self.nodegroups[group].diskparams.get(kind, {}) if group else {}
        built_in = params.defaults(params.DISKS.get(kind, {}))
        found = built_in | self.cluster.diskparams.get(kind, {}) | of_group
        if found.get("vg") == "":
            found["vg"] = self.cluster.volume_group_name or ""
        return found

    def nd_params(self, node: Node) -> dict[str, Any]:
        """Node parameters: built-in < cluster < group < node."""
        group = self.names("nodegroups").exact(node.group)
        of_group = self.nodegroups[group].ndparams if group else {}
        return params.defaults(params.NODE) | self.cluster.ndparams | of_group | node.ndparams


_NO_OBJECTS: dict[str, Any] = {section: {} for section in KINDS}


def _section(objects: Mapping[str, Stamped], misplaced: list[str]) -> dict[str, Stamped]:
    """The objects of a section by UUID, upgraded."""
    upgraded: dict[str, Stamped] = {}
    for key, item in objects.items():
        if "uuid" not in item.present:
            item = dataclasses.replace(item, uuid=key) if is_uuid(key) else item
            key = item.uuid
        if type(item) is Instance and (names := params.GLOBAL_HYPERVISOR & item.hvparams.keys()):
            where = member("/instances", item.name) + "/hvparams"
            misplaced.extend(f"{where}/{name}" for name in sorted(names))
            kept = {name: one for name, one in item.hvparams.items() if name not in names}
            item = dataclasses.replace(item, hvparams=kept)
        upgraded[key] = item
    return upgraded


# JSON pointers (RFC 6901) into a configuration, with names in place of UUIDs.

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def resolve(configuration: Configuration, pointer: str) -> Any:
    """The JSON at *pointer*.

    :param pointer: ``/instances/web1.example.com/nics/0``; empty for the whole. An object may be
        given by UUID, name, or a short name that only one has.
    :raises ConfigError: if there is no such place.
    """
    try:
        parts = jsonpointer.JsonPointer(pointer).parts
    except jsonpointer.JsonPointerException:
        hint = "in a name, ~ is written ~0, and / is written ~1"
        if not pointer.startswith("/"):
            hint = f"a pointer begins with a slash: /{pointer}"
        raise ConfigError(f"{pointer} is no JSON pointer", hint=hint) from None
    if len(parts) > 1 and parts[0] in NOUNS and parts[1] not in getattr(configuration, parts[0]):
        parts = [parts[0], configuration.names(parts[0]).get(parts[1]), *parts[2:]]
    return descend(configuration.to_json(), parts)


def descend(value: Any, parts: Sequence[str]) -> Any:
    """The part of JSON *value* at the reference tokens *parts* of a pointer; raises ConfigError.

    The library's own way down also goes into strings, and past the end of lists.
    """
    place = ""
    for part in parts:
        inner = member(place, part)
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and _INDEX.fullmatch(part) and int(part) < len(value):
            value = value[int(part)]
        else:
            near = isinstance(value, dict) and 0 < len(value) < 1000
            known = nearest(part, value) if near else None
            raise ConfigError(f"there is no {inner}", hint=known)
        place = inner
    return value
