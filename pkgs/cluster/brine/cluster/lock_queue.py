"""Who holds a lock, and who waits for it: no threads, no time, no input.

A lock is held by one owner alone (*exclusive*) or by several (*shared*). Those that wait are one
queue. An exclusive request has an entry of its own. Shared requests have an entry together, which
later ones join until it is granted; after that, the next shared request begins another entry at
the queue's end. So sharers pass exclusive requests that wait, but none waits for ever. A request
of a more urgent priority is ahead of all others. A lock that is free again is granted to the first
entry; sharers of the next priority wait until it is free once more. Source: Ganeti's design for
2.1, "Locking improvements".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from itertools import chain

from brine.common.locks import LockError


class LockDeletedError(LockError):
    """A lock that was deleted, together with what it protects."""


class RequestState(Enum):
    """The state of a request. It leaves *waiting* once."""

    WAITING = auto()
    GRANTED = auto()
    DELETED = auto()  # with its lock
    WITHDRAWN = auto()


class LockRequest:
    """A request for a lock. Its attribute *settled* is called when it no longer waits."""

    __slots__ = ("is_shared", "owner", "priority", "settled", "state")

    def __init__(self, owner: Hashable, *, is_shared: bool, priority: int) -> None:
        self.owner = owner
        self.is_shared = is_shared
        self.priority = priority
        self.settled: Callable[[], object] = lambda: None
        self.state = RequestState.WAITING


class _Entry:
    """A place in the queue: one exclusive request, or shared ones that are granted together."""

    __slots__ = ("is_shared", "requests")

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.requests: list[LockRequest] = []


class LockQueue:
    """One lock. The caller sees to it that one thread at a time is here.

    :param name: for errors, which have its text.
    """

    __slots__ = ("_holders", "_is_deleted", "_waiting", "name")

    def __init__(self, name: object) -> None:
        self.name = name
        self._holders: dict[Hashable, bool] = {}  # whether each one shares it
        self._waiting: dict[int, deque[_Entry]] = {}  # by priority; no queue is empty
        self._is_deleted = False

    def take(self, owner: Hashable, *, shared: bool) -> bool:
        """Have the lock at once, or not at all.

        :raises LockError: if the lock is deleted, or the owner has it.
        """
        holders = self._holders
        if self._is_deleted:
            raise LockDeletedError(f"{self.name}: is deleted")
        if owner in holders:
            raise LockError(f"{self.name}: {owner} holds it already")
        if self._waiting or (holders and not self._is_free_for(shared=shared)):
            return False
        holders[owner] = shared
        return True

    def request(
        self,
        owner: Hashable,
        *,
        shared: bool,
        settled: Callable[[], object],
        priority: int = 0,
    ) -> LockRequest | None:
        """Ask for the lock. Returns what waits; None if the owner has it at once.

        :param settled: is called later, when the lock is granted or deleted.
        :param priority: a smaller number is more urgent.
        :raises LockError: if the lock is deleted, or the owner has it.
        """
        if self.take(owner, shared=shared):
            return None
        request = LockRequest(owner, is_shared=shared, priority=priority)
        self._entry_for(request).requests.append(request)
        self._grant()
        if request.state is RequestState.GRANTED:
            return None
        request.settled = settled
        return request

    def withdraw(self, request: LockRequest) -> bool:
        """No longer wait. Returns whether the request still waited; else it was settled before."""
        if request.state is not RequestState.WAITING:
            return False
        request.state = RequestState.WITHDRAWN
        queue = self._waiting[request.priority]
        entry = next(one for one in queue if request in one.requests)
        entry.requests.remove(request)
        if not entry.requests:
            self._drop(entry, request.priority)
        self._grant()
        return True

    def release(self, owner: Hashable) -> None:
        """Give the lock back, and grant it to those whose turn it is.

        :raises LockError: if the owner has it not.
        """
        if self._holders.pop(owner, None) is None:
            raise LockError(f"{self.name}: {owner} does not hold it")
        if self._waiting and not self._holders:
            self._grant()

    def downgrade(self, owner: Hashable) -> None:
        """Share a lock that was held exclusively. Sharers that wait get it, too: those of the most
        urgent priority pass exclusive requests of that priority, as they do while all wait.

        :raises LockError: if the owner has it not.
        """
        held_shared = self._holders.get(owner)
        if held_shared is None:
            raise LockError(f"{self.name}: {owner} does not hold it")
        if held_shared:
            return  # or a sharer could let others pass again and again
        self._holders[owner] = True
        if self._waiting:
            priority = min(self._waiting)
            for entry in [one for one in self._waiting[priority] if one.is_shared]:
                self._give(entry, priority)

    def delete(self, owner: Hashable) -> None:
        """Delete a lock that is held exclusively; all that wait for it are told.

        :raises LockError: if the owner does not hold it so.
        """
        if not self.is_owned(owner, shared=False):
            raise LockError(f"{self.name}: {owner} does not hold it alone")
        self._is_deleted = True
        self._holders.clear()
        waiting = [*self.waiting()]
        self._waiting.clear()
        for request in waiting:
            request.state = RequestState.DELETED
            request.settled()

    def is_owned(self, owner: Hashable, *, shared: bool | None = None) -> bool:
        """Whether an owner holds it; with *shared*, whether in that way."""
        held = self._holders.get(owner)
        return held is not None and shared in (None, held)

    @property
    def is_deleted(self) -> bool:
        return self._is_deleted

    @property
    def is_idle(self) -> bool:
        """Whether no owner holds it or waits for it."""
        return not self._holders and not self._waiting

    def holders(self) -> dict[Hashable, bool]:
        """Each owner, and whether it shares the lock."""
        return dict(self._holders)

    def waiting(self) -> Iterator[LockRequest]:
        """All requests that wait, in the order of their turns."""
        queues = (self._waiting[priority] for priority in sorted(self._waiting))
        for entry in chain.from_iterable(queues):
            yield from entry.requests

    def _is_free_for(self, *, shared: bool) -> bool:
        return all(self._holders.values()) if shared else not self._holders

    def _entry_for(self, request: LockRequest) -> _Entry:
        queue = self._waiting.setdefault(request.priority, deque())
        if request.is_shared:
            for entry in queue:
                if entry.is_shared:
                    return entry
        queue.append(_Entry(is_shared=request.is_shared))
        return queue[-1]

    def _drop(self, entry: _Entry, priority: int) -> None:
        queue = self._waiting[priority]
        queue.remove(entry)
        if not queue:
            del self._waiting[priority]

    def _grant(self) -> None:
        """Grant the lock to the first entry, if that can have it."""
        if not self._waiting:
            return
        priority = min(self._waiting)
        entry = self._waiting[priority][0]
        if self._is_free_for(shared=entry.is_shared):
            self._give(entry, priority)

    def _give(self, entry: _Entry, priority: int) -> None:
        self._drop(entry, priority)
        for request in entry.requests:
            self._holders[request.owner] = request.is_shared
            request.state = RequestState.GRANTED
            request.settled()
