"""Locks of a cluster: turns, time limits, sets of names, and random histories."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from brine.cluster import locks as locks_module
from brine.cluster.lock_queue import LockDeletedError, LockQueue, RequestState
from brine.cluster.lock_table import attempt_s
from brine.cluster.locks import LockSet, SharedLock
from brine.common.background import begun
from brine.common.locks import LockError
from lab.waiting import wait_for


class _Turns:
    """A lock's queue, and who was granted it, in order."""

    def __init__(self) -> None:
        self.queue = LockQueue("web1")
        self.granted: list[str] = []
        self.requests: dict[str, Any] = {}

    def ask(self, owner: str, *, priority: int = 0) -> None:
        """Ask for it; the names of sharers begin with s."""
        settled = partial(self._settled, owner)
        request = self.queue.request(
            owner, shared=owner.startswith("s"), settled=settled, priority=priority
        )
        if request is None:
            self.granted.append(owner)
        else:
            self.requests[owner] = request

    def _settled(self, owner: str) -> None:
        self.granted.append(owner)


def test_sharers_pass_exclusive_requests_until_their_entry_is_granted() -> None:
    turns = _Turns()
    for owner in ("x1", "s1", "x2", "s2", "x3", "s3"):
        turns.ask(owner)
    assert turns.granted == ["x1"]
    turns.queue.release("x1")
    assert turns.granted == ["x1", "s1", "s2", "s3"]
    turns.ask("s4")  # its turn is after both
    for owner in ("s1", "s2", "s3"):
        turns.queue.release(owner)
    assert turns.granted[4:] == ["x2"]
    turns.queue.release("x2")
    turns.queue.release("x3")
    assert turns.granted[4:] == ["x2", "x3", "s4"]


def test_a_more_urgent_request_is_ahead_of_all_others() -> None:
    turns = _Turns()
    turns.ask("s1")
    turns.ask("x1")
    turns.ask("s2", priority=-1)  # can share at once
    turns.ask("x2", priority=-1)
    turns.ask("s3", priority=5)
    assert turns.granted == ["s1", "s2"]
    turns.queue.release("s1")
    turns.queue.release("s2")
    turns.queue.release("x2")
    turns.queue.release("x1")
    assert turns.granted == ["s1", "s2", "x2", "x1", "s3"]


def test_less_urgent_sharers_have_a_turn_of_their_own() -> None:
    turns = _Turns()
    turns.ask("x1")
    for owner, priority in (("s3", 1), ("s1", 0), ("s2", 0)):
        turns.ask(owner, priority=priority)
    turns.queue.release("x1")
    turns.queue.release("s1")
    assert turns.granted == ["x1", "s1", "s2"]
    turns.queue.release("s2")
    assert turns.granted[3:] == ["s3"]


def test_who_no_longer_waits_holds_up_nobody() -> None:
    turns = _Turns()
    for owner in ("s1", "x1", "s2"):
        turns.ask(owner)
    assert turns.granted == ["s1"]
    assert turns.queue.withdraw(turns.requests["x1"])
    assert turns.granted == ["s1", "s2"]
    assert not turns.queue.withdraw(turns.requests["s2"])


def test_all_that_wait_for_a_deleted_lock_are_told() -> None:
    turns = _Turns()
    for owner in ("x1", "s1", "x2"):
        turns.ask(owner)
    turns.queue.delete("x1")
    assert turns.granted == ["x1", "s1", "x2"]
    assert {one.state for one in turns.requests.values()} == {RequestState.DELETED}
    with pytest.raises(LockDeletedError):
        turns.ask("s2")
    for fault in (partial(turns.queue.release, "x1"), partial(turns.queue.delete, "x1")):
        with pytest.raises(LockError):
            fault()


def test_a_sharer_neither_deletes_nor_asks_again() -> None:
    turns = _Turns()
    turns.ask("s1")
    for fault in (turns.queue.delete, turns.ask):
        with pytest.raises(LockError):
            fault("s1")
    with pytest.raises(LockError):
        turns.queue.downgrade("x1")


def test_sharers_join_one_who_downgrades_ahead_of_exclusive_requests() -> None:
    turns = _Turns()
    for owner in ("x1", "x2", "s1", "x3", "s2"):
        turns.ask(owner)
    turns.queue.downgrade("x1")
    assert turns.queue.holders() == {"x1": True, "s1": True, "s2": True}
    turns.ask("s3")
    turns.queue.downgrade("s1")  # shares it already, and lets nobody pass
    assert turns.granted == ["x1", "s1", "s2"]
    for owner in ("x1", "s1", "s2"):
        turns.queue.release(owner)
    assert turns.granted == ["x1", "s1", "s2", "x2"]


def test_a_downgrade_lets_no_less_urgent_sharer_pass() -> None:
    turns = _Turns()
    turns.ask("x1")
    turns.ask("s1", priority=1)
    turns.ask("x2")
    turns.queue.downgrade("x1")
    assert turns.granted == ["x1"]
    turns.ask("s2")
    for owner in ("x1", "x2", "s2"):
        turns.queue.release(owner)
    assert turns.granted == ["x1", "x2", "s2", "s1"]


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_grant_each_request_once_and_never_two_that_exclude_each_other(
    seed: int,
) -> None:
    chance = random.Random(seed)
    turns, asked, withdrawn = _Turns(), 0, 0
    for _ in range(200):
        holders = turns.queue.holders()
        waiting = [*turns.queue.waiting()]
        choice = chance.random()
        if choice < 0.5 or not holders:
            asked += 1
            turns.ask(f"{chance.choice('sx')}{asked}", priority=chance.choice((0, 0, 0, -1, 1)))
        elif choice < 0.6 and waiting:
            request = chance.choice(waiting)
            assert turns.queue.withdraw(request)
            withdrawn += 1
        elif choice < 0.7 and False in holders.values():
            turns.queue.downgrade(*holders)
        else:
            turns.queue.release(chance.choice([*holders]))
        holders = turns.queue.holders()
        assert len(holders) == 1 or all(holders.values())
        assert holders or not any(turns.queue.waiting())
    while holders := turns.queue.holders():
        turns.queue.release(next(iter(holders)))
    assert len(turns.granted) == len({*turns.granted}) == asked - withdrawn


def elsewhere(work: Callable[[], object]) -> object:
    """What work in another thread returns or raises."""
    return begun(work)()


def test_threads_share_a_lock_or_have_it_alone() -> None:
    lock = SharedLock("web1")
    assert lock.acquire(shared=True)
    assert lock.is_owned()
    assert not lock.is_owned(shared=False)
    assert elsewhere(lambda: lock.acquire(shared=True, timeout=0)) is True
    assert elsewhere(lambda: lock.acquire(timeout=0)) is False
    assert elsewhere(lambda: lock.acquire(timeout=0.01)) is False


def test_who_waits_gets_it_from_the_one_who_gives_it_back() -> None:
    lock = SharedLock("web1")
    lock.acquire()
    waits = begun(lambda: lock.acquire(timeout=60))
    lock.release()
    assert waits() is True


@pytest.mark.parametrize("work", ["acquire", "delete"])
def test_a_deleted_lock_is_an_error_for_all_others(work: str) -> None:
    lock = SharedLock("web1")
    lock.acquire()
    waits = begun(partial(getattr(lock, work), timeout=60))
    time.sleep(0.01)
    assert lock.delete()
    with pytest.raises(LockDeletedError):
        waits()
    with pytest.raises(LockDeletedError):
        lock.acquire()
    with pytest.raises(LockDeletedError):
        lock.delete()


def test_what_is_held_or_not_held_is_an_error() -> None:
    lock = SharedLock("web1")
    for fault in (lock.release, lock.downgrade):
        with pytest.raises(LockError, match="does not hold"):
            fault()
    lock.acquire(shared=True)
    for again in (lock.acquire, lock.delete):
        with pytest.raises(LockError):
            again()
    with pytest.raises(ValueError, match="negative"):
        lock.acquire(timeout=-1)


def test_threads_at_random_never_hold_what_another_has_alone() -> None:
    lock, inside, faults = SharedLock("web1"), {"s": 0, "x": 0}, []
    counting = threading.Lock()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            kind = chance.choice("ssx")
            timeout = chance.choice((None, 0, 0.001))
            if not lock.acquire(
                shared=kind == "s", timeout=timeout, priority=chance.choice((0, 1))
            ):
                continue
            with counting:
                inside[kind] += 1
                if inside["x"] > 1 or (inside["x"] and inside["s"]):
                    faults.append(dict(inside))
            time.sleep(0)
            with counting:
                inside[kind] -= 1
            lock.release()

    for result in [begun(partial(work, seed)) for seed in range(8)]:
        assert result() is None
    assert faults == []
    assert lock.acquire(timeout=0)


def waiting(locks: LockSet, name: str) -> int:
    """How many threads wait for a name."""
    return len([*locks._queues[name].waiting()])


def test_names_are_taken_together_or_not_at_all() -> None:
    locks = LockSet(["web1", "web2", "web3"], name="instance")
    assert locks.acquire(["web3", "web1"]) == {"web1", "web3"}
    assert locks.owned() == {"web1", "web3"}
    other = partial(locks.acquire, ["web1", "web2"], timeout=0.01)
    assert elsewhere(other) is None
    assert elsewhere(partial(locks.acquire, ["web2"], timeout=0)) == {"web2"}
    assert elsewhere(partial(locks.acquire, ["web2"], timeout=0)) is None  # nobody gave it back
    locks.release(["web1"])
    assert locks.owned() == {"web3"}
    with pytest.raises(LockError, match="holds some"):
        locks.acquire(["web1"])
    with pytest.raises(LockError, match="not hold web1"):
        locks.release(["web1"])
    locks.release()
    with pytest.raises(LockError):
        locks.release()


def test_who_waits_for_several_holds_none_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story of Ganeti's design: A holds inst4, B wants all, C wants inst1 and gets it."""
    names = ["inst1", "inst2", "inst3", "inst4"]
    locks = LockSet(names, name="instance")
    held = threading.Event()
    done = threading.Event()

    def a() -> None:
        locks.acquire(["inst4"])
        held.set()
        done.wait(60)
        locks.release()

    a_ends = begun(a)
    held.wait(60)
    b_ends = begun(lambda: locks.acquire(names))
    # Within the first attempt B has inst1; after it, C gets its turn.

    def c() -> None:
        assert locks.acquire(["inst1"], timeout=60)
        locks.release()

    assert elsewhere(c) is None
    done.set()
    assert a_ends() is None
    assert b_ends() == {*names}


def test_after_five_attempts_it_waits_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["web1", "web2"]
    set_ = LockSet(names, name="instance")
    limits: list[float] = []

    def shortened(tries: int, count: int) -> float:
        limits.append(attempt_s(tries, count))
        return limits[-1] / 1000

    set_.acquire(["web2"])
    monkeypatch.setattr(locks_module, "attempt_s", shortened)
    waits = begun(lambda: set_.acquire(names))
    wait_for("the sixth attempt", lambda: len(limits) == 6 and waiting(set_, "web2") == 1)
    assert limits == [1, 2, 4, 8, 16, math.inf]
    set_.release()
    assert waits() == {*names}


def test_the_whole_set_keeps_others_from_adding() -> None:
    locks = LockSet(["web1"], name="instance")
    assert locks.acquire(None, shared=True) == {"web1"}
    assert locks.owns_all()
    adds = begun(lambda: locks.add(["web2"]))
    with pytest.raises(LockError, match="shares all"):
        locks.add(["web3"])
    locks.release()
    assert adds() is None
    assert locks.acquire(None) == {"web1", "web2"}
    locks.add(["web3"], acquired=True)
    assert locks.owned() == {"web1", "web2", "web3"}
    locks.downgrade()
    assert elsewhere(lambda: locks.acquire(None, shared=True, timeout=60)) == locks.owned()


def test_the_whole_set_is_whole_though_names_go_meanwhile() -> None:
    locks = LockSet(["web1", "web2"], name="instance")
    locks.acquire(["web1"])
    whole = begun(lambda: locks.acquire(None, timeout=60))
    named = begun(lambda: locks.acquire(["web1"], timeout=60))
    wait_for("both to wait", lambda: waiting(locks, "web1") == 2)
    assert locks.remove(["web1"]) == {"web1"}
    assert whole() == {"web2"}
    with pytest.raises(LockError):
        named()


def test_an_opportunist_takes_what_is_free() -> None:
    locks = LockSet(["web1", "web2"], name="instance")
    locks.acquire(["web1"])
    assert elsewhere(lambda: locks.acquire(None, opportunistic=True)) == {"web2"}
    other = LockSet(["web1"], name="instance")
    other.acquire(["web1"])
    assert elsewhere(lambda: other.acquire(["web1"], opportunistic=True)) == set()


def test_what_is_not_there_changes_nothing() -> None:
    locks = LockSet(["web1"], name="instance")
    with pytest.raises(LockError, match="there is no web2"):
        locks.acquire(["web1", "web2"])
    assert elsewhere(lambda: locks.acquire(["web1"], timeout=0)) == {"web1"}
    with pytest.raises(LockError, match="there already"):
        locks.add(["web1", "web2"])
    assert locks.names() == {"web1"}
    assert locks.remove(["web9"]) == set()


def test_a_thread_that_holds_some_names_adds_none() -> None:
    """Another one may hold the whole set, and wait for these."""
    locks = LockSet(["web1", "web2"], name="instance")
    locks.acquire(["web1"])
    whole = begun(lambda: locks.acquire(None))
    wait_for("the other to wait", lambda: waiting(locks, "web1") == 1)
    with pytest.raises(LockError, match="can't add"):
        locks.add(["web3"], acquired=True)
    locks.release()
    assert whole() == {"web1", "web2"}


def test_nothing_held_is_nothing_to_downgrade() -> None:
    locks = LockSet(["web1"], name="instance")
    with pytest.raises(LockError, match="holds none"):
        locks.downgrade()
    locks.acquire(None)
    locks.remove(["web1"])
    locks.downgrade()  # the whole of an empty set
    with pytest.raises(LockError, match="shares all"):
        locks.add(["web2"])
    locks.release()
    locks.add(["web2"])


def test_a_removal_that_is_refused_removes_nothing() -> None:
    locks = LockSet(["web1", "web2"], name="instance")
    locks.acquire(["web1", "web2"])
    locks.downgrade(["web2"])
    with pytest.raises(LockError, match="shares web2"):
        locks.remove(["web1", "web2"])
    assert locks.names() == locks.owned() == {"web1", "web2"}


def test_an_interrupted_wait_leaves_nothing_behind() -> None:
    """As at Ctrl-C, when a signal's handler raises an exception."""
    locks = LockSet(["web1", "web2"], name="instance")
    held, over = threading.Event(), threading.Event()

    def other() -> None:
        locks.acquire(["web2"])
        held.set()
        over.wait(60)
        locks.release()

    ends = begun(other)
    held.wait(60)

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError):
            locks.acquire(["web1", "web2"])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert waiting(locks, "web2") == 0
    assert locks.owned() == set()
    assert elsewhere(lambda: locks.acquire(["web1"], timeout=0)) == {"web1"}
    over.set()
    assert ends() is None
    assert elsewhere(lambda: locks.acquire(["web2"], timeout=0)) == {"web2"}


def test_removing_needs_all_that_is_removed() -> None:
    locks = LockSet(["web1", "web2", "web3"], name="instance")
    locks.acquire(["web1", "web2"])
    with pytest.raises(LockError, match="not hold web3"):
        locks.remove(["web1", "web3"])
    assert locks.remove(["web1"]) == {"web1"}
    assert locks.owned() == {"web2"}
    locks.release()
    assert locks.remove(["web2", "web3"]) == {"web2", "web3"}
    assert locks.names() == set()
