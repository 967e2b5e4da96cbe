"""The client: it queries several master candidates, and uses the newest answer.

::

    client = ConfdClient(["192.0.2.1", "192.0.2.2"], [load_key(Path("/etc/brine/hmac.key"))])
    ip = client.ask(questions.node_ip_of_instance_ip("198.51.100.7"))

It blocks, keeps no connection and no state, and may be used in several threads at once.

Sources: "Ganeti Confd" in the Ganeti 2.1 design (the highest serial wins), and confd-protocol(7).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import math
import queue
import random
import re
import select
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from brine.common.errors import BrineError, printable
from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    PORT,
    ConfdReply,
    DatagramRefusal,
    ErrorCode,
    HmacKey,
    QueryKey,
    RefusedError,
    ReplyStatus,
    RequestType,
    pack_request,
    place,
    unpack_reply,
)
from brine.confd.questions import QUERY_COMMANDS, Question
from brine.config.model import Configuration

T = TypeVar("T")

COVERAGE = 6  # candidates, if there are more
TIMEOUT_S = 10.0


class ConfdError(BrineError):
    """A question that could not be asked, or was not answered."""


class NoAnswerError(ConfdError):
    """No peer answered in time."""


class AnswerError(ConfdError):
    """The newest reply says that there is no answer, by a code or, if that is None, in words."""

    def __init__(self, message: str, code: ErrorCode | None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


# Whom to ask: addresses from a command line, from ssconf, or from the configuration.

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]*))(?::([^:]*))?")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that may answer: an IPv4 or IPv6 address, or a name that resolves to some."""

    host: str
    port: int = PORT

    def __str__(self) -> str:
        """As :func:`parse_peer` takes it; the usual port is left out."""
        return self.host if self.port == PORT else place(self.host, self.port)


def parse_peer(text: str, *, port: int = PORT) -> Peer:
    """``192.0.2.1``, ``2001:db8::1`` or ``node1.example.com``, each perhaps with a port; with one
    an IPv6 address stands in brackets."""
    if _is_address(text):
        return Peer(text, port)
    found = _ADDRESS.fullmatch(text)
    address, name, port_text = (found[1] or "", found[2] or "", found[3]) if found else ("", "", "")
    if not (_is_address(address) or _NAME.fullmatch(name)):
        hint = "try 192.0.2.1, node1.example.com:1814 or [2001:db8::1]:1814"
        raise ConfdError(f"not an address: {text!r}", hint=hint)
    if port_text is not None:
        if not (_PORT.fullmatch(port_text) and 0 < int(port_text) < 65536):
            raise ConfdError(f"not a port, which is from 1 to 65535: {text!r}")
        port = int(port_text)
    return Peer(address or name, port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def find_peers(*, ssconf_dir: Path, config_file: Path) -> list[str]:
    """The addresses of the master candidates: from ssconf, which every node has, or where that is
    not filled from a master candidate's own configuration."""
    file = ssconf_dir / "ssconf_master_candidates_ips"
    found: list[str] = []
    try:
        with contextlib.suppress(FileNotFoundError):
            found = file.read_text(encoding="ascii").split()
        if not found:
            file = config_file
            with contextlib.suppress(FileNotFoundError, PermissionError):  # not everybody's to read
                nodes = Configuration.parse(file.read_bytes()).nodes.values()
                found = [it.primary_ip for it in nodes if it.master_candidate and not it.offline]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        hint = "name whom to ask with --peer"
        raise ConfdError(f"{file}: can't be read: {why}", hint=hint) from error
    if not found:
        message = f"this node knows no master candidates: neither {ssconf_dir} nor {config_file}"
        hint = "name one or more with --peer; brine config export-ssconf fills the first"
        raise ConfdError(message, hint=hint)
    return found


# What came back, and the choice of the answer.

_UNORDERED = frozenset(
    {
        RequestType.NODE_IPS,
        RequestType.MASTER_CANDIDATE_IPS,
        RequestType.INSTANCE_IPS,
        RequestType.NODE_DRBD,
        RequestType.OFFLINE_NODES,
        RequestType.INSTANCES,
    }
)
"""Types whose answer is a list in no order that means something: daemons differ in it."""


class Silence(StrEnum):
    """Why there is no reply of a peer, as far as one can know."""

    SILENT = "silent"
    REFUSED = "refused"  # its kernel said that nothing listens on the port
    UNREACHABLE = "unreachable"  # no route, or a router said so
    UNRESOLVED = "unresolved"  # the name has no address


class Dropped(StrEnum):
    """Why a datagram that came in was not taken for a reply."""

    SIGNATURE = "signature"  # wrong, or of a key that we don't have
    SALT = "salt"  # authentic, but no answer to this question
    MALFORMED = "malformed"
    DUPLICATE = "duplicate"  # a peer's second reply


class PeerStanding(StrEnum):
    """A reply beside the newest one."""

    NEWEST = "newest"
    AGREES = "agrees"
    STALE = "stale"  # of a lower serial
    DISAGREES = "disagrees"  # says something else, and not because it is older
    FAILED = "failed"  # could not answer, which says nothing of the configuration


@dataclass(frozen=True, slots=True)
class PeerReply:
    """One peer's reply."""

    peer: Peer
    reply: ConfdReply
    round_trip_s: float  # from the datagram that it answers to its arrival

    @property
    def is_failure(self) -> bool:
        """Whether the peer could not look for an answer: without a configuration, or too old."""
        if self.reply.status == ReplyStatus.ERROR:
            return self.reply.answer is not True and self.reply.answer == ErrorCode.INTERNAL
        return self.reply.status != ReplyStatus.OK


@dataclass(frozen=True)
class Result:
    """All that came back: one reply a peer, in the order they came, and the peers without one."""

    type: int
    query: Any
    replies: tuple[PeerReply, ...]
    silences: dict[Peer, Silence]
    dropped: Counter[Dropped]

    @property
    def asked(self) -> tuple[Peer, ...]:
        """All peers that were asked."""
        return (*(one.peer for one in self.replies), *self.silences)

    @property
    def needed(self) -> int:
        """How many replies are enough."""
        return needed_replies(len(self.asked))

    @property
    def enough(self) -> bool:
        """Whether so many could answer that the newest is likely to be the cluster's newest."""
        return 0 < self.needed <= self.able

    @property
    def able(self) -> int:
        """How many could look for an answer."""
        return sum(not one.is_failure for one in self.replies)

    @property
    def newest(self) -> PeerReply | None:
        """The reply of the highest serial; an answer before an error, then the first that came.

        That an entry is unknown is a reply with a serial too, so what was removed is not found
        again by asking an older peer. Errors of Ganeti's daemons have the serial 0, though.
        """

        def age(one: PeerReply) -> tuple[bool, int, bool]:
            return not one.is_failure, one.reply.serial, one.reply.status == ReplyStatus.OK

        return max(self.replies, key=age, default=None)

    @cached_property
    def standings(self) -> tuple[PeerStanding, ...]:
        """How each of ``replies`` compares with the newest one."""
        newest = self.newest
        return tuple(self._standing(one, newest) for one in self.replies if newest)

    def _standing(self, one: PeerReply, newest: PeerReply) -> PeerStanding:
        reply = one.reply
        if one is newest:
            return PeerStanding.NEWEST
        if one.is_failure and not newest.is_failure:
            return PeerStanding.FAILED
        is_older = reply.serial < newest.reply.serial
        if is_older and (reply.serial or reply.status == ReplyStatus.OK):
            return PeerStanding.STALE
        if _comparable(self.type, reply) == _comparable(self.type, newest.reply):
            return PeerStanding.AGREES
        return PeerStanding.DISAGREES

    @property
    def disagreement(self) -> bool:
        """Whether a peer contradicts the newest reply, and is not merely older."""
        return PeerStanding.DISAGREES in self.standings

    def with_standing(self, standing: PeerStanding) -> list[PeerReply]:
        """The replies of that standing."""
        pairs = zip(self.replies, self.standings, strict=True)
        return [one for one, its in pairs if its == standing]

    def answer(self) -> Any:
        """The newest answer. Raises NoAnswerError without one, AnswerError if it is an error."""
        newest = self.newest
        if not newest:
            raise _no_answer_error(self)
        if newest.reply.status != ReplyStatus.OK:
            raise _answer_error(self, newest.reply, newest.peer)
        return newest.reply.answer

    def decoded(self, question: Question[T]) -> T:
        """The newest answer, typed. Raises ConfdError, too, if it has another shape."""
        answer = self.answer()
        try:
            return question.decode(answer)
        except (ValueError, TypeError, LookupError) as error:
            peer = self.newest.peer if self.newest else None
            message = f"{peer} gave an answer that is none to this question: {answer!r:.80}"
            raise ConfdError(message) from error


def needed_replies(asked: int) -> int:
    """How many of *asked* peers must reply: of few all, or all but one; then a majority."""
    if asked < 3:
        return asked
    return asked - 1 if asked < 5 else asked // 2 + 1


def _comparable(request_type: int, reply: ConfdReply) -> Any:
    """Equal for replies that say the same."""

    def in_order(items: Any) -> Any:
        if not isinstance(items, list):
            return items
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))

    if reply.status != ReplyStatus.OK:
        return "error"  # peers word them differently
    if request_type in _UNORDERED:
        return in_order(reply.answer)
    if request_type == RequestType.NODE_INSTANCES and isinstance(reply.answer, list):
        return [in_order(part) for part in reply.answer]
    return reply.answer


def _no_answer_error(result: Result) -> NoAnswerError:
    reasons = ", ".join(f"{peer} {silence}" for peer, silence in result.silences.items())
    # Daemons are silent to whom they don't trust.
    hint = "peers are silent to a request with another key or another time: "
    hint += "compare hmac.key and the clocks; is UDP let through?"
    if result.dropped[Dropped.SIGNATURE]:
        hint = "replies came with another signature: compare hmac.key with that of the peers"
    elif set(result.silences.values()) == {Silence.REFUSED}:
        hint = "is brine-confd running there, and on that port?"
    elif set(result.silences.values()) == {Silence.UNRESOLVED}:
        hint = "name IP addresses instead"
    return NoAnswerError(f"no peer answered: {reasons}", hint=hint)


def _answer_error(result: Result, reply: ConfdReply, peer: Peer) -> AnswerError:
    if reply.status != ReplyStatus.ERROR:
        return AnswerError(f"{peer} does not know this question", None)
    if type(reply.answer) is str:  # Ganeti's daemon explains
        return AnswerError(f"{peer} says: {printable(' '.join(reply.answer.split()))}", None)
    try:
        code = ErrorCode(reply.answer)
    except ValueError:
        return AnswerError(f"{peer} answers with an unknown error: {reply.answer!r:.80}", None)
    hint = None
    noun = next((it.argument for kind, it in QUERY_COMMANDS.items() if kind == result.type), "")
    if code == ErrorCode.UNKNOWN_ENTRY and noun in ("NODE", "INSTANCE"):
        message = f"there is no {noun.lower()} {result.query}"
        hint = "name it whole, by UUID, or by a short name that no other has"
    elif code == ErrorCode.UNKNOWN_ENTRY and noun == "IP":
        ip, link = result.query.get(QueryKey.IP), result.query.get(QueryKey.LINK)
        message = f"no instance has the IP {ip} on {link or 'the default link'}"
        hint = None if link else "where it is on another link: --link LINK"
    elif code == ErrorCode.UNKNOWN_ENTRY:
        message = "there is no such entry in the configuration"
    elif code == ErrorCode.INTERNAL:
        message = f"{peer} can't answer at present"
        hint = "see the journal there: journalctl -u brine-confd"
    elif code == ErrorCode.TOO_LARGE:
        message = f"the answer does not fit a datagram of {LARGEST_DATAGRAM} bytes"
        hint = "ask for a part of it"
        if result.type == RequestType.INSTANCES:
            hint = "--after '' prints the first page, --after NAME those that follow"
    elif result.type == RequestType.CONFIG:
        message = f"nothing in the configuration is at {result.query!r}"
        hint = "a JSON pointer (RFC 6901) is such as /cluster/mac_prefix"
    else:
        message = f"{peer} does not take this question's argument"
    return AnswerError(message, code, hint=hint)


# One question to several peers, by datagrams that may get lost.

_FIRST_PAUSE_S = 0.5
_PAUSE_GROWTH = 2
_FAILURES = 3  # of a peer, as during a restart of its daemon, before it is given up
_RECEIVE_BUFFER = 1024 * 1024  # several answers of the largest size come at the same time
_AT_ONCE = 64  # datagrams, before the clock is looked at, even in a flood

# Of <linux/in.h>, <linux/in6.h> and <linux/errqueue.h>; Python 3.11 does not name them.
_RECEIVE_ERRORS = {
    socket.AF_INET: (socket.IPPROTO_IP, 11),  # IP_RECVERR
    socket.AF_INET6: (socket.IPPROTO_IPV6, 25),  # IPV6_RECVERR
}
_EXTENDED_ERROR = struct.Struct("=I")  # struct sock_extended_err begins with the errno


@dataclass(eq=False)
class _PeerState:
    """The state of a peer during a query."""

    peer: Peer
    addresses: list[tuple[int, Any]] = field(default_factory=list)  # families, socket addresses
    attempts: int = 0
    pause_s: float = _FIRST_PAUSE_S
    due_s: float = math.inf  # when to send next
    failures: int = 0
    silence: Silence = Silence.SILENT
    reply: PeerReply | None = None
    given_up: bool = False

    @property
    def over(self) -> bool:
        return self.given_up or self.reply is not None


class _Exchange:
    """Asks peers one question.

    Each datagram has a reply salt of its own. So each reply belongs to a certain peer, whatever
    address it comes from. A reply that an attacker repeats under other addresses counts once.
    """

    def __init__(
        self, request_type: int, query: Any, peers: Sequence[Peer], keys: tuple[HmacKey, ...]
    ) -> None:
        self._type = request_type
        self._query = query
        self._keys = keys
        self._states = [_PeerState(peer) for peer in peers]
        self._sent: dict[str, tuple[_PeerState, float]] = {}  # by reply salt; when
        self._sockets: dict[int, socket.socket] = {}  # by address family
        self._poll = select.poll()
        self._resolved: queue.SimpleQueue[tuple[_PeerState, list[Any]]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._poll.register(self._woken, select.POLLIN)
        self._replies: list[PeerReply] = []
        self._dropped: Counter[Dropped] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._woken, self._waker, *self._sockets.values()):
            one.close()

    def run(self, wanted: int, timeout_s: float) -> Result:
        """Ask until so many have answered, no other can reply, or the time is over."""
        ends_s = time.monotonic() + timeout_s
        for state in self._states:
            self._resolve(state)
        while (now_s := time.monotonic()) < ends_s and not self._is_over(wanted):
            for state in self._states:
                if state.due_s <= now_s and not state.over:
                    state.due_s = now_s + state.pause_s
                    state.pause_s *= _PAUSE_GROWTH
                    self._send(state)
            if self._is_over(wanted):  # none of them could be sent to
                break
            due_s = min([ends_s, *(state.due_s for state in self._states if not state.over)])
            for descriptor, _ in self._poll.poll(math.ceil((due_s - now_s) * 1000)):
                if descriptor == self._woken.fileno():
                    self._woken.recv(1)
                    self._begin(*self._resolved.get())
            for one in self._sockets.values():
                self._read(one)
        silences = {one.peer: one.silence for one in self._states if not one.reply}
        return Result(self._type, self._query, tuple(self._replies), silences, self._dropped)

    def _is_over(self, wanted: int) -> bool:
        answered = sum(not one.is_failure for one in self._replies)
        return answered >= wanted or all(one.over for one in self._states)

    def _resolve(self, state: _PeerState) -> None:
        """Find a peer's addresses. Only a name needs a resolver, which may take long."""
        where, kind = (state.peer.host, state.peer.port), socket.SOCK_DGRAM

        def ask_resolver() -> None:
            try:
                found = socket.getaddrinfo(*where, type=kind)
            except (OSError, UnicodeError):  # a label of a name may be too long to be encoded
                found = []
            self._resolved.put((state, found))
            with contextlib.suppress(OSError):  # the query has ended
                self._waker.send(b"\0")

        try:
            literal = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            self._begin(state, socket.getaddrinfo(*where, type=kind, flags=literal))
        except (socket.gaierror, UnicodeError):
            threading.Thread(target=ask_resolver, daemon=True).start()

    def _begin(self, state: _PeerState, found: list[Any]) -> None:
        state.addresses = [(family, address) for family, _, _, _, address in found]
        state.due_s = 0.0
        if not found:
            state.silence = Silence.UNRESOLVED
            state.given_up = True

    def _send(self, state: _PeerState) -> None:
        family, address = state.addresses[state.attempts % len(state.addresses)]
        key = self._keys[state.attempts % len(self._keys)]
        state.attempts += 1
        salt = str(uuid.uuid4())
        # Each attempt has its own time: that of the first may be too old for the last.
        datagram = pack_request(self._type, self._query, salt, key, now_s=time.time())
        self._sent[salt] = state, time.monotonic()
        for _ in range(3):
            try:
                self._socket(family).sendto(datagram, address)
                return
            except BlockingIOError:
                return  # the next attempt will do
            except OSError as error:
                # The error of an earlier datagram, which the kernel reports once, or of this one.
                fault = error
        self._failed(state, fault.errno)

    def _socket(self, family: int) -> socket.socket:
        """The socket of an address family. Its port is the kernel's choice, a new one each time."""
        if family not in self._sockets:
            one = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._sockets[family] = one
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            # Have ICMP errors told with the address that they are about. A connected socket would
            # do as well, but takes no reply from another address of a node that has several.
            one.setsockopt(*_RECEIVE_ERRORS[socket.AddressFamily(family)], 1)
            self._poll.register(one, select.POLLIN)
        return self._sockets[family]

    def _read(self, one: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                _, control, _, address = one.recvmsg(0, 512, socket.MSG_ERRQUEUE)
            except OSError:
                break
            if control and address:
                self._undelivered(_EXTENDED_ERROR.unpack_from(control[0][2])[0], address)
        for _ in range(_AT_ONCE):
            try:
                self._take(one.recv(LARGEST_DATAGRAM + 1), time.monotonic())
            except BlockingIOError:
                break
            except OSError:  # what the queue of errors has, once more
                continue

    def _take(self, datagram: bytes, now_s: float) -> None:
        try:
            reply, salt = unpack_reply(datagram, self._keys)
        except RefusedError as error:
            wrong_key = error.refusal is DatagramRefusal.SIGNATURE
            self._dropped[Dropped.SIGNATURE if wrong_key else Dropped.MALFORMED] += 1
            return
        if salt not in self._sent:
            self._dropped[Dropped.SALT] += 1
            return
        state, sent_s = self._sent[salt]
        if state.reply:
            self._dropped[Dropped.DUPLICATE] += 1
            return
        state.reply = PeerReply(state.peer, reply, now_s - sent_s)
        self._replies.append(state.reply)

    def _undelivered(self, number: int, address: Any) -> None:
        """Take an ICMP error: a datagram to *address* did not arrive."""
        for state in self._states:
            if address[:2] in [known[:2] for _, known in state.addresses]:
                self._failed(state, number)

    def _failed(self, state: _PeerState, number: int | None) -> None:
        refused = number == errno.ECONNREFUSED
        state.silence = Silence.REFUSED if refused else Silence.UNREACHABLE
        state.failures += 1
        if state.over:
            return
        if state.failures < len(state.addresses):
            self._send(state)  # to a name's next address, such as IPv4's of localhost
        elif state.failures >= len(state.addresses) + _FAILURES - 1:
            state.given_up = True


class ConfdClient:
    """Asks the master candidates of one cluster.

    Each question goes to several of them, chosen at random. The newest answer counts, once so many
    peers have replied that it is likely to be the cluster's newest.

    Example::

        client = ConfdClient(["192.0.2.1", "node2.example.com"], [load_key(key_file)])
        try:
            role = client.ask(questions.node_role("node3.example.com"), timeout_s=2.0)
        except NoAnswerError as error:
            print(error, error.hint)

    :param peers: addresses as :func:`parse_peer` takes them.
    :param keys: the valid secrets, the current one first. Requests are signed with it; a peer that
        does not answer is asked again with the next.
    :param port: of peers that name none.
    :raises ConfdError: if there is no peer or no key, or an address is wrong.
    """

    def __init__(self, peers: Iterable[str], keys: Sequence[bytes], *, port: int = PORT) -> None:
        self.peers = tuple(dict.fromkeys(parse_peer(one, port=port) for one in peers))
        if not self.peers:
            raise ConfdError("there is no peer to ask")
        if not keys:
            raise ConfdError("there is no key to sign with")
        self._keys = tuple(HmacKey(secret) for secret in keys)

    def query(
        self,
        request_type: int,
        query: Any = None,
        *,
        coverage: int | None = None,
        at_least: int | None = None,
        patient: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> Result:
        """Ask, and wait for replies.

        Example::

            result = client.query(RequestType.NODE_ROLE, "node3.example.com", patient=True)
            for one, standing in zip(result.replies, result.standings):
                print(one.peer, standing)

        :param coverage: how many peers to ask, chosen at random; by default six, or all if there
            are fewer.
        :param at_least: wait until so many could look for an answer; by default, until enough have
            that the newest is likely to be the cluster's.
        :param patient: wait for all of them.
        :param timeout_s: how long to wait at most, in seconds.
        :returns: all replies, perhaps none.
        :raises ConfdError: if the request does not fit a datagram.
        """
        salt = str(uuid.uuid4())
        size = len(pack_request(request_type, query, salt, self._keys[0], now_s=time.time()))
        if size > LARGEST_DATAGRAM:
            raise ConfdError(
                f"the request is of {size} bytes, and a datagram of {LARGEST_DATAGRAM} at most",
                hint="ask for less at a time",
            )
        asked = random.sample(self.peers, min(coverage or COVERAGE, len(self.peers)))
        with _Exchange(request_type, query, asked, self._keys) as exchange:
            needed = at_least or needed_replies(len(asked))
            return exchange.run(len(asked) if patient else needed, timeout_s)

    def ask(
        self,
        question: Question[T],
        *,
        coverage: int | None = None,
        at_least: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        """The newest answer to one of :mod:`brine.confd.questions`; see :meth:`Result.decoded`.

        Example::

            ip = client.ask(questions.node_ip_of_instance_ip("198.51.100.7"))

        :param coverage: how many peers to ask; see :meth:`query`.
        :param at_least: so many must be able to answer, and are waited for; the newest answer of
            fewer does not count.
        :param timeout_s: how long to wait at most, in seconds.
        :raises NoAnswerError: if no peer answered, or fewer than that.
        :raises ConfdError: if the newest answer is an error, or has another shape.
        """
        result = self.query(
            question.type,
            question.query,
            coverage=coverage,
            at_least=at_least,
            timeout_s=timeout_s,
        )
        if 0 < result.able < (at_least or 1):
            text = f"{result.able} of {len(result.asked)} peers answered, and {at_least} are needed"
            silent = ", ".join(f"{peer} {why}" for peer, why in result.silences.items())
            raise NoAnswerError(f"{text}: {silent}" if silent else text)
        return result.decoded(question)
