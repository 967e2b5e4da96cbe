"""Time, links and processes of a simulated cluster."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from lab.move_history import EventKind, HistoryEvent

Action = Callable[..., object]


class World:
    """A virtual clock with what is to happen, and links that lose, double, delay and reorder.

    :param is_calm: links are fast and lose nothing, until one is cut.
    """

    def __init__(self, seed: int, *, is_calm: bool = False) -> None:
        self.random = random.Random(seed)
        self.is_calm = is_calm
        self.now = 0.0
        self.history: list[HistoryEvent] = []
        self.cut: set[frozenset[str]] = set()
        self.processes: dict[str, Process] = {}
        self.on_event: Callable[[str], object] | None = None
        self._queue: list[tuple[float, int, str, Action, tuple[Any, ...]]] = []
        self._number = 0

    def later(self, delay: float, action: Action, *args: Any, label: str = "") -> None:
        """Do something after a delay in seconds. What has a label is an event of a move."""
        heapq.heappush(self._queue, (self.now + delay, self.number(), label, action, args))

    def number(self) -> int:
        """Another one each time."""
        self._number += 1
        return self._number

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until and not is_over():
            self.now, _, label, action, args = heapq.heappop(self._queue)
            if label and self.on_event:
                self.on_event(label)
            action(*args)

    def tell(self, kind: EventKind, subject: str, node: str = "", detail: str = "") -> None:
        """Write an event into the history."""
        self.history.append(HistoryEvent(self.now, kind, subject, node, detail))

    def between(self, least: float, most: float) -> float:
        return self.random.uniform(least, most)

    def connected(self, one: str, other: str) -> bool:
        """Whether their link is whole."""
        return not self.cut or frozenset((one, other)) not in self.cut

    def send(self, sender: str, to: str, action: Action, *args: Any, label: str = "") -> None:
        """Have a message do something where it arrives: perhaps never, late, or twice."""
        copies = 1
        if not self.is_calm:
            chance = self.random.random()
            copies = 0 if chance < 0.1 else 2 if chance < 0.2 else 1
        for _ in range(copies):
            delay = self.between(0.01, 0.1)
            if not self.is_calm and self.random.random() < 0.1:
                delay = self.between(0.1, 20)
            self.later(delay, self._arrive, sender, to, action, args, label=label)

    def _arrive(self, sender: str, to: str, action: Action, args: tuple[Any, ...]) -> None:
        if self.connected(sender, to) and self.processes[to].is_up:
            action(*args)


class Process:
    """What may be killed: then nothing happens of what it was about to do."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_up = True
        self._life = 0
        world.processes[name] = self

    def later(self, delay: float, action: Action, *args: Any, label: str = "") -> None:
        self.world.later(delay, self._do, self._life, action, args, label=label)

    def _do(self, life: int, action: Action, args: tuple[Any, ...]) -> None:
        if life == self._life and self.is_up:
            action(*args)

    def kill(self) -> None:
        self._life += 1
        self.is_up = False

    def start(self) -> None:
        self._life += 1
        self.is_up = True
