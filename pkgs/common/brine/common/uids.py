"""User ids that no other process has: each process, such as a VM, gets one of a pool to itself.

A user id is taken as long as somebody has a lock on its file, or a process runs with it. The lock
is :manpage:`flock(2)`'s. It belongs to the open file, so a process that inherits the descriptor has
it too, and the kernel ends it with the last of them. The file is removed by who gives the user id
back, while he has the lock: whoever opened it before sees that it is gone, and makes another.

Source: design-2.1, "User-id pool", which asks for a POSIX lock; that is not inherited, and ends
when its process closes any descriptor of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from brine.common import paths
from brine.common.accounts import account_of, listed
from brine.common.running_uids import PROC, running_uids
from brine.common.uid_pool import Ranges, UidPoolError, count_uids, uid_pool_fault

T = TypeVar("T")

_OPENINGS = 10
"""Of a lock file that others remove meanwhile."""

_RANDOM = random.SystemRandom()  # processes that were forked must not all try the same ones


class Uid:
    """A user id that is ours, with the locked descriptor that makes it so.

    As a context manager it is unlocked at the end of the block, and released after an error.

    :param uid: the number.
    """

    def __init__(self, uid: int, descriptor: int, lock_dir: Path) -> None:
        self.uid = uid
        self._descriptor: int | None = descriptor
        self._lock_dir = lock_dir

    @property
    def descriptor(self) -> int:
        """What a process has to inherit to have the user id for its life; ours until
        :meth:`unlock`. With :mod:`subprocess`: ``pass_fds=[uid.descriptor]``.

        :raises ValueError: if we have let go of it.
        """
        if self._descriptor is None:
            raise ValueError(f"the lock of user id {self.uid} is not held any more")
        return self._descriptor

    def hand_over(self) -> int:
        """Let the program that this process becomes (exec) have the descriptor, which is returned.
        If there is no exec after all, it is still ours."""
        os.set_inheritable(self.descriptor, True)
        return self.descriptor

    def unlock(self) -> None:
        """Let go of the descriptor. Processes that inherited it keep the lock. If there are none, a
        process must run with the user id by now: that is what keeps it taken. The file stays."""
        if self._descriptor is not None:
            # Not LOCK_UN, which would end the lock for all who have inherited it.
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Give the user id back: unlock it, and remove the file unless others have the lock."""
        self.unlock()
        release_uid(self.uid, lock_dir=self._lock_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.unlock()
        else:
            self.release()


def request_unused_uid(pool: Ranges, *, lock_dir: Path = paths.LOCK_DIR, proc: Path = PROC) -> Uid:
    """A user id of *pool* that no process has, chosen at random, and locked. Waits for nobody.

    One that belongs to an account of this node, as its user id or group id, is passed over, with a
    warning: a process that has it would be that user.

    :raises UidPoolError: if all are in use, there are none, or that can't be found out.
    """
    if fault := uid_pool_fault(pool):
        raise UidPoolError(fault)
    running: set[int] = set()
    locked = 0
    owned: dict[int, str] = {}
    for uid in _shuffled(pool):
        descriptor = _lock(_lock_file(lock_dir, uid), create=True)
        if descriptor is None:
            locked += 1
            continue
        ours = Uid(uid, descriptor, lock_dir)
        with contextlib.ExitStack() as stack:
            stack.callback(ours.release)
            # Seen with the lock, not before: now nobody else starts a process with it. Those that
            # ran at an earlier look are taken for in use, so that there are few looks.
            if uid not in running:
                running = running_uids(proc)
            if uid in running:
                continue
            if account := account_of(uid):
                owned[uid] = account
                continue
            stack.pop_all()
        _warn_of(owned)
        return ours
    _warn_of(owned)
    raise _none_left(pool, locked, len(owned), lock_dir)


def release_uid(uid: int, *, lock_dir: Path = paths.LOCK_DIR) -> bool:
    """Give back a user id whose process has ended: remove its lock file, unless somebody has the
    lock. Whether there are processes with that user id is not looked at.

    :return: whether there is no such file any more.
    :raises UidPoolError: if it can't be removed.
    """
    file = _lock_file(lock_dir, uid)
    try:
        descriptor = _lock(file, create=False)
    except FileNotFoundError:
        return True
    if descriptor is None:
        return False
    try:
        # With the lock nobody else removes it. Who has opened it before sees that it is gone.
        file.unlink(missing_ok=True)
    except OSError as error:
        raise UidPoolError(f"{file}: can't be removed: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return True


def release_forgotten(*, lock_dir: Path = paths.LOCK_DIR) -> None:
    """Give back the user ids that nobody has the lock of: whoever had them was killed, and who
    would have released them was, too.

    :raises UidPoolError: if one of their files can't be removed.
    """
    for file in lock_dir.glob("uid-*.lock"):
        number = file.name.removeprefix("uid-").removesuffix(".lock")
        if number.isdecimal():
            release_uid(int(number), lock_dir=lock_dir)


def exec_with_unused_uid(
    pool: Ranges,
    function: Callable[[Uid], T],
    *,
    lock_dir: Path = paths.LOCK_DIR,
    proc: Path = PROC,
) -> T:
    """Call *function*, which starts a process, with a user id that no other has. If it raises, the
    user id is given back.

    :return: what it returns.
    :raises UidPoolError: see :func:`request_unused_uid`.
    """
    with request_unused_uid(pool, lock_dir=lock_dir, proc=proc) as uid:
        return function(uid)


def _shuffled(pool: Ranges) -> Iterator[int]:
    """Each user id once, in random order. There may be millions, of which few are asked for: only
    what was moved to another place is kept."""
    moved: dict[int, int] = {}
    for left in range(count_uids(pool), 0, -1):
        place = _RANDOM.randrange(left)
        yield _nth(pool, moved.get(place, place))
        moved[place] = moved.pop(left - 1, left - 1)


def _nth(pool: Ranges, number: int) -> int:
    for first, last in pool:
        if number <= last - first:
            return first + number
        number -= last - first + 1
    raise IndexError(number)


def _lock_file(lock_dir: Path, uid: int) -> Path:
    return lock_dir / f"uid-{uid}.lock"


def _lock(file: Path, *, create: bool) -> int | None:
    """A descriptor of *file* with the lock; None if somebody else has it.

    :raises FileNotFoundError: if there is no file, and none is to be made.
    :raises UidPoolError: if it can't be locked.
    """
    # Only to be read: a VM that inherits it can't fill the file system of the locks.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        if create:
            file.parent.mkdir(mode=0o755, exist_ok=True)
        for _ in range(_OPENINGS):
            with contextlib.ExitStack() as stack:
                descriptor = os.open(file, flags, 0o600)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A file that was removed before we had the lock is nobody's lock any more.
                if _is_at(file, descriptor):
                    stack.pop_all()
                    return descriptor
    except BlockingIOError:
        return None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise
        hint = "be root" if isinstance(error, PermissionError) else None
        raise UidPoolError(f"{file}: can't be locked: {error.strerror}", hint=hint) from error
    return None  # others remove it all the time, so it is in use


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        there = os.stat(file, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _warn_of(owned: dict[int, str]) -> None:
    if not owned:
        return
    import logging  # most pools have none, and no start should wait for it

    text = "user ids of the pool are passed over, as they belong to accounts of this node: %s"
    logging.getLogger(__name__).warning(text, listed(owned))


def _none_left(pool: Ranges, locked: int, owned: int, lock_dir: Path) -> UidPoolError:
    count = count_uids(pool)
    if count == 0:
        hint = "brine uidpool add, on the master, puts some into it"
        return UidPoolError("the pool of user ids is empty", hint=hint)
    are = "1 user id of the pool is" if count == 1 else f"{count} user ids of the pool are all"
    accounts = f", {owned} of accounts" if owned else ""
    without = count - locked - owned
    return UidPoolError(
        f"{are} in use on this node: {locked} locked, {without} without a lock{accounts}",
        hint="brine uidpool add, on the master, makes the pool larger; "
        f"fuser -v {lock_dir}/uid-*.lock tells who has the locks",
    )
