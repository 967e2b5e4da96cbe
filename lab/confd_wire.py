"""confd's datagrams, written a second time: tests don't check Brine's code by itself.

Source: "Ganeti Confd" in the Ganeti 2.1 design, and what Ganeti 3.0's daemon says.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"plj0"


class Asks(IntEnum):
    """The types of request that Ganeti has."""

    PING = 0
    NODE_ROLE = 1
    NODE_IP_OF_INSTANCE_IP = 2
    CLUSTER_MASTER = 3
    NODE_IPS = 4
    MASTER_CANDIDATE_IPS = 5
    INSTANCE_IPS = 6
    NODE_DRBD = 7
    NODE_INSTANCES = 8
    INSTANCE_DISKS = 9
    CONFIG = 10
    DATA_COLLECTORS = 11


@dataclass(frozen=True, slots=True)
class Heard:
    """A reply whose signature is right."""

    salt: str
    status: int
    answer: Any
    serial: int


class ForgedError(Exception):
    """A reply without a valid signature."""


def request(key: bytes, type: int, query: Any, reply_salt: str) -> bytes:
    """A request that is sent now."""
    message = json.dumps({"protocol": 1, "type": int(type), "query": query, "rsalt": reply_salt})
    salt = str(int(time.time()))
    return (
        MAGIC
        + json.dumps(
            {"msg": message, "salt": salt, "hmac": _signature(key, salt + message)}
        ).encode()
    )


def opened(key: bytes, datagram: bytes) -> Heard:
    """Take a reply apart. Raises ForgedError, or ValueError where it is none."""
    if not datagram.startswith(MAGIC):
        raise ValueError(f"not a reply: {datagram[:20]!r}")
    envelope = json.loads(datagram[len(MAGIC) :])
    if envelope["hmac"] != _signature(key, envelope["salt"] + envelope["msg"]):
        raise ForgedError(envelope)
    message = json.loads(envelope["msg"])
    if message["protocol"] != 1:
        raise ValueError(f"not a reply of protocol 1: {message}")
    return Heard(envelope["salt"], message["status"], message["answer"], message["serial"])


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha1).hexdigest()
