"""How often a crashed instance is started again: the waits, the end of them, and forgetting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brine.instance.restart_counter import NONE, Tries
from brine.watcher.decide import Next, Policy, is_forgotten, next_step, tried

POLICY = Policy(tries=5, backoff_s=300, forget_after_s=28800)
NOW = 1_800_000_000.0


def test_five_tries_each_after_twice_the_wait_and_then_one_every_eight_hours() -> None:
    tries, now, waits = NONE, NOW, []
    while (step := next_step(tries, POLICY, now)) in (Next.START, Next.WAIT):
        if step is Next.WAIT:
            now += 1
            continue
        waits.append(now - (tries.last or now))
        tries = tried(tries, POLICY, now)
    # Each may be as early as the timer's passes are, compared with its settings.
    assert waits == [0, 240, 540, 1140, 2340]
    assert step is Next.GIVE_UP
    for count in (5, 6, 7):
        assert tries == Tries(count, now, given_up=count > 5)
        tries = replace(tries, given_up=True)
        assert next_step(tries, POLICY, now + 28799) is Next.REST
        now += 28800
        assert next_step(tries, POLICY, now) is Next.START
        tries = tried(tries, POLICY, now)


def test_who_allows_more_tries_has_them() -> None:
    given_up = Tries(5, NOW - 9600, given_up=True)
    assert next_step(given_up, POLICY, NOW) is Next.REST
    more = Policy(tries=6)
    assert next_step(given_up, more, NOW) is Next.START
    # After which it is given up anew, and that is said.
    assert next_step(tried(given_up, more, NOW), more, NOW) is Next.GIVE_UP


def test_no_tries_are_given_up_at_once() -> None:
    assert next_step(NONE, Policy(tries=0), NOW) is Next.GIVE_UP


@pytest.mark.parametrize("set_back_s", [1.0, 86400.0, 1e9])
def test_a_clock_that_was_set_back_delays_no_longer_than_one_that_was_not(
    set_back_s: float,
) -> None:
    tries = Tries(1, NOW + set_back_s)
    assert next_step(tries, POLICY, NOW) is Next.START
    # That is on record with the new clock.
    again = tried(tries, POLICY, NOW)
    assert next_step(again, POLICY, NOW + 539) is Next.WAIT
    assert next_step(again, POLICY, NOW + 540) is Next.START
    assert is_forgotten(tries, POLICY, NOW)


def test_forgotten_after_eight_hours() -> None:
    assert not is_forgotten(Tries(2, NOW - 28799), POLICY, NOW)
    assert is_forgotten(Tries(2, NOW - 28800), POLICY, NOW)
    # It may just be tried once more.
    assert not is_forgotten(Tries(5, NOW, given_up=True), POLICY, NOW)
