"""The load: many clients, each of which asks its next question when its last was answered.

Run as `python3 -m bench.confd.generator`: takes Orders and writes what it Saw, both as JSON.
"""

import gc
import json
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from lab import confd_wire

MANY_REQUESTS = 20_000
"""Signed before the first is sent, each with a salt of its own."""
FRESH_REQUESTS = 100_000
"""Of those that get an answer but once: more than can be answered in the time."""
PATIENCE_S = 10.0
"""So long none of the clients may hear anything; then what they asked counts as lost."""
_SAMPLE_EVERY_S = 0.01
_HIGHEST_DESCRIPTOR = 1024
_LONGEST_REPLY = 65536


@dataclass(frozen=True)
class Orders:
    """What to ask, how, and how long.

    A client is a socket of its own with one request outstanding. With `once`, each query is asked
    at most once, and without any warming up. With `fresh`, no datagram is sent twice. `renames` are
    pairs of paths: the first is renamed to the second, one pair after each `rename_every_s`.
    """

    port: int
    key: str
    type: int
    queries: list[Any]
    clients: int
    seconds: float
    warm_up_s: float = 0.0
    once: bool = False
    fresh: bool = False
    renames: list[tuple[str, str]] = field(default_factory=list)
    rename_every_s: float = 1.0


@dataclass(frozen=True)
class Saw:
    """How it went: answers a second, the times that they took, and what is to be verified.

    None: too few answers came to tell.

    `sample` holds the numbers of some requests, and their replies in hexadecimal digits; request N
    asked query N modulo their count, and its reply's salt must be `salt(N)`.
    """

    rate: float
    p50_s: float | None
    p99_s: float | None
    worst_s: float | None
    answers: int
    lost: int
    sample: list[tuple[int, str]]


def salt(number: int) -> str:
    """The reply salt of the request of that number."""
    return f"{number:08d}-7c1f-4b1e-bench"


class Clients:
    """The sockets, and what there is to ask."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        queries = orders.queries
        self._requests = [
            confd_wire.request(
                orders.key.encode(), orders.type, queries[number % len(queries)], salt(number)
            )
            for number in range(_count(orders))
        ]
        self._next = 0
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        for _ in range(min(orders.clients, len(self._requests))):
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            client.connect(("127.0.0.1", orders.port))
            self._sockets[client.fileno()] = client
            self._poll.register(client, select.EPOLLIN)

    def ask(self, seconds: float) -> Saw:
        """Ask for so long, or once all there is; then wait for what is outstanding.

        The daemon is busy until the last answer, so those that come after the time count as well.
        """
        requests, poll = self._requests, self._poll.poll
        total, clock, batch = len(requests), time.perf_counter, len(self._sockets)
        first = self._next if self._orders.fresh else 0
        stop_after = total if self._orders.once or self._orders.fresh else sys.maxsize
        # By descriptor, in lists: the loop must cost much less than what it measures.
        calls: list[tuple[Callable[[int], bytes], Callable[[bytes], int]] | None]
        calls = [None] * _HIGHEST_DESCRIPTOR
        asked_at, asked = [0.0] * _HIGHEST_DESCRIPTOR, [0] * _HIGHEST_DESCRIPTOR
        sample: list[tuple[int, bytes]] = []
        latencies: list[float] = []
        note = latencies.append
        renames = list(reversed(self._orders.renames))

        began_at = now = clock()
        stop_at, rename_at = began_at + seconds, began_at + self._orders.rename_every_s
        sample_at = began_at
        for sent, (descriptor, client) in enumerate(self._sockets.items(), first):
            calls[descriptor] = client.recv, client.send
            asked_at[descriptor], asked[descriptor] = clock(), sent
            client.send(requests[sent])
        sent, outstanding = first + batch, batch
        while outstanding and (ready := poll(PATIENCE_S, batch)):
            for descriptor, _ in ready:
                receive, send = calls[descriptor]  # type: ignore[misc]
                reply = receive(_LONGEST_REPLY)
                now = clock()
                note(now - asked_at[descriptor])
                if now >= sample_at:
                    sample.append((asked[descriptor], reply))
                    sample_at = now + _SAMPLE_EVERY_S
                if now > stop_at or sent >= stop_after:
                    outstanding -= 1
                    continue
                asked_at[descriptor], asked[descriptor] = now, sent % total
                send(requests[sent % total])
                sent += 1
            if renames and now >= rename_at:
                os.rename(*renames.pop())
                rename_at = now + self._orders.rename_every_s
        self._next = sent
        return _summary(latencies, now - began_at, outstanding, sample)


def _count(orders: Orders) -> int:
    if orders.once:
        return len(orders.queries)
    return FRESH_REQUESTS if orders.fresh else MANY_REQUESTS


def _summary(
    latencies: list[float], elapsed_s: float, lost: int, sample: list[tuple[int, bytes]]
) -> Saw:
    percentiles: list[float] | list[None] = [None] * 99
    if len(latencies) > 1:
        percentiles = statistics.quantiles(latencies, n=100, method="inclusive")
    return Saw(
        rate=len(latencies) / elapsed_s if latencies else 0.0,
        p50_s=percentiles[49],
        p99_s=percentiles[98],
        worst_s=max(latencies, default=None),
        answers=len(latencies),
        lost=lost,
        sample=[(number, reply.hex()) for number, reply in sample],
    )


def main() -> None:
    """Ask what is ordered."""
    orders = Orders(**json.load(sys.stdin))
    clients = Clients(orders)
    gc.disable()
    if orders.warm_up_s:
        clients.ask(orders.warm_up_s)
    json.dump(asdict(clients.ask(orders.seconds)), sys.stdout)


if __name__ == "__main__":
    main()
