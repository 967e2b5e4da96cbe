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
from collections.abc import Collection, Iterable
from threading import Lock, Thread, current_thread
from typing import NamedTuple

from brine.cluster.lock_queue import LockDeletedError, LockQueue, LockRequest, RequestState
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
        """Wait for the lock; False if it was not to be had in time.

        :param timeout: in seconds; 0 does not wait, None waits for ever.
        :param priority: a smaller number is more urgent.
        :raises LockError: if this thread holds it.
        :raises LockDeletedError: if it is, or meanwhile was, deleted.
        """
        if timeout is not None and timeout < 0:
            raise ValueError("a timeout must not be negative")
        with self._mutex:
            signal = _Signal()
            request = self._queue.request(
                current_thread(), shared=shared, priority=priority, settled=signal.give
            )
        return request is None or self._await(request, signal, timeout)

    def _await(self, request: LockRequest, signal: _Signal, timeout: float | None) -> bool:
        try:
            signal.wait(timeout)
        finally:
            # Also where a signal's handler has raised an exception.
            with self._mutex:
                is_withdrawn = self._queue.withdraw(request)
        if request.state is RequestState.DELETED:
            raise LockDeletedError(f"{self.name}: was deleted meanwhile")
        return not is_withdrawn

    def release(self) -> None:
        """Give the lock back.

        :raises LockError: if this thread has it not.
        """
        with self._mutex:
            self._queue.release(current_thread())

    def downgrade(self) -> None:
        """Share a lock that this thread held alone.

        :raises LockError: if this thread has it not.
        """
        with self._mutex:
            self._queue.downgrade(current_thread())

    def delete(self, *, timeout: float | None = None, priority: int = 0) -> bool:
        """Delete the lock; threads that wait for it get a :class:`LockDeletedError`. A thread that
        does not hold it waits for it first; False if it was not to be had in time.

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


class _Signal:
    """Told once, by any thread, to one that waits."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def give(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None) -> None:
        self._lock.acquire(timeout=-1 if timeout is None else timeout)


class _Wanted(NamedTuple):
    """What a thread wants of a set of locks.

    :param names: None is all that there are.
    :param deadline: of the monotonic clock; infinity is never.
    :param is_opportunistic: those that are free, and wait for none.
    """

    names: frozenset[str] | None
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
        self._mutex = Lock()
        self._locks = {each: SharedLock(f"{name} {each}") for each in names}
        # Its holder has all names, also those that other threads would add.
        self._whole = SharedLock(f"all of {name}")
        self._owned: dict[Thread, set[str]] = {}

    # What there is.

    def names(self) -> set[str]:
        """All names."""
        with self._mutex:
            return {*self._locks}

    def owned(self) -> set[str]:
        """The names that this thread holds."""
        with self._mutex:
            return {*self._owned.get(current_thread(), ())}

    def is_owned(self, name: str, *, shared: bool | None = None) -> bool:
        """Whether this thread holds a name; with *shared*, whether in that way."""
        lock = self._locks.get(name)
        return lock is not None and lock.is_owned(shared=shared)

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
        if self.owned() or self._whole.is_owned():
            raise LockError(f"{self.name}: this thread holds some already")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        wanted = _Wanted(
            None if names is None else frozenset(names), shared, deadline, priority, opportunistic
        )
        if names is not None:
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
            names = sorted(self.names() if wanted.names is None else wanted.names)
            limit_s = math.inf if wanted.is_opportunistic else attempt_s(tries, len(names))
            end = time.monotonic() + limit_s
            found = self._attempt(names, wanted, min(end, wanted.deadline))
            if found is not None or end == math.inf or time.monotonic() >= wanted.deadline:
                return found
            time.sleep(_PAUSE_S)
            tries += 1

    def _attempt(self, names: list[str], wanted: _Wanted, until: float) -> set[str] | None:
        """Acquire all of these names, or none."""
        owned: set[str] = set()
        is_done = False
        try:
            for name in names:
                try:
                    is_had = self._take(name, wanted, until)
                except LockDeletedError:
                    if wanted.names is not None:
                        raise
                    continue  # of the whole set, those that are left
                if is_had:
                    owned.add(name)
                elif not wanted.is_opportunistic:
                    return None
            is_done = True
        finally:
            if not is_done:
                self._give_back(owned)
        with self._mutex:
            self._keep(owned)
        return {*owned}

    def _take(self, name: str, wanted: _Wanted, until: float) -> bool:
        """Acquire one lock; False if it was not to be had in time."""
        lock = self._locks.get(name)
        if lock is None:
            raise LockDeletedError(f"{self.name}: there is no {name}")
        timeout: float | None = 0.0
        if not wanted.is_opportunistic:
            timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        return lock.acquire(shared=wanted.is_shared, timeout=timeout, priority=wanted.priority)

    def _give_back(self, names: Iterable[str]) -> None:
        for name in names:
            self._locks[name].release()

    def release(self, names: Collection[str] | None = None) -> None:
        """Give locks back; without names, all that this thread holds. A thread that holds the
        whole set, and gives names back, no longer holds the whole.

        :raises LockError: if this thread does not hold all of them.
        """
        owned = self.owned()
        given = owned if names is None else {*names}
        self._check_held(given, owned)
        if self._whole.is_owned():
            self._whole.release()
        elif not owned and names is None:
            raise LockError(f"{self.name}: this thread holds none")
        with self._mutex:
            self._keep(owned - given)
        self._give_back(given)

    def _check_held(self, names: set[str], owned: set[str]) -> None:
        if missing := names - owned:
            raise LockError(f"{self.name}: this thread does not hold {', '.join(sorted(missing))}")

    def _keep(self, names: set[str]) -> None:
        if names:
            self._owned[current_thread()] = names
        else:
            self._owned.pop(current_thread(), None)

    def downgrade(self, names: Collection[str] | None = None) -> None:
        """Share locks that this thread held alone; without names, all of them.

        :raises LockError: if this thread does not hold all of them.
        """
        owned = self.owned()
        given = owned if names is None else {*names}
        self._check_held(given, owned)
        for name in given:
            self._locks[name].downgrade()
        if self._whole.is_owned() and all(self.is_owned(name, shared=True) for name in owned):
            self._whole.downgrade()

    # Names that come and go.

    def add(self, names: Iterable[str], *, acquired: bool = False, shared: bool = False) -> None:
        """Add names; it waits for a thread that holds the whole set.

        :param acquired: this thread holds the new ones then, besides what it holds.
        :raises LockError: if one is there already, or this thread only shares the whole set.
        """
        given = {*names}
        has_whole = self._whole.is_owned()
        if has_whole and not self._whole.is_owned(shared=False):
            raise LockError(f"{self.name}: this thread shares all names, and can't add any")
        if not has_whole:
            self._whole.acquire()
        try:
            with self._mutex:
                if known := given & self._locks.keys():
                    raise LockError(f"{self.name}: {', '.join(sorted(known))}: there already")
                locks = {each: SharedLock(f"{self.name} {each}") for each in given}
                if acquired:
                    for lock in locks.values():
                        lock.acquire(shared=shared)
                    self._owned.setdefault(current_thread(), set()).update(given)
                self._locks.update(locks)
        finally:
            if not has_whole:
                self._whole.release()

    def remove(self, names: Collection[str]) -> set[str]:
        """Delete names; threads that wait for them get a :class:`LockDeletedError`. A thread that
        holds names of the set must hold all that it removes. Returns those that were there.

        :raises LockError: if this thread holds others, or shares one of them.
        """
        given, owned = {*names}, self.owned()
        if owned:
            self._check_held(given, owned)
        removed = set()
        for name in sorted(given):
            lock = self._locks.get(name)
            try:
                if lock is None or not lock.delete():
                    continue
            except LockDeletedError:  # another thread was faster
                continue
            removed.add(name)
            with self._mutex:
                self._locks.pop(name, None)
                self._keep(self._owned.get(current_thread(), set()) - {name})
        return removed
