"""What a node gets of the configuration: ``brine config export-node``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from brine.config import ssconf
from brine.config.model import Configuration, Instance, Node

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExport:
    """All that a node has to have, with the keys that ``--json`` prints.

    :param configuration: the file's text for a master candidate, an excerpt for others.
    :param instances: the names of the node's instances, sorted.
    :param ssconf: the content of each file of ssconf, without final line ends, by its name.
    :param files: the other files that the node's instances, and the cluster, name.
    """

    serial: int
    node: str
    candidate: bool
    instances: list[str]
    configuration: str
    ssconf: dict[str, str]
    files: list[str]


def find_node(configuration: Configuration, reference: str) -> Node:
    """The node of a name, where either that or the configuration's may be the short one.

    :raises ConfigError: if there is none, or several have that short name.
    """
    names = configuration.names("nodes")
    found = names.exact(reference) or names.exact(reference.partition(".")[0])
    return configuration.nodes[found or names.get(reference)]


def export(configuration: Configuration, data: bytes, node: Node) -> NodeExport:
    """What *node* gets.

    :param data: the configuration's file.
    :raises SsconfError: if a value can't be one of ssconf; ConfigError if a path can't be one.
    """
    own = excerpt(configuration, node)
    values = ssconf.export(configuration)
    instances = configuration.instances.values()
    return NodeExport(
        serial=configuration.serial_no,
        node=node.name,
        candidate=node.master_candidate,
        instances=sorted(one.name for one in instances if one.primary_node == node.uuid),
        configuration=data.decode() if node.master_candidate else own.format().decode(),
        ssconf={ssconf.file_name(key): value for key, value in values.items()},
        files=list(ssconf.extra_files(own)),
    )


def excerpt(configuration: Configuration, node: Node) -> Configuration:
    """A configuration with all that the specs of the node's instances are made of. Others'
    instances have only what tells whose they are, and nothing is private."""
    instances = configuration.instances
    own = {key: one for key, one in instances.items() if one.primary_node == node.uuid}
    disks = [disk for one in own.values() for disk in one.disks]
    networks = [nic.network for one in own.values() for nic in one.nics]
    systems = {one.os for one in own.values()}
    cluster = configuration.cluster
    return Configuration(
        cluster=replace(
            cluster,
            os_hvp={name: one for name, one in cluster.os_hvp.items() if name in systems},
            osparams={name: one for name, one in cluster.osparams.items() if name in systems},
            osparams_private_cluster={},
        ),
        version=configuration.version,
        serial_no=configuration.serial_no,
        ctime=configuration.ctime,
        mtime=configuration.mtime,
        nodes={
            key: one
            if key == node.uuid
            else Node(uuid=key, name=one.name, primary_ip=one.primary_ip)
            for key, one in configuration.nodes.items()
        },
        nodegroups=_chosen(configuration.nodegroups, [node.group]),
        instances={
            key: replace(one, osparams_private={})
            if key in own
            else Instance(uuid=key, name=one.name, primary_node=one.primary_node)
            for key, one in instances.items()
        },
        disks=_chosen(configuration.disks, disks),
        networks=_chosen(configuration.networks, networks),
    )


def _chosen(objects: Mapping[str, T], keys: Iterable[str | None]) -> dict[str, T]:
    wanted = set(keys)
    return {key: one for key, one in objects.items() if key in wanted}
