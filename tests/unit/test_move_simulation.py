"""Moves of a simulated cluster, with kills and cuts everywhere: never two copies, no lost write.

The decisions are those of brine.cluster.moves and brine.moves themselves; the tests break one at a
time to see that the checker would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from brine.cluster.moves import Move, MoveStep, following_step
from brine.common.operation import Elsewhere, Following, Operation, OperationState
from brine.moves import source, target
from brine.moves.source import (
    SourceAct,
    SourceDecision,
    SourceGuest,
    SourceMove,
    SourceView,
    TargetWord,
)
from brine.moves.target import TargetAct, TargetDecision, TargetGuest, TargetMove, TargetView
from simulator import master
from simulator.machines import Volume
from simulator.master import SimMaster
from simulator.story import KINDS, Cluster, Kind, events_of, random_history, with_fault

Histories = Iterable[list[str]]
"""What is wrong with each of them."""

_EVERYDAY = 300
_ALL = 10_000


def faults_for(kind: Kind) -> list[str]:
    """The faults that concern a move from n1 to n2."""
    return [name for name in Cluster(0, {"web1": kind}).faults() if "n3" not in name]


def wrong_with_faults(kind: Kind, *, every: int, mended_s: float) -> dict[str, list[str]]:
    """What is wrong after each fault before each n-th event of a move."""
    events = events_of(kind)
    found = {}
    for offset, fault in enumerate(faults_for(kind)):
        for number in range(offset % every, len(events), every):
            if wrong := with_fault(kind, number, fault, mended_s):
                found[f"{fault} before event {number}, {events[number]}"] = wrong
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_move_is_done_or_undone_after_a_fault_at_any_of_its_events(kind: Kind) -> None:
    assert wrong_with_faults(kind, every=3, mended_s=5.0) == {}


@pytest.mark.long
@pytest.mark.parametrize("mended_s", [0.2, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_fault_before_each_event_of_each_kind_of_move(kind: Kind, mended_s: float) -> None:
    assert wrong_with_faults(kind, every=1, mended_s=mended_s) == {}


def test_random_histories_have_no_fault() -> None:
    assert {seed: wrong for seed in range(_EVERYDAY) if (wrong := random_history(seed))} == {}


@pytest.mark.long
def test_ten_thousand_random_histories_have_no_fault() -> None:
    seeds = range(_EVERYDAY, _ALL)
    assert {seed: wrong for seed in seeds if (wrong := random_history(seed))} == {}


# The checker can fail: rules that are broken one at a time.


def _source_broken(
    change: Callable[[SourceMove, SourceView, SourceDecision], SourceAct | None],
) -> Any:
    real = source.source_act

    def broken(move: SourceMove, view: SourceView) -> SourceDecision:
        decision = real(move, view)
        act = change(move, view, decision)
        return SourceDecision(act) if act else decision

    return source, "source_act", broken


def go_before_the_claim_is_given() -> Any:
    """The target takes the claim before the source has given it away durably."""

    def change(_: SourceMove, view: SourceView, decision: SourceDecision) -> SourceAct | None:
        if view.word is TargetWord.RUNS and not view.is_given:
            return SourceAct.GIVE
        return SourceAct.GO if decision.act is SourceAct.GIVE else None

    return _source_broken(change)


def continued_in_postmigrate() -> Any:
    """A process that has just started continues a QEMU that has sent its guest."""

    def change(_: SourceMove, view: SourceView, __: SourceDecision) -> SourceAct | None:
        is_new = view.word is TargetWord.NONE and view.guest is SourceGuest.SENT
        return SourceAct.RESUME if is_new and view.is_given else None

    return _source_broken(change)


def cleared_before_the_target_runs() -> Any:
    def change(_: SourceMove, view: SourceView, __: SourceDecision) -> SourceAct | None:
        return SourceAct.CLEAR if view.is_given else None

    return _source_broken(change)


def given_though_the_target_does_not_hold_it() -> Any:
    def change(_: SourceMove, __: SourceView, decision: SourceDecision) -> SourceAct | None:
        return SourceAct.GIVE if decision.act is SourceAct.ASK else None

    return _source_broken(change)


def a_new_run_is_not_seen() -> Any:
    real = source.source_guest

    def broken(move: SourceMove, *, run: str, status: str, migration: str) -> SourceGuest:
        guest = real(move, run=run, status=status, migration=migration)
        return SourceGuest.OFF if guest is SourceGuest.OTHER_RUN else guest

    return source, "source_guest", broken


def continued_without_go() -> Any:
    """The target continues the guest as soon as it has all of it."""
    real = target.hold_act

    def broken(move: TargetMove | None, view: TargetView) -> TargetDecision:
        if move and view.guest is TargetGuest.COMPLETE:
            return TargetDecision(TargetAct.CONTINUE)
        return real(move, view)

    return target, "hold_act", broken


def held_without_a_sync() -> Any:
    return Volume, "sync", lambda _: None


def prepared_after_the_end() -> Any:
    """A target that forgets which moves have ended."""
    real = target.prepare_act

    def broken(move: TargetMove | None, view: TargetView) -> TargetDecision:
        return real(move, replace(view, is_ended=False))

    return target, "prepare_act", broken


def dropped_without_asking_the_source() -> Any:
    def broken(record: Operation) -> Following:
        state, step, error = following_step(record)
        if isinstance(step, Elsewhere) and step.name == MoveStep.CANCEL:
            move = Move.of(record.facts)
            step = Elsewhere(MoveStep.DROP, step.facts, move.target)
            return Following(OperationState.UNDOING, step, error)
        return Following(state, step, error)

    return master, "following_step", broken


def edited_during_the_move() -> Any:
    return SimMaster, "may_edit", lambda self, _: self.process.is_up


def _moves_with(kind: Kind, fault: str, mended_s: float) -> Histories:
    """Moves of a kind, with a fault before each event."""
    numbers = range(len(events_of(kind)))
    return (with_fault(kind, number, fault, mended_s) for number in numbers)


def _at_random() -> Histories:
    return map(random_history, range(1000))


_LIVE, _LIVE_SHARED, _COLD, _COLD_SHARED, _OFF = KINDS
_AFTER_A_FAULT = {
    "continued_in_postmigrate": (_LIVE_SHARED, "kill process of n1", 1),
    "a_new_run_is_not_seen": (_COLD_SHARED, "start web1 on n1", 0),
    "continued_without_go": (_LIVE_SHARED, "cut n1-n2", 20),
    "held_without_a_sync": (_LIVE, "power of n2", 1),
    "dropped_without_asking_the_source": (_LIVE, "abort web1", 0),
}
"""By the broken rule, the moves and the fault that show it; random histories show the others."""


@pytest.mark.parametrize(
    ("broken", "wrong"),
    [
        (go_before_the_claim_is_given, "runs twice"),
        (continued_in_postmigrate, "runs twice"),
        (cleared_before_the_target_runs, "is at home on"),
        (given_though_the_target_does_not_hold_it, "has lost the write"),
        (a_new_run_is_not_seen, "runs twice"),
        (continued_without_go, "runs twice"),
        (held_without_a_sync, "has lost the write"),
        (prepared_after_the_end, "has records"),
        (dropped_without_asking_the_source, "has lost the write"),
        (edited_during_the_move, "runs twice"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_broken_rule_is_seen(
    broken: Callable[[], Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = _AFTER_A_FAULT.get(broken.__name__)
    histories = _moves_with(*fault) if fault else _at_random()
    monkeypatch.setattr(*broken())
    assert any(wrong in one for history in histories for one in history)
