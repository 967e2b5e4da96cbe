"""What the watcher does about an instance: each row of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brine.instance.restart_counter import NONE, Tries
from brine.watcher.decide import (
    Action,
    Decision,
    DesiredState,
    EndCause,
    Life,
    Policy,
    Sight,
    decide,
)

NOW = 1_800_000_000.0
POLICY = Policy(tries=5, backoff_s=300, forget_after_s=8 * 3600)
HOUR_S = 3600.0

BY_USER = DesiredState(up=False, by_user=True)
UP, DOWN, AGAIN = DesiredState(up=True), DesiredState(up=False), DesiredState(up=True, restart=True)
UNTRIED = Tries(0, 0.0, given_up=True)
GIVEN_UP = Tries(5, NOW - HOUR_S, given_up=True)
SLOW = Tries(9, NOW - 8 * HOUR_S, given_up=True)

CLEAN_UP, SET_DOWN, START = Action.CLEAN_UP, Action.SET_DOWN, Action.START
TRY, GIVE_UP, FORGET = Action.TRY, Action.GIVE_UP, Action.FORGET


def decision(wish: DesiredState | None, sight: Sight, tries: Tries = NONE) -> Decision:
    return decide(wish, sight, tries, POLICY, NOW)


def ended(end: EndCause, life: Life = Life.DOWN) -> Sight:
    return Sight(life, end, said="---s--")


ROWS: dict[str, tuple[DesiredState | None, Sight, Tries, tuple[Action, ...]]] = {
    "runs": (UP, Sight(Life.RUNNING), NONE, ()),
    "runs, should not": (DOWN, Sight(Life.RUNNING), NONE, ()),
    "runs, was tried just now": (UP, Sight(Life.RUNNING), Tries(3, NOW - 60), ()),
    "runs for long": (UP, Sight(Life.RUNNING), Tries(3, NOW - 8 * HOUR_S), (FORGET,)),
    "runs, was given up": (UP, Sight(Life.RUNNING), GIVEN_UP, ()),
    "runs, was given up untried": (UP, Sight(Life.RUNNING), UNTRIED, (FORGET,)),
    "is paused": (UP, Sight(Life.PAUSED), NONE, ()),
    "is suspended": (UP, Sight(Life.SUSPENDED), NONE, ()),
    "runs, a stop of it was broken off": (
        UP,
        Sight(Life.RUNNING, has_stale_stop=True),
        NONE,
        (CLEAN_UP,),
    ),
    "starts": (UP, Sight(Life.STARTING), NONE, ()),
    "stops": (UP, Sight(Life.STOPPING), NONE, ()),
    "starts for too long": (UP, Sight(Life.STARTING, said="too long", is_overdue=True), NONE, ()),
    "stops for too long": (
        DOWN,
        Sight(Life.STOPPING, said="too long", is_busy=True, is_overdue=True),
        NONE,
        (),
    ),
    "is worked on": (UP, Sight(Life.DOWN, EndCause.CRASH, is_busy=True), NONE, ()),
    "preserved, is worked on": (UP, Sight(Life.PRESERVED, EndCause.USER, is_busy=True), NONE, ()),
    "is a zombie": (UP, Sight(Life.ZOMBIE, said="(null)"), NONE, ()),
    "is unknown": (UP, Sight(Life.UNKNOWN, said="?????"), NONE, ()),
    "its user's": (UP, ended(EndCause.USER), NONE, (SET_DOWN,)),
    "its user's, preserved": (UP, ended(EndCause.USER, Life.PRESERVED), NONE, (SET_DOWN, CLEAN_UP)),
    "its user's, again": (AGAIN, ended(EndCause.USER), NONE, (START,)),
    "its user's, again, preserved": (
        AGAIN,
        ended(EndCause.USER, Life.PRESERVED),
        NONE,
        (CLEAN_UP, START),
    ),
    "its user's, after tries": (UP, ended(EndCause.USER), Tries(5, NOW), (SET_DOWN,)),
    "its user's, again, given up": (AGAIN, ended(EndCause.USER), GIVEN_UP, (START,)),
    "rebooted": (UP, ended(EndCause.REBOOT, Life.PRESERVED), NONE, (CLEAN_UP, TRY)),
    "its admin's": (UP, ended(EndCause.ADMIN), NONE, ()),
    "its admin's, preserved": (UP, ended(EndCause.ADMIN, Life.PRESERVED), NONE, (CLEAN_UP,)),
    "down": (DOWN, ended(EndCause.CRASH), NONE, ()),
    "down, preserved": (DOWN, ended(EndCause.CRASH, Life.PRESERVED), NONE, (CLEAN_UP,)),
    "down, its user's, preserved": (DOWN, ended(EndCause.USER, Life.PRESERVED), NONE, (CLEAN_UP,)),
    "down, its user's, half done": (
        BY_USER,
        Sight(Life.DOWN, EndCause.USER, has_user_marker=True),
        NONE,
        (SET_DOWN,),
    ),
    "down, its user's, noted, preserved": (
        BY_USER,
        ended(EndCause.USER, Life.PRESERVED),
        NONE,
        (CLEAN_UP,),
    ),
    "down, its user's, crashed since": (BY_USER, ended(EndCause.CRASH), NONE, ()),
    "crashed": (UP, ended(EndCause.CRASH), NONE, (TRY,)),
    "crashed, preserved": (UP, ended(EndCause.CRASH, Life.PRESERVED), NONE, (CLEAN_UP, TRY)),
    "crashed, to start again": (AGAIN, ended(EndCause.CRASH), NONE, (TRY,)),
    "crashed, too early": (UP, ended(EndCause.CRASH), Tries(1, NOW - 239), ()),
    "crashed, too early, preserved": (
        UP,
        ended(EndCause.CRASH, Life.PRESERVED),
        Tries(1, NOW - 239),
        (CLEAN_UP,),
    ),
    "crashed, second try": (UP, ended(EndCause.CRASH), Tries(1, NOW - 300), (TRY,)),
    "crashed, third try too early": (UP, ended(EndCause.CRASH), Tries(2, NOW - 539), ()),
    "crashed, third try": (UP, ended(EndCause.CRASH), Tries(2, NOW - 600), (TRY,)),
    "crashed, last try": (UP, ended(EndCause.CRASH), Tries(4, NOW - 2400), (TRY,)),
    "crashed, too often": (UP, ended(EndCause.CRASH), Tries(5, NOW - HOUR_S), (GIVE_UP,)),
    "crashed, too often, preserved": (
        UP,
        ended(EndCause.CRASH, Life.PRESERVED),
        Tries(5, NOW - HOUR_S),
        (CLEAN_UP, GIVE_UP),
    ),
    "given up": (UP, ended(EndCause.CRASH), GIVEN_UP, ()),
    "given up, preserved": (UP, ended(EndCause.CRASH, Life.PRESERVED), GIVEN_UP, (CLEAN_UP,)),
    "given up, due": (UP, ended(EndCause.CRASH), SLOW, (TRY,)),
    "given up, reset": (UP, replace(ended(EndCause.FAILED), is_reset=True), GIVEN_UP, (TRY,)),
    "given up, lacks": (UP, replace(ended(EndCause.FAILED), lacks=("/d",)), GIVEN_UP, ()),
    "given up, lacked": (UP, replace(ended(EndCause.FAILED), lacks=()), GIVEN_UP, (TRY,)),
    "too early, lacked": (UP, replace(ended(EndCause.FAILED), lacks=()), Tries(2, NOW - 9), (TRY,)),
    "did not start": (UP, ended(EndCause.FAILED), NONE, (TRY,)),
    "never started": (UP, ended(EndCause.NEVER), NONE, (TRY,)),
    "kvmd is off": (UP, ended(EndCause.UNKNOWN), NONE, (SET_DOWN,)),
    "kvmd is off, to start again": (AGAIN, ended(EndCause.UNKNOWN), NONE, (START,)),
    "nobody knows": (UP, ended(EndCause.UNTOLD), NONE, ()),
    "nobody knows, preserved": (UP, ended(EndCause.UNTOLD, Life.PRESERVED), NONE, ()),
    "not ours, runs": (None, Sight(Life.RUNNING), NONE, ()),
    "not ours, preserved": (None, ended(EndCause.USER, Life.PRESERVED), NONE, ()),
    "not ours, crashed": (None, ended(EndCause.CRASH, Life.PRESERVED), NONE, ()),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row(row: str) -> None:
    wish, sight, tries, actions = ROWS[row]
    assert decision(wish, sight, tries).actions == actions


ODD = {
    "runs, should not",
    "starts for too long",
    "stops for too long",
    "is a zombie",
    "is unknown",
    "crashed, too often",
    "crashed, too often, preserved",
    "given up",
    "given up, preserved",
    "given up, lacks",
    "nobody knows",
    "nobody knows, preserved",
}


@pytest.mark.parametrize("row", ROWS)
def test_an_administrator_is_called_for_what_the_watcher_can_not_mend(row: str) -> None:
    wish, sight, tries, _ = ROWS[row]
    assert decision(wish, sight, tries).is_odd == (row in ODD)


@pytest.mark.parametrize("row", ROWS)
def test_whatever_is_done_or_left_has_a_reason(row: str) -> None:
    wish, sight, tries, actions = ROWS[row]
    quiet = (
        "runs",
        "runs, was tried just now",
        "runs for long",
        "runs, was given up",
        "runs, was given up untried",
        "down",
        "down, its user's, crashed since",
    )
    assert bool(decision(wish, sight, tries).why) == (row not in quiet or actions == (CLEAN_UP,))


@pytest.mark.parametrize("end", [EndCause.USER, EndCause.CRASH, EndCause.UNTOLD])
def test_what_is_not_ours_is_cleaned_up_only_where_it_is_to_be(end: EndCause) -> None:
    sight = ended(end, Life.PRESERVED)
    assert decide(None, sight, NONE, POLICY, NOW, clean_all=True).actions == (CLEAN_UP,)
    for life in (Life.RUNNING, Life.PAUSED, Life.STOPPING, Life.UNKNOWN, Life.ZOMBIE):
        assert not decide(None, Sight(life), NONE, POLICY, NOW, clean_all=True).actions


@pytest.mark.parametrize("wish", [UP, DOWN, AGAIN, None])
@pytest.mark.parametrize("life", Life)
@pytest.mark.parametrize("end", [None, *EndCause])
def test_whatever_is_seen_what_runs_is_left_alone_and_what_is_unknown_too(
    wish: DesiredState | None, life: Life, end: EndCause | None
) -> None:
    for clean_all in (False, True):
        found = decide(wish, Sight(life, end), NONE, POLICY, NOW, clean_all=clean_all)
        if life not in (Life.PRESERVED, Life.DOWN):
            assert found.actions == ()
        if CLEAN_UP in found.actions:
            assert life is Life.PRESERVED
        if not (wish and wish.up):
            assert set(found.actions) <= {CLEAN_UP}
