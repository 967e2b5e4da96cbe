"""What is asked: for each request type many different questions, in an order without pattern."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lab import ganeti_config
from lab.confd_wire import Asks

INSTANCES_A_NODE = 10
LARGEST_DATAGRAM = 61440
"""Ganeti's clients take no larger one."""
_IP_AND_QUOTES = len('\\"10.0.0.1\\",')


@dataclass(frozen=True)
class Kind:
    """A request type, and what brine-confd should reach with it beside the peer."""

    type: Asks
    title: str
    rate_target: float | None
    """At least so many times the peer's rate."""
    is_point: bool = False
    """Asks for one of many: its rate must not depend on how many there are."""
    is_large: bool = False
    """Its answer is long, so brine-confd gives it once a datagram."""


KINDS = (
    Kind(Asks.PING, "ping", 1.5),
    Kind(Asks.NODE_ROLE, "node role", 1.5, is_point=True),
    Kind(Asks.NODE_IP_OF_INSTANCE_IP, "node IP of instance IP", 1.5, is_point=True),
    Kind(Asks.CLUSTER_MASTER, "cluster master", 1.5),
    Kind(Asks.NODE_IPS, "node IPs", 1.5, is_large=True),
    Kind(Asks.MASTER_CANDIDATE_IPS, "master candidate IPs", 1.5, is_large=True),
    Kind(Asks.INSTANCE_IPS, "instance IPs", 10, is_large=True),
    Kind(Asks.NODE_DRBD, "node's DRBD minors", None, is_large=True),
    Kind(Asks.NODE_INSTANCES, "node's instances", 10, is_point=True, is_large=True),
    Kind(Asks.INSTANCE_DISKS, "instance's disks", 10, is_point=True, is_large=True),
    Kind(Asks.CONFIG, "pointer to an instance's name", None),
)


_BAD_SIZE = 60_000


def _forged(message: bytes) -> bytes:
    """A datagram of somebody without the key, as large as they come."""
    repeated = message * ((_BAD_SIZE - 100) // len(message))
    return b'plj0{"msg": "%b", "salt": "%d", "hmac": "%b"}' % (repeated, time.time(), b"0" * 40)


BAD = {
    "letters": _forged(b"x"),
    "quotes": _forged(rb"\""),
    "escapes": _forged(rb"\u0041"),
    "JSON": b"plj0" + b"[{}," * (_BAD_SIZE // 4),
}


@dataclass(frozen=True)
class Size:
    """A cluster: so many instances, ten a node."""

    instances: int

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return max(1, self.instances // INSTANCES_A_NODE)

    def fits(self, kind: Kind) -> bool:
        """Whether the answers fit a datagram."""
        count = {Asks.INSTANCE_IPS: self.instances, Asks.NODE_IPS: self.nodes}.get(kind.type, 0)
        return count * _IP_AND_QUOTES < LARGEST_DATAGRAM


def queries(kind: Kind, size: Size) -> list[Any]:
    """Every different query of a kind, shuffled, the same way each time."""
    found = list(_queries(kind.type, size))
    random.Random(kind.title).shuffle(found)
    return found


def _queries(type: Asks, size: Size) -> Iterator[Any]:
    match type:
        case Asks.NODE_ROLE | Asks.NODE_DRBD | Asks.NODE_INSTANCES:
            yield from (ganeti_config.node_name(n) for n in range(1, size.nodes + 1))
        case Asks.NODE_IP_OF_INSTANCE_IP:
            yield from ({"1": ganeti_config.instance_ip(n)} for n in _instances(size))
        case Asks.INSTANCE_DISKS:
            yield from (ganeti_config.instance_name(n) for n in _instances(size))
        case Asks.CONFIG:
            for number in _instances(size):
                yield f"/instances/{ganeti_config.uuid_of('instance', number)}/name"
        case _:
            yield None


def _instances(size: Size) -> range:
    return range(1, size.instances + 1)
