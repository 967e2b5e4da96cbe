"""The answers to all types of queries, from one configuration.

Sources: the table of request types in confd-protocol(7); "Ganeti Confd" in the Ganeti 2.1 design.
"""

from __future__ import annotations

import bisect
import dataclasses
import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jsonpointer import JsonPointer, JsonPointerException

from brine.confd.protocol import (
    QUERIES,
    ConfdReply,
    ErrorCode,
    Field,
    QueryKey,
    ReplyStatus,
    RequestType,
    Role,
)
from brine.config.model import KINDS, ConfigDisk, ConfigNic, Configuration, Instance, Node, descend
from brine.config.schema import ConfigError, without_secrets

_PAGE_SIZE = 30_000
"""Bytes of names in a page of instances: well below a datagram, with all their quotes."""
_MANY_OBJECTS = 1000
"""More of them don't fit a datagram, and are not written out to find that out."""

UNKNOWN_ENTRY = ConfdReply(ReplyStatus.ERROR, ErrorCode.UNKNOWN_ENTRY)
INTERNAL_ERROR = ConfdReply(ReplyStatus.ERROR, ErrorCode.INTERNAL)
ARGUMENT_ERROR = ConfdReply(ReplyStatus.ERROR, ErrorCode.ARGUMENT)
TOO_LARGE = ConfdReply(ReplyStatus.ERROR, ErrorCode.TOO_LARGE)
NOT_IMPLEMENTED = ConfdReply(ReplyStatus.NOT_IMPLEMENTED, ErrorCode.ARGUMENT)


class Answers:
    """Answers from one configuration, which does not change.

    :param reveal_secrets: whether DRBD's secrets and private parameters are told, too; the daemon
        does so only where its settings say it.
    """

    def __init__(self, configuration: Configuration, *, reveal_secrets: bool = True) -> None:
        self._configuration = configuration
        self._reveal_secrets = reveal_secrets
        self.serial = configuration.cluster.serial_no
        """The serial number of all replies except pings."""
        self._node_ips: dict[tuple[str, str], str] = {}  # by link and instance IP
        self._instance_ips: dict[str, list[str]] = defaultdict(list)  # by link
        self._primaries: dict[str, list[Instance]] = defaultdict(list)  # by node UUID
        self._secondaries: dict[str, list[Instance]] = defaultdict(list)
        self._drbd: dict[str, list[list[Any]]] = defaultdict(list)
        for instance in configuration.instances.values():
            self._add_instance(instance)
        self._names = sorted(one.name for one in configuration.instances.values())
        self._default_link = str(configuration.nic_params(ConfigNic())["link"])

    def answer(self, request_type: int, query: Any) -> ConfdReply:
        """The reply to one question, whatever it is.

        Errors have a serial number, too: an instance that is unknown to the newest configuration
        is gone, whatever an older one says.
        """
        ask = _BY_TYPE.get(request_type)
        if ask is None:
            reply = NOT_IMPLEMENTED
        elif request_type in QUERIES and type(query) not in QUERIES[request_type]:
            reply = ARGUMENT_ERROR
        else:
            try:
                reply = ask(self, query)
            except ConfigError:  # no such object, or several of that short name
                reply = UNKNOWN_ENTRY
        if reply.status != ReplyStatus.OK:
            return ConfdReply(reply.status, reply.answer, self.serial)
        return reply

    # Building the index.

    def _add_instance(self, instance: Instance) -> None:
        nodes = self._configuration.nodes
        primary = nodes.get(instance.primary_node)
        self._primaries[instance.primary_node].append(instance)
        for nic in instance.nics:
            link = str(self._configuration.nic_params(nic)["link"])
            if nic.ip:
                self._instance_ips[link].append(nic.ip)
                if primary:
                    self._node_ips.setdefault((link, _canonical(nic.ip)), primary.primary_ip)
        disks = [self._configuration.disks.get(uuid) for uuid in instance.disks]
        secondaries: dict[str, None] = {}
        for number, disk in enumerate(disks):
            for mirror in _drbd_disks(disk):
                self._add_mirror(instance, f"disk/{number}", mirror)
                ends = [uuid for uuid in mirror.logical_id[:2] if type(uuid) is str]
                secondaries.update(dict.fromkeys(ends))
        secondaries.pop(instance.primary_node, None)
        for uuid in secondaries:
            self._secondaries[uuid].append(instance)

    def _add_mirror(self, instance: Instance, name: str, mirror: ConfigDisk) -> None:
        ends = mirror.logical_id[:5]
        if len(ends) < 5 or type(ends[0]) is not str or type(ends[1]) is not str:
            return
        first, second, _, first_minor, second_minor = ends
        for uuid, minor, peer in ((first, first_minor, second), (second, second_minor, first)):
            node, its_peer = (
                self._configuration.nodes.get(uuid),
                self._configuration.nodes.get(peer),
            )
            if node and its_peer:
                role = "primary" if uuid == instance.primary_node else "secondary"
                self._drbd[uuid].append(
                    [node.name, minor, instance.name, name, role, its_peer.name]
                )

    # One method a request type.

    def _ping(self, _query: Any) -> ConfdReply:
        return ConfdReply(ReplyStatus.OK, self._configuration.version)

    def _node_role(self, query: str) -> ConfdReply:
        return self._reply(self._role(self._configuration.node(query)))

    def _role(self, node: Node) -> Role:
        if node.uuid == self._configuration.cluster.master_node:
            return Role.MASTER
        if node.drained:
            return Role.DRAINED
        if node.offline:
            return Role.OFFLINE
        return Role.CANDIDATE if node.master_candidate else Role.REGULAR

    def _node_ip_of_instance_ip(self, query: dict[str, Any]) -> ConfdReply:
        link = query.get(QueryKey.LINK)
        if link is None:
            link = self._default_link
        if type(link) is not str:
            return ARGUMENT_ERROR
        ip = query.get(QueryKey.IP)
        if ip is not None:
            return self._node_ip(link, ip)
        ips = query.get(QueryKey.IP_LIST) or []
        if type(ips) is not list or any(type(one) is not str for one in ips):
            return ARGUMENT_ERROR
        found = [self._node_ip(link, one) for one in ips]
        return self._reply([[one.status, one.answer, one.serial] for one in found])

    def _node_ip(self, link: str, ip: Any) -> ConfdReply:
        if type(ip) is not str:
            return ARGUMENT_ERROR
        node_ip = self._node_ips.get((link, _canonical(ip)))
        return UNKNOWN_ENTRY if node_ip is None else self._reply(node_ip)

    def _cluster_master(self, query: dict[str, Any] | None) -> ConfdReply:
        cluster = self._configuration.cluster
        master = self._configuration.node(cluster.master_node)
        if query is None:
            return self._reply(master.name)
        values = {
            Field.NAME: master.name,
            Field.CLUSTER_IP: cluster.master_ip,
            Field.MASTER_NODE_IP: master.primary_ip,
        }
        fields = query.get(QueryKey.FIELDS) or []
        try:
            # Ganeti's client sends them as strings, its daemon takes them as numbers.
            return self._reply([values[Field(int(one))] for one in fields])
        except (TypeError, ValueError, OverflowError):
            return ARGUMENT_ERROR

    def _all_node_ips(self, _query: Any) -> ConfdReply:
        return self._reply([node.primary_ip for node in self._nodes()])

    def _master_candidate_ips(self, _query: Any) -> ConfdReply:
        return self._reply([node.primary_ip for node in self._nodes() if node.master_candidate])

    def _link_ips(self, query: str | None) -> ConfdReply:
        link = self._default_link if query is None else query
        return self._reply(self._instance_ips.get(link, []))

    def _node_drbd(self, query: str) -> ConfdReply:
        return self._reply(self._drbd.get(self._configuration.node(query).uuid, []))

    def _node_instances(self, query: str) -> ConfdReply:
        uuid = self._configuration.node(query).uuid
        found = self._primaries.get(uuid, []), self._secondaries.get(uuid, [])
        if sum(map(len, found)) > _MANY_OBJECTS:
            return TOO_LARGE
        return self._reply([self._told([one.to_json() for one in its]) for its in found])

    def _instance_disks(self, query: str) -> ConfdReply:
        instance = self._configuration.instance(query)
        disks = [self._configuration.disks.get(uuid) for uuid in instance.disks]
        return self._reply(self._told([disk.to_json() for disk in disks if disk]))

    def _config(self, query: str) -> ConfdReply:
        try:
            parts = JsonPointer(query).parts
            value, rest = self._start_of(parts)
            return self._reply(descend(self._told(value), rest))
        except _TooManyError:
            return TOO_LARGE
        except (JsonPointerException, ConfigError):
            return ARGUMENT_ERROR

    def _start_of(self, parts: list[str]) -> tuple[Any, list[str]]:
        """A part of the configuration as JSON, and the rest of a pointer into it.

        Only what is asked for is written out: a whole large configuration takes its time.
        """
        sections = {name: getattr(self._configuration, name) for name in KINDS}
        if not parts:
            if sum(map(len, sections.values())) > _MANY_OBJECTS:
                raise _TooManyError
            return self._configuration.to_json(), parts
        section = sections.get(parts[0])
        if section is None:
            empty: dict[str, Any] = {key: {} for key in KINDS}
            return dataclasses.replace(self._configuration, **empty).to_json(), parts
        if len(parts) > 1 and parts[1] in section:
            return section[parts[1]].to_json(), parts[2:]
        if len(parts) == 1 and len(section) > _MANY_OBJECTS:
            raise _TooManyError
        if len(parts) > 1:
            raise JsonPointerException("no such object")
        return {uuid: one.to_json() for uuid, one in section.items()}, parts[1:]

    def _data_collectors(self, _query: Any) -> ConfdReply:
        return self._reply(self._configuration.cluster.data_collectors or {})

    def _offline_nodes(self, _query: Any) -> ConfdReply:
        return self._reply([node.name for node in self._nodes() if node.offline])

    def _instances(self, query: str | None) -> ConfdReply:
        if query is None:
            return self._reply(self._names)
        page: list[str] = []
        size = 0
        for name in self._names[bisect.bisect_right(self._names, query) :]:
            size += len(name.encode())
            if page and size > _PAGE_SIZE:
                break
            page.append(name)
        return self._reply(page)

    def _instance_primary_node(self, query: str) -> ConfdReply:
        instance = self._configuration.instance(query)
        return self._reply(self._configuration.node(instance.primary_node).name)

    def _told(self, value: Any) -> Any:
        """JSON of the configuration as it may leave this node."""
        return value if self._reveal_secrets else without_secrets(value)

    def _reply(self, answer: Any) -> ConfdReply:
        return ConfdReply(ReplyStatus.OK, answer, self.serial)

    def _nodes(self) -> Iterable[Node]:
        return self._configuration.nodes.values()


_BY_TYPE: Mapping[int, Callable[[Answers, Any], ConfdReply]] = {
    RequestType.PING: Answers._ping,
    RequestType.NODE_ROLE: Answers._node_role,
    RequestType.NODE_IP_OF_INSTANCE_IP: Answers._node_ip_of_instance_ip,
    RequestType.CLUSTER_MASTER: Answers._cluster_master,
    RequestType.NODE_IPS: Answers._all_node_ips,
    RequestType.MASTER_CANDIDATE_IPS: Answers._master_candidate_ips,
    RequestType.INSTANCE_IPS: Answers._link_ips,
    RequestType.NODE_DRBD: Answers._node_drbd,
    RequestType.NODE_INSTANCES: Answers._node_instances,
    RequestType.INSTANCE_DISKS: Answers._instance_disks,
    RequestType.CONFIG: Answers._config,
    RequestType.DATA_COLLECTORS: Answers._data_collectors,
    RequestType.OFFLINE_NODES: Answers._offline_nodes,
    RequestType.INSTANCES: Answers._instances,
    RequestType.INSTANCE_PRIMARY_NODE: Answers._instance_primary_node,
}


class _TooManyError(Exception):
    """More objects than a datagram could hold."""


def _canonical(ip: str) -> str:
    """An IP address as others write it, too; what is none stays as it is."""
    if ":" not in ip:  # IPv4 has but one form, and there is no time to lose
        return ip
    try:
        return str(ipaddress.IPv6Address(ip))
    except ValueError:
        return ip


def _drbd_disks(disk: ConfigDisk | None) -> Iterator[ConfigDisk]:
    """The DRBD devices among a disk and what it is made of."""
    if disk is None:
        return
    if disk.dev_type == "drbd":
        yield disk
    for child in disk.children:
        yield from _drbd_disks(child)
