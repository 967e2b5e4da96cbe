"""A node and the configuration: the part that the node gets, and its events, recorded there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any, TypeVar

from brine.common.errors import BrineError, printable, warn
from brine.common.outbox import MOST_EVENTS, ClusterEvent, is_event_id
from brine.common.own_addresses import is_own_address
from brine.common.own_node import noted_node
from brine.common.schema import key, parse, shown
from brine.config import ssconf
from brine.config.model import ConfigDisk, Configuration, Instance, Node
from brine.config.schema import ConfigError, is_uuid, name_fault, shallow

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


@dataclass(frozen=True, slots=True)
class ThisNode:
    """The node that this host is, with the keys that ``--json`` prints.

    :param host: this host's name.
    :param is_renamed: whether that is not the node's: one of both was renamed, and the other is to
        be.
    :param is_master: whether it is the cluster's master.
    """

    name: str
    uuid: str
    host: str
    is_renamed: bool
    is_master: bool

    def warn_of_names(self) -> None:
        """Warn if the host has another name than its node. Either may be the new one."""
        if self.is_renamed:
            hint = f"brine config rename-node {self.name} {self.host}, on the master"
            text = f"this host is {self.host}, and its node {self.name}"
            warn(text, hint=f"{hint}; or name the host {self.name}")


def find_this_node(configuration: Configuration) -> ThisNode:
    """The node that this host is: by the host's name; or else by the UUID that was noted.

    :raises ConfigError: if it is none.
    """
    host, noted, is_renamed = os.uname().nodename, noted_node(), False
    try:
        node = find_node(configuration, host)
    except ConfigError:
        if not noted or noted.uuid not in configuration.nodes:
            raise
        node, is_renamed = configuration.nodes[noted.uuid], True
    is_master = configuration.names("nodes").exact(configuration.cluster.master_node) == node.uuid
    return ThisNode(node.name, node.uuid, host, is_renamed, is_master)


def is_this_host(configuration: Configuration, node: Node) -> bool:
    """Whether a node is the one that this host is, by its name, the note, or an IP address."""
    addresses = (node.primary_ip, node.secondary_ip)
    if any(is_own_address(one) and not ip_address(one).is_loopback for one in addresses):
        return True
    try:
        return find_this_node(configuration).uuid == node.uuid
    except ConfigError:
        return False


def with_new_name(configuration: Configuration, node: Node, new_name: str) -> Configuration:
    """The configuration with another name of a node, whose UUID stays. What refers to the node by
    its name, as an old file may, refers to it by its UUID then.

    :raises ConfigError: if the name is none, or another node's.
    """
    if fault := name_fault(new_name):
        raise ConfigError(fault)
    if is_uuid(new_name):
        raise ConfigError(f"{new_name}: a name must not look like a UUID")
    other = configuration.names("nodes").named(new_name)
    if other not in (None, node.uuid):
        raise ConfigError(f"there is a node {configuration.nodes[str(other)].name} already")
    old_name = node.name.lower()

    def by_uuid(reference: Any) -> Any:
        is_it = isinstance(reference, str) and reference.lower() == old_name
        return node.uuid if is_it else reference

    def of_disk(disk: ConfigDisk) -> ConfigDisk:
        ends = 2 if disk.dev_type in ("drbd", "drbd8") else 0
        identity = [*map(by_uuid, disk.logical_id[:ends]), *disk.logical_id[ends:]]
        children = tuple(map(of_disk, disk.children))
        nodes = list(map(by_uuid, disk.nodes))
        if (nodes, identity, children) == (disk.nodes, disk.logical_id, disk.children):
            return disk
        return replace(disk, nodes=nodes, logical_id=identity, children=children)

    def of_instance(one: Instance) -> Instance:
        primary, others = by_uuid(one.primary_node), list(map(by_uuid, one.secondary_nodes))
        if (primary, others) == (one.primary_node, one.secondary_nodes):
            return one
        return replace(one, primary_node=primary, secondary_nodes=others)

    cluster = configuration.cluster
    return replace(
        configuration,
        cluster=replace(cluster, master_node=by_uuid(cluster.master_node)),
        nodes=configuration.nodes | {node.uuid: replace(node, name=new_name)},
        instances={key: of_instance(one) for key, one in configuration.instances.items()},
        disks={key: of_disk(one) for key, one in configuration.disks.items()},
    )


def export(configuration: Configuration, data: bytes, node: Node) -> NodeExport:
    """The part that *node* gets: ``brine config export-node``.

    :param data: the configuration's file.
    :raises SsconfError: if a value can't be one of ssconf; ConfigError if a path can't be one.
    """
    own = part_for(configuration, node)
    values = ssconf.all_values(configuration)
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


def part_for(configuration: Configuration, node: Node) -> Configuration:
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
            else Instance(
                uuid=key,
                name=one.name,
                primary_node=one.primary_node,
                serial_no=one.serial_no,
            )
            for key, one in instances.items()
        },
        disks=_chosen(configuration.disks, disks),
        networks=_chosen(configuration.networks, networks),
    )


def _chosen(objects: Mapping[str, T], keys: Iterable[str | None]) -> dict[str, T]:
    wanted = set(keys)
    return {key: one for key, one in objects.items() if key in wanted}


# Events of a node, as ``brine outbox list --json`` prints them there. A node is not trusted: it may
# speak of its own instances only.

EVENTS_HINT = "events are what brine outbox list --json prints"

_KIND = "admin-state"
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdminState:
    """The data of an event of the kind ``admin-state``."""

    admin_state: str = key(choices=("up", "down", "offline"))
    source: str = key(choices=("admin", "user"))


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """The result of recording an event, with the keys that ``--json`` prints.

    :param id: of the event; empty if it has none that can be one.
    :param recorded: whether the configuration says so now; *changed* whether it did not before.
    :param reason: of what was not done, in one line.
    """

    id: str
    recorded: bool
    changed: bool
    reason: str = ""


@shallow()
def record(
    configuration: Configuration, node: Node, events: Any
) -> tuple[Configuration, list[RecordedEvent]]:
    """Record a node's *events*, as ``brine config record`` does: set the admin_state of the
    instances that they name. The latest event of an instance counts.

    :return: the new configuration, and what became of each event, in their order.
    :raises ConfigError: if *events* is no list, or has more than an outbox keeps: the lock is held
        meanwhile.
    """
    if type(events) is not list:
        raise ConfigError(f"must be a list of events, but is {shown(events)}", hint=EVENTS_HINT)
    if len(events) > MOST_EVENTS:
        raise ConfigError(f"has {len(events)} events, and an outbox keeps {MOST_EVENTS}")
    instances = dict(configuration.instances)
    results: dict[int, RecordedEvent] = {}
    sound: list[tuple[str, int, ClusterEvent, _AdminState]] = []
    for index, item in enumerate(events):
        try:
            event = parse(ClusterEvent, item)
            sound.append((event.id, index, event, _read(configuration, node, event)))
        except BrineError as error:
            given = item.get("id") if isinstance(item, dict) else None
            event_id = given if isinstance(given, str) and is_event_id(given) else ""
            reason = printable(str(error))[:_LONGEST_REASON]
            results[index] = RecordedEvent(event_id, recorded=False, changed=False, reason=reason)
    for _, index, event, said in sorted(sound, key=lambda one: one[:2]):
        old = instances[event.instance]
        if old.admin_state == "offline" and said.source == "user":
            reason = f"{old.name} is offline in the configuration, and stays so"
            results[index] = RecordedEvent(event.id, recorded=True, changed=False, reason=reason)
            continue
        new = replace(old, admin_state=said.admin_state, admin_state_source=said.source)
        instances[event.instance] = new
        results[index] = RecordedEvent(event.id, recorded=True, changed=new != old)
    return replace(configuration, instances=instances), [results[i] for i in range(len(events))]


def _read(configuration: Configuration, node: Node, event: ClusterEvent) -> _AdminState:
    """The content of an event; raises ConfigError or SchemaError if it is invalid, or if this node
    must not report it."""
    if event.kind != _KIND:
        raise ConfigError(f"must be {_KIND}, but is {shown(event.kind)}", where="/kind")
    if event.instance not in configuration.instances:
        raise ConfigError(f"there is no instance {shown(event.instance)}", where="/instance")
    instance = configuration.instances[event.instance]
    if instance.primary_node != node.uuid:
        text = f"{instance.name} is not an instance of {node.name}"
        raise ConfigError(text, where="/instance")
    said = parse(_AdminState, event.data, "/data")
    if said.source == "user" and said.admin_state != "down":
        text = f"a user can only shut an instance down, but this is {said.admin_state}"
        raise ConfigError(text, where="/data/admin_state")
    return said
