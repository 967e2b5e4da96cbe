"""The client: it queries several candidates, and uses the newest answer.

::

    client = ConfdClient(["192.0.2.1", "192.0.2.2"], [load_key(Path("/etc/brine/hmac.key"))])
    ip = await client.ask(questions.node_ip_of_instance_ip("198.51.100.7"))

A program without an event loop has :class:`BlockingConfdClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from brine.confd.protocol import (
    LARGEST_DATAGRAM,
    PORT,
    ConfdRequest,
    DatagramRefusal,
    HmacKey,
    RefusedError,
    pack_request,
    unpack_reply,
)
from brine.confd.questions import Question
from brine.confd.replies import (
    ConfdError,
    Dropped,
    Peer,
    PeerReply,
    PeersError,
    RequestTooLargeError,
    Result,
    Silence,
    is_failure,
    needed_replies,
    parse_peer,
)

# One question to several peers, by datagrams that may get lost.

P = ParamSpec("P")
T = TypeVar("T")

_FIRST_PAUSE_S = 0.5
_PAUSE_GROWTH = 2
_FAILURES = 3
"""How often a peer may refuse, as during a restart of its daemon, before it is given up."""

_RECEIVE_BUFFER = 1024 * 1024  # several answers of the largest size come at the same time
_AT_ONCE = 64
"""The number of datagrams that are read before timers run: a flood must not stop the clock."""

# Of <linux/in.h>, <linux/in6.h> and <linux/errqueue.h>; Python 3.11 does not name them.
_IP_RECVERR = 11
_IPV6_RECVERR = 25
_EXTENDED_ERROR = struct.Struct("=I")  # struct sock_extended_err begins with the errno

_Address = tuple[Any, ...]


@dataclass(eq=False)
class _PeerState:
    """The state of a peer during a query."""

    peer: Peer
    addresses: list[tuple[int, _Address]]  # family and socket address
    attempts: int = 0
    failures: int = 0
    silence: Silence = Silence.SILENT
    reply: PeerReply | None = None
    given_up: bool = False

    @property
    def over(self) -> bool:
        return self.given_up or self.reply is not None


class Exchange:
    """Asks *peers* one question. A context manager, which closes the sockets.

    Each datagram has a reply salt of its own. So each reply belongs to a certain peer, whatever
    address it comes from. A reply that an attacker repeats under other addresses counts once.

    :param keys: an unanswered request is repeated with the next key; a reply may be signed with
        any.
    :param patient: wait for every peer, not only until enough have answered.
    :param clock: the time since the epoch, in seconds.
    :raises RequestTooLargeError: if the question does not fit a datagram.
    """

    def __init__(
        self,
        request_type: int,
        query: Any,
        peers: tuple[Peer, ...],
        keys: tuple[HmacKey, ...],
        *,
        patient: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._type = request_type
        self._query = query
        self._keys = keys
        self._clock = clock
        self._states = [_PeerState(peer, []) for peer in peers]
        self._wanted = len(peers) if patient else needed_replies(len(peers))
        self._sent: dict[str, tuple[_PeerState, float]] = {}  # by reply salt; when
        self._sockets: dict[int, socket.socket] = {}
        self._over = asyncio.Event()
        self.replies: list[PeerReply] = []
        self.dropped: Counter[Dropped] = Counter()
        size = len(self._pack(str(uuid.uuid4()), keys[0]))
        if size > LARGEST_DATAGRAM:
            raise RequestTooLargeError(
                f"the request is of {size} bytes, and a datagram of {LARGEST_DATAGRAM} at most",
                hint="ask for less at a time",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets.values():
            asyncio.get_running_loop().remove_reader(one)
            one.close()

    @property
    def silences(self) -> dict[Peer, Silence]:
        """The peers that have not replied."""
        return {one.peer: one.silence for one in self._states if not one.reply}

    async def run(self, timeout_s: float) -> None:
        """Ask until enough peers have replied, no other can reply, or the time is over."""
        tasks = [asyncio.create_task(self._ask_peer(state)) for state in self._states]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._over.wait()
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in done:
            if isinstance(failure, Exception):
                raise failure

    # Sending.

    async def _ask_peer(self, state: _PeerState) -> None:
        """Send to a peer, and again after growing pauses, until it has replied or refuses."""
        try:
            state.addresses = await _resolve(state.peer)
        except OSError:
            state.silence = Silence.UNRESOLVED
            self._give_up(state)
            return
        pause_s = _FIRST_PAUSE_S
        while not state.over:
            self._send(state)
            await asyncio.sleep(pause_s)
            pause_s *= _PAUSE_GROWTH

    def _send(self, state: _PeerState) -> None:
        family, address = state.addresses[state.attempts % len(state.addresses)]
        key = self._keys[state.attempts % len(self._keys)]
        state.attempts += 1
        salt = str(uuid.uuid4())
        datagram = self._pack(salt, key)
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

    def _pack(self, salt: str, key: HmacKey) -> bytes:
        # Each attempt has its own time: that of the first may be too old for the last.
        request = ConfdRequest(self._type, self._query, salt)
        return pack_request(request, key, now_s=self._clock())

    def _socket(self, family: int) -> socket.socket:
        """The socket of an address family. Its port is the kernel's choice, a new one each time."""
        if family not in self._sockets:
            one = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            # Have ICMP errors told with the address that they are about. A connected socket would
            # do as well, but takes no reply from another address of a node that has several.
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
            else:
                one.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            self._sockets[family] = one
            asyncio.get_running_loop().add_reader(one, self._readable, one)
        return self._sockets[family]

    # Receiving.

    def _readable(self, one: socket.socket) -> None:
        for number, address in _told_errors(one):
            self._undelivered(number, address)
        for _ in range(_AT_ONCE):
            try:
                datagram = one.recv(LARGEST_DATAGRAM + 1)
            except BlockingIOError:
                break
            except OSError:  # what the queue of errors has, once more
                continue
            self._take(datagram, time.monotonic())

    def _take(self, datagram: bytes, now_s: float) -> None:
        try:
            reply, salt = unpack_reply(datagram, self._keys)
        except RefusedError as error:
            wrong_key = error.refusal is DatagramRefusal.SIGNATURE
            self.dropped[Dropped.SIGNATURE if wrong_key else Dropped.MALFORMED] += 1
            return
        if salt not in self._sent:
            self.dropped[Dropped.SALT] += 1
            return
        state, sent_s = self._sent[salt]
        if state.reply:
            self.dropped[Dropped.DUPLICATE] += 1
            return
        state.reply = PeerReply(state.peer, reply, now_s - sent_s)
        self.replies.append(state.reply)
        self._check_over()

    def _undelivered(self, number: int, address: _Address) -> None:
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
            self._give_up(state)

    def _give_up(self, state: _PeerState) -> None:
        state.given_up = True
        self._check_over()

    def _check_over(self) -> None:
        answered = sum(not is_failure(one.reply) for one in self.replies)
        if answered >= self._wanted or all(one.over for one in self._states):
            self._over.set()


async def _resolve(peer: Peer) -> list[tuple[int, _Address]]:
    """The socket addresses of a peer. Only a name needs a resolver, and so a thread.

    :raises OSError: if it has none.
    """
    kind = socket.SOCK_DGRAM
    try:
        literal = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(peer.host, peer.port, type=kind, flags=literal)
    except socket.gaierror:
        found = await _in_a_thread(lambda: socket.getaddrinfo(peer.host, peer.port, type=kind))
    return [(family, address) for family, _, _, _, address in found]


async def _in_a_thread(call: Callable[[], T]) -> T:
    """Run *call* in a thread, and wait for it no longer than the caller does.

    The event loop would wait for its own threads at its end, and a resolver may take long.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if outcome.done():
            return
        if error:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast(T, value))

    def run() -> None:
        value: T | None = None
        fault: Exception | None = None
        try:
            value = call()
        except Exception as error:
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            loop.call_soon_threadsafe(settle, value, fault)

    threading.Thread(target=run, daemon=True).start()
    return await outcome


def _told_errors(one: socket.socket) -> Iterator[tuple[int, _Address]]:
    """The ICMP errors that the kernel keeps for a socket: the errno, and the destination."""
    for _ in range(_AT_ONCE):
        try:
            _, control, _, address = one.recvmsg(0, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return
        for _level, _kind, data in control:
            if len(data) >= _EXTENDED_ERROR.size and address:
                yield _EXTENDED_ERROR.unpack_from(data)[0], address
                break


COVERAGE = 6
"""The number of candidates that are asked, if there are more."""
TIMEOUT_S = 10.0


class ConfdClient:
    """Asks the master candidates of one cluster. It keeps no connection and no state.

    :param peers: addresses as :func:`~brine.confd.replies.parse_peer` takes them.
    :param keys: the valid secrets, the current one first. Requests are signed with it; a peer that
        does not answer is asked again with the next.
    :param port: of peers without one.
    :param clock: the time since the epoch, in seconds; daemons are silent if it differs from
        theirs.
    :raises PeersError: if there is no peer, or an address is not valid.
    """

    def __init__(
        self,
        peers: Iterable[str | Peer],
        keys: Sequence[bytes],
        *,
        port: int = PORT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        given = (one if isinstance(one, Peer) else parse_peer(one, port=port) for one in peers)
        self.peers = tuple(dict.fromkeys(given))
        if not self.peers:
            raise PeersError("there is no peer to ask")
        if not keys:
            raise ConfdError("there is no key to sign with")
        self._keys = tuple(HmacKey(secret) for secret in keys)
        self._clock = clock

    async def query(
        self,
        request_type: int,
        query: Any = None,
        *,
        coverage: int | None = None,
        patient: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> Result:
        """Ask, and return all replies, if any.

        :param request_type: of :class:`~brine.confd.protocol.RequestType`.
        :param query: the argument of that type, as JSON.
        :param coverage: how many peers to ask, chosen at random; by default six, or all if there
            are fewer.
        :param patient: wait for all of them, not only until enough have replied.
        :raises RequestTooLargeError: if the question does not fit a datagram.
        """
        asked = random.sample(self.peers, min(coverage or COVERAGE, len(self.peers)))
        with Exchange(
            request_type, query, tuple(asked), self._keys, patient=patient, clock=self._clock
        ) as exchange:
            await exchange.run(timeout_s)
        return Result(request_type, tuple(exchange.replies), exchange.silences, exchange.dropped)

    async def ask(
        self, question: Question[T], *, coverage: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> T:
        """The newest answer to one of :mod:`brine.confd.questions`.

        :raises NoAnswerError: if no peer answered.
        :raises AnswerError: if there is no answer, such as for an unknown name.
        :raises ConfdError: if the answer has another shape than the question's.
        """
        result = await self.query(
            question.type, question.query, coverage=coverage, timeout_s=timeout_s
        )
        return decode(question, result)


def _blocking(
    method: Callable[Concatenate[ConfdClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingConfdClient, P], T]:
    @functools.wraps(method)
    def run(client: BlockingConfdClient, /, *given: P.args, **options: P.kwargs) -> T:
        return asyncio.run(method(client._client, *given, **options))

    return run


class BlockingConfdClient:
    """:class:`ConfdClient` for plain programs, and for threads of any program."""

    def __init__(
        self,
        peers: Iterable[str | Peer],
        keys: Sequence[bytes],
        *,
        port: int = PORT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = ConfdClient(peers, keys, port=port, clock=clock)

    query = _blocking(ConfdClient.query)
    ask = _blocking(ConfdClient.ask)


def decode(question: Question[T], result: Result) -> T:
    """The typed answer of a result.

    :raises ConfdError: as :meth:`ConfdClient.ask` does.
    """
    answer = result.answer()
    try:
        return question.decode(answer)
    except (ValueError, TypeError, LookupError) as error:
        peer = result.newest.peer if result.newest else None
        message = f"{peer} gave an answer that is none to this question: {answer!r:.80}"
        raise ConfdError(message) from error
