"""The client: asks several master candidates, takes the newest answer.

::

    client = ConfdClient(["192.0.2.1", "192.0.2.2"], [load_key(Path("/etc/brine/hmac.key"))])
    ip = await client.ask(questions.node_ip_of_instance_ip("198.51.100.7"))

A program without an event loop has :class:`BlockingConfdClient`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from brine.confd.exchange import Exchange
from brine.confd.peers import Peer, PeersError, parse_peer
from brine.confd.protocol import PORT, Key
from brine.confd.questions import Question
from brine.confd.result import ConfdError, Result

T = TypeVar("T")

COVERAGE = 6
"""So many candidates are asked, where there are more."""
TIMEOUT_S = 10.0


class ConfdClient:
    """Asks the master candidates of one cluster. It keeps no connection and no state.

    :param peers: whom to ask: addresses as :func:`~brine.confd.peers.parse_peer` takes them.
    :param keys: the secrets that are valid, the current one first. Requests are signed with it;
        who does not answer is asked again with the next.
    :param port: of the peers that name none.
    :param clock: the time since the epoch, in seconds; daemons are silent if it is far from theirs.
    :raises PeersError: if there is no peer, or an address is none.
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
        self._keys = tuple(Key(secret) for secret in keys)
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
        """Ask, and return what came back, be it nothing.

        :param request_type: of :class:`~brine.confd.protocol.RequestType`.
        :param query: what goes with it, as JSON.
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

        :raises NoAnswerError: if nobody answered.
        :raises AnswerError: if there is no answer, such as for a name that is not known.
        :raises ConfdError: if the answer has another shape than the question's.
        """
        result = await self.query(
            question.type, question.query, coverage=coverage, timeout_s=timeout_s
        )
        return decode(question, result)


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

    def query(
        self,
        request_type: int,
        query: Any = None,
        *,
        coverage: int | None = None,
        patient: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> Result:
        """See :meth:`ConfdClient.query`."""
        return asyncio.run(
            self._client.query(
                request_type, query, coverage=coverage, patient=patient, timeout_s=timeout_s
            )
        )

    def ask(
        self, question: Question[T], *, coverage: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> T:
        """See :meth:`ConfdClient.ask`."""
        return asyncio.run(self._client.ask(question, coverage=coverage, timeout_s=timeout_s))


def decode(question: Question[T], result: Result) -> T:
    """The typed answer out of a result.

    :raises ConfdError: as :meth:`ConfdClient.ask` does.
    """
    answer = result.answer()
    try:
        return question.decode(answer)
    except (ValueError, TypeError, LookupError) as error:
        peer = result.newest.peer if result.newest else None
        message = f"{peer} gave an answer that is none to this question: {answer!r:.80}"
        raise ConfdError(message) from error
