"""What is wrong in a configuration: dangling references, duplicates, what no component knows."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from brine.common.errors import nearest
from brine.common.schema import member, shape_of, shown, unknown_key
from brine.common.uids import uid_pool_fault
from brine.config import params, schema
from brine.config.model import (
    Cluster,
    ConfigDisk,
    ConfigNic,
    Configuration,
    Instance,
    Network,
    Node,
    NodeGroup,
    Stamped,
    every,
)
from brine.config.params import Mistake
from brine.config.schema import ConfigObject, is_private, is_uuid, shallow

# Checks that several kinds of objects have in common.


def unknown_keys(where: str, item: ConfigObject) -> Iterator[Mistake]:
    """Keys of an object that its kind does not have."""
    for key in item.extra:
        text = unknown_key(key, shape_of(type(item)).by_key)
        yield Mistake(member(where, key), text, "unknown-key")


def form(
    where: str, check: Callable[[str], str | None], value: str | None, kind: str
) -> Iterator[Mistake]:
    """A value that does not look as it should, by a check of :mod:`formats`."""
    # What is empty is absent, but nothing goes without a name.
    if (value or kind == "name") and (fault := check(value or "")):
        yield Mistake(where, fault, kind)


def reference(
    where: str, noun: str, value: Any, known: set[str], *, needed: bool = False
) -> Iterator[Mistake]:
    """A reference to nothing.

    :param noun: what it should refer to.
    :param needed: it must refer to something.
    """
    if value in known if isinstance(value, str) else False:
        return
    if value or needed:
        what = "" if is_private(where) else f" {shown(value)}"
        text = f"there is no {noun}{what}" if value else f"must name a {noun}"
        yield Mistake(where, text, "dangling")


def choice(where: str, value: str, choices: Iterable[str]) -> Iterator[Mistake]:
    """A value that is none of the few that there are."""
    if value not in choices:
        known = ", ".join(choices)
        yield Mistake(where, f"must be one of {known}, but is {shown(value)}", "value")


def grouped(
    where: str,
    groups: Mapping[str, Mapping[str, Any]],
    components: Mapping[str, params.Component],
    *,
    for_instance: bool = False,
) -> Iterator[Mistake]:
    """Parameters in groups, each with a component of its own."""
    for group, values in groups.items():
        place = member(where, group)
        component = components.get(group)
        if component is None:
            text = f"there is no such group of parameters; {nearest(group, components)}"
            yield Mistake(place, text, "unknown-parameter")
        else:
            yield from params.validate(component, values, place, for_instance=for_instance)


K = TypeVar("K")
V = TypeVar("V")

ADMIN_STATES = ("up", "down", "offline")
ADMIN_STATE_SOURCES = ("admin", "user")
ALLOC_POLICIES = ("preferred", "last_resort", "unallocable")
DISK_MODES = ("rw", "ro")

_TOP_LEVEL = frozenset({"filters", "maintenance"})
_HOSTS = frozenset({"nodes", "instances"})  # their names are host names: case does not count
_LEGACY_DISK_TYPES = {"lvm", "drbd8"}


@shallow()
def find(configuration: Configuration, *, by_uuid: bool = False) -> list[Mistake]:
    """All that is wrong in a configuration; pointers have names in place of UUIDs.

    :param by_uuid: pointers have UUIDs, which stay when a name or a place in a list changes.
    """
    return list(_Verifier(configuration, by_uuid=by_uuid).all())


def find_misplaced(data: Mapping[str, Any]) -> list[Mistake]:
    """Parameters of the whole cluster on instances, in a configuration's JSON. Loading drops them,
    so they are not there to be found afterwards."""
    found = []
    instances = data.get("instances") or {}
    for key, instance in instances.items():
        for name in params.GLOBAL_HYPERVISOR & set(instance.get("hvparams") or ()):
            where = member("/instances", instance.get("name", key)) + f"/hvparams/{name}"
            text = "is a parameter of the whole cluster, not of an instance; loading drops it"
            found.append(Mistake(where, text, "misplaced-parameter"))
    return sorted(found, key=lambda mistake: mistake.where)


class _Verifier:
    def __init__(self, configuration: Configuration, *, by_uuid: bool) -> None:
        self._config = configuration
        self._by_uuid = by_uuid
        self._nodes = {node.uuid for node in configuration.nodes.values()}
        self._groups = {group.uuid for group in configuration.nodegroups.values()}
        self._networks = {network.uuid for network in configuration.networks.values()}
        self._disks = {disk.uuid for disk in configuration.disks.values()}
        self._macs: dict[str, str] = {}
        self._ips: dict[tuple[str, str], str] = {}
        self._node_ips: dict[str, Node] = {}
        self._users: dict[str, str] = {}

    def all(self) -> Iterator[Mistake]:
        config = self._config
        for key in config.extra:
            if key not in _TOP_LEVEL:
                yield Mistake(member("", key), "is not known", "unknown-key")
        yield from self._cluster(config.cluster)
        for key, node in config.nodes.items():
            yield from self._node(self._place("nodes", key, node), node)
        yield from self._master(config.cluster)
        for key, group in config.nodegroups.items():
            yield from self._group(self._place("nodegroups", key, group), group)
        for key, network in config.networks.items():
            yield from self._network(self._place("networks", key, network), network)
        for key, instance in config.instances.items():
            yield from self._instance(self._place("instances", key, instance), instance)
        for key, disk in config.disks.items():
            where = member("/disks", key)
            yield from self._disk(where, disk)
            if disk.uuid not in self._users:
                yield Mistake(where, "no instance has this disk", "orphan")
        yield from self._identities()

    def _place(self, section: str, key: str, item: ConfigObject) -> str:
        """The JSON pointer of an object, by its name where it has one."""
        name = (
            None if self._by_uuid or isinstance(item, ConfigDisk) else getattr(item, "name", None)
        )
        return member(f"/{section}", name or key)

    def _part(self, where: str, nic: ConfigNic, index: int) -> str:
        return f"{where}/nics/{nic.uuid if self._by_uuid else index}"

    def _cluster(self, cluster: Cluster) -> Iterator[Mistake]:
        where = "/cluster"
        yield from unknown_keys(where, cluster)
        yield from form(f"{where}/cluster_name", schema.label_fault, cluster.name, "name")
        yield from reference(f"{where}/master_node", "node", cluster.master_node, self._nodes)
        yield from form(f"{where}/master_ip", schema.ip_fault, cluster.master_ip, "ip")
        yield from form(f"{where}/mac_prefix", schema.mac_prefix_fault, cluster.mac_prefix, "mac")
        if fault := uid_pool_fault(cluster.uid_pool):
            yield Mistake(f"{where}/uid_pool", fault, "value")
        if cluster.primary_ip_family not in (2, 10):
            text = f"must be 2 (IPv4) or 10 (IPv6), but is {cluster.primary_ip_family}"
            yield Mistake(f"{where}/primary_ip_family", text, "value")
        for index, hypervisor in enumerate(cluster.enabled_hypervisors):
            place = f"{where}/enabled_hypervisors/{index}"
            yield from choice(place, hypervisor, params.HYPERVISORS)
        yield from grouped(f"{where}/hvparams", cluster.hvparams, params.HYPERVISORS)
        for system, of_system in cluster.os_hvp.items():
            place = member(f"{where}/os_hvp", system)
            yield from grouped(place, of_system, params.HYPERVISORS, for_instance=True)
        yield from grouped(f"{where}/beparams", cluster.beparams, {"default": params.BACKEND})
        yield from grouped(f"{where}/nicparams", cluster.nicparams, {"default": params.NIC})
        yield from params.validate(params.NODE, cluster.ndparams, f"{where}/ndparams")
        yield from grouped(f"{where}/diskparams", cluster.diskparams, params.DISKS)

    def _node(self, where: str, node: Node) -> Iterator[Mistake]:
        yield from unknown_keys(where, node)
        yield from form(f"{where}/name", schema.name_fault, node.name, "name")
        yield from form(f"{where}/primary_ip", schema.ip_fault, node.primary_ip, "ip")
        yield from form(f"{where}/secondary_ip", schema.ip_fault, node.secondary_ip, "ip")
        yield from reference(f"{where}/group", "node group", node.group, self._groups)
        yield from params.validate(params.NODE, node.ndparams, f"{where}/ndparams")
        own = {schema.canonical_ip(node.secondary_ip): "secondary_ip"}
        own[schema.canonical_ip(node.primary_ip)] = "primary_ip"  # often one for both
        for ip, key in own.items():
            other = self._node_ips.setdefault(ip, node) if ip else node
            if other is not node:
                of_other = self._place("nodes", other.uuid, other)
                yield Mistake(f"{where}/{key}", f"{ip} is also {of_other}'s", "duplicate-ip")

    def _master(self, cluster: Cluster) -> Iterator[Mistake]:
        nodes = self._config.nodes.values()
        where = "/cluster/master_node"
        master = next((node for node in nodes if node.uuid == cluster.master_node), None)
        if master and (master.offline or master.drained):
            state = "offline" if master.offline else "drained"
            yield Mistake(where, f"the master is {state}", "master")
        elif master and not master.master_candidate:
            yield Mistake(where, "the master is no master candidate", "master")
        elif nodes and not any(node.master_candidate for node in nodes):
            yield Mistake(where, "no node is a master candidate", "master")
        other = self._node_ips.get(schema.canonical_ip(cluster.master_ip))
        if master and other and other is not master:
            text = f"{cluster.master_ip} is also {self._place('nodes', other.uuid, other)}'s"
            yield Mistake("/cluster/master_ip", text, "duplicate-ip")

    def _group(self, where: str, group: NodeGroup) -> Iterator[Mistake]:
        yield from unknown_keys(where, group)
        yield from form(f"{where}/name", schema.label_fault, group.name, "name")
        yield from params.validate(params.NODE, group.ndparams, f"{where}/ndparams")
        yield from grouped(f"{where}/diskparams", group.diskparams, params.DISKS)
        yield from choice(f"{where}/alloc_policy", group.alloc_policy, ALLOC_POLICIES)
        for network, values in group.networks.items():
            place = member(f"{where}/networks", network)
            yield from reference(place, "network", network, self._networks)
            yield from params.validate(params.NIC, values, place)

    def _network(self, where: str, network: Network) -> Iterator[Mistake]:
        yield from unknown_keys(where, network)
        yield from form(f"{where}/name", schema.label_fault, network.name, "name")
        for key, net, gateway in (
            ("", network.network, network.gateway),
            ("6", network.network6, network.gateway6),
        ):
            fault = schema.ip_network_fault(net) if net else None
            if fault:
                yield Mistake(f"{where}/network{key}", fault, "ip")
            if not gateway:
                continue
            place = f"{where}/gateway{key}"
            yield from form(place, schema.ip_fault, gateway, "ip")
            if not net or fault or schema.ip_fault(gateway):
                continue
            if ipaddress.ip_address(gateway) not in ipaddress.ip_network(net):
                yield Mistake(place, f"{gateway} is not in {net}", "ip")
        yield from form(f"{where}/mac_prefix", schema.mac_prefix_fault, network.mac_prefix, "mac")

    def _instance(self, where: str, instance: Instance) -> Iterator[Mistake]:
        yield from unknown_keys(where, instance)
        yield from form(f"{where}/name", schema.name_fault, instance.name, "name")
        if instance.primary_node or not instance.forthcoming:
            place = f"{where}/primary_node"
            yield from reference(place, "node", instance.primary_node, self._nodes, needed=True)
        for index, node in enumerate(instance.secondary_nodes):
            yield from reference(f"{where}/secondary_nodes/{index}", "node", node, self._nodes)
        yield from choice(f"{where}/admin_state", instance.admin_state, ADMIN_STATES)
        source = instance.admin_state_source
        yield from choice(f"{where}/admin_state_source", source, ADMIN_STATE_SOURCES)
        component = params.HYPERVISORS.get(instance.hypervisor)
        if component is None:
            yield from choice(f"{where}/hypervisor", instance.hypervisor, params.HYPERVISORS)
        elif instance.hvparams:
            place = f"{where}/hvparams"
            yield from params.validate(component, instance.hvparams, place, for_instance=True)
        yield from self._memory(where, instance)
        for index, nic in enumerate(instance.nics):
            yield from self._nic(self._part(where, nic, index), nic)
        for index, disk in enumerate(instance.disks):
            place = f"{where}/disks/{index}"
            yield from reference(place, "disk", disk, self._disks)
            if (other := _first(self._users, disk, place)) is not None:
                yield Mistake(place, f"the disk is also {other}", "duplicate-disk")

    def _memory(self, where: str, instance: Instance) -> Iterator[Mistake]:
        if not instance.beparams:
            return
        faults = list(params.validate(params.BACKEND, instance.beparams, f"{where}/beparams"))
        yield from faults
        filled = self._config.be_params(instance)
        least, most = filled["minmem"], filled["maxmem"]
        if not faults and type(least) is type(most) is int and least > most:
            text = f"minmem, {least} MiB, is more than maxmem, {most} MiB"
            yield Mistake(f"{where}/beparams", text, "value")

    def _nic(self, where: str, nic: ConfigNic) -> Iterator[Mistake]:
        yield from unknown_keys(where, nic)
        if nic.mac:
            mac = nic.mac.lower()
            yield from form(f"{where}/mac", schema.mac_fault, mac, "mac")
            if (other := _first(self._macs, mac, where)) is not None:
                yield Mistake(f"{where}/mac", f"{mac} is also {other}'s", "duplicate-mac")
        if nic.network is not None:
            yield from reference(f"{where}/network", "network", nic.network, self._networks)
        if nic.nicparams:
            yield from params.validate(params.NIC, nic.nicparams, f"{where}/nicparams")
        filled = self._config.nic_params(nic)
        has_address = bool(nic.ip or nic.network)
        yield from params.validate_nic(filled, where, has_address=has_address)
        if nic.ip:
            yield from form(f"{where}/ip", schema.ip_fault, nic.ip, "ip")
            segment = nic.network or f"link {filled['link']}"
            key = (segment, schema.canonical_ip(nic.ip))
            if (other := _first(self._ips, key, where)) is not None:
                yield Mistake(f"{where}/ip", f"{nic.ip} is also {other}'s", "duplicate-ip")

    def _disk(self, where: str, disk: ConfigDisk) -> Iterator[Mistake]:
        yield from unknown_keys(where, disk)
        if disk.dev_type and disk.dev_type not in _LEGACY_DISK_TYPES:
            yield from choice(f"{where}/dev_type", disk.dev_type, params.DISKS)
        yield from choice(f"{where}/mode", disk.mode, DISK_MODES)
        yield from params.validate_disk(disk.dev_type, disk.params, f"{where}/params")
        if disk.size < 0:
            yield Mistake(f"{where}/size", f"must not be negative, but is {disk.size}", "value")
        for index, node in enumerate(disk.nodes):
            yield from reference(f"{where}/nodes/{index}", "node", node, self._nodes)
        if disk.dev_type in ("drbd", "drbd8"):
            for index, node in enumerate(disk.logical_id[:2]):
                yield from reference(f"{where}/logical_id/{index}", "node", node, self._nodes)
        for index, child in enumerate(disk.children):
            yield from self._disk(f"{where}/children/{index}", child)

    def _identities(self) -> Iterator[Mistake]:
        uuids = {self._config.cluster.uuid: "/cluster"}
        names: dict[tuple[str, str], Stamped] = {}
        for section, key, item in every(self._config):
            where = self._place(section, key, item)
            if key != item.uuid:
                text = f"has the key {key}, but the UUID {item.uuid}"
                yield Mistake(where, text, "key-mismatch")
            inner = item.nics if isinstance(item, Instance) else ()
            for each, its_place in [(item, where)] + [
                (nic, self._part(where, nic, index)) for index, nic in enumerate(inner)
            ]:
                if (other := _first(uuids, each.uuid, its_place)) is not None:
                    yield Mistake(its_place, f"has the UUID of {other}", "duplicate-uuid")
            name = None if isinstance(item, ConfigDisk) else getattr(item, "name", None)
            if name is None:
                continue
            folded = name.lower() if section in _HOSTS else name
            if (twin := _first(names, (section, folded), item)) is not None:
                text = f"{name} is also the name of {twin.uuid}"
                if getattr(twin, "name", None) != name:
                    text = f"only the case of letters tells {name} from the name of {twin.uuid}"
                yield Mistake(member(f"/{section}", key) + "/name", text, "duplicate-name")
            if is_uuid(name):
                yield Mistake(f"{where}/name", "a name must not look like a UUID", "name")


def _first(seen: dict[K, V], key: K, value: V) -> V | None:
    """Who had *key* before; None, and *value* has it, if nobody did."""
    if key in seen:
        return seen[key]
    seen[key] = value
    return None
