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
from typing import Self

from brine.common import paths
from brine.common.errors import BrineError
from brine.common.privileges import Capability, may

Ranges = Sequence[Sequence[int]]
"""A pool, as pairs of first and last. Functions here take these, and make lists, for JSON."""

PROC = Path("/proc")

_RANGE = re.compile(r"([0-9]{1,10})(?:\s*-\s*([0-9]{1,10}))?")
_LARGEST_UID = 2**32 - 2  # the next one means "leave it as it is" to the kernel
_MOST_LISTED = 5
_OPENINGS = 10  # of a lock file that others remove meanwhile
_RANDOM = random.SystemRandom()  # processes that were forked must not all try the same ones


class UidPoolError(BrineError):
    """A pool of user ids that can't be used, or that has none to give."""


# Pools.


def parse_uid_pool(text: str) -> list[list[int]]:
    """A pool, sorted, from ``4000-4099,5000``; line ends may stand in place of commas.

    :raises UidPoolError: if a part is no range, two overlap, or root is in one.
    """
    ranges = []
    for part in re.split(r"[,\n]", text):
        if not part.strip():
            continue
        match = _RANGE.fullmatch(part.strip())
        if not match:
            said = _excerpt(part.strip())
            raise UidPoolError(f"{said} is no range of user ids, such as 4000-4099")
        ranges.append([int(match[1]), int(match[2] or match[1])])
    ranges.sort()
    _check(ranges)
    return ranges


def format_uid_pool(pool: Ranges, separator: str) -> str:
    """The inverse of :func:`parse_uid_pool`."""
    return separator.join(
        str(first) if first == last else f"{first}-{last}" for first, last in pool
    )


def uid_pool_fault(pool: Ranges) -> str | None:
    """The fault of a pool, or None."""
    before = 0
    for pair in sorted(map(list, pool)):
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= _LARGEST_UID:
            text = f"{_excerpt(pair)} is no range of user ids"
            return f"{text}: first and last, from 1 to {_LARGEST_UID}"
        first, last = pair
        if first == 0:
            return "user id 0 is root's, which can't be in a pool"
        if first <= before:
            return f"the range {first}-{last} overlaps the one before"
        before = last
    return None


def add_to_uid_pool(pool: Ranges, added: Ranges) -> list[list[int]]:
    """A pool that has the ids of both. Its own ids need not be added."""
    _check(added)
    _check(pool)
    return _changed(pool, _joined([*pool, *added]))


def remove_from_uid_pool(pool: Ranges, removed: Ranges) -> list[list[int]]:
    """A pool without some ids, which may be a part of a range, and must be in it."""
    _check(removed)
    _check(pool)
    if missing := _without(removed, pool):
        text = f"not in the pool: {format_uid_pool(missing, ',')}"
        raise UidPoolError(text, hint="brine uidpool show prints its ids")
    return _changed(pool, _without(pool, removed))


def replace_uid_pool(pool: Ranges, new: Ranges) -> list[list[int]]:
    """A pool in the place of another. If both have the same ids, it is the old one as it was."""
    _check(new)
    return _changed(pool, _joined(new))


def count_uids(pool: Ranges) -> int:
    return sum(last - first + 1 for first, last in pool)


def _check(pool: Ranges) -> None:
    if fault := uid_pool_fault(pool):
        raise UidPoolError(fault)


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _changed(old: Ranges, new: list[list[int]]) -> list[list[int]]:
    """*new*; but ids that did not change are not written in another way."""
    if uid_pool_fault(old) is None and _joined(old) == new:
        return [list(pair) for pair in old]
    return new


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
        for start, end in _joined(others):
            if first < start <= last:
                left.append([first, start - 1])
            if start <= last:
                first = max(first, end + 1)
        if first <= last:
            left.append([first, last])
    return left


# The accounts of this node: the ids of its users and groups are theirs.


def accounts_among(ranges: Ranges) -> dict[int, str]:
    """The accounts among *ranges*, in words, by number. Directories that do not list their users
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
    shown = [f"{number} ({name})" for number, name in list(accounts.items())[:_MOST_LISTED]]
    more = len(accounts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _account_of(number: int) -> str | None:
    """The account that has a number as user id or group id, in words. This asks directories such
    as LDAP, too, if the node knows its users by them."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    with contextlib.suppress(KeyError):
        return f"group {grp.getgrgid(number).gr_name}"
    return None


# The user ids that processes run with (:manpage:`proc(5)`).


def running_uids() -> set[int]:
    """The real, effective, saved and file system user ids of all processes.

    :raises UidPoolError: if there may be processes that we do not see.
    """
    found: set[int] = set()
    try:
        ourselves = os.readlink(PROC / "self")
        processes = [name for name in os.listdir(PROC) if name.isdecimal()]
        if ourselves not in processes:
            raise _unknown(f"{PROC} does not show this process")
        if hiding := _hiding():
            raise _unknown(f"{PROC} hides those of others (it is mounted with {hiding})")
        for process in processes:
            # One that ends meanwhile; those that are hidden look like that, too.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.update(_uids_of(PROC / process / "status"))
    except OSError as error:
        raise _unknown(f"{error.filename or PROC}: {error.strerror}") from error
    return found


def _uids_of(status: Path) -> Iterator[int]:
    lines = status.read_bytes().splitlines()
    uids = next((line.split()[1:] for line in lines if line.startswith(b"Uid:")), [])
    if len(uids) != 4 or not all(map(bytes.isdigit, uids)):
        raise _unknown(f"{status} does not say whose it is")
    return map(int, uids)


def _hiding() -> str | None:
    """The mount option that may hide other users' processes from us, if there is one.

    Members of the group of its ``gid=`` see more, but not with each value of ``hidepid=``: the
    capability alone counts.
    """
    device = os.stat(PROC).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (PROC / "self/mountinfo").read_text(errors="replace").splitlines()
    options = next((line.split()[-1] for line in mounts if line.split()[2] == number), None)
    if options is None:
        raise _unknown(f"{PROC} is not among the mounts of this process")
    said = dict(option.partition("=")[::2] for option in options.split(","))
    if "hidepid" not in said or may(Capability.SYS_PTRACE):
        return None
    return f"hidepid={said['hidepid']}"


def _unknown(why: str) -> UidPoolError:
    return UidPoolError(
        f"which user ids are in use can't be found out: {why}",
        hint="be root, with a /proc that shows all processes",
    )


# Requests.


class Uid:
    """A user id that is ours, with the locked descriptor that makes it so.

    As a context manager it is unlocked at the end of the block, and released after an error.

    :param uid: the number.
    :param descriptor: what a process has to inherit to have the user id for its life; ours until
        :meth:`unlock`. With :mod:`subprocess`: ``pass_fds=[uid.descriptor]``.
    """

    def __init__(self, uid: int, descriptor: int) -> None:
        self.uid = uid
        self.descriptor = descriptor

    def hand_over(self) -> int:
        """Let the program that this process becomes (exec) have the descriptor, which is returned.
        If there is no exec after all, it is still ours."""
        os.set_inheritable(self.descriptor, True)
        return self.descriptor

    def unlock(self) -> None:
        """Let go of the descriptor. Processes that inherited it keep the lock. If there are none, a
        process must run with the user id by now: that is what keeps it taken. The file stays."""
        if self.descriptor >= 0:
            # Not LOCK_UN, which would end the lock for all processes that inherited it.
            os.close(self.descriptor)
            self.descriptor = -1

    def release(self) -> None:
        """Give the user id back: unlock it, and remove the file unless others have the lock."""
        self.unlock()
        release_uid(self.uid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.unlock()
        else:
            self.release()


def request_unused_uid(pool: Ranges) -> Uid:
    """A user id of *pool* that no process has, chosen at random, and locked. Never waits.

    One that belongs to an account of this node, as its user id or group id, is passed over, with a
    warning: a process that has it would be that user.

    :raises UidPoolError: if all are in use, there are none, or that can't be found out.
    """
    _check(pool)
    if not pool:
        hint = "brine uidpool add, on the master, puts some into it"
        raise UidPoolError("the pool of user ids is empty", hint=hint)
    running: set[int] = set()
    owned: dict[int, str] = {}
    count, locked = count_uids(pool), 0
    try:
        for uid in _from_a_random_one(pool, count):
            descriptor = _lock(_lock_file(uid), os.O_CREAT)
            if descriptor is None:
                locked += 1
                continue
            with contextlib.ExitStack() as stack:
                ours = Uid(uid, descriptor)
                stack.callback(ours.release)
                # Looked at with the lock held: no other command starts a process with it now. Those
                # that ran at an earlier look are taken for in use, so that there are few looks.
                if uid not in running:
                    running = running_uids()
                if uid in running:
                    continue
                if account := _account_of(uid):
                    owned[uid] = account
                    continue
                stack.pop_all()
                return ours
    finally:
        if owned:
            _warn_of(owned)
    are = "1 user id of the pool is" if count == 1 else f"{count} user ids of the pool are all"
    others = f"{count - locked - len(owned)} without a lock"
    accounts = f", {len(owned)} of accounts" if owned else ""
    raise UidPoolError(
        f"{are} in use on this node: {locked} locked, {others}{accounts}",
        hint="brine uidpool add, on the master, makes the pool larger; "
        f"fuser -v {paths.LOCK_DIR}/uid-*.lock tells who has the locks",
    )


def release_uid(uid: int) -> bool:
    """Give back a user id whose process has ended: remove its lock file, unless a process has the
    lock. Whether there are processes with that user id is not looked at. Returns whether the file
    is gone."""
    file = _lock_file(uid)
    try:
        descriptor = _lock(file)
    except FileNotFoundError:
        return True
    if descriptor is None:
        return False
    try:
        # Only the holder of the lock removes the file. Another process that has it open notices it.
        file.unlink(missing_ok=True)
    except OSError as error:
        raise UidPoolError(f"{file}: can't be removed: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return True


def release_forgotten() -> None:
    """Give back the user ids whose lock is free: the processes that had them were killed, and so
    were those that would have released them."""
    for file in paths.LOCK_DIR.glob("uid-*.lock"):
        number = file.name.removeprefix("uid-").removesuffix(".lock")
        if number.isdecimal():
            release_uid(int(number))


def _from_a_random_one(pool: Ranges, count: int) -> Iterator[int]:
    """Each user id once, from a random one on. There may be millions."""
    number = _RANDOM.randrange(count)
    for index, (first, last) in enumerate(pool):
        if number <= last - first:
            yield from range(first + number, last + 1)
            for others_first, others_last in (*pool[index + 1 :], *pool[:index]):
                yield from range(others_first, others_last + 1)
            yield from range(first, first + number)
            return
        number -= last - first + 1


def _lock_file(uid: int) -> Path:
    return paths.LOCK_DIR / f"uid-{uid}.lock"


def _lock(file: Path, create: int = 0) -> int | None:
    """A descriptor of *file* with the lock; None if another process has it.

    :param create: ``O_CREAT``, or 0: then FileNotFoundError tells that there is none.
    """
    # Only to be read: a VM that inherits it can't fill the file system of the locks.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | create
    try:
        if create:
            file.parent.mkdir(mode=0o755, exist_ok=True)
        for _ in range(_OPENINGS):
            with contextlib.ExitStack() as stack:
                descriptor = os.open(file, flags, 0o600)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A file that was removed before this got the lock is no lock any more.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.lstat(file), os.fstat(descriptor)):
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


def _warn_of(owned: dict[int, str]) -> None:
    import logging  # most pools have none, and no start should wait for it

    text = "user ids of the pool are passed over, as they belong to accounts of this node: %s"
    logging.getLogger(__name__).warning(text, listed(owned))
