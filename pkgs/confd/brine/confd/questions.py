"""The queries: the request of each, and the meaning of its answer.

A :class:`Question` goes to :meth:`brine.confd.client.ConfdClient.ask`, which returns its typed
answer. The shapes are those of the table in confd-protocol(7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from brine.confd.protocol import Field, QueryKey, ReplyStatus, RequestType, Role

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """Something to ask.

    :param query: what goes with the type, as JSON.
    :param decode: makes the typed answer of what comes; ValueError, TypeError and LookupError
        mean that the answer has another shape.
    """

    type: RequestType
    query: Any
    decode: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class DrbdMinor:
    """One end of a DRBD device.

    :param disk: such as ``disk/0``.
    :param role: of the node for the instance: ``primary`` or ``secondary``.
    :param peer: the node at the other end.
    """

    node: str
    minor: int
    instance: str
    disk: str
    role: str
    peer: str


@dataclass(frozen=True, slots=True)
class NodeInstances:
    """The instances of a node, as objects of the configuration.

    :param primary: those that run there.
    :param secondary: those whose disks have their mirror there.
    """

    primary: tuple[dict[str, Any], ...]
    secondary: tuple[dict[str, Any], ...]


def ping() -> Question[int]:
    """The configuration's version, such as 3000000."""
    return Question(RequestType.PING, None, _whole)


def node_role(node: str) -> Question[Role]:
    """What that node is to its cluster."""
    return Question(RequestType.NODE_ROLE, node, lambda answer: Role(_whole(answer)))


def node_ip_of_instance_ip(ip: str, *, link: str | None = None) -> Question[str]:
    """The primary IP of the node that the instance of that IP runs on.

    :param link: the link that *ip* is on; by default the cluster's.
    """
    query = {QueryKey.IP.value: ip, **_link(link)}
    return Question(RequestType.NODE_IP_OF_INSTANCE_IP, query, _text)


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

    query = {QueryKey.IP_LIST.value: asked, **_link(link)}
    return Question(RequestType.NODE_IP_OF_INSTANCE_IP, query, decode)


def cluster_master() -> Question[str]:
    """The master's name."""
    return Question(RequestType.CLUSTER_MASTER, None, _text)


def cluster_master_fields(fields: Iterable[Field]) -> Question[tuple[str, ...]]:
    """The fields of the master, in that order."""
    query = {QueryKey.FIELDS.value: [field.value for field in fields]}
    return Question(RequestType.CLUSTER_MASTER, query, _texts)


def node_ips() -> Question[tuple[str, ...]]:
    """The primary IPs of all nodes."""
    return Question(RequestType.NODE_IPS, None, _texts)


def master_candidate_ips() -> Question[tuple[str, ...]]:
    """The primary IPs of the master candidates."""
    return Question(RequestType.MASTER_CANDIDATE_IPS, None, _texts)


def instance_ips(*, link: str | None = None) -> Question[tuple[str, ...]]:
    """The IPs of all instances on a link; by default the cluster's."""
    return Question(RequestType.INSTANCE_IPS, link, _texts)


def node_drbd(node: str) -> Question[tuple[DrbdMinor, ...]]:
    """The DRBD devices of a node."""

    def decode(answer: Any) -> tuple[DrbdMinor, ...]:
        return tuple(DrbdMinor(*minor) for minor in answer)

    return Question(RequestType.NODE_DRBD, node, decode)


def node_instances(node: str) -> Question[NodeInstances]:
    """The instances of a node."""

    def decode(answer: Any) -> NodeInstances:
        primary, secondary = answer
        return NodeInstances(_objects(primary), _objects(secondary))

    return Question(RequestType.NODE_INSTANCES, node, decode)


def instance_disks(instance: str) -> Question[tuple[dict[str, Any], ...]]:
    """The disks of an instance (its name or UUID), as objects of the configuration."""
    return Question(RequestType.INSTANCE_DISKS, instance, _objects)


def config(pointer: str) -> Question[Any]:
    """A part of the configuration, by a JSON pointer (RFC 6901)."""
    return Question(RequestType.CONFIG, pointer, lambda answer: answer)


def data_collectors() -> Question[dict[str, Any]]:
    """The data collectors by name, each with ``active`` and ``interval`` (microseconds)."""
    return Question(RequestType.DATA_COLLECTORS, None, _object)


def offline_nodes() -> Question[tuple[str, ...]]:
    """The names of the nodes that are offline. Of Brine's daemon only."""
    return Question(RequestType.OFFLINE_NODES, None, _texts)


def instances(*, after: str | None = None) -> Question[tuple[str, ...]]:
    """The names of all instances. Of Brine's daemon only.

    :param after: only a page of names, those that come after this one; "" for the first page.
    """
    return Question(RequestType.INSTANCES, after, _texts)


def instance_primary_node(instance: str) -> Question[str]:
    """The name of the node that an instance (its name or UUID) runs on. Of Brine's daemon only."""
    return Question(RequestType.INSTANCE_PRIMARY_NODE, instance, _text)


def _link(link: str | None) -> dict[str, str]:
    return {} if link is None else {QueryKey.LINK.value: link}


def _whole(answer: Any) -> int:
    if type(answer) is not int:
        raise TypeError
    return answer


def _text(answer: Any) -> str:
    if type(answer) is not str:
        raise TypeError
    return answer


def _texts(answer: Any) -> tuple[str, ...]:
    if type(answer) is not list:
        raise TypeError
    return tuple(_text(one) for one in answer)


def _object(answer: Any) -> dict[str, Any]:
    if type(answer) is not dict:
        raise TypeError
    return answer


def _objects(answer: Any) -> tuple[dict[str, Any], ...]:
    if type(answer) is not list:
        raise TypeError
    return tuple(_object(one) for one in answer)
