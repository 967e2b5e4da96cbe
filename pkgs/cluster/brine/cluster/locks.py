"""Locks of a cluster's parts, for threads: :class:`SharedLock`, and :class:`LockSet` of many names.

    instances = LockSet(["web1", "web2"], name="instance")
    if instances.acquire(["web2", "web1"], timeout=10) is not None:
        try:
            ...
        finally:
            instances.release()

The owner of a lock is a thread. Source: Ganeti's design for 2.1, "Locking improvements".
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from threading import Lock, Thread, current_thread
from typing import NamedTuple

from brine.cluster.lock_queue import LockDeletedError, LockQueue, RequestState
from brine.cluster.lock_table import attempt_s
from brine.common.locks import LockError

_PAUSE_S = 0.01


class SharedLock:
    """A lock that one thread holds alone, or several share. See :mod:`brine.cluster.lock_queue` for
    whose turn it is.

    :param name: for errors.
    """

    __slots__ = ("_mutex", "_queue", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._mutex = Lock()
        self._queue = LockQueue(name)

    def acquire(
        self, *, shared: bool = False, timeout: float | None = None, priority: int = 0
    ) -> bool:
        """Wait for the lock; returns whether this thread got it in time.

        :param timeout: in seconds; 0 does not wait, None waits for ever.
        :param priority: a smaller number is more urgent.
        :raises LockError: if this thread holds it.
        :raises LockDeletedError: if it is, or meanwhile was, deleted.
        """
        if timeout is not None and timeout < 0:
            raise ValueError("a timeout must not be negative")
        with self._mutex:
            if self._queue.take(current_thread(), shared=shared):
                return True
            wait = _Wait(self._mutex, self._queue, shared=shared, priority=priority)
        return wait.is_granted(timeout)

    def release(self) -> None:
        """Give the lock back.

        :raises LockError: if this thread has it not.
        """
        with self._mutex:
            self._queue.release(current_thread())

    def downgrade(self) -> None:
        """Share a lock that this thread held alone, with sharers that wait, too.

        :raises LockError: if this thread has it not.
        """
        with self._mutex:
            self._queue.downgrade(current_thread())

    def delete(self, *, timeout: float | None = None, priority: int = 0) -> bool:
        """Delete the lock; threads that wait for it get a :class:`LockDeletedError`. A thread that
        does not hold it waits for it first; returns False if the time was not enough.

        :raises LockError: if this thread shares it.
        :raises LockDeletedError: if it was deleted before.
        """
        if not self.is_owned() and not self.acquire(timeout=timeout, priority=priority):
            return False
        with self._mutex:
            self._queue.delete(current_thread())
        return True

    def is_owned(self, *, shared: bool | None = None) -> bool:
        """Whether this thread holds it; with *shared*, whether in that way."""
        with self._mutex:
            return self._queue.is_owned(current_thread(), shared=shared)


class _Wait:
    """The wait of this thread for a lock that others hold. The thread holds the mutex when it makes
    this object, and lets go of it while it waits."""

    __slots__ = ("_mutex", "_owner", "_queue", "_request", "_told")

    def __init__(self, mutex: Lock, queue: LockQueue, *, shared: bool, priority: int) -> None:
        self._mutex, self._queue, self._owner = mutex, queue, current_thread()
        self._told = Lock()
        self._told.acquire()
        self._request = queue.request(
            self._owner, shared=shared, priority=priority, settled=self._told.release
        )

    def is_granted(self, timeout: float | None) -> bool:
        """Wait; returns whether this thread got the lock in time.

        :raises LockDeletedError: if it was deleted.
        """
        request = self._request
        if request is None:
            return True
        try:
            self._told.acquire(timeout=-1 if timeout is None else timeout)
        except BaseException:  # a signal's handler raised it
            with self._mutex:
                self._queue.withdraw(request)
                if request.state is RequestState.GRANTED:
                    self._queue.release(self._owner)
            raise
        with self._mutex:
            is_withdrawn = self._queue.withdraw(request)
        if request.state is RequestState.DELETED:
            raise LockDeletedError(f"{self._queue.name}: was deleted meanwhile")
        return not is_withdrawn


class _Wanted(NamedTuple):
    """What a thread wants of a set of locks.

    :param names: in their order; None is all that there are.
    :param deadline: of the monotonic clock; infinity is never.
    :param is_opportunistic: those that are free, and wait for none.
    """

    names: list[str] | None
    is_shared: bool
    deadline: float
    priority: int
    is_opportunistic: bool


class LockSet:
    """Locks by name, which a thread acquires together.

    They are taken in the order of their names, so that two threads can't wait for each other.
    A thread that waits for one of several holds the others, but not for long: what is not complete
    within ``2**tries`` seconds is given back, and tried again. After five attempts, the next one
    waits as long as it takes.

    A thread acquires the locks of one call at a time: it releases all before it acquires others.

    :param name: for errors.
    """

    def __init__(self, names: Iterable[str] = (), *, name: str = "locks") -> None:
        self.name = name
        self._mutex = Lock()  # of all that follows but the whole, which has its own
        self._queues = {each: LockQueue(f"{name} {each}") for each in names}
        self._owned: dict[Thread, set[str]] = {}  # none of them is empty
        # Its holder has all names, also those that other threads would add.
        self._whole = SharedLock(f"all of {name}")

    # What there is.

    def names(self) -> set[str]:
        """All names."""
        with self._mutex:
            return {*self._queues}

    def owned(self) -> set[str]:
        """The names that this thread holds."""
        with self._mutex:
            return {*self._owned.get(current_thread(), ())}

    def is_owned(self, name: str, *, shared: bool | None = None) -> bool:
        """Whether this thread holds a name; with *shared*, whether in that way."""
        with self._mutex:
            queue = self._queues.get(name)
            return queue is not None and queue.is_owned(current_thread(), shared=shared)

    def owns_all(self) -> bool:
        """Whether this thread holds the whole set."""
        return self._whole.is_owned()

    # Having them.

    def acquire(
        self,
        names: Collection[str] | None,
        *,
        shared: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        opportunistic: bool = False,
    ) -> set[str] | None:
        """Acquire locks together. Returns their names; None if not all were to be had in time, and
        then this thread holds none.

        :param names: None is the whole set: no other thread adds names meanwhile.
        :param opportunistic: take those that are free, and wait for none; that may be none at all.
        :raises LockError: if this thread holds names of the set, or there is no such name.
        """
        if timeout is not None and timeout < 0:
            raise ValueError("a timeout must not be negative")
        if current_thread() in self._owned or self._whole.is_owned():
            raise LockError(f"{self.name}: this thread holds some already")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        given = None if names is None else sorted(dict.fromkeys(names))
        wanted = _Wanted(given, shared, deadline, priority, opportunistic)
        if given is not None:
            return self._acquire(wanted)
        if not self._whole.acquire(shared=shared, timeout=timeout, priority=priority):
            return None
        found = None
        try:
            found = self._acquire(wanted)
        finally:
            if found is None:
                self._whole.release()
        return found

    def _acquire(self, wanted: _Wanted) -> set[str] | None:
        """Attempt it until it works, or the time is over."""
        tries = 0
        while True:
            names = sorted(self.names()) if wanted.names is None else wanted.names
            end = time.monotonic() + attempt_s(tries, len(names))
            found = self._attempt(names, wanted, min(end, wanted.deadline))
            if found is not None or time.monotonic() >= wanted.deadline:
                return found
            time.sleep(_PAUSE_S)
            tries += 1

    def _attempt(self, names: Iterable[str], wanted: _Wanted, until: float) -> set[str] | None:
        """Acquire all of these names, or none."""
        taken: list[str] = []
        rest = iter(names)
        is_done = False
        try:
            while held_up := self._take(rest, wanted, taken):
                name, wait = held_up
                timeout = None if until == math.inf else max(0.0, until - time.monotonic())
                try:
                    if not wait.is_granted(timeout):
                        return None
                    taken.append(name)
                except LockDeletedError:
                    if wanted.names is not None:
                        raise
            with self._mutex:
                self._keep({*taken})
            is_done = True
        finally:
            if not is_done:
                with self._mutex:
                    self._give_back(taken)
        return {*taken}

    def _take(
        self, names: Iterator[str], wanted: _Wanted, taken: list[str]
    ) -> tuple[str, _Wait] | None:
        """Take the next names, and note them, until one has to be waited for; returns that."""
        owner, queues, shared = current_thread(), self._queues, wanted.is_shared
        with self._mutex:
            for name in names:
                queue = queues.get(name)
                if queue is None:
                    if wanted.names is None:
                        continue  # of the whole set, those that are left
                    raise LockDeletedError(f"{self.name}: there is no {name}")
                if queue.take(owner, shared=shared):
                    taken.append(name)
                elif not wanted.is_opportunistic:
                    wait = _Wait(self._mutex, queue, shared=shared, priority=wanted.priority)
                    return name, wait
        return None

    def _give_back(self, names: Iterable[str]) -> None:
        owner = current_thread()
        for name in names:
            self._queues[name].release(owner)

    def release(self, names: Collection[str] | None = None) -> None:
        """Give locks back; without names, all that this thread holds. A thread that holds the
        whole set, and gives names back, no longer holds the whole.

        :raises LockError: if this thread does not hold all of them.
        """
        has_whole = self._whole.is_owned()
        with self._mutex:
            owned, given = self._held(names, has_whole=has_whole)
            self._keep(owned - given)
            self._give_back(given)
        if has_whole:
            self._whole.release()

    def _held(self, names: Collection[str] | None, *, has_whole: bool) -> tuple[set[str], set[str]]:
        """All names that this thread holds, and those of them that it means.

        :raises LockError: if it does not hold all that it means.
        """
        owned = self._owned.get(current_thread(), set())
        if names is None:
            if not owned and not has_whole:
                raise LockError(f"{self.name}: this thread holds none")
            return owned, owned
        given = {*names}
        if missing := given - owned:
            text = ", ".join(sorted(missing))
            raise LockError(f"{self.name}: this thread does not hold {text}")
        return owned, given

    def _keep(self, names: set[str]) -> None:
        if names:
            self._owned[current_thread()] = names
        else:
            self._owned.pop(current_thread(), None)

    def downgrade(self, names: Collection[str] | None = None) -> None:
        """Share locks that this thread held alone; without names, all of them.

        :raises LockError: if this thread does not hold all of them.
        """
        owner, has_whole = current_thread(), self._whole.is_owned()
        with self._mutex:
            owned, given = self._held(names, has_whole=has_whole)
            for name in given:
                self._queues[name].downgrade(owner)
            shares_all = all(self._queues[name].is_owned(owner, shared=True) for name in owned)
        if has_whole and shares_all:
            self._whole.downgrade()

    # Names that come and go.

    def add(self, names: Iterable[str], *, acquired: bool = False, shared: bool = False) -> None:
        """Add names; it waits for a thread that holds the whole set. The thread itself holds the
        whole set alone, or nothing of it: else two threads could wait for each other.

        :param acquired: this thread holds the new ones then, besides what it holds.
        :raises LockError: if one is there already, or this thread holds some names, or shares all.
        """
        given = {*names}
        has_whole = self._whole.is_owned(shared=False)
        if not has_whole and (self.owned() or self._whole.is_owned()):
            raise LockError(f"{self.name}: this thread holds some or shares all, and can't add any")
        if not has_whole:
            self._whole.acquire()
        try:
            with self._mutex:
                if known := given & self._queues.keys():
                    raise LockError(f"{self.name}: {', '.join(sorted(known))}: there already")
                queues = {each: LockQueue(f"{self.name} {each}") for each in given}
                if acquired:
                    for queue in queues.values():
                        queue.take(current_thread(), shared=shared)
                    self._keep(given | self._owned.get(current_thread(), set()))
                self._queues.update(queues)
        finally:
            if not has_whole:
                self._whole.release()

    def remove(self, names: Collection[str]) -> set[str]:
        """Delete names; threads that wait for them get a :class:`LockDeletedError`. A thread that
        holds names of the set must hold all that it removes. Returns those that were there.

        :raises LockError: if this thread holds others, or shares one of them; then all are left.
        """
        given, owner = {*names}, current_thread()
        with self._mutex:
            if owner in self._owned:
                self._held(given, has_whole=False)
                for name in given:
                    if not self._queues[name].is_owned(owner, shared=False):
                        raise LockError(f"{self.name}: this thread shares {name}")
        return {name for name in sorted(given) if self._remove(name)}

    def _remove(self, name: str) -> bool:
        owner, wait = current_thread(), None
        with self._mutex:
            queue = self._queues.get(name)
            if queue is None:
                return False
            if not queue.is_owned(owner) and not queue.take(owner, shared=False):
                wait = _Wait(self._mutex, queue, shared=False, priority=0)
        try:
            if wait:
                wait.is_granted(None)
        except LockDeletedError:  # another thread was faster
            return False
        with self._mutex:
            queue.delete(owner)
            del self._queues[name]
            self._keep(self._owned.get(owner, set()) - {name})
        return True
