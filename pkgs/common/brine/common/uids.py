"""The pool of user ids, of which each VM gets one that no other process has.

A user id is in use while a process holds the lock of its file, or runs with it. The lock is that of
:manpage:`flock(2)`. It belongs to the open file, so a process that inherits the descriptor has it
too, and the kernel ends it with the last of them. Giving the user id back removes the file under
the lock: a process that opened the file before sees that it is gone, and makes another.

Source: design-2.1, "User-id pool", which asks for a POSIX lock; that is not inherited, and ends
when its process closes any descriptor of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.privileges import Capability, may

# Pools of user ids: ranges that are kept for processes of ours, such as VMs, one id each.

Ranges = Sequence[Sequence[int]]
"""What the functions here take; what they make are lists, for JSON."""

_RANGE = re.compile(r"([0-9]{1,10})(?:\s*-\s*([0-9]{1,10}))?")
_LARGEST_UID = 2**32 - 2  # the next one means "leave it as it is" to the kernel


class UidPoolError(BrineError):
    """A pool of user ids that can't be used, or that has none to give."""


def parse_uid_pool(text: str) -> list[list[int]]:
    """A pool from ``4000-4099,5000``; line ends may stand in place of commas.

    :return: sorted.
    :raises UidPoolError: if a part is no range, two overlap, or root is in one.
    """
    ranges = []
    for part in re.split(r"[,\n]", text):
        if not part.strip():
            continue
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise UidPoolError(
                f"{_excerpt(part.strip())} is no range of user ids, such as 4000-4099"
            )
        first = int(match[1])
        ranges.append([first, int(match[2]) if match[2] else first])
    ranges.sort()
    _check(ranges)
    return ranges


def format_uid_pool(pool: Ranges, separator: str) -> str:
    """The inverse of :func:`parse_uid_pool`."""
    return separator.join(
        str(first) if first == last else f"{first}-{last}" for first, last in pool
    )


def uid_pool_fault(pool: Ranges) -> str | None:
    """What is wrong with a pool."""
    last = 0
    for pair in sorted(map(list, pool)):
        if fault := _range_fault(pair):
            return fault
        if pair[0] == 0:
            return "user id 0 is root's, which can't be in a pool"
        if pair[0] <= last:
            return f"the range {pair[0]}-{pair[1]} overlaps the one before"
        last = pair[1]
    return None


def add_to_uid_pool(pool: Ranges, added: Ranges) -> list[list[int]]:
    """A pool that has the ids of both. What is in it already need not be added, and is no mistake.

    :raises UidPoolError: if one of both is no pool.
    """
    _check(added)
    _check(pool)
    return _changed(pool, _joined([*pool, *added]))


def remove_from_uid_pool(pool: Ranges, removed: Ranges) -> list[list[int]]:
    """A pool without some ids, which may be a part of a range.

    :raises UidPoolError: if one of them is not in the pool, or one of both is no pool.
    """
    _check(removed)
    _check(pool)
    if missing := _without(removed, pool):
        text = f"not in the pool: {format_uid_pool(missing, ',')}"
        raise UidPoolError(text, hint="brine uidpool show prints what is in it")
    return _changed(pool, _without(pool, removed))


def replace_uid_pool(pool: Ranges, new: Ranges) -> list[list[int]]:
    """A pool in the place of another. If both have the same ids, it is the old one as it was.

    :raises UidPoolError: if *new* is no pool.
    """
    _check(new)
    return _changed(pool, _joined(new))


def count_uids(pool: Ranges) -> int:
    """How many ids are in a pool."""
    return sum(last - first + 1 for first, last in pool)


def _changed(old: Ranges, new: list[list[int]]) -> list[list[int]]:
    """*new*; but ids that did not change are not written in another way."""
    if uid_pool_fault(old) is None and _joined(old) == new:
        return [list(pair) for pair in old]
    return new


def _check(pool: Ranges) -> None:
    if fault := uid_pool_fault(pool):
        raise UidPoolError(fault)


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _range_fault(pair: Sequence[int]) -> str | None:
    if len(pair) == 2 and 0 <= pair[0] <= pair[1] <= _LARGEST_UID:
        return None
    return f"{_excerpt(list(pair))} is no range of user ids: first and last, from 1 up"


def _joined(ranges: Ranges) -> list[list[int]]:
    """The same ids in as few ranges as can be, sorted."""
    joined: list[list[int]] = []
    for first, last in sorted(map(list, ranges)):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined


def _without(ranges: Ranges, others: Ranges) -> list[list[int]]:
    """The ids that are in no range of *others*."""
    left: list[list[int]] = []
    for first, last in _joined(ranges):
        for from_, to in _joined(others):
            if to < first or from_ > last:
                continue
            if first < from_:
                left.append([first, from_ - 1])
            first = to + 1
        if first <= last:
            left.append([first, last])
    return left


# The accounts of this node: the ids of its users and groups are theirs.

_MOST = 5


def account_of(number: int) -> str | None:
    """Who has a number as user id, or as group id, in words; None if nobody has.

    Directories such as LDAP are asked, too, where the node knows its users by them.
    """
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    with contextlib.suppress(KeyError):
        return f"group {grp.getgrgid(number).gr_name}"
    return None


def accounts_among(ranges: Ranges) -> dict[int, str]:
    """Who has numbers of *ranges*, in words, by number. Directories that do not list their users
    leave them out."""
    groups = {each.gr_gid: f"group {each.gr_name}" for each in grp.getgrall()}
    users = {each.pw_uid: each.pw_name for each in pwd.getpwall()}
    found = {**groups, **users}
    return {
        number: found[number]
        for number in sorted(found)
        if any(first <= number <= last for first, last in ranges)
    }


def listed(accounts: dict[int, str]) -> str:
    """Accounts in one line, with their numbers; of many the first."""
    shown = [f"{number} ({name})" for number, name in list(accounts.items())[:_MOST]]
    more = f" and {len(accounts) - _MOST} more" if len(accounts) > _MOST else ""
    return ", ".join(shown) + more


# The user ids that processes run with (:manpage:`proc(5)`).

PROC = Path("/proc")

_HINT = "be root, with a /proc that shows all processes"


def running_uids(proc: Path = PROC) -> set[int]:
    """The real, effective, saved and file system user ids of all processes.

    :raises UidPoolError: if there may be processes that we do not see.
    """
    try:
        ourselves = os.readlink(proc / "self")
        processes = [name for name in os.listdir(proc) if name.isdecimal()]
        hiding = _hiding(proc)
    except OSError as error:
        raise _unknown(f"{proc}: {error.strerror}") from error
    if ourselves not in processes:
        raise _unknown(f"{proc} does not show this process")
    if hiding:
        raise _unknown(f"{proc} hides those of others (it is mounted with {hiding})")
    found: set[int] = set()
    for process in processes:
        found.update(_uids_of(proc / process / "status"))
    return found


def _uids_of(status: Path) -> Iterator[int]:
    try:
        lines = status.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended meanwhile; for those that are hidden see below
    except OSError as error:
        raise _unknown(f"{status}: {error.strerror}") from error
    uids = next((line.split()[1:] for line in lines if line.startswith(b"Uid:")), [])
    if len(uids) != 4 or not all(map(bytes.isdigit, uids)):
        raise _unknown(f"{status} does not say whose it is")
    yield from map(int, uids)


def _hiding(proc: Path) -> str | None:
    """The mount option that hides other users' processes from us, if one does.

    They look like processes that have ended: there is no such file.
    """
    options = _options(proc)
    hiding = next((each for each in options if each.startswith("hidepid=")), None)
    if hiding is None or may(Capability.SYS_PTRACE):
        return None
    # The kernel asks this group's members nothing more, but for hidepid=ptraceable.
    exempt = next((int(each[4:]) for each in options if each.startswith("gid=")), None)
    groups = {os.getegid(), *os.getgroups()}
    return None if exempt in groups and hiding not in _FOR_EVERYBODY else hiding


_FOR_EVERYBODY = ("hidepid=ptraceable", "hidepid=4")


def _options(proc: Path) -> list[str]:
    """The options of the file system at *proc*."""
    device = os.stat(proc).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (proc / "self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[-1].split(",")
    raise _unknown(f"{proc} is not among the mounts of this process")


def _unknown(why: str) -> UidPoolError:
    return UidPoolError(f"which user ids are in use can't be found out: {why}", hint=_HINT)


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

    def __exit__(self, kind: object, *_: object) -> None:
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
