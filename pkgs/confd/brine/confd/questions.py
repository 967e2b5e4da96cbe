"""The queries: the request of each, its command line, and the meaning of its answer.

A :class:`Question` goes to :meth:`brine.confd.client.ConfdClient.ask`, which returns its typed
answer. The shapes are those of the table in confd-protocol(7).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from brine.common.errors import UsageError
from brine.confd.protocol import Field, QueryKey, ReplyStatus, RequestType, Role

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """Something to ask.

    :param decode: makes the typed answer of what comes; ValueError, TypeError and LookupError
        mean that the answer has another shape.
    """

    type: RequestType
    query: Any
    decode: Callable[[Any], T]


class DrbdMinor(NamedTuple):
    """One end of a DRBD device: the role is the node's for the instance, ``primary`` or
    ``secondary``, and the peer is the node at the other end."""

    node: str
    minor: int
    instance: str
    disk: str
    role: str
    peer: str


class NodeInstances(NamedTuple):
    """The instances of a node, as objects of the configuration: those that run there, and those
    whose disks have their mirror there."""

    primary: tuple[dict[str, Any], ...]
    secondary: tuple[dict[str, Any], ...]


class QueryCommand(NamedTuple):
    """A type of queries on the command line.

    :param help: one line.
    :param ask: makes the question of the argument, if it has one, and of the options by name.
    :param argument: the name of its argument, if it has one.
    :param options: of ``link``, ``field`` and ``after``.
    """

    help: str
    ask: Callable[..., Question[Any]]
    argument: str = ""
    options: tuple[str, ...] = ()


def _exactly(kind: type[T]) -> Callable[[Any], T]:
    def decode(answer: Any) -> T:
        if type(answer) is not kind:
            raise TypeError
        return answer

    return decode


def _each(decode: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    return lambda answer: tuple(map(decode, _list(answer)))


_whole, _text = _exactly(int), _exactly(str)
_list: Callable[[Any], list[Any]] = _exactly(list)
_object: Callable[[Any], dict[str, Any]] = _exactly(dict)
_texts = _each(_text)


def _plain(kind: RequestType, decode: Callable[[Any], T]) -> Callable[[], Question[T]]:
    """A question that is its type alone."""
    return lambda: Question(kind, None, decode)


def _about(kind: RequestType, decode: Callable[[Any], T]) -> Callable[[str], Question[T]]:
    """A question about a node or an instance: its name, UUID or short name."""
    return lambda reference: Question(kind, reference, decode)


ping = _plain(RequestType.PING, _whole)
node_role = _about(RequestType.NODE_ROLE, lambda answer: Role(_whole(answer)))
node_ips = _plain(RequestType.NODE_IPS, _texts)
master_candidate_ips = _plain(RequestType.MASTER_CANDIDATE_IPS, _texts)
node_drbd = _about(RequestType.NODE_DRBD, _each(lambda minor: DrbdMinor(*minor)))
node_instances = _about(
    RequestType.NODE_INSTANCES, lambda answer: NodeInstances(*map(_each(_object), answer))
)
instance_disks = _about(RequestType.INSTANCE_DISKS, _each(_object))
data_collectors = _plain(RequestType.DATA_COLLECTORS, _object)
offline_nodes = _plain(RequestType.OFFLINE_NODES, _texts)
instance_primary_node = _about(RequestType.INSTANCE_PRIMARY_NODE, _text)


def node_ip_of_instance_ip(ip: str, *, link: str | None = None) -> Question[str]:
    """The primary IP of the node that the instance of that IP runs on; by default on the cluster's
    link."""
    return Question(RequestType.NODE_IP_OF_INSTANCE_IP, _on_link(QueryKey.IP, ip, link), _text)


def node_ips_of_instance_ips(
    ips: Iterable[str], *, link: str | None = None
) -> Question[dict[str, str | None]]:
    """The same for several IPs in one datagram; None for an IP that is unknown."""
    asked = list(ips)

    def decode(answer: Any) -> dict[str, str | None]:
        return {
            ip: _text(found) if status == ReplyStatus.OK else None
            for ip, (status, found, _serial) in zip(asked, answer, strict=True)
        }

    query = _on_link(QueryKey.IP_LIST, asked, link)
    return Question(RequestType.NODE_IP_OF_INSTANCE_IP, query, decode)


def _on_link(key: QueryKey, value: Any, link: str | None) -> dict[str, Any]:
    query = {key.value: value}
    return query if link is None else {**query, QueryKey.LINK.value: link}


def _node_ip(texts: list[str], *, link: str | None) -> Question[Any]:
    ips: dict[str, None] = {}
    for text in texts:
        try:
            ips[str(ipaddress.ip_address(text))] = None
        except ValueError:
            raise UsageError(f"not an IP address: {text!r}") from None
    if len(ips) == 1:
        return node_ip_of_instance_ip(*ips, link=link)
    return node_ips_of_instance_ips(ips, link=link)


cluster_master = _plain(RequestType.CLUSTER_MASTER, _text)
FIELDS = {field.name.lower().replace("_", "-"): field for field in Field}
"""The fields that the master can be asked for, by their names on the command line."""


def cluster_master_fields(fields: Iterable[Field]) -> Question[tuple[str, ...]]:
    """The fields of the master, in that order."""
    query = {QueryKey.FIELDS.value: [field.value for field in fields]}
    return Question(RequestType.CLUSTER_MASTER, query, _texts)


def _master(*, field: list[str] | None) -> Question[Any]:
    if not field:
        return cluster_master()
    return cluster_master_fields(dict.fromkeys(FIELDS[one] for one in field))


def instance_ips(*, link: str | None = None) -> Question[tuple[str, ...]]:
    """The IPs of all instances on a link; by default the cluster's."""
    return Question(RequestType.INSTANCE_IPS, link, _texts)


def config(pointer: str) -> Question[Any]:
    """A part of the configuration, by a JSON pointer (RFC 6901)."""
    if pointer and not pointer.startswith("/"):
        hint = f"a pointer begins with a slash: /{pointer}"
        raise UsageError(f"not a JSON pointer: {pointer!r}", hint=hint)
    return Question(RequestType.CONFIG, pointer, lambda answer: answer)


def instances(*, after: str | None = None) -> Question[tuple[str, ...]]:
    """The names of all instances, or a page of those that come after one; "" is the first page."""
    return Question(RequestType.INSTANCES, after, _texts)


QUERY_COMMANDS = {
    RequestType.PING: QueryCommand("the version of the configuration's format", ping),
    RequestType.NODE_ROLE: QueryCommand(
        "what a node is: master, candidate, offline, drained or regular", node_role, "NODE"
    ),
    RequestType.NODE_IP_OF_INSTANCE_IP: QueryCommand(
        "the IP of the node that an instance is on, by the instance's IP", _node_ip, "IP", ("link",)
    ),
    RequestType.CLUSTER_MASTER: QueryCommand("the master's name", _master, options=("field",)),
    RequestType.NODE_IPS: QueryCommand("the IPs of all nodes", node_ips),
    RequestType.MASTER_CANDIDATE_IPS: QueryCommand(
        "the IPs of the master candidates", master_candidate_ips
    ),
    RequestType.INSTANCE_IPS: QueryCommand(
        "the IPs of all instances on a link", instance_ips, options=("link",)
    ),
    RequestType.NODE_DRBD: QueryCommand(
        "a node's DRBD devices: node, minor, instance, disk, role, peer", node_drbd, "NODE"
    ),
    RequestType.NODE_INSTANCES: QueryCommand(
        "the instances of a node, primary and secondary", node_instances, "NODE"
    ),
    RequestType.INSTANCE_DISKS: QueryCommand(
        "the disks of an instance, one JSON object per line", instance_disks, "INSTANCE"
    ),
    RequestType.CONFIG: QueryCommand(
        "a part of the configuration, by a JSON pointer such as /cluster/mac_prefix",
        config,
        "POINTER",
    ),
    RequestType.DATA_COLLECTORS: QueryCommand("the data collectors", data_collectors),
    RequestType.OFFLINE_NODES: QueryCommand("the nodes that are offline", offline_nodes),
    RequestType.INSTANCES: QueryCommand("all instances", instances, options=("after",)),
    RequestType.INSTANCE_PRIMARY_NODE: QueryCommand(
        "the node that an instance is on", instance_primary_node, "INSTANCE"
    ),
}
