"""Brine's locks in Ganeti's own tests, and in what its tests of sets asked for, by its names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brine.common.background import begun
from component.ganeti_locks import LockSet, NoLockError
from lab import ganeti, peer_packages

BY_DESIGN = {
    # Ganeti's threads look again at each notification; ours are handed a lock, and never look.
    "testAcquireTimeoutWithSpuriousNotifications",
}


@pytest.mark.skipif(
    not shutil.which("apt-get"), reason="Ganeti's packages come by apt, which is not there"
)
def test_ganetis_own_tests_pass() -> None:
    modules = ganeti.library("ganeti.locking")
    tests = ganeti.lock_tests(modules)
    paths = [modules.environment()["PYTHONPATH"], *sys.path]
    done = subprocess.run(
        [
            *(peer_packages.PYTHON, "-P", "-W", "ignore"),
            *(str(Path(__file__).with_name("ganeti_lock_tests.py")), str(tests), *BY_DESIGN),
        ],
        env={**os.environ, **modules.environment(), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 35 tests" in done.stderr


@pytest.fixture
def locks() -> LockSet:
    return LockSet(["one", "two", "three"], "test")


def test_names_of_a_set_come_and_go(locks: LockSet) -> None:
    locks.add(["five", "six"], acquired=1)
    assert locks.list_owned() == {"five", "six"}
    assert locks.remove("five") == ["five"]
    with pytest.raises(AssertionError):
        locks.add("eight", acquired=1)
    locks.release()
    with pytest.raises(NoLockError):
        locks.add("six")
    assert locks.acquire(None) == {"one", "two", "three", "six"}
    assert locks.owning_all()
    locks.add("eight")
    assert locks.list_owned() == {"one", "two", "three", "six"}
    locks.release()
    assert locks.remove(["two", "nine", "one"]) == ["two", "one"]
    assert locks.names() == {"three", "six", "eight"}


def test_wrong_use_of_a_set_is_refused(locks: LockSet) -> None:
    with pytest.raises(AssertionError):
        locks.release()
    with pytest.raises(NoLockError):
        locks.acquire("nine")
    assert locks.acquire(["one", "three", "one"], shared=1) == {"one", "three"}
    for fault in (locks.acquire, locks.release, locks.remove, locks.downgrade):
        with pytest.raises(AssertionError):
            fault("two")
    with pytest.raises(AssertionError):
        locks.remove("one")  # it shares that


def test_a_set_is_shared_name_by_name(locks: LockSet) -> None:
    locks.acquire(None)
    assert locks.downgrade(["one"])
    assert locks.check_owned("one", shared=1)
    assert locks.check_owned(["two", "three"], shared=0)
    assert begun(lambda: locks.acquire("one", shared=1, timeout=0))() == {"one"}
    assert begun(lambda: locks.acquire(["one", "two"], shared=1, timeout=0.05))() is None
    assert begun(lambda: locks.acquire(None, timeout=0, opportunistic=True))() is None
    locks.release([])  # no longer the whole
    assert not locks.owning_all()
    assert begun(lambda: locks.acquire(None, shared=1, opportunistic=True))() == {"one"}
    assert locks.is_owned()


def test_a_set_is_asked_for_in_the_order_of_its_names(locks: LockSet) -> None:
    asked: list[str] = []
    locks.acquire(["two", "one", "three"], test_notify=asked.append)
    assert asked == ["one", "three", "two"]
