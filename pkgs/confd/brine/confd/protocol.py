"""The wire protocol: the format of datagrams, and their signatures.

A datagram is ``plj0`` and a JSON object of three strings: ``msg``, itself JSON; ``salt``; and
``hmac``, the HMAC-SHA1 of salt and msg together, in hexadecimal, under the cluster's key. A
request's salt is the time, a reply's salt is what the request asked for.

Sources: "Ganeti Confd" in the Ganeti 2.1 design, and confd-protocol(7).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from hmac import compare_digest
from typing import Any, NamedTuple

MAGIC = b"plj0"
PROTOCOL_VERSION = 1
PORT = 1814
LARGEST_DATAGRAM = 61440
"""In bytes; Ganeti's clients take no larger one."""
MAX_CLOCK_SKEW_S = 300

_SMALL_DATAGRAM = 4096
_LARGE_DATAGRAM = 16384
"""In bytes; the envelope of a larger request is read more strictly, in time that is bounded."""
_MOST_MEMBERS = 8
_FEW_ESCAPES = 8
_SIGNATURE_DIGITS = 40

_raw_decode = json.JSONDecoder().raw_decode
_BLOCK_SIZE = 64  # of SHA-1, in bytes

# The envelope as json.dumps() makes it, and its punctuation as other clients may.
_USUAL_START = b'plj0{"msg": "'
_USUAL_SALT = b'", "salt": "'
_USUAL_SIGNATURE = b'", "hmac": "'
_OPENING = re.compile(r"plj0[ \t\n\r]*\{[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_CLOSING = re.compile(r"[ \t\n\r]*\}[ \t\n\r]*")

# The same of a large request, around the one string that may be long. No repetition is unbounded.
_LARGE_START = re.compile(
    rb'plj0\s{0,8}\{\s{0,8}((?:"(?:salt|hmac)"\s{0,8}:\s{0,8}"[0-9a-f]{0,40}"\s{0,8},\s{0,8}){0,2})'
    rb'"msg"\s{0,8}:\s{0,8}"'
)
_LARGE_END = re.compile(
    rb'"((?:\s{0,8},\s{0,8}"(?:salt|hmac)"\s{0,8}:\s{0,8}"[0-9a-f]{0,40}"){0,2})\s{0,8}\}\s{0,8}\Z'
)
_LARGEST_END = 256
_MEMBER = re.compile(rb'"(salt|hmac)"\s*:\s*"([0-9a-f]*)"')
_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{4}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|.)")


def place(host: str, port: int) -> str:
    """A host and a port, as people write them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RequestType(IntEnum):
    """The types of queries. Those up to 11 are Ganeti's; from 100 on they are Brine's."""

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
    OFFLINE_NODES = 100
    INSTANCES = 101
    INSTANCE_PRIMARY_NODE = 102


class ReplyStatus(IntEnum):
    """Whether a reply answers."""

    OK = 0
    ERROR = 1
    NOT_IMPLEMENTED = 2


class ErrorCode(IntEnum):
    """The answer of a reply whose status is an error. The last one is Brine's."""

    UNKNOWN_ENTRY = 0
    INTERNAL = 1
    ARGUMENT = 2
    TOO_LARGE = 3


class Role(IntEnum):
    """The role of a node, as an answer to NODE_ROLE."""

    MASTER = 0
    CANDIDATE = 1
    OFFLINE = 2
    DRAINED = 3
    REGULAR = 4


class QueryKey(StrEnum):
    """The keys of a query that is an object."""

    LINK = "0"
    IP = "1"
    IP_LIST = "2"
    FIELDS = "3"


class Field(IntEnum):
    """The fields of CLUSTER_MASTER."""

    NAME = 0
    CLUSTER_IP = 1
    MASTER_NODE_IP = 2


class DatagramRefusal(Enum):
    """Why a datagram gets no answer."""

    MAGIC = "not of this protocol"
    MALFORMED = "not well formed"
    SIGNATURE = "wrong signature"
    TIME = "wrong time"
    REPEATED = "repeated"


class RefusedError(Exception):
    """A datagram that must be met with silence."""

    def __init__(self, refusal: DatagramRefusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class HmacKey:
    """A cluster's HMAC key, ready to sign.

    The key's two padded blocks are hashed once here and copied for each signature, which costs a
    third of what :func:`hmac.digest` does (RFC 2104, section 4).
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) > _BLOCK_SIZE:
            secret = hashlib.sha1(secret, usedforsecurity=False).digest()
        secret = secret.ljust(_BLOCK_SIZE, b"\0")
        self._inner = hashlib.sha1(bytes(byte ^ 0x36 for byte in secret), usedforsecurity=False)
        self._outer = hashlib.sha1(bytes(byte ^ 0x5C for byte in secret), usedforsecurity=False)

    def sign(self, data: bytes, more: bytes | memoryview = b"") -> str:
        """The HMAC-SHA1 of *data* and *more*, 40 hexadecimal digits."""
        inner = self._inner.copy()
        inner.update(data)
        inner.update(more)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.hexdigest()


class Signed(NamedTuple):
    """The content of an authentic datagram: JSON text, its salt, and the key that signed it."""

    message: str
    salt: str
    key: HmacKey


def decode_json(text: str) -> Any:
    """As :func:`json.loads`, in half the time for text without blanks around it."""
    try:
        value, end = _raw_decode(text)
    except ValueError:
        return json.loads(text)
    return value if end == len(text) else json.loads(text)


_Parts = tuple[bytes | memoryview, bytes, bytes]
"""Message, salt and signature of a datagram, in UTF-8."""


def open_signed(datagram: bytes, keys: tuple[HmacKey, ...]) -> Signed:
    """Take a datagram apart. Its message is JSON, which is not parsed before its sender is known.

    :raises RefusedError: if it is not of this protocol, or it was made without any of the keys.
    """
    return _opened(datagram, keys, _parts)


def open_request(datagram: bytes, keys: tuple[HmacKey, ...]) -> Signed:
    """As :func:`open_signed`, for a server: a stranger's datagram takes little time, however large.

    Of a request of more than 16 KiB the envelope has exactly its three strings, and *msg* has few
    escapes, or none but those of quotes and slashes, and of a newline at its end. Requests of that
    size are lists of addresses, and all JSON libraries write these so.
    """
    size = len(datagram)
    if size > _LARGE_DATAGRAM:
        return _opened(datagram, keys, _large_parts)
    return _opened(datagram, keys, _usual_parts if size <= _SMALL_DATAGRAM else _parts)


def _opened(
    datagram: bytes, keys: tuple[HmacKey, ...], parts_of: Callable[[bytes], _Parts]
) -> Signed:
    if datagram[:4] != MAGIC:
        raise RefusedError(DatagramRefusal.MAGIC)
    try:
        message, salt, digits = parts_of(datagram)
        signature = digits.decode()
        for key in keys:
            if compare_digest(key.sign(salt, message), signature):
                return Signed(bytes(message).decode(), salt.decode(), key)
    except (ValueError, KeyError, TypeError):
        raise RefusedError(DatagramRefusal.MALFORMED) from None
    raise RefusedError(DatagramRefusal.SIGNATURE)


def _usual_parts(datagram: bytes) -> _Parts:
    """As :func:`_parts`, quickly where json.dumps() has made the datagram."""
    if not (datagram.startswith(_USUAL_START) and datagram.endswith(b'"}')):
        return _parts(datagram)
    end = datagram.rfind(_USUAL_SALT)
    message = datagram[len(_USUAL_START) : end].replace(rb"\"", b'"')
    rest = datagram[end + len(_USUAL_SALT) : -2]
    salt, found, signature = rest.partition(_USUAL_SIGNATURE)
    return _parts(datagram) if b"\\" in message or not found else (message, salt, signature)


def _parts(datagram: bytes) -> _Parts:
    """The parts of a datagram: an object of strings, read one by one."""
    text = datagram.decode()
    members: dict[str, str] = {}
    place = _after(_OPENING, text, 0)
    for _ in range(_MOST_MEMBERS):
        name, place = _string(text, place)
        members[name], place = _string(text, _after(_COLON, text, place))
        comma = _COMMA.match(text, place)
        if not comma:
            break
        place = comma.end()
    if _after(_CLOSING, text, place) != len(text):
        raise ValueError
    return members["msg"].encode(), members["salt"].encode(), members["hmac"].encode()


def _string(text: str, place: int) -> tuple[str, int]:
    if not text.startswith('"', place):
        raise ValueError
    value, end = _raw_decode(text, place)
    return value, end


def _after(punctuation: re.Pattern[str], text: str, place: int) -> int:
    found = punctuation.match(text, place)
    if not found:
        raise ValueError
    return found.end()


def _large_parts(datagram: bytes) -> _Parts:
    """The parts of a large request, with no more copies of it than it takes."""
    start = _LARGE_START.match(datagram)
    end = _LARGE_END.search(datagram, len(datagram) - _LARGEST_END)
    if len(datagram) > LARGEST_DATAGRAM or not start or not end:
        raise ValueError
    members = dict(_MEMBER.findall(start[1] + end[1]))
    if len(members) != 2 or len(members[b"hmac"]) != _SIGNATURE_DIGITS:
        raise ValueError
    message = _unescaped(datagram, start.end(), end.start())
    return message, members[b"salt"], members[b"hmac"]


def _unescaped(datagram: bytes, start: int, end: int) -> bytes | memoryview:
    """The meaning of a long JSON string in a datagram, in UTF-8. If the string has invalid escapes,
    the result is meaningless. To check each escape would take longer than the signature does."""
    if b"\\" not in datagram:
        return memoryview(datagram)[start:end]
    bare = datagram.translate(None, b"\\")
    count = len(datagram) - len(bare)
    if count > _FEW_ESCAPES:
        meant = memoryview(bare)[start : end - count]
        return bytes(meant[:-1]) + b"\n" if datagram.endswith(rb"\n", start, end) else meant
    body = datagram[start:end]
    parts: list[bytes] = []
    place = 0
    while (escape := body.find(b"\\", place)) >= 0:
        found = _ESCAPE.match(body, escape)
        if not found:
            break
        parts += body[place:escape], _meaning(found[0])
        place = found.end()
    return b"".join([*parts, body[place:]])


def _meaning(escape: bytes) -> bytes:
    try:
        text: str = _raw_decode(f'"{escape.decode()}"')[0]
        return text.encode()
    except ValueError:
        return escape


def seal(message: str, salt: str, key: HmacKey) -> bytes:
    """Make a datagram. *message* is JSON text."""
    envelope = {"msg": message, "salt": salt, "hmac": key.sign((salt + message).encode())}
    return MAGIC + json.dumps(envelope).encode()


def pack_request(
    request_type: int, query: Any, reply_salt: str, key: HmacKey, *, now_s: float
) -> bytes:
    """The datagram of a request that is sent at *now_s*, in seconds since the epoch.

    :param query: None, a string, or an object with the keys of :class:`QueryKey`.
    :param reply_salt: chosen anew for each request, so that no other reply is taken for its own.
    """
    message = {
        "protocol": PROTOCOL_VERSION,
        "type": int(request_type),
        "query": query,
        "rsalt": reply_salt,
    }
    return seal(json.dumps(message), str(int(now_s)), key)


@dataclass(frozen=True, slots=True)
class ConfdReply:
    """An answer, as the request's type has it. Where the status is an error, it is an
    :class:`ErrorCode`, or text that explains."""

    status: int
    answer: Any
    serial: int = 0  # of the configuration that the answer is from


def encode_reply(reply: ConfdReply) -> str:
    """The JSON text of a reply, still without salt and signature."""
    message = {
        "protocol": PROTOCOL_VERSION,
        "status": int(reply.status),
        "answer": reply.answer,
        "serial": reply.serial,
    }
    return json.dumps(message, separators=(",", ":"))


def unpack_reply(datagram: bytes, keys: tuple[HmacKey, ...]) -> tuple[ConfdReply, str]:
    """An authentic reply and its salt. Raises RefusedError if it is none."""
    signed = open_signed(datagram, keys)
    try:
        message = decode_json(signed.message)
        reply = ConfdReply(message["status"], message["answer"], message["serial"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise RefusedError(DatagramRefusal.MALFORMED) from None
    if type(reply.status) is not int or type(reply.serial) is not int:
        raise RefusedError(DatagramRefusal.MALFORMED)
    return reply, signed.salt
