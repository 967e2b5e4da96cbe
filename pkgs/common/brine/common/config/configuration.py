"""A whole configuration in memory: its objects by UUID, and how they are found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from brine.common.config import params
from brine.common.config.formats import is_uuid
from brine.common.config.jsontext import parse_json
from brine.common.config.names import Names
from brine.common.config.objects import (
    Cluster,
    ConfigError,
    Disk,
    Instance,
    Network,
    Nic,
    Node,
    NodeGroup,
    Stamped,
)
from brine.common.config.shape import member, shallow, shown

VERSION = 3000000
"""The format's version where nothing else says one: Ganeti 3.0's."""

KINDS: dict[str, type[Stamped]] = {
    "nodes": Node,
    "nodegroups": NodeGroup,
    "instances": Instance,
    "disks": Disk,
    "networks": Network,
}
"""The sections of objects, by their JSON key."""


@dataclass(frozen=True)
class Configuration:
    """A configuration. What is in it is not to be changed: make another one of it.

    :param version: of the format, as Ganeti counts it: 3000000 is 3.0.
    :param serial_no: raised at each change of anything.
    :param ctime: when it was made, seconds since 1970; mtime when it was changed last.
    :param nodes: by UUID, in the file's order, as all objects are.
    :param present: the top-level keys that the file had, in order.
    :param extra: what the file had under others than these.
    """

    cluster: Cluster
    version: int = VERSION
    serial_no: int = 1
    ctime: float = 0.0
    mtime: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    nodegroups: dict[str, NodeGroup] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    disks: dict[str, Disk] = field(default_factory=dict)
    networks: dict[str, Network] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    present: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """A configuration from the bytes of a file.

        :raises ConfigError: if it is not JSON, no configuration, or something in it has the wrong
            type.
        """
        return cls.from_json(parse_json(data))

    @classmethod
    @shallow()
    def from_json(cls, data: Any) -> Self:
        """A configuration from its JSON, with the upgrades that loading does: objects without UUID
        get one, and global hypervisor parameters are dropped from instances.

        :raises ConfigError: see :meth:`parse`.
        """
        if type(data) is not dict or type(data.get("cluster")) is not dict:
            raise ConfigError(
                "this is no configuration: it has no cluster",
                hint="a configuration is an object with the keys cluster, nodes, instances, ...",
            )
        values: dict[str, Any] = {"cluster": Cluster.from_json(data["cluster"], "/cluster")}
        for key, kinds in _TOP.items():
            value = data.get(key)
            if value is None:
                continue
            if type(value) not in kinds:
                raise ConfigError(f"must be a number, but is {shown(value)}", where=f"/{key}")
            values[key] = value
        for section, kind in KINDS.items():
            values[section] = _section(data.get(section), section, kind)
        extra = {key: value for key, value in data.items() if key not in _KNOWN}
        return cls(**values, extra=extra, present=tuple(data))

    def to_json(self) -> dict[str, Any]:
        """The whole as JSON: a new object, whose parts may be those of this configuration."""
        made: dict[str, Any] = {
            "version": self.version,
            "serial_no": self.serial_no,
            "ctime": self.ctime,
            "mtime": self.mtime,
            "cluster": self.cluster.to_json(),
            **self.extra,
        }
        for section in KINDS:
            objects: dict[str, Stamped] = getattr(self, section)
            made[section] = {key: item.to_json() for key, item in objects.items()}
        order = [key for key in self.present if key in made]
        return {key: made[key] for key in dict.fromkeys([*order, *made])}

    @shallow()
    def format(self) -> bytes:
        """The bytes of a file that :meth:`parse` reads."""
        text = json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False)
        return text.encode() + b"\n"

    @cached_property
    def node_names(self) -> Names[Node]:
        """Finds nodes."""
        return Names("node", self.nodes)

    @cached_property
    def nodegroup_names(self) -> Names[NodeGroup]:
        """Finds node groups."""
        return Names("node group", self.nodegroups)

    @cached_property
    def instance_names(self) -> Names[Instance]:
        """Finds instances."""
        return Names("instance", self.instances)

    @cached_property
    def network_names(self) -> Names[Network]:
        """Finds networks."""
        return Names("network", self.networks)

    def node(self, reference: str) -> Node:
        """The node of that UUID, name, or short name; raises NotFoundError, AmbiguousError."""
        return self.node_names.get(reference)

    def nodegroup(self, reference: str) -> NodeGroup:
        """The node group of that UUID or name; raises NotFoundError."""
        return self.nodegroup_names.get(reference)

    def instance(self, reference: str) -> Instance:
        """The instance of that UUID, name, or short name; raises NotFoundError, AmbiguousError."""
        return self.instance_names.get(reference)

    def network(self, reference: str) -> Network:
        """The network of that UUID or name; raises NotFoundError."""
        return self.network_names.get(reference)

    @cached_property
    def _nic_defaults(self) -> dict[str, Any]:
        return params.defaults(params.NIC) | self.cluster.nicparams.get("default", {})

    @cached_property
    def _be_defaults(self) -> dict[str, Any]:
        return params.defaults(params.BACKEND) | self.cluster.beparams.get("default", {})

    def nic_params(self, nic: Nic) -> dict[str, Any]:
        """mode, link and vlan of a NIC: built-in < cluster < NIC."""
        return self._nic_defaults | nic.nicparams

    def be_params(self, instance: Instance) -> dict[str, Any]:
        """Memory, CPUs and the like of an instance: built-in < cluster < instance."""
        return self._be_defaults | instance.beparams

    def hv_params(self, instance: Instance) -> dict[str, Any]:
        """Hypervisor parameters: built-in < cluster < operating system < instance."""
        hypervisor = instance.hypervisor
        of_cluster = self.cluster.hvparams.get(hypervisor, {})
        of_system = self.cluster.os_hvp.get(instance.os, {}).get(hypervisor, {})
        built_in = params.defaults(params.HYPERVISORS.get(hypervisor, {}))
        return built_in | of_cluster | of_system | instance.hvparams

    def nd_params(self, node: Node) -> dict[str, Any]:
        """Node parameters: built-in < cluster < group < node."""
        group = self.nodegroup_names.find(node.group)
        of_group = group.ndparams if group else {}
        return params.defaults(params.NODE) | self.cluster.ndparams | of_group | node.ndparams

    def disk_params(self, template: str, group: NodeGroup | None = None) -> dict[str, Any]:
        """Parameters of disks of a template: built-in < cluster < group."""
        built_in = params.defaults(params.DISKS.get(template, {}))
        of_group = group.diskparams.get(template, {}) if group else {}
        return built_in | self.cluster.diskparams.get(template, {}) | of_group


_TOP: dict[str, frozenset[type]] = {
    "version": frozenset({int}),
    "serial_no": frozenset({int}),
    "ctime": frozenset({int, float}),
    "mtime": frozenset({int, float}),
}
_KNOWN = frozenset({"cluster", *_TOP, *KINDS})


def _section(data: Any, section: str, kind: type[Stamped]) -> dict[str, Any]:
    if data is None:
        return {}
    if type(data) is not dict:
        raise ConfigError(f"must be an object, but is {shown(data)}", where=f"/{section}")
    objects: dict[str, Stamped] = {}
    for key, value in data.items():
        item = kind.from_json(value, member(f"/{section}", key))
        if "uuid" not in item.present:
            if is_uuid(key):
                item = dataclasses.replace(item, uuid=key)
            key = item.uuid
        if type(item) is Instance:
            item = _without_globals(item)
        objects[key] = item
    return objects


def _without_globals(instance: Instance) -> Instance:
    """An instance without parameters that only the cluster can have (design-2.1, "Global
    hypervisor parameters")."""
    if not params.GLOBAL_HYPERVISOR.isdisjoint(instance.hvparams):
        kept = {
            key: value
            for key, value in instance.hvparams.items()
            if key not in params.GLOBAL_HYPERVISOR
        }
        return dataclasses.replace(instance, hvparams=kept)
    return instance


def every(configuration: Configuration) -> Iterator[tuple[str, str, Stamped]]:
    """All objects but the cluster: section, key, object."""
    for section in KINDS:
        for key, item in getattr(configuration, section).items():
            yield section, key, item
