"""Brine's locks under the names of Ganeti's, for Ganeti's own tests of its locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from brine.cluster import locks
from brine.cluster.lock_queue import LockDeletedError, LockQueue
from brine.common.locks import LockError

MODE, OWNER, PENDING = 10, 11, 12
"""What can be asked about a lock: ``ganeti.query.LQ_*``."""


class NoLockError(Exception):
    """There is no such lock, or there is one already: ``ganeti.errors.LockError``."""


Names = str | Collection[str]
Notify = Callable[..., object] | None


@contextmanager
def _faults() -> Iterator[None]:
    """Wrong use is an AssertionError."""
    try:
        yield
    except LockDeletedError as error:
        raise NoLockError(str(error)) from error
    except LockError as error:
        raise AssertionError(str(error)) from error


class _Mutex:
    """A mutex that tells when a thread has begun to ask, before other threads can."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._asking = threading.local()

    def asks(self, told: Callable[[], object] | None) -> None:
        """Tell when this thread has the mutex next."""
        self._asking.told = told

    def __enter__(self) -> None:
        self._mutex.acquire()
        told, self._asking.told = getattr(self._asking, "told", None), None
        if told:
            told()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._mutex.release()


class SharedLock:
    """``ganeti.locking.SharedLock``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = locks.SharedLock(name)
        self._mutex = _Mutex()
        self._lock._mutex = self._mutex  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<SharedLock name={self.name}>"

    def acquire(
        self,
        shared: int = 0,
        timeout: float | None = None,
        priority: int | None = None,
        test_notify: Notify = None,
    ) -> bool:
        self._mutex.asks(test_notify)
        with _faults():
            return self._lock.acquire(shared=bool(shared), timeout=timeout, priority=priority or 0)

    def release(self) -> None:
        with _faults():
            self._lock.release()

    def downgrade(self) -> bool:
        with _faults():
            self._lock.downgrade()
        return True

    def delete(self, timeout: float | None = None, priority: int | None = None) -> bool:
        with _faults():
            return self._lock.delete(timeout=timeout, priority=priority or 0)

    def is_owned(self, shared: int = -1) -> bool:
        return self._lock.is_owned(shared=_way(shared))

    # For threading.Condition.

    _is_owned = is_owned

    def _release_save(self) -> int:
        shared = self.is_owned(shared=1)
        self.release()
        return shared

    def _acquire_restore(self, shared: int) -> None:
        self.acquire(shared=shared)

    # What only tests ask.

    def GetLockInfo(self, requested: Collection[int]) -> list[Any]:  # noqa: N802
        queue = self._lock._queue
        with self._mutex:
            holders = [one.name for one in queue.holders() if isinstance(one, threading.Thread)]
            is_shared = all(queue.holders().values())
            pending = [*_pending(queue)] if PENDING in requested else None
        mode = ("shared" if is_shared else "exclusive") if holders else None
        if queue.is_deleted:
            mode = "deleted"
        asks_owner = holders and OWNER in requested
        return [
            (
                self.name,
                mode if MODE in requested else None,
                holders if asks_owner else None,
                pending,
            )
        ]

    def _count_pending(self) -> int:
        [(_, _, _, pending)] = self.GetLockInfo({PENDING})
        return len(pending)

    def _check_empty(self) -> bool:
        return self._count_pending() == 0


def _way(shared: int) -> bool | None:
    return None if shared < 0 else bool(shared)


def _pending(queue: LockQueue) -> Iterator[tuple[str, list[str]]]:
    """The entries of a queue: how each wants the lock, and its threads' names."""
    for priority in sorted(queue._waiting):
        for entry in queue._waiting[priority]:
            owners = [one.owner for one in entry.requests]
            names = [one.name for one in owners if isinstance(one, threading.Thread)]
            yield "shared" if entry.is_shared else "exclusive", names


class _Asked(dict[str, LockQueue]):
    """The locks of a set. It tells of each name that a thread asks for."""

    def __init__(self, locks: Mapping[str, LockQueue]) -> None:
        super().__init__(locks)
        self.by = threading.local()

    def get(self, name: str, default: Any = None) -> Any:
        told = getattr(self.by, "told", None)
        if told:
            told(name)
        return super().get(name, default)


class LockSet:
    """``ganeti.locking.LockSet``, which Ganeti had until its version 2.11."""

    def __init__(self, names: Collection[str], name: str) -> None:
        self._set = locks.LockSet(names, name=name)
        self._asked = self._set._queues = _Asked(self._set._queues)

    def acquire(
        self,
        names: Names | None,
        timeout: float | None = None,
        shared: int = 0,
        priority: int | None = None,
        opportunistic: bool = False,
        test_notify: Notify = None,
    ) -> set[str] | None:
        self._asked.by.told = test_notify
        try:
            with _faults():
                return self._set.acquire(
                    None if names is None else _names(names),
                    shared=bool(shared),
                    timeout=timeout,
                    priority=priority or 0,
                    opportunistic=opportunistic,
                )
        finally:
            self._asked.by.told = None

    def release(self, names: Names | None = None) -> None:
        with _faults():
            self._set.release(None if names is None else _names(names))

    def downgrade(self, names: Names | None = None) -> bool:
        with _faults():
            self._set.downgrade(None if names is None else _names(names))
        return True

    def add(self, names: Names, acquired: int = 0, shared: int = 0) -> bool:
        if {*_names(names)} & self._set.names():
            raise NoLockError("there already")
        with _faults():
            self._set.add(_names(names), acquired=bool(acquired), shared=bool(shared))
        return True

    def remove(self, names: Names) -> list[str]:
        with _faults():
            removed = self._set.remove(_names(names))
        return [name for name in _names(names) if name in removed]

    def is_owned(self) -> bool:
        return bool(self._set.owned()) or self._set.owns_all()

    def check_owned(self, names: Names, shared: int = -1) -> bool:
        return all(self._set.is_owned(name, shared=_way(shared)) for name in _names(names))

    def owning_all(self) -> bool:
        return self._set.owns_all()

    def list_owned(self) -> set[str]:
        return self._set.owned()

    def names(self) -> set[str]:
        return self._set.names()


def _names(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else [*names]
