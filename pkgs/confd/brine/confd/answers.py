"""The answers to all types of queries, from one configuration.

Sources: the table of request types in confd-protocol(7); "Ganeti Confd" in the Ganeti 2.1 design.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from jsonpointer import JsonPointer, JsonPointerException

from brine.confd.protocol import (
    ConfdReply,
    ErrorCode,
    Field,
    QueryKey,
    ReplyStatus,
    RequestType,
    Role,
)
from brine.config.model import KINDS, ConfigDisk, ConfigNic, Configuration, Instance, descend
from brine.config.schema import ConfigError, canonical_ip, without_secrets

_PAGE_SIZE = 30_000
"""Bytes of names in a page of instances: well below a datagram, with all their quotes."""
_MANY_OBJECTS = 1000
"""More of them don't fit a datagram, and are not written out to find that out."""

_Method = Callable[["Answers", Any], Any]
_METHODS: dict[int, _Method] = {}
_QUERIES: dict[int, tuple[type, ...]] = {}
"""The types of a request's query. The query of a request that is not here is ignored."""


def _to(request_type: RequestType, *queries: type) -> Callable[[_Method], _Method]:
    """Mark the method that answers requests of a type."""

    def register(method: _Method) -> _Method:
        _METHODS[request_type] = method
        if queries:
            _QUERIES[request_type] = queries
        return method

    return register


class _ErrorAnswer(Exception):  # noqa: N818 - it is an answer
    def __init__(self, code: ErrorCode) -> None:
        self.code = code


class Answers:
    """Answers from one configuration, which does not change.

    :param reveal_secrets: whether DRBD's secrets and private parameters are told, too.
    """

    def __init__(self, configuration: Configuration, *, reveal_secrets: bool = True) -> None:
        self.configuration = configuration
        self._reveal_secrets = reveal_secrets
        self.serial = configuration.cluster.serial_no
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
        method = _METHODS.get(request_type)
        if method is None:
            return ConfdReply(ReplyStatus.NOT_IMPLEMENTED, ErrorCode.ARGUMENT, self.serial)
        try:
            if request_type in _QUERIES and type(query) not in _QUERIES[request_type]:
                raise _ErrorAnswer(ErrorCode.ARGUMENT)
            answer = method(self, query)
        except ConfigError:  # no such object, or several of that short name
            return ConfdReply(ReplyStatus.ERROR, ErrorCode.UNKNOWN_ENTRY, self.serial)
        except _ErrorAnswer as error:
            return ConfdReply(ReplyStatus.ERROR, error.code, self.serial)
        serial = 0 if request_type == RequestType.PING else self.serial
        return ConfdReply(ReplyStatus.OK, answer, serial)

    # Building the index.

    def _add_instance(self, instance: Instance) -> None:
        primary = self.configuration.nodes.get(instance.primary_node)
        self._primaries[instance.primary_node].append(instance)
        for nic in instance.nics:
            link = str(self.configuration.nic_params(nic)["link"])
            if nic.ip:
                self._instance_ips[link].append(nic.ip)
                if primary:
                    self._node_ips.setdefault((link, _canonical(nic.ip)), primary.primary_ip)
        secondaries: dict[str, None] = {}
        for number, uuid in enumerate(instance.disks):
            for mirror in _drbd_disks(self.configuration.disks.get(uuid)):
                self._add_mirror(instance, f"disk/{number}", mirror)
                ends = [end for end in mirror.logical_id[:2] if type(end) is str]
                secondaries.update(dict.fromkeys(ends))
        secondaries.pop(instance.primary_node, None)
        for uuid in secondaries:
            self._secondaries[uuid].append(instance)

    def _add_mirror(self, instance: Instance, name: str, mirror: ConfigDisk) -> None:
        ends = mirror.logical_id[:5]
        if len(ends) < 5 or type(ends[0]) is not str or type(ends[1]) is not str:
            return
        nodes = self.configuration.nodes
        first, second, _, first_minor, second_minor = ends
        for uuid, minor, peer in ((first, first_minor, second), (second, second_minor, first)):
            if uuid in nodes and peer in nodes:
                role = "primary" if uuid == instance.primary_node else "secondary"
                row = [nodes[uuid].name, minor, instance.name, name, role, nodes[peer].name]
                self._drbd[uuid].append(row)

    # One method a request type.

    @_to(RequestType.PING)
    def _ping(self, _query: Any) -> int:
        return self.configuration.version

    @_to(RequestType.NODE_ROLE, str)
    def _node_role(self, query: str) -> Role:
        node = self.configuration.node(query)
        if node.uuid == self.configuration.cluster.master_node:
            return Role.MASTER
        if node.drained:
            return Role.DRAINED
        if node.offline:
            return Role.OFFLINE
        return Role.CANDIDATE if node.master_candidate else Role.REGULAR

    @_to(RequestType.NODE_IP_OF_INSTANCE_IP, dict)
    def _node_ip_of_instance_ip(self, query: dict[str, Any]) -> str | list[list[Any]]:
        ip, link = query.get(QueryKey.IP), query.get(QueryKey.LINK)
        if link is None:
            link = self._default_link
        ips = [ip]
        if ip is None:
            ips = query.get(QueryKey.IP_LIST) or []
        if type(ips) is not list or {type(link), *map(type, ips)} != {str}:
            raise _ErrorAnswer(ErrorCode.ARGUMENT)
        found = [self._node_ips.get((link, _canonical(one))) for one in ips]
        if ip is None:
            unknown = [ReplyStatus.ERROR, ErrorCode.UNKNOWN_ENTRY, 0]
            return [[ReplyStatus.OK, one, self.serial] if one else unknown for one in found]
        if found[0] is None:
            raise _ErrorAnswer(ErrorCode.UNKNOWN_ENTRY)
        return found[0]

    @_to(RequestType.CLUSTER_MASTER, dict, NoneType)
    def _cluster_master(self, query: dict[str, Any] | None) -> str | list[str]:
        cluster = self.configuration.cluster
        master = self.configuration.node(cluster.master_node)
        if query is None:
            return master.name
        values = {
            Field.NAME: master.name,
            Field.CLUSTER_IP: cluster.master_ip,
            Field.MASTER_NODE_IP: master.primary_ip,
        }
        try:
            # Ganeti's client sends them as strings, its daemon takes them as numbers.
            return [values[Field(int(one))] for one in query.get(QueryKey.FIELDS) or []]
        except (TypeError, ValueError, OverflowError):
            raise _ErrorAnswer(ErrorCode.ARGUMENT) from None

    @_to(RequestType.NODE_IPS)
    def _all_node_ips(self, _query: Any) -> list[str]:
        return [node.primary_ip for node in self.configuration.nodes.values()]

    @_to(RequestType.MASTER_CANDIDATE_IPS)
    def _master_candidate_ips(self, _query: Any) -> list[str]:
        nodes = self.configuration.nodes.values()
        return [node.primary_ip for node in nodes if node.master_candidate]

    @_to(RequestType.INSTANCE_IPS, str, NoneType)
    def _link_ips(self, query: str | None) -> list[str]:
        return self._instance_ips.get(self._default_link if query is None else query, [])

    @_to(RequestType.NODE_DRBD, str)
    def _node_drbd(self, query: str) -> list[list[Any]]:
        return self._drbd.get(self.configuration.node(query).uuid, [])

    @_to(RequestType.NODE_INSTANCES, str)
    def _node_instances(self, query: str) -> list[Any]:
        uuid = self.configuration.node(query).uuid
        found = self._primaries.get(uuid, []), self._secondaries.get(uuid, [])
        if sum(map(len, found)) > _MANY_OBJECTS:
            raise _ErrorAnswer(ErrorCode.TOO_LARGE)
        return [self._told([one.to_json() for one in its]) for its in found]

    @_to(RequestType.INSTANCE_DISKS, str)
    def _instance_disks(self, query: str) -> Any:
        disks = map(self.configuration.disks.get, self.configuration.instance(query).disks)
        return self._told([disk.to_json() for disk in disks if disk])

    @_to(RequestType.CONFIG, str)
    def _config(self, query: str) -> Any:
        try:
            value, rest = self._start_of(JsonPointer(query).parts)
            return descend(self._told(value), rest)
        except (JsonPointerException, ConfigError):
            raise _ErrorAnswer(ErrorCode.ARGUMENT) from None

    def _start_of(self, parts: list[str]) -> tuple[Any, list[str]]:
        """A part of the configuration as JSON, and the rest of a pointer into it.

        Only what is asked for is written out: a whole large configuration takes its time.
        """
        sections = {name: getattr(self.configuration, name) for name in KINDS}
        if parts and parts[0] not in sections:
            empty: dict[str, Any] = {name: {} for name in KINDS}
            return dataclasses.replace(self.configuration, **empty).to_json(), parts
        if len(parts) > 1:
            its = sections[parts[0]].get(parts[1])
            if its is None:
                raise JsonPointerException("no such object")
            return its.to_json(), parts[2:]
        named = [sections[parts[0]]] if parts else list(sections.values())
        if sum(map(len, named)) > _MANY_OBJECTS:
            raise _ErrorAnswer(ErrorCode.TOO_LARGE)
        if not parts:
            return self.configuration.to_json(), []
        return {uuid: one.to_json() for uuid, one in named[0].items()}, []

    @_to(RequestType.DATA_COLLECTORS)
    def _data_collectors(self, _query: Any) -> Any:
        return self.configuration.cluster.data_collectors or {}

    @_to(RequestType.OFFLINE_NODES)
    def _offline_nodes(self, _query: Any) -> list[str]:
        return [node.name for node in self.configuration.nodes.values() if node.offline]

    @_to(RequestType.INSTANCES, str, NoneType)
    def _instances(self, query: str | None) -> list[str]:
        if query is None:
            return self._names
        page: list[str] = []
        size = 0
        for name in self._names[bisect.bisect_right(self._names, query) :]:
            size += len(name.encode())
            if page and size > _PAGE_SIZE:
                break
            page.append(name)
        return page

    @_to(RequestType.INSTANCE_PRIMARY_NODE, str)
    def _instance_primary_node(self, query: str) -> str:
        return self.configuration.node(self.configuration.instance(query).primary_node).name

    def _told(self, value: Any) -> Any:
        """JSON of the configuration as it may leave this node."""
        return value if self._reveal_secrets else without_secrets(value)


WITHOUT_QUERY = frozenset(RequestType) - _QUERIES.keys()
"""The types of requests whose query is ignored."""


def _canonical(ip: str) -> str:
    """An IP address in its canonical form; other text stays as it is."""
    # IPv4 has but one form, and there is no time to lose.
    return canonical_ip(ip) if ":" in ip else ip


def _drbd_disks(disk: ConfigDisk | None) -> Iterator[ConfigDisk]:
    """The DRBD devices among a disk and its parts."""
    if disk is None:
        return
    if disk.dev_type == "drbd":
        yield disk
    for child in disk.children:
        yield from _drbd_disks(child)
