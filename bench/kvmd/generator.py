"""The load generator: thousands of scripted VMs in one process, on a core of its own.

Run as `python3 -m bench.kvmd.generator FOLDER SUFFIX`; takes orders on standard input.
"""

import gc
import itertools
import os
import select
import sys
import time
from collections import deque
from pathlib import Path
from typing import assert_never

from bench.kvmd import orders
from bench.kvmd.guest import Guest

PATIENCE_S = 5.0
"""Give up on connections when none has come for so long, and on a verdict file when it has not."""
QUIET_S = 0.02
"""Wait so long before each ending: in life it comes out of the quiet, to a daemon gone cold."""


class Generator:
    """All VMs in one control directory, served by one epoll."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix
        self._epoll = select.epoll()
        self._by_fd: dict[int, Guest] = {}
        self._standing: deque[Guest] = deque()
        self._lost: list[Guest] = []
        self._numbers = itertools.count()
        self._first_at = 0.0
        self._connected = 0
        self._most_connected = 0
        self._last_connected_at = 0.0

    def obey(self, order: orders.Order) -> orders.Reply:
        """Do what is asked and report."""
        match order:
            case orders.Appear():
                self._first_at = time.monotonic()
                for _ in range(order.count):
                    self._add()
                return self._serve_all(PATIENCE_S if order.serve else 0)
            case orders.Serve():
                return self._serve_all(order.patience_s)
            case orders.EndEach():
                return self._end_each(order.samples)
            case orders.EndTogether():
                return self._end(order.count)
        assert_never(order)

    def _add(self) -> None:
        guest = Guest(self._folder, f"vm{next(self._numbers):06}", self._suffix)
        self._standing.append(guest)
        self._watch(guest.listener.fileno(), guest)

    def _watch(self, fd: int, guest: Guest) -> None:
        self._by_fd[fd] = guest
        self._epoll.register(fd, select.EPOLLIN)

    def _serve(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            guest = self._by_fd[fd]
            if fd == guest.listener.fileno():
                # One client at a time: the next one waits in the backlog until this one leaves.
                self._epoll.unregister(fd)
                self._watch(guest.greet().fileno(), guest)
                continue
            was_ready = guest.ready
            if not guest.answer():
                self._connected -= was_ready
                self._watch(guest.listener.fileno(), guest)
            elif guest.ready and not was_ready:
                self._connected += 1
                self._most_connected = max(self._most_connected, self._connected)
                self._last_connected_at = time.monotonic()

    def _serve_all(self, patience_s: float) -> orders.Connected:
        progress_at, seen = time.monotonic(), self._connected
        while self._connected < len(self._standing) and time.monotonic() - progress_at < patience_s:
            self._serve(0.1)
            if self._connected > seen:
                progress_at, seen = self._last_connected_at, self._connected
        return orders.Connected(
            connected=self._connected,
            most=self._most_connected,
            asked=len(self._standing),
            first_at=self._first_at,
            last_at=self._last_connected_at,
        )

    def _settle(self) -> int:
        """Have all VMs connected, then let the daemon rest. Returns how many it never came to."""
        self._serve_all(PATIENCE_S)
        lost = [guest for guest in self._standing if not guest.ready]
        self._lost += lost  # it may still come, but is waited for no more
        for guest in lost:
            self._standing.remove(guest)
        until = time.monotonic() + QUIET_S
        while (left := until - time.monotonic()) > 0:
            self._serve(left)
        return len(lost)

    def _end(self, count: int) -> orders.Verdicts:
        """End the VMs that have stood longest: one time for all, first event to last file."""
        guests = list(itertools.islice((guest for guest in self._standing if guest.ready), count))
        if len(guests) < count:
            return orders.Verdicts([], missed=count, lost=0)
        for guest in guests:
            self._standing.remove(guest)
        self._connected -= count
        sent_at = guests[0].power_off()
        for guest in guests[1:]:
            guest.power_off()
        for guest in guests:
            guest.vanish()
        missed = 0
        file_exists = os.access
        for guest in guests:
            # A tight loop costs the daemon nothing on its own core; an inotify watch would.
            while not file_exists(guest.verdict_path, os.F_OK):
                if time.monotonic() - sent_at > PATIENCE_S:
                    missed += 1
                    break
        took_s = time.monotonic() - sent_at
        for guest in guests:
            Path(guest.verdict_path).unlink(missing_ok=True)
            self._add()
        return orders.Verdicts([] if missed else [took_s], missed, lost=self._settle())

    def _end_each(self, samples: int) -> orders.Verdicts:
        seconds: list[float] = []
        missed = lost = 0
        for _ in range(samples):
            one = self._end(1)
            seconds += one.seconds
            missed += one.missed
            lost += one.lost
            if not self._connected:  # the daemon is gone
                break
        return orders.Verdicts(seconds, missed, lost)


def main() -> None:
    """Obey orders until standard input ends."""
    folder, suffix = sys.argv[1:]
    generator = Generator(Path(folder), suffix)
    gc.disable()
    while (order := orders.read(sys.stdin)) is not None:
        assert not isinstance(order, orders.Connected | orders.Verdicts)
        orders.write(sys.stdout, generator.obey(order))


if __name__ == "__main__":
    main()
