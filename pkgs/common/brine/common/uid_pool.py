"""Pools of user ids: ranges that are kept for processes of ours, such as VMs, one id each.

A pool is a list of ranges ``[first, last]``, both inclusive, as the configuration has it. Source:
design-2.1, "User-id pool".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from brine.common.errors import BrineError

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


def expand_uid_pool(pool: Ranges) -> Iterator[int]:
    """Each id of a pool. There may be millions."""
    for first, last in pool:
        yield from range(first, last + 1)


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
