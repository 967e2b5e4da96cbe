"""Pools of user ids: read, written, checked and changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brine.common.uids import (
    UidPoolError,
    add_to_uid_pool,
    count_uids,
    format_uid_pool,
    parse_uid_pool,
    remove_from_uid_pool,
    replace_uid_pool,
    uid_pool_fault,
)

Pool = list[list[int]]

POOL = [[4000, 4099], [5000, 5000]]


def drawn(ranges: list[tuple[int, int]]) -> Pool:
    """A pool of ranges that do not overlap, whatever was drawn."""
    pool: Pool = []
    for first, length in sorted(ranges):
        if not pool or first > pool[-1][1]:
            pool.append([first, first + length])
    return pool


# Small numbers, so that ranges meet, touch, and have holes between them.
pools = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 8)), max_size=6).map(drawn)


@pytest.mark.parametrize(
    "text",
    [
        "4000-4099,5000",
        "4000-4099\n5000\n",  # ssconf's
        " 5000 , 4000 - 4099,",
        "4000-4099\r\n5000",
        "5000-5000,4000-4099",
    ],
)
def test_commas_and_line_ends_separate_ranges(text: str) -> None:
    assert parse_uid_pool(text) == POOL
    assert parse_uid_pool("") == parse_uid_pool(" \n") == []


@pytest.mark.parametrize("separator", [",", "\n"])
@given(pool=pools)
def test_what_is_written_can_be_read(separator: str, pool: Pool) -> None:
    assert parse_uid_pool(format_uid_pool(pool, separator)) == pool


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("4099-4000", "[4099, 4000] is no range of user ids: first and last, from 1 to 4294967294"),
        ("4294967295", "from 1 to 4294967294"),
        ("4294967295", "[4294967295, 4294967295] is no range of user ids"),
        ("99999999999", "'99999999999' is no range of user ids, such as 4000-4099"),
        ("alice", "'alice' is no range"),
        ("-5", "'-5' is no range"),
        ("4000-", "'4000-' is no range"),
        ("4000-4099-4199", "'4000-4099-4199' is no range"),
        ("4000 4001", "'4000 4001' is no range"),
        ("٤٠٠٠", "is no range"),
        ("4000-4099,4050", "the range 4050-4050 overlaps the one before"),
        ("4000,4000", "the range 4000-4000 overlaps the one before"),
        ("5000,0-99", "user id 0 is root's"),
    ],
)
def test_what_is_no_pool_is_told(text: str, fault: str) -> None:
    with pytest.raises(UidPoolError) as caught:
        parse_uid_pool(text)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("4100", "4000-4100,5000"),
        ("3999", "3999-4099,5000"),
        ("4999,5001", "4000-4099,4999-5001"),
        ("4050-4200", "4000-4200,5000"),
        ("1-6000", "1-6000"),
        ("4010-4020", "4000-4099,5000"),
        ("5000", "4000-4099,5000"),
    ],
)
def test_added_ids_join_those_that_they_touch(added: str, expected: str) -> None:
    assert format_uid_pool(add_to_uid_pool(POOL, parse_uid_pool(added)), ",") == expected


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        ("4100", "4100"),
        ("3990-4010", "3990-3999"),
        ("3990-5010", "3990-3999,4100-4999,5001-5010"),
        ("4000,6000", "6000"),
    ],
)
def test_what_is_not_in_the_pool_can_not_be_removed(removed: str, missing: str) -> None:
    with pytest.raises(UidPoolError) as caught:
        remove_from_uid_pool(POOL, parse_uid_pool(removed))
    assert str(caught.value) == f"not in the pool: {missing}"


def test_the_same_ids_stay_written_as_they_were() -> None:
    touching = [[4000, 4009], [4010, 4019]]
    assert add_to_uid_pool(touching, [[4005, 4012]]) == touching
    assert replace_uid_pool(touching, [[4000, 4019]]) == touching
    assert replace_uid_pool(touching, [[4000, 4018], [4020, 4020]]) == [[4000, 4018], [4020, 4020]]


@pytest.mark.parametrize("pool", [[[4000]], [[1, 2, 3]], [[]], [[5, 1]], [[-1, 5]]])
def test_pairs_that_are_no_ranges_are_faults(pool: Pool) -> None:
    assert "is no range of user ids" in str(uid_pool_fault(pool))
    with pytest.raises(UidPoolError, match="is no range"):
        add_to_uid_pool(POOL, pool)


def test_a_pool_with_a_fault_can_be_replaced_and_nothing_else() -> None:
    faulty = [[0, 5], [5, 9]]
    assert replace_uid_pool(faulty, [[1, 9]]) == [[1, 9]]
    assert replace_uid_pool([[5, 9], [9, 10]], [[5, 10]]) == [[5, 10]]
    with pytest.raises(UidPoolError, match="root's"):
        replace_uid_pool(POOL, [[0, 0]])
    for change in (add_to_uid_pool, remove_from_uid_pool):
        with pytest.raises(UidPoolError, match="root's"):
            change(faulty, [[7, 7]])


def ids_of(pool: Pool) -> set[int]:
    return {number for first, last in pool for number in range(first, last + 1)}


@given(pools, pools)
def test_pools_are_sets_of_ids(one: Pool, other: Pool) -> None:
    ids, others = ids_of(one), ids_of(other)
    both = add_to_uid_pool(one, other)
    assert uid_pool_fault(both) is None
    assert ids_of(both) == ids | others
    assert count_uids(both) == len(ids | others)
    assert ids_of(remove_from_uid_pool(both, other)) == ids - others
    assert ids_of(replace_uid_pool(one, other)) == others
    if others <= ids:
        assert ids_of(remove_from_uid_pool(one, other)) == ids - others
    else:
        with pytest.raises(UidPoolError):
            remove_from_uid_pool(one, other)


def test_a_pool_may_have_millions_of_ids() -> None:
    huge = parse_uid_pool("1-4294967294")
    assert count_uids(huge) == 2**32 - 2
    assert remove_from_uid_pool(huge, [[2, 2**32 - 3]]) == [[1, 1], [2**32 - 2, 2**32 - 2]]
