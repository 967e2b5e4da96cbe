"""A process that answers requests, as long as its configuration is the current one."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from brine.confd.protocol import RefusedError
from brine.confd.responder import Responder

REPORT_INTERVAL_S = 1.0
_BATCH = 64
"""Datagrams of one socket before the next one, and orders, are looked at."""
_LARGEST_DATAGRAM = 65536
_UNSENT = "answer not sent"


@dataclass
class Report:
    """What a worker did since its last report; also its sign of life.

    :param answered: how many requests.
    :param refused: why, and how many datagrams, were not answered.
    :param source: the IP address that the last of them came from.
    """

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    source: str = ""

    def encode(self) -> bytes:
        """One line, short enough for a pipe to take it whole (PIPE_BUF in :manpage:`pipe(7)`)."""
        return json.dumps([self.answered, self.refused, self.source]).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Report:
        """A report from a line."""
        answered, refused, source = json.loads(line)
        return cls(answered, Counter(refused), source)


class Worker:
    """Answers what comes in at some sockets.

    :param orders: descriptor of a pipe; what comes in there, or its end, means to stop.
    :param reports: descriptor of a pipe for reports.
    :param turn: descriptor of a pipe that ends when the workers before this one are gone; None
        where there were none. Two configurations must never be answered from at the same time: a
        client would see the serial number go back.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        responder: Responder,
        *,
        orders: int,
        reports: int,
        turn: int | None,
    ) -> None:
        self._sockets = {one.fileno(): one for one in sockets}
        self._responder = responder
        self._orders = orders
        self._reports = reports
        self._turn = turn
        self._report = Report()
        self._report_due_s = 0.0

    def run(self) -> None:
        """Work until told to stop."""
        if self._turn is not None:
            self._wait_for_turn(self._turn)
        with select.epoll() as poll:
            for descriptor in (*self._sockets, self._orders):
                poll.register(descriptor, select.EPOLLIN)
            stopping = False
            while not stopping:
                for descriptor, _ in poll.poll(REPORT_INTERVAL_S):
                    if descriptor == self._orders:
                        stopping = True
                    else:
                        self._serve(self._sockets[descriptor])
                self._report_if_due()
        self._send_report()

    def _wait_for_turn(self, turn: int) -> None:
        # Also when told to stop: whoever waits for this worker waits for those before it, too.
        while not select.select([turn], [], [], REPORT_INTERVAL_S)[0]:
            self._report_if_due()
        os.close(turn)

    def _serve(self, peer: socket.socket) -> None:
        receive, send, respond = peer.recvfrom, peer.sendto, self._responder.respond
        report = self._report
        for _ in range(_BATCH):
            try:
                datagram, source = receive(_LARGEST_DATAGRAM)
            except BlockingIOError:
                return
            try:
                answer = respond(datagram)
            except RefusedError as error:
                self._refuse(error.refusal.value, source)
                continue
            try:
                send(answer, source)
            except OSError:
                self._refuse(_UNSENT, source)
            else:
                report.answered += 1

    def _refuse(self, reason: str, source: Any) -> None:
        self._report.refused[reason] += 1
        self._report.source = source[0]

    def _report_if_due(self) -> None:
        if time.monotonic() >= self._report_due_s:
            self._send_report()

    def _send_report(self) -> None:
        self._report_due_s = time.monotonic() + REPORT_INTERVAL_S
        try:
            os.write(self._reports, self._report.encode())
        except BlockingIOError:  # nobody has read for long; what is counted goes with the next
            return
        except BrokenPipeError:  # whoever reads is gone, which the pipe of orders says, too
            return
        self._report.answered = 0
        self._report.refused.clear()
