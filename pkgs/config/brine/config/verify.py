"""The faults of a configuration: dangling references, duplicates, unknown keys."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from brine.common.errors import closest, nearest
from brine.common.schema import member, shape_of, shown, unknown_key
from brine.config import params
from brine.config.model import (
    HOSTS,
    IPV4,
    IPV6,
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
)
from brine.config.params import Mistake
from brine.config.runnable import NodeRules
from brine.config.schema import ConfigObject, canonical_ip, ip_fault, is_uuid, shallow
from brine.vm.values import line_fault

_TOP_LEVEL = frozenset({"filters", "maintenance"})
_LEGACY_DISK_TYPES = ("", "lvm", "drbd8")
_RULES: dict[type[ConfigObject], list[dataclasses.Field[Any]]] = {
    kind: [one for one in dataclasses.fields(kind) if one.metadata.get("rules")]
    for kind in (Cluster, ConfigNic, *KINDS.values())
}
"""The fields that have rules."""


@shallow()
def find_mistakes(
    configuration: Configuration,
    *,
    by_uuid: bool = False,
    removed: Mapping[str, str] | None = None,
) -> list[Mistake]:
    """All that is wrong in a configuration; pointers have names in place of UUIDs.

    :param by_uuid: pointers have UUIDs, which stay when a name or a place in a list changes.
    :param removed: names of objects that an input removes, by all that may refer to them.
    """
    verifier = _Verifier(configuration, by_uuid=by_uuid, removed=removed)
    found = list(verifier.all())
    places = {mistake.where for mistake in found}
    found += [mistake for mistake in verifier.odd() if mistake.where not in places]
    return found


class _Verifier:
    def __init__(
        self, configuration: Configuration, *, by_uuid: bool, removed: Mapping[str, str] | None
    ) -> None:
        self._config = configuration
        self._by_uuid = by_uuid
        self._removed = removed or {}
        # A key just written by hand may be meant otherwise; to find out how takes a while.
        self._has_hints = removed is not None and not by_uuid
        self._known = {
            section: {item.uuid for item in getattr(configuration, section).values()}
            for section in KINDS
        }
        self._macs: dict[str, str] = {}
        self._ips: dict[tuple[str, str], str] = {}
        self._node_ips: dict[str, Node] = {}
        self._users: dict[str, tuple[Instance, str]] = {}
        self._uuids = {configuration.cluster.uuid: "/cluster"}
        self._names: dict[tuple[str, str], Stamped] = {}
        self._node_rules = NodeRules(configuration)

    def all(self) -> Iterator[Mistake]:
        config = self._config
        for key in config.extra:
            if key not in _TOP_LEVEL:
                yield Mistake(member("", key), "is not known", "unknown-key")
        for where in config.misplaced:
            text = "is a parameter of the whole cluster, not of an instance; loading drops it"
            yield Mistake(where, text, "misplaced-parameter")
        yield from self._object("/cluster", config.cluster)
        for system, of_system in config.cluster.os_hvp.items():
            place = member("/cluster/os_hvp", system)
            yield from _grouped(place, of_system, params.HYPERVISORS, for_instance=True)
        checks: dict[str, Callable[[str, Any], Iterator[Mistake]]] = {
            "nodes": self._node,
            "nodegroups": self._group,
            "networks": self._network,
            "instances": self._instance,
            "disks": self._disk,
        }
        for section, check in checks.items():
            for key, item in getattr(config, section).items():
                where = self._place(section, item) if section in NOUNS else member("/disks", key)
                yield from self._identity(where, section, key, item)
                yield from check(where, item)
        yield from self._master(config.cluster)

    def odd(self) -> Iterator[Mistake]:
        """Values that no file of ours can have, wherever they are: control characters, and numbers
        that Ganeti's daemons can't read."""
        try:
            text = self._config.format().decode()
            if not ("\\" in text or "\x7f" in text or _LARGE.search(text)):
                return
        except ValueError:  # a number of thousands of digits
            pass
        for key, value in self._config.to_json().items():
            if key not in KINDS:
                yield from self._odd_values(f"/{key}", value)
        for section in KINDS:
            for key, item in getattr(self._config, section).items():
                where = self._place(section, item) if section in NOUNS else member("/disks", key)
                yield from self._odd_values(where, item.to_json())

    def _odd_values(self, where: str, value: Any) -> Iterator[Mistake]:
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, list):
            for index, one in enumerate(value):
                has_uuid = self._by_uuid and isinstance(one, dict) and "uuid" in one
                inner = [*inner, (str(one["uuid"] if has_uuid else index), one)]
        elif fault := _odd_fault(value, is_free=not _FREE_TEXTS.isdisjoint(where.split("/"))):
            yield Mistake(where, fault, "value")
        for key, one in inner:
            place = member(where, key)
            if fault := _odd_fault(key, is_free=False):
                yield Mistake(place, f"its key {fault}", "value")
            yield from self._odd_values(place, one)

    def _place(self, section: str, item: Stamped) -> str:
        """The JSON pointer of an object, by its name where it has one."""
        has_name = not self._by_uuid and section in NOUNS
        return member(f"/{section}", getattr(item, "name", "") if has_name else item.uuid)

    def _object(self, where: str, item: ConfigObject) -> Iterator[Mistake]:
        """Unknown keys of an object, and values against the rules of its kind."""
        for key in item.extra:
            text = unknown_key(key, shape_of(type(item)).by_key)
            yield Mistake(member(where, key), text, "unknown-key")
        for field in _RULES[type(item)]:
            place = f"{where}/{field.metadata['key'] or field.name}"
            yield from self._value(place, getattr(item, field.name), field)

    def _value(self, place: str, value: Any, field: dataclasses.Field[Any]) -> Iterable[Mistake]:
        """The faults of a field's value by its rules."""
        rules = field.metadata["rules"]
        if "fault" in rules:
            fault = rules["fault"](value)
            return (Mistake(place, fault, rules["kind"]),) if fault else ()
        if "params" in rules:
            return params.validate(rules["params"], value, place) if value else ()
        if "texts" in rules:
            return _not_texts(place, value, rules["texts"], secret=field.metadata["secret"])
        if "groups" in rules:
            return _grouped(place, value, rules["groups"])
        if isinstance(value, list):
            singles = (
                self._single(f"{place}/{index}", one, rules) for index, one in enumerate(value)
            )
            return chain.from_iterable(singles)
        return self._single(place, value, rules)

    def _single(self, place: str, value: Any, rules: Mapping[str, Any]) -> Iterable[Mistake]:
        """The faults of a single value by rules that hold for each value of a list, too."""
        if "choices" in rules:
            return _choice(place, value, rules["choices"])
        if "lines" in rules:
            fault = line_fault(value)
            return (Mistake(place, fault, "value"),) if fault else ()
        return self._reference(place, rules["refers"], value)

    def _node(self, where: str, node: Node) -> Iterator[Mistake]:
        yield from self._object(where, node)
        own = {canonical_ip(node.secondary_ip): "secondary_ip"}
        own[canonical_ip(node.primary_ip)] = "primary_ip"  # often one for both
        for ip, key in own.items():
            other = self._node_ips.setdefault(ip, node) if ip else node
            if other is not node:
                of_other = self._place("nodes", other)
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
        yield from _family(cluster)
        other = self._node_ips.get(canonical_ip(cluster.master_ip))
        if master and other and other is not master:
            text = f"{cluster.master_ip} is also {self._place('nodes', other)}'s"
            yield Mistake("/cluster/master_ip", text, "duplicate-ip")

    def _group(self, where: str, group: NodeGroup) -> Iterator[Mistake]:
        yield from self._object(where, group)
        for network, values in group.networks.items():
            place = member(f"{where}/networks", self._removed.get(network, network))
            yield from self._reference(place, "networks", network)
            yield from params.validate(params.NIC, values, place)

    def _network(self, where: str, network: Network) -> Iterator[Mistake]:
        faults = list(self._object(where, network))
        yield from faults
        if any(fault.kind == "ip" for fault in faults):
            return
        for key, net, gateway in (
            ("gateway", network.network, network.gateway),
            ("gateway6", network.network6, network.gateway6),
        ):
            if net and gateway and ipaddress.ip_address(gateway) not in ipaddress.ip_network(net):
                yield Mistake(f"{where}/{key}", f"{gateway} is not in {net}", "ip")

    def _instance(self, where: str, instance: Instance) -> Iterator[Mistake]:
        faults = list(self._object(where, instance))
        yield from faults
        if not instance.primary_node and not instance.forthcoming:
            yield Mistake(f"{where}/primary_node", "must name a node", "dangling")
        component = params.HYPERVISORS.get(instance.hypervisor)
        if component and instance.hvparams:
            place = f"{where}/hvparams"
            yield from params.validate(component, instance.hvparams, place, for_instance=True)
        filled = self._config.be_params(instance)
        least, most = filled["minmem"], filled["maxmem"]
        place = f"{where}/beparams"
        is_sound = not any(fault.where.startswith(place) for fault in faults)
        if instance.beparams and is_sound and type(least) is type(most) is int and least > most:
            yield Mistake(place, f"minmem, {least} MiB, is more than maxmem, {most} MiB", "value")
        nics = [*self._nics(where, instance)]
        for place, nic in nics:
            yield from self._nic(place, nic)
        for index, disk in enumerate(instance.disks):
            place = f"{where}/disks/{index}"
            yield from self._reference(place, "disks", disk)
            user = self._users.setdefault(disk, (instance, place))
            if user[1] is not place:
                yield Mistake(place, f"the disk is also {user[1]}", "duplicate-disk")
        yield from self._secondaries(where, instance)
        yield from self._node_rules.faults(instance, where, nics)

    def _secondaries(self, where: str, instance: Instance) -> Iterator[Mistake]:
        seen = {instance.primary_node: "primary_node"}
        for index, node in enumerate(instance.secondary_nodes):
            place = f"secondary_nodes/{index}"
            if node and (other := seen.setdefault(node, place)) is not place:
                text = f"is the node of {where}/{other} too"
                yield Mistake(f"{where}/{place}", text, "duplicate-node")

    def _nics(self, where: str, instance: Instance) -> Iterator[tuple[str, ConfigNic]]:
        for index, nic in enumerate(instance.nics):
            yield f"{where}/nics/{nic.uuid if self._by_uuid else index}", nic

    def _nic(self, where: str, nic: ConfigNic) -> Iterator[Mistake]:
        yield from self._object(where, nic)
        mac = nic.mac.lower()
        if mac and (other := self._macs.setdefault(mac, where)) is not where:
            yield Mistake(f"{where}/mac", f"{mac} is also {other}'s", "duplicate-mac")
        filled = self._config.nic_params(nic)
        if nic.ip:
            key = (nic.network or f"link {filled['link']}", canonical_ip(nic.ip))
            if (other := self._ips.setdefault(key, where)) is not where:
                yield Mistake(f"{where}/ip", f"{nic.ip} is also {other}'s", "duplicate-ip")

    def _disk(self, where: str, disk: ConfigDisk) -> Iterator[Mistake]:
        user = self._users.get(disk.uuid)
        yield from self._volume(where, disk, user)
        if user is None:
            yield Mistake(where, "no instance has this disk", "orphan")

    def _volume(
        self, where: str, disk: ConfigDisk, user: tuple[Instance, str] | None
    ) -> Iterator[Mistake]:
        """Of a disk, or of a part of one."""
        yield from self._object(where, disk)
        if disk.dev_type not in _LEGACY_DISK_TYPES:
            yield from _choice(f"{where}/dev_type", disk.dev_type, params.DISKS)
        yield from params.validate_disk(disk.dev_type, disk.params, f"{where}/params")
        for index, node in enumerate(disk.nodes):
            place = f"{where}/nodes/{index}"
            for mistake in self._reference(place, "nodes", node):
                if user and user[0].primary_node == node:
                    continue  # there is only one word that is wrong
                if user and node in self._removed:
                    number, name = user[1].rpartition("/")[2], user[0].name
                    text = f"{mistake.text}, and disk {number} of {name} is on it"
                    mistake = dataclasses.replace(mistake, text=text)
                yield mistake
        if disk.dev_type in ("drbd", "drbd8"):
            for index, node in enumerate(disk.logical_id[:2]):
                yield from self._reference(f"{where}/logical_id/{index}", "nodes", node)
        for index, child in enumerate(disk.children):
            yield from self._volume(f"{where}/children/{index}", child, user)

    def _reference(self, where: str, section: str, value: Any) -> Iterator[Mistake]:
        """A reference to nothing."""
        if not value or (type(value) is str and value in self._known[section]):
            return
        noun = NOUNS.get(section, "disk")
        text = f"there is no {noun} {shown(value)}"
        names = self._config.names(section) if section in NOUNS else None
        # A part of a DRBD disk's identity may be its secret.
        if "/logical_id/" in where or type(value) is not str:
            text = f"must name a {noun}, and there is none of that name or UUID"
        elif value in self._removed:
            text = f"the {noun} {self._removed[value]} is being removed"
        elif names and (several := names.short(value)):
            text = f"{len(several)} {noun}s are named {value}: give the whole name"
        elif names and self._has_hints and (hint := closest(value, names.every())):
            text = f"{text}; {hint}"
        yield Mistake(where, text, "dangling")

    def _identity(self, where: str, section: str, key: str, item: Stamped) -> Iterator[Mistake]:
        if key != item.uuid:
            yield Mistake(where, f"has the key {key}, but the UUID {item.uuid}", "key-mismatch")
        nics = self._nics(where, item) if isinstance(item, Instance) else ()
        for place, each in [(where, item), *nics]:
            if (other := self._uuids.setdefault(each.uuid, place)) is not place:
                yield Mistake(place, f"has the UUID of {other}", "duplicate-uuid")
        if section not in NOUNS:
            return
        name = getattr(item, "name", "")
        folded = name.lower() if section in HOSTS else name
        if (twin := self._names.setdefault((section, folded), item)) is not item:
            text = f"{name} is also the name of {twin.uuid}"
            if getattr(twin, "name", None) != name:
                text = f"only the case of letters tells {name} from the name of {twin.uuid}"
            yield Mistake(member(f"/{section}", key) + "/name", text, "duplicate-name")
        if is_uuid(name):
            yield Mistake(f"{where}/name", "a name must not look like a UUID", "name")


def _family(cluster: Cluster) -> Iterator[Mistake]:
    """Whether the cluster's family of addresses is that of its own address, with such a netmask."""
    family, netmask = cluster.primary_ip_family, cluster.master_netmask
    if cluster.master_ip and not ip_fault(cluster.master_ip):
        of_address = IPV6 if ":" in cluster.master_ip else IPV4
        if family in (IPV4, IPV6) and of_address != family:
            text = f"is {family}, but {cluster.master_ip} is of the family {of_address}"
            yield Mistake("/cluster/primary_ip_family", text, "ip")
    if family == IPV4 and 32 < netmask <= 128:
        text = f"must be at most 32 with primary_ip_family {IPV4}, but is {netmask}"
        yield Mistake("/cluster/master_netmask", text, "value")


def _choice(where: str, value: str, choices: Iterable[str]) -> Iterator[Mistake]:
    """The fault of a value that is not among those allowed."""
    if value not in choices:
        known = ", ".join(choices)
        yield Mistake(where, f"must be one of {known}, but is {shown(value)}", "value")


def _not_texts(
    where: str, values: Mapping[str, Any], levels: int, *, secret: bool
) -> Iterator[Mistake]:
    """The values of a mapping, *levels* deep, that are no strings, as all of an operating system's
    parameters are."""
    for key, value in values.items():
        place = member(where, key)
        if levels > 1 and isinstance(value, dict):
            yield from _not_texts(place, value, levels - 1, secret=secret)
        elif levels > 1 or not isinstance(value, str):
            text = f"must be a string, but is {shown(value, secret=secret)}"
            is_plain = levels == 1 and not secret and type(value) in (int, float)
            yield Mistake(place, f'{text}; put it in quotes: "{value}"' if is_plain else text)


_LARGE = re.compile("[:,[]-?[0-9]{19}")
"""In the JSON of a configuration: a number, or the like, that may be too large."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_CONTROLS_OF_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_FREE_TEXTS = frozenset(
    {"osparams", "osparams_private", "osparams_private_cluster", "filters", "maintenance"}
)
"""Keys of texts that may have several lines."""
_LARGEST = (1 << 63) - 1


def _odd_fault(value: Any, *, is_free: bool) -> str | None:
    if isinstance(value, str):
        if found := (_CONTROLS_OF_TEXT if is_free else _CONTROLS).search(value):
            return f"has the control character {found[0]!a}"
    elif type(value) is int and abs(value) > _LARGEST:
        return "is too large a number"
    return None


def _grouped(
    where: str,
    groups: Mapping[str, Mapping[str, Any]],
    components: Mapping[str, params.Component],
    *,
    for_instance: bool = False,
) -> Iterator[Mistake]:
    """Parameters in groups, each with a component of its own."""
    for group, values in groups.items():
        place = member(where, group)
        if group in components:
            component = components[group]
            yield from params.validate(component, values, place, for_instance=for_instance)
        else:
            text = f"there is no such group of parameters; {nearest(group, components)}"
            yield Mistake(place, text, "unknown-parameter")
