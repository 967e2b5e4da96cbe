"""Many locks, and owners that claim several of them: attempts, levels, random histories."""

from __future__ import annotations

import random
from functools import partial

import pytest

from brine.cluster.lock_table import ClaimState, LockClaim, LockName, LockTable
from brine.common.locks import LockError


class _Story:
    """A table, its time, and the claims by their owners."""

    def __init__(self) -> None:
        self.table = LockTable()
        self.now = 0.0
        self.claims: dict[str, list[LockClaim]] = {}
        self.settled: list[str] = []

    def claim(self, owner: str, *names: str, shared: bool = False, **how: float) -> LockClaim:
        claim = self.table.claim(
            owner,
            map(LockName.parse, names),
            now=self.now,
            shared=shared,
            settled=partial(self.settled.append, owner),
            timeout=how.get("timeout"),
            priority=int(how.get("priority", 0)),
        )
        self.claims.setdefault(owner, []).append(claim)
        return claim

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.advance(self.now)

    def release(self, owner: str) -> None:
        self.table.release(owner, now=self.now)

    def is_free(self) -> bool:
        return [*self.table.claims()] == [] and self.table._queues == {}


def states(*claims: LockClaim) -> list[str]:
    return [claim.state.name for claim in claims]


def test_the_story_of_the_design() -> None:
    """A holds inst4, B wants all, C wants inst1 and need not wait for A."""
    story = _Story()
    story.claim("a", "instance/inst4")
    names = [f"instance/inst{number}" for number in (1, 2, 3, 4)]
    b = story.claim("b", *names)
    c = story.claim("c", "instance/inst1")
    assert str(b.lock_waited_for()) == "instance/inst4"
    assert states(b, c) == ["WAITING", "WAITING"]
    story.pass_time(1)  # B's first attempt is over
    assert states(b, c) == ["WAITING", "GRANTED"]
    story.release("c")
    story.release("a")
    assert states(b) == ["GRANTED"]
    assert story.settled == ["a", "c", "b"]
    story.release("b")
    assert story.is_free()


def test_after_five_attempts_a_claim_keeps_what_it_gets() -> None:
    story = _Story()
    story.claim("a", "instance/web2")
    b = story.claim("b", "instance/web1", "instance/web2")
    ends = []
    while end := story.table.next_end():
        ends.append(end)
        story.pass_time(end - story.now)
    assert ends == [1, 3, 7, 15, 31]
    c = story.claim("c", "instance/web1")
    story.pass_time(1000)
    assert (b.state, c.state) == (ClaimState.WAITING, ClaimState.WAITING)


@pytest.mark.parametrize(("timeout", "end"), [(0, 0), (0.5, 0.5), (2, 2), (40, 40)])
def test_a_claim_gives_up_in_time(timeout: float, end: float) -> None:
    story = _Story()
    story.claim("a", "instance/web2")
    b = story.claim("b", "instance/web1", "instance/web2", timeout=timeout)
    while b.state is ClaimState.WAITING:
        next_end = story.table.next_end()
        assert next_end is not None
        story.pass_time(next_end - story.now)
    assert (b.state, story.now) == (ClaimState.TIMED_OUT, end)
    assert story.claim("c", "instance/web1", timeout=0).state is ClaimState.GRANTED


def test_levels_are_taken_in_their_order() -> None:
    story = _Story()
    story.claim("a", "node/n1", "instance/web1", "storage/n1-vg")
    assert [str(name) for name in story.claims["a"][0].names] == [
        "instance/web1",
        "node/n1",
        "storage/n1-vg",
    ]
    for name in ("instance/web2", "node/n1", "cluster", "storage/n2"):
        with pytest.raises(LockError, match="is to be taken before"):
            story.claim("a", name)
    story.release("a")
    story.claim("a", "cluster", shared=True)
    story.claim("a", "instance/web1")
    assert story.claims["a"][-1].state is ClaimState.GRANTED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "instance",
        "instance/",
        "cluster/a",
        "Instance/a",
        "box/a",
        "node/a\nb",
        "node/" + "n" * 256,
    ],
)
def test_what_names_no_lock_is_refused(text: str) -> None:
    with pytest.raises(LockError):
        LockName.parse(text)


def test_a_claim_has_some_locks() -> None:
    with pytest.raises(LockError):
        _Story().claim("a")


def test_an_owner_that_ends_waits_for_nothing() -> None:
    story = _Story()
    story.claim("a", "instance/web1")
    story.claim("b", "instance/web1", "node/n1")
    c = story.claim("c", "instance/web1", shared=True)
    d = story.claim("d", "instance/web1", shared=True)
    story.release("b")
    story.release("a")
    assert (c.state, d.state) == (ClaimState.GRANTED, ClaimState.GRANTED)
    for owner in ("c", "d"):
        story.release(owner)
    assert story.is_free()


def _excluding(story: _Story) -> list[tuple[LockClaim, LockClaim]]:
    """Claims that hold one lock together, though one of them is exclusive."""
    holding: dict[LockName, list[LockClaim]] = {}
    for claim in story.table.claims():
        for name in claim.held:
            holding.setdefault(name, []).append(claim)
    return [
        (one, other)
        for claims in holding.values()
        for one in claims
        for other in claims
        if one is not other and not (one.is_shared and other.is_shared)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_come_to_an_end_and_never_two_hold_one_lock(seed: int) -> None:
    chance = random.Random(seed)
    story = _Story()
    names = [f"{level}/{one}" for level in ("instance", "node", "storage") for one in "abc"]
    for number in range(150):
        owners = sorted({str(claim.owner) for claim in story.table.claims()})
        choice = chance.random()
        if choice < 0.5 or not owners:
            wanted = chance.sample(names, chance.randint(1, 4))
            timeout = chance.choice((None, None, 0, 3))
            how = {} if timeout is None else {"timeout": timeout}
            shared = chance.random() < 0.4
            story.claim(f"o{number}", *wanted, shared=shared, priority=chance.choice((0, 1)), **how)
        elif choice < 0.7:
            story.pass_time(chance.random() * 3)
        else:
            story.release(chance.choice(owners))
        assert _excluding(story) == []
    # Each one that has its locks lets them go in the end: all others get theirs, or give up.
    for _ in range(10_000):
        if not (claims := [*story.table.claims()]):
            break
        granted = [one for one in claims if one.state is ClaimState.GRANTED]
        if granted:
            story.release(str(granted[0].owner))
        else:
            end = story.table.next_end()
            assert end is not None, "all wait for each other"
            story.pass_time(end - story.now)
        assert _excluding(story) == []
    assert story.is_free()
    states = {claim.state for claims in story.claims.values() for claim in claims}
    assert states <= {ClaimState.RELEASED, ClaimState.TIMED_OUT}
