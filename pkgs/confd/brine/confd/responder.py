"""From one datagram to the datagram that answers it, or to silence."""

from __future__ import annotations

import json
import mmap
import time
from json.encoder import encode_basestring
from typing import Any

from brine.confd.answers import ARGUMENT_ERROR, INTERNAL_ERROR, NOT_IMPLEMENTED, TOO_LARGE, Answers
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    PROTOCOL_VERSION,
    Key,
    QueryKey,
    Refusal,
    RefusedError,
    Reply,
    RequestType,
    Status,
    decode_json,
    encode_reply,
    open_request,
)

_CACHE_LIMIT = 96 * 1024 * 1024
"""Of replies that are kept ready, in bytes."""
_LONGEST_TIME = 12
"""Digits of a request's time; more are of no time near ours."""

_OVERHEAD = 400
"""Of keeping one, beside its text."""
_WITHOUT_QUERY = frozenset(
    {
        RequestType.PING,
        RequestType.NODE_IPS,
        RequestType.MASTER_CANDIDATE_IPS,
        RequestType.DATA_COLLECTORS,
        RequestType.OFFLINE_NODES,
    }
)

_LARGE_ANSWER = 3
"""An answer so many times as long as its request would serve to flood others' addresses."""
_BUCKETS = 1 << 14
_BUCKET_SIZE = 64
"""In bytes: eight signatures, by their first eight bytes."""
_MARK_SIZE = 8

_Ready = tuple[bytes, bytes]
"""A reply's JSON text: as it is signed, and as it stands in the envelope, in quotes."""


class GivenAnswers:
    """The requests that were given a large answer, so that none is given twice.

    It is shared with the processes that are forked after it was made: the kernel spreads repeated
    datagrams over all workers, and a new configuration has new workers. It has room for 131,072
    signatures in 1 MiB, and forgets the oldest of a bucket.
    """

    def __init__(self) -> None:
        self._table = mmap.mmap(-1, _BUCKETS * _BUCKET_SIZE)

    def add(self, signature: str) -> bool:
        """Take a request down; whether it was not there yet.

        :param signature: 40 hexadecimal digits, which only those with the key can choose.
        """
        digest = bytes.fromhex(signature)
        start = int.from_bytes(digest[:4], "big") % _BUCKETS * _BUCKET_SIZE
        bucket = self._table[start : start + _BUCKET_SIZE]
        mark = digest[4 : 4 + _MARK_SIZE]
        if mark in bucket:
            return False
        self._table[start : start + _BUCKET_SIZE] = mark + bucket[:-_MARK_SIZE]
        return True


class Responder:
    """Answers requests from one configuration.

    A reply's text depends only on the question, so it is made once and kept; what depends on who
    asks, the salt and the signature, is made each time.

    :param answers: None where there is no configuration to answer from.
    :param keys: who may ask; a reply is signed with the key of its request.
    :param max_clock_skew_s: how far a request's time may be from ours, either way.
    :param given: who has had a large answer, from this responder and from others.
    """

    def __init__(
        self,
        answers: Answers | None,
        keys: tuple[Key, ...],
        *,
        max_clock_skew_s: float,
        given: GivenAnswers | None = None,
    ) -> None:
        self._answers = answers
        self._keys = keys
        self._max_clock_skew_s = max_clock_skew_s
        self._given = given or GivenAnswers()
        serial = answers.serial if answers else 0
        self._too_large = Reply(TOO_LARGE.status, TOO_LARGE.answer, serial)
        self._ready: dict[object, _Ready] = {}
        self._ready_size = 0
        self._errors: dict[Reply, _Ready] = {}

    def respond(self, datagram: bytes) -> bytes:
        """The datagram that answers.

        :raises RefusedError: where there must be none.
        """
        message, salt, key = open_request(datagram, self._keys)
        if len(salt) > _LONGEST_TIME or not (salt.isascii() and salt.isdigit()):
            raise RefusedError(Refusal.TIME)
        if abs(int(salt) - time.time()) > self._max_clock_skew_s:
            raise RefusedError(Refusal.TIME)
        try:
            request = decode_json(message)
            reply_salt = request["rsalt"]
            salted = reply_salt.encode()
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            # Whoever sent it has the key, and is told, but with a salt that was not asked for.
            return _seal(self._error(ARGUMENT_ERROR), "", b"", key)
        reply = self._reply(request)
        sealed = _seal(reply, reply_salt, salted, key)
        if len(sealed) > LARGEST_DATAGRAM:
            sealed = _seal(self._error(self._too_large), reply_salt, salted, key)
        if len(sealed) > _LARGE_ANSWER * len(datagram):
            # By what was signed, which may be written in many ways.
            is_new = self._given.add(key.sign((salt + message).encode()))
            if not is_new:
                raise RefusedError(Refusal.REPEATED)
        return sealed

    def _reply(self, request: Any) -> _Ready:
        request_type, query = request.get("type"), request.get("query")
        question = _question(request_type, query)
        if question is not None and request.get("protocol") == PROTOCOL_VERSION:
            ready = self._ready.get(question)
            if ready is not None:
                return ready
        if self._answers is None:
            return self._error(INTERNAL_ERROR)
        if request.get("protocol") != PROTOCOL_VERSION:
            return self._error(NOT_IMPLEMENTED)
        if type(request_type) is not int:
            return self._error(ARGUMENT_ERROR)
        reply = self._answers.answer(request_type, query)
        if reply.status != Status.OK:
            return self._error(reply)
        ready = _encode(reply)
        if len(ready[1]) > LARGEST_DATAGRAM:
            ready = self._error(self._too_large)
        if question is not None:
            self._keep(question, ready)
        return ready

    def _keep(self, question: object, ready: _Ready) -> None:
        size = len(ready[0]) + len(ready[1]) + _OVERHEAD
        if self._ready_size + size > _CACHE_LIMIT:
            self._ready.clear()
            self._ready_size = 0
        self._ready_size += size
        self._ready[question] = ready

    def _error(self, reply: Reply) -> _Ready:
        """An error's text; there are few, so that senders of nonsense fill no memory."""
        if reply not in self._errors:
            self._errors[reply] = _encode(reply)
        return self._errors[reply]


def _question(request_type: Any, query: Any) -> object:
    """What makes two requests one question; None for those whose answer is not kept."""
    if type(request_type) is not int:
        return None
    if request_type in _WITHOUT_QUERY:
        return request_type
    if query is None or type(query) is str:
        return request_type, query
    if request_type == RequestType.NODE_IP_OF_INSTANCE_IP and type(query) is dict:
        ip, link = query.get(QueryKey.IP), query.get(QueryKey.LINK)
        if type(ip) is str and (link is None or type(link) is str):
            return request_type, ip, link
    return None


def _encode(reply: Reply) -> _Ready:
    text = encode_reply(reply)
    return text.encode(), json.dumps(text).encode()


def _seal(ready: _Ready, salt: str, salted: bytes, key: Key) -> bytes:
    """The whole datagram. Like protocol.seal, with the long part already made."""
    text, quoted = ready
    return b'plj0{"hmac":"%b","msg":%b,"salt":%b}' % (
        key.sign(salted + text).encode(),
        quoted,
        encode_basestring(salt).encode(),
    )
