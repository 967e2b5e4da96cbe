"""A worker of the daemon: it receives datagrams, and sends answers."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from brine.common.errors import BrineError
from brine.confd.answers import WITHOUT_QUERY, Answers
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    PROTOCOL_VERSION,
    ConfdReply,
    DatagramRefusal,
    ErrorCode,
    HmacKey,
    QueryKey,
    RefusedError,
    ReplyStatus,
    RequestType,
    decode_json,
    encode_reply,
    open_request,
    place,
)

_CACHE_LIMIT = 96 * 1024 * 1024  # of replies, in bytes
_OVERHEAD = 400  # of a cached reply, beside its text, in bytes
_LONGEST_TIME = 12  # digits of a request's time

_LARGE_ANSWER = 3
"""The ratio of an answer's length to its request's above which an attacker could use the answer to
flood another address."""
_BUCKETS = 1 << 14
_BUCKET_SIZE, _MARK_SIZE = 64, 8
"""In bytes: a bucket has eight signatures, by eight bytes of each."""

_EncodedReply = tuple[bytes, bytes]
"""A reply's JSON text: as it is signed, and quoted as it stands in the envelope."""


class LargeAnswers:
    """The requests that have got a large answer, so that none gets it twice.

    Processes that are forked later share it: the kernel spreads repeated datagrams over all
    workers, and a new configuration has new workers. It has room for 131,072 signatures in 1 MiB,
    and forgets the oldest of a bucket.
    """

    def __init__(self) -> None:
        self._table = mmap.mmap(-1, _BUCKETS * _BUCKET_SIZE)

    def add(self, signature: str) -> bool:
        """Record a request; returns whether it is new.

        :param signature: 40 hexadecimal digits, which only a holder of the key can choose.
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
    """Answers requests from one configuration, if there is one.

    A reply's text depends only on the question, so it is made once and cached. The salt and the
    signature, with the key of the request, are made for each request.

    :param given: the requests that have got a large answer from any responder.
    """

    def __init__(
        self,
        answers: Answers | None,
        keys: tuple[HmacKey, ...],
        *,
        max_clock_skew_s: float,
        given: LargeAnswers,
    ) -> None:
        self._answers = answers
        self._keys = keys
        self._max_clock_skew_s = max_clock_skew_s
        self._given = given
        self._too_large = _error(ErrorCode.TOO_LARGE, answers.serial if answers else 0)
        self._ready: dict[object, _EncodedReply] = {}
        self._ready_size = 0

    def respond(self, datagram: bytes) -> bytes:
        """The datagram that answers a request.

        :raises RefusedError: if there must be no answer.
        """
        message, salt, key = open_request(datagram, self._keys)
        if len(salt) > _LONGEST_TIME or not (salt.isascii() and salt.isdigit()):
            raise RefusedError(DatagramRefusal.TIME)
        if abs(int(salt) - time.time()) > self._max_clock_skew_s:
            raise RefusedError(DatagramRefusal.TIME)
        try:
            request = decode_json(message)
            reply_salt = request["rsalt"]
            salted = reply_salt.encode()
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            # The sender has the key, and gets an error, with a salt that was not asked for.
            return _seal(_error(ErrorCode.ARGUMENT), "", b"", key)
        sealed = _seal(self._reply(request), reply_salt, salted, key)
        if len(sealed) > LARGEST_DATAGRAM:
            sealed = _seal(self._too_large, reply_salt, salted, key)
        if len(sealed) > _LARGE_ANSWER * len(datagram):
            # By the signed text, because the envelope may be written in many ways.
            is_new = self._given.add(key.sign((salt + message).encode()))
            if not is_new:
                raise RefusedError(DatagramRefusal.REPEATED)
        return sealed

    def _reply(self, request: dict[str, Any]) -> _EncodedReply:
        if self._answers is None:
            return _error(ErrorCode.INTERNAL)
        if request.get("protocol") != PROTOCOL_VERSION:
            return _encode(ConfdReply(ReplyStatus.NOT_IMPLEMENTED, ErrorCode.ARGUMENT))
        request_type, query = request.get("type"), request.get("query")
        if type(request_type) is not int:
            return _error(ErrorCode.ARGUMENT)
        question = _question(request_type, query)
        ready = self._ready.get(question)
        if ready is not None:
            return ready
        reply = self._answers.answer(request_type, query)
        ready = _encode(reply)
        if len(ready[1]) > LARGEST_DATAGRAM:
            ready = self._too_large
        # Errors are not kept, so that invalid requests fill no memory.
        if question is not None and reply.status == ReplyStatus.OK:
            self._keep(question, ready)
        return ready

    def _keep(self, question: object, ready: _EncodedReply) -> None:
        size = len(ready[0]) + len(ready[1]) + _OVERHEAD
        if self._ready_size + size > _CACHE_LIMIT:
            self._ready.clear()
            self._ready_size = 0
        self._ready_size += size
        self._ready[question] = ready


def _question(request_type: int, query: Any) -> object:
    """The key of a request in the cache; None if its answer is not cached."""
    if request_type in WITHOUT_QUERY:
        return request_type
    if query is None or type(query) is str:
        return request_type, query
    if request_type == RequestType.NODE_IP_OF_INSTANCE_IP and type(query) is dict:
        ip, link = query.get(QueryKey.IP), query.get(QueryKey.LINK)
        if type(ip) is str and (link is None or type(link) is str):
            return request_type, ip, link
    return None


def _error(code: ErrorCode, serial: int = 0) -> _EncodedReply:
    return _encode(ConfdReply(ReplyStatus.ERROR, code, serial))


def _encode(reply: ConfdReply) -> _EncodedReply:
    text = encode_reply(reply)
    return text.encode(), json.dumps(text).encode()


def _seal(ready: _EncodedReply, salt: str, salted: bytes, key: HmacKey) -> bytes:
    """The complete datagram. Like protocol.seal, with the long part already made."""
    text, quoted = ready
    return b'plj0{"hmac":"%b","msg":%b,"salt":%b}' % (
        key.sign(salted + text).encode(),
        quoted,
        encode_basestring(salt).encode(),
    )


# The UDP sockets of requests.

_RECEIVE_BUFFER = 4 * 1024 * 1024
"""In bytes; the kernel gives as much of it as net.core.rmem_max allows."""


class PortError(BrineError):
    """An address or port that can't be listened on."""


def open_sockets(
    addresses: Sequence[str], port: int, count: int, *, sole: bool = True
) -> list[list[socket.socket]]:
    """Open *count* sets of sockets, each with one for every address, all on one port.

    The kernel spreads clients over the sets (SO_REUSEPORT, :manpage:`socket(7)`). ``::`` takes IPv4
    too, unless there is an IPv4 address beside it, and is that alone where there is no IPv6.

    :param sole: whether nothing else of this user may listen there, this process included.
    :raises PortError: if any of them can't be opened; then none is left open.
    """
    with contextlib.ExitStack() as undo:
        for address in addresses if sole else ():
            # With SO_REUSEPORT, a second daemon of the same user would get half of the requests.
            # Without it, the kernel refuses a second one.
            _open(address, port, addresses, shared=False).close()
        sets: list[list[socket.socket]] = [[] for _ in range(count)]
        for sockets in sets:
            for address in addresses:
                opened = _open(address, port, addresses, shared=True)
                sockets.append(undo.enter_context(opened))
        undo.pop_all()
        return sets


def _open(address: str, port: int, beside: Sequence[str], *, shared: bool) -> socket.socket:
    is_alone = address != "::" or any("." in other for other in beside)
    if address == "::" and not socket.has_dualstack_ipv6():
        address = "0.0.0.0"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as undo:
        try:
            opened = undo.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            opened.setblocking(False)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_alone)
            if shared:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            opened.bind(socket.getaddrinfo(address, port, family, socket.SOCK_DGRAM)[0][4])
        except OSError as error:
            hints = {
                errno.EADDRINUSE: f"see who has the port: ss -ulpn 'sport = :{port}'",
                errno.EADDRNOTAVAIL: "it must be an address of this node: ip -brief address",
            }
            message = f"can't listen on {place(address, port)}: {error.strerror}"
            raise PortError(message, hint=hints.get(error.errno or 0)) from error
        undo.pop_all()
        return opened


# The worker process, which answers requests while its configuration is the current one.

REPORT_INTERVAL_S = 1.0
_BATCH = 64
"""The number of datagrams that are read from one socket before the next one, and orders."""
_LARGEST_DATAGRAM = 65536
_UNSENT = "answer not sent"


class Worker:
    """Answers the requests at some sockets.

    :param link: takes a report each second, which is also a sign of life: how many requests were
        answered, how many were not by reason, and the source IP address of the last of these, as
        JSON. Its end means to stop.
    :param turn: descriptor of a pipe that ends when the former workers are gone. Two configurations
        must never be in use at the same time: a client would see the serial number fall.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        responder: Responder,
        *,
        link: socket.socket,
        turn: int | None,
    ) -> None:
        self._sockets = {one.fileno(): one for one in sockets}
        self._responder = responder
        self._link = link
        self._turn = turn
        self._answered = 0
        self._refused: Counter[str] = Counter()
        self._source = ""
        self._report_due_s = 0.0

    def run(self) -> None:
        """Work until told to stop."""
        if self._turn is not None:
            # Also when told to stop: the worker after this one waits for all former workers.
            while not select.select([self._turn], [], [], REPORT_INTERVAL_S)[0]:
                self._report()
            os.close(self._turn)
        with select.epoll() as poll:
            for descriptor in (*self._sockets, self._link.fileno()):
                poll.register(descriptor, select.EPOLLIN)
            stopping = False
            while not stopping:
                for descriptor, _ in poll.poll(REPORT_INTERVAL_S):
                    if descriptor in self._sockets:
                        self._serve(self._sockets[descriptor])
                    else:
                        stopping = True
                if stopping or time.monotonic() >= self._report_due_s:
                    self._report()

    def _serve(self, peer: socket.socket) -> None:
        receive, send, respond = peer.recvfrom, peer.sendto, self._responder.respond
        for _ in range(_BATCH):
            try:
                datagram, source = receive(_LARGEST_DATAGRAM)
            except BlockingIOError:
                return
            try:
                send(respond(datagram), source)
            except RefusedError as error:
                self._refuse(error.refusal.value, source)
            except OSError:
                self._refuse(_UNSENT, source)
            else:
                self._answered += 1

    def _refuse(self, reason: str, source: Any) -> None:
        self._refused[reason] += 1
        self._source = source[0]

    def _report(self) -> None:
        self._report_due_s = time.monotonic() + REPORT_INTERVAL_S
        try:
            self._link.send(json.dumps([self._answered, self._refused, self._source]).encode())
        except OSError:
            # The supervisor has not read for long, and the counts go with the next report; or it is
            # gone, and the link says so, too.
            return
        self._answered = 0
        self._refused.clear()
