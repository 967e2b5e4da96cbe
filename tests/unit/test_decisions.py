"""What the watcher does about an instance: each row of the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brine.instance.restart_counter import NONE, Tries
from brine.instance.spec import AdminState, Spec, parse
from brine.instance.status import Observed
from brine.instance.unit import Active, Unit
from brine.watcher.decide import (
    Action,
    Case,
    Decision,
    EndCause,
    Life,
    Policy,
    decide,
)

NOW = 1_800_000_000.0
POLICY = Policy(tries=5, backoff_s=300, forget_after_s=8 * 3600)
HOUR_S = 3600.0

UP = Observed(parse(Spec, {"name": "web1", "admin_state": "up"}))
AGAIN = Observed(replace(UP.spec, user_shutdown="restart"))
DOWN = Observed(replace(UP.spec, admin_state="down"))
BY_USER = Observed(replace(DOWN.spec, admin_state_source="user"))
UNTRIED = Tries(0, 0.0, given_up=True)
GIVEN_UP = Tries(5, NOW - HOUR_S, given_up=True)
SLOW = Tries(9, NOW - 8 * HOUR_S, given_up=True)

CLEAN_UP, SET_DOWN, START = Action.CLEAN_UP, Action.SET_DOWN, Action.START
TRY, GIVE_UP, FORGET = Action.TRY, Action.GIVE_UP, Action.FORGET


def case(life: Life, end: EndCause | None = None, **others: Any) -> Case:
    return Case("web1", "web1", None, life, end, **others)


def ended(end: EndCause, life: Life = Life.DOWN) -> Case:
    return case(life, end, said="---s--")


def decision(
    seen: Observed | None, case: Case, tries: Tries = NONE, *, clean_all: bool = False
) -> Decision:
    return decide(replace(case, seen=seen), tries, POLICY, NOW, clean_all=clean_all)


ROWS: dict[str, tuple[Observed | None, Case, Tries, tuple[Action, ...]]] = {
    "runs": (UP, case(Life.RUNNING), NONE, ()),
    "runs, should not": (DOWN, case(Life.RUNNING), NONE, ()),
    "runs, was tried just now": (UP, case(Life.RUNNING), Tries(3, NOW - 60), ()),
    "runs for long": (UP, case(Life.RUNNING), Tries(3, NOW - 8 * HOUR_S), (FORGET,)),
    "runs, was given up": (UP, case(Life.RUNNING), GIVEN_UP, ()),
    "runs, was given up untried": (UP, case(Life.RUNNING), UNTRIED, (FORGET,)),
    "is paused": (UP, case(Life.PAUSED), NONE, ()),
    "is suspended": (UP, case(Life.SUSPENDED), NONE, ()),
    "runs, a stop of it was broken off": (
        replace(UP, unit=Unit("web1", Active.ACTIVE), was_stopped=True, is_stop_over=True),
        case(Life.RUNNING),
        NONE,
        (CLEAN_UP,),
    ),
    "starts": (UP, case(Life.STARTING), NONE, ()),
    "stops": (UP, case(Life.STOPPING), NONE, ()),
    "starts for too long": (
        replace(UP, overdue="too long"),
        case(Life.STARTING, said="too long"),
        NONE,
        (),
    ),
    "stops for too long": (
        replace(DOWN, overdue="too long"),
        case(Life.STOPPING, said="too long", is_busy=True),
        NONE,
        (),
    ),
    "is worked on": (UP, case(Life.DOWN, EndCause.CRASH, is_busy=True), NONE, ()),
    "preserved, is worked on": (UP, case(Life.PRESERVED, EndCause.USER, is_busy=True), NONE, ()),
    "is a zombie": (UP, case(Life.ZOMBIE, said="(null)"), NONE, ()),
    "is unknown": (UP, case(Life.UNKNOWN, said="?????"), NONE, ()),
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
        replace(BY_USER, has_user_marker=True),
        case(Life.DOWN, EndCause.USER),
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
    "not ours, runs": (None, case(Life.RUNNING), NONE, ()),
    "not ours, preserved": (None, ended(EndCause.USER, Life.PRESERVED), NONE, ()),
    "not ours, crashed": (None, ended(EndCause.CRASH, Life.PRESERVED), NONE, ()),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row(row: str) -> None:
    seen, what, tries, actions = ROWS[row]
    assert decision(seen, what, tries).actions == actions


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
    seen, what, tries, _ = ROWS[row]
    assert decision(seen, what, tries).is_odd == (row in ODD)


@pytest.mark.parametrize("row", ROWS)
def test_whatever_is_done_or_left_has_a_reason(row: str) -> None:
    seen, what, tries, actions = ROWS[row]
    quiet = (
        "runs",
        "runs, was tried just now",
        "runs for long",
        "runs, was given up",
        "runs, was given up untried",
        "down",
        "down, its user's, crashed since",
    )
    assert bool(decision(seen, what, tries).why) == (row not in quiet or actions == (CLEAN_UP,))


@pytest.mark.parametrize("end", [EndCause.USER, EndCause.CRASH, EndCause.UNTOLD])
def test_what_is_not_ours_is_cleaned_up_only_where_it_is_to_be(end: EndCause) -> None:
    assert decision(None, ended(end, Life.PRESERVED), clean_all=True).actions == (CLEAN_UP,)
    for life in (Life.RUNNING, Life.PAUSED, Life.STOPPING, Life.UNKNOWN, Life.ZOMBIE):
        assert not decision(None, case(life), clean_all=True).actions


@pytest.mark.parametrize("seen", [UP, DOWN, AGAIN, None])
@pytest.mark.parametrize("life", Life)
@pytest.mark.parametrize("end", [None, *EndCause])
def test_whatever_is_seen_what_runs_is_left_alone_and_what_is_unknown_too(
    seen: Observed | None, life: Life, end: EndCause | None
) -> None:
    for clean_all in (False, True):
        found = decision(seen, case(life, end), clean_all=clean_all)
        if life not in (Life.PRESERVED, Life.DOWN):
            assert found.actions == ()
        if CLEAN_UP in found.actions:
            assert life is Life.PRESERVED
        if not (seen and seen.spec.admin_state == AdminState.UP):
            assert set(found.actions) <= {CLEAN_UP}
