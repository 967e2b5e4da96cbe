"""The faults of a configuration: dangling references, duplicates, unknown keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from brine.common.errors import nearest
from brine.common.schema import member, shape_of, shown, unknown_key
from brine.common.uids import uid_pool_fault
from brine.config import params, schema
from brine.config.model import (
    KINDS,
    NOUNS,
    Cluster,
    ConfigDisk,
    ConfigNic,
    Configuration,
    Instance,
    Network,
    Node,
    NodeGroup,
    Stamped,
    all_objects,
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
    """A value that does not look as it should, by a check of :mod:`brine.config.schema`."""
    # What is empty is absent, but nothing goes without a name.
    if (value or kind == "name") and (fault := check(value or "")):
        yield Mistake(where, fault, kind)


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
def find(
    configuration: Configuration,
    *,
    by_uuid: bool = False,
    removed: Mapping[str, str] | None = None,
) -> list[Mistake]:
    """All that is wrong in a configuration; pointers have names in place of UUIDs.

    :param by_uuid: pointers have UUIDs, which stay when a name or a place in a list changes.
    :param removed: names by UUID of objects that are no longer there; mistakes name them.
    """
    return list(_Verifier(configuration, by_uuid=by_uuid, removed=removed or {}).all())


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
    def __init__(
        self, configuration: Configuration, *, by_uuid: bool, removed: Mapping[str, str]
    ) -> None:
        self._config = configuration
        self._by_uuid = by_uuid
        self._removed = removed
        self._known = {
            section: {item.uuid for item in getattr(configuration, section).values()}
            for section in KINDS
        }
        self._macs: dict[str, str] = {}
        self._ips: dict[tuple[str, str], str] = {}
        self._node_ips: dict[str, Node] = {}
        self._users: dict[str, tuple[Instance, str]] = {}

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
            yield from self._disk(where, disk, self._users.get(key))
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
        yield from self._reference(f"{where}/master_node", "nodes", cluster.master_node)
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
        yield from self._reference(f"{where}/group", "nodegroups", node.group)
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
            place = member(f"{where}/networks", self._removed.get(network, network))
            yield from self._reference(place, "networks", network)
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
            yield from self._reference(place, "nodes", instance.primary_node, needed=True)
        for index, node in enumerate(instance.secondary_nodes):
            yield from self._reference(f"{where}/secondary_nodes/{index}", "nodes", node)
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
            yield from self._reference(place, "disks", disk)
            if (other := _first(self._users, disk, (instance, place))) is not None:
                yield Mistake(place, f"the disk is also {other[1]}", "duplicate-disk")

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
            yield from self._reference(f"{where}/network", "networks", nic.network)
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

    def _disk(
        self, where: str, disk: ConfigDisk, user: tuple[Instance, str] | None
    ) -> Iterator[Mistake]:
        yield from unknown_keys(where, disk)
        if disk.dev_type and disk.dev_type not in _LEGACY_DISK_TYPES:
            yield from choice(f"{where}/dev_type", disk.dev_type, params.DISKS)
        yield from choice(f"{where}/mode", disk.mode, DISK_MODES)
        yield from params.validate_disk(disk.dev_type, disk.params, f"{where}/params")
        if disk.size < 0:
            yield Mistake(f"{where}/size", f"must not be negative, but is {disk.size}", "value")
        for index, node in enumerate(disk.nodes):
            place = f"{where}/nodes/{index}"
            for mistake in self._reference(place, "nodes", node):
                if user is None or node not in self._removed:
                    yield mistake
                elif user[0].primary_node != node:  # else there is only one word that is wrong
                    number, name = user[1].rpartition("/")[2], user[0].name
                    text = f"{mistake.text}, and disk {number} of {name} is on it"
                    yield Mistake(place, text, mistake.kind)
        if disk.dev_type in ("drbd", "drbd8"):
            for index, node in enumerate(disk.logical_id[:2]):
                yield from self._reference(f"{where}/logical_id/{index}", "nodes", node)
        for index, child in enumerate(disk.children):
            yield from self._disk(f"{where}/children/{index}", child, user)

    def _reference(
        self, where: str, section: str, value: Any, *, needed: bool = False
    ) -> Iterator[Mistake]:
        """A reference to nothing.

        :param needed: it must refer to something.
        """
        if isinstance(value, str) and value in self._known[section]:
            return
        noun = NOUNS.get(section, "disk")
        if not value:
            if needed:
                yield Mistake(where, f"must name a {noun}", "dangling")
        elif is_private(where):
            yield Mistake(where, f"there is no {noun}", "dangling")
        elif isinstance(value, str) and value in self._removed:
            text = f"the {noun} {self._removed[value]} is being removed"
            yield Mistake(where, text, "dangling")
        else:
            yield Mistake(where, f"there is no {noun} {shown(value)}", "dangling")

    def _identities(self) -> Iterator[Mistake]:
        uuids = {self._config.cluster.uuid: "/cluster"}
        names: dict[tuple[str, str], Stamped] = {}
        for section, key, item in all_objects(self._config):
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
