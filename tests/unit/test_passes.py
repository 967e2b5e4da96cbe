"""A pass of the watcher: what is done, in which order, and what a kill at each step leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.instance import restart_counter as record
from brine.instance.restart_counter import Tries
from brine.instance.spec import Spec, parse
from brine.instance.status import Observed
from brine.watcher import passes
from brine.watcher.decide import Action, Case, EndCause, Life, Policy
from brine.watcher.passes import Pass, PassOutcome
from lab.waiting import wait_for

NOW = 1_800_000_000.0
POLICY = Policy(tries=2, backoff_s=300)

pytestmark = pytest.mark.usefixtures("own_node")


class Killed(BaseException):
    """The watcher was killed."""


@dataclass
class Node:
    """Instances that are worked on by turning what there is of them.

    :param killed_at: the step before which the watcher is killed, from 1.
    """

    cases: dict[str, Case] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    stopped: frozenset[str] = frozenset()
    killed_at: int = 0
    is_left: bool = False
    before_work: Callable[[], None] = lambda: None

    def has(
        self, name: str, life: Life, end: EndCause | None = None, *, restart: bool = False
    ) -> None:
        keys = {
            "name": name,
            "admin_state": "up",
            "user_shutdown": "restart" if restart else "stop",
        }
        self.cases[name] = Case(name, name, Observed(parse(Spec, keys)), life, end)

    def look(self) -> list[Case | BrineError]:
        return list(self.cases.values())

    def look_again(self, key: str) -> Case | None:
        return self.cases.get(key)

    @contextmanager
    def alone(self, case: Case) -> Iterator[None]:
        self.before_work()
        yield

    def set_down(self, case: Case) -> None:
        self._step(case, "down")
        assert case.seen
        down = replace(case.seen.spec, admin_state="down")
        self.cases[case.key] = replace(case, seen=Observed(down))

    def clean_up(self, case: Case) -> None:
        self._step(case, "clean")
        now = self.cases[case.key]
        # With a domain goes all that is known of its end.
        assert now.seen
        is_users = now.end is EndCause.USER and now.seen.spec.admin_state == "down"
        end = EndCause.USER if is_users else EndCause.NEVER
        self.cases[case.key] = replace(now, life=Life.DOWN, end=end)

    def start(self, case: Case) -> Callable[[], bool]:
        self._step(case, "start")
        now = self.cases[case.key]
        if case.name in self.broken:

            def fail() -> bool:
                raise BrineError(f"{case.name}: did not start")

            self.cases[case.key] = replace(now, life=Life.DOWN, end=EndCause.CRASH)
            return fail
        if case.name in self.stopped:
            self.cases[case.key] = replace(now, life=Life.DOWN, end=EndCause.ADMIN)
            return lambda: False
        self.cases[case.key] = replace(now, life=Life.RUNNING, end=None)
        return lambda: True

    def leave(self) -> None:
        self.is_left = True

    def _step(self, case: Case, what: str) -> None:
        self.steps.append(f"{what} {case.name}")
        if len(self.steps) == self.killed_at:
            raise Killed


def run(node: Node, **options: Any) -> dict[str, PassOutcome]:
    """A pass, one instance at a time."""
    options = {"parallel": 1, "clock": lambda: NOW, **options}
    return {each.name: each for each in Pass(node, POLICY, **options).run()}


def test_each_instance_has_its_own_outcome() -> None:
    node = Node()
    node.has("crashed", Life.PRESERVED, EndCause.CRASH)
    node.has("runs", Life.RUNNING)
    node.has("users", Life.PRESERVED, EndCause.USER)
    found = run(node)
    assert node.steps == ["down users", "clean users", "clean crashed", "start crashed"]
    assert found["crashed"].actions == (Action.CLEAN_UP, Action.TRY)
    assert found["runs"].actions == ()
    assert record.of("crashed") == Tries(1, NOW)


def test_one_that_was_stopped_while_it_started_is_not_said_to_run() -> None:
    node = Node(stopped=frozenset({"web1"}))
    node.has("web1", Life.DOWN, EndCause.CRASH)
    found = run(node)["web1"]
    assert (found.actions, found.fault) == ((Action.TRY,), None)
    assert found.decision.why == "it crashed: try 1 of 2; and it was stopped meanwhile"


def test_a_clean_up_that_is_stuck_holds_up_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even as many of them as are worked on at the same time."""
    monkeypatch.setattr(passes, "_STUCK_S", 0.1)
    node = Node()
    for name in ("a", "b"):
        node.has(name, Life.PRESERVED, EndCause.USER)
    node.has("db1", Life.DOWN, EndCause.CRASH)
    is_started = Event()

    def clean_up(_: Case) -> None:
        assert is_started.wait(60)

    def start(_: Case) -> Callable[[], bool]:
        is_started.set()
        return lambda: True

    monkeypatch.setattr(node, "clean_up", clean_up)
    monkeypatch.setattr(node, "start", start)
    found = run(node)
    assert {name: one.actions[-1] for name, one in found.items()} == {
        "a": Action.CLEAN_UP,
        "b": Action.CLEAN_UP,
        "db1": Action.TRY,
    }


def test_a_pause_ends_a_pass_that_is_in_progress() -> None:
    node = Node()
    for name in "abc":
        node.has(name, Life.DOWN, EndCause.CRASH)
    found = run(node, is_paused=lambda: bool(node.steps))
    assert node.steps == ["start a"]
    assert found["b"].decision.why == "the watcher was paused meanwhile"
    assert (record.of("a").count, record.of("b").count) == (1, 0)


def test_what_frees_memory_comes_before_what_needs_it() -> None:
    node = Node()
    node.has("a", Life.DOWN, EndCause.CRASH)
    node.has("b", Life.PRESERVED, EndCause.CRASH)
    node.has("c", Life.PRESERVED, EndCause.USER)
    found = run(node)
    assert node.steps == ["down c", "clean c", "start a", "clean b", "start b"]
    assert list(found) == ["a", "b", "c"]


def test_who_has_had_enough_of_a_pass_has_nothing_more_begun() -> None:
    node = Node()
    for name in "abcdefgh":
        node.has(name, Life.DOWN, EndCause.CRASH)
    begun = Event()

    def interrupted(case: Case) -> Callable[[], bool]:
        node.steps.append(case.name)
        begun.set()
        return lambda: wait_for("the end of the wait", lambda: node.is_left)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(node, "start", interrupted)

        def result(_: object) -> None:
            begun.wait(60)
            raise KeyboardInterrupt

        patched.setattr("concurrent.futures.Future.result", result)
        run(node)
    assert node.steps == ["a"]


def test_a_dry_run_counts_as_a_pass_does_that_finds_a_damaged_record(own_node: Path) -> None:
    node = Node()
    node.has("web1", Life.DOWN, EndCause.CRASH)
    (own_node / "watcher.json").write_text("{")
    found = run(node, dry_run=True)
    assert found["web1"].actions == (Action.TRY,)
    assert "damaged" in str(found[""].fault)


def test_a_dry_run_shows_the_same_and_does_nothing() -> None:
    node = Node()
    node.has("crashed", Life.DOWN, EndCause.CRASH)
    node.has("users", Life.PRESERVED, EndCause.USER)
    would = run(node, dry_run=True)
    assert node.steps == []
    assert record.of("crashed").count == 0
    assert {each.name: each.actions for each in would.values()} == {
        name: each.actions for name, each in run(node).items()
    }


def test_what_changed_meanwhile_is_decided_anew() -> None:
    """An administrator's command came in between."""
    node = Node()
    node.has("crashed", Life.DOWN, EndCause.CRASH)

    def stop() -> None:
        crashed = node.cases["crashed"]
        assert crashed.seen
        down = Observed(replace(crashed.seen.spec, admin_state="down"))
        node.cases["crashed"] = replace(crashed, seen=down)

    node.before_work = stop
    found = run(node)
    assert node.steps == []
    assert found["crashed"].actions == ()
    assert found["crashed"].decision.why == ""
    assert record.of("crashed").count == 0


def test_what_somebody_else_works_on_is_no_fault() -> None:
    node = Node()
    node.has("crashed", Life.DOWN, EndCause.CRASH)

    def locked() -> None:
        raise LockedError("web1.lock: locked by another process, and was for 5 s")

    node.before_work = locked
    found = run(node)["crashed"]
    assert (found.decision.why, found.fault) == ("somebody is working on it", None)


def test_a_clean_up_does_not_say_that_it_gives_up() -> None:
    node = Node()
    node.has("crashed", Life.DOWN, EndCause.CRASH)
    record.note("crashed", Tries(2, NOW - 9999))
    assert run(node, only=frozenset({Action.CLEAN_UP}))["crashed"].decision.is_odd is False
    assert run(node)["crashed"].decision.is_odd


def test_what_is_gone_meanwhile_is_no_fault() -> None:
    node = Node()
    node.has("crashed", Life.DOWN, EndCause.CRASH)
    node.before_work = node.cases.clear
    assert run(node)["crashed"].fault is None
    assert node.steps == []


def test_one_that_fails_does_not_stop_the_others() -> None:
    node = Node(broken={"a"})
    for name in "abc":
        node.has(name, Life.DOWN, EndCause.CRASH)
    found = run(node)
    assert [name for name, each in found.items() if each.fault] == ["a"]
    assert node.cases["b"].life is node.cases["c"].life is Life.RUNNING


def test_giving_up_is_said_once() -> None:
    node, said = Node(broken={"web1"}), []
    node.has("web1", Life.DOWN, EndCause.CRASH)
    now = itertools.count(NOW, 10_000)

    def told(case: Case, action: Action, tries: Tries) -> None:
        said.append((action, tries.count))

    for _ in range(6):
        run(node, told=told, clock=lambda: next(now))
    assert said == [(Action.TRY, 1), (Action.TRY, 2), (Action.GIVE_UP, 2), (Action.TRY, 3)]
    assert record.of("web1").given_up
    # Somebody has mended it, and started it.
    node.has("web1", Life.RUNNING)
    now = itertools.count(NOW + 200_000)
    run(node, clock=lambda: next(now))
    assert record.of("web1").count == 0


def test_only_some_things_are_done() -> None:
    node = Node()
    node.has("crashed", Life.PRESERVED, EndCause.CRASH)
    node.has("users", Life.PRESERVED, EndCause.USER)
    run(node, only=frozenset({Action.SET_DOWN, Action.CLEAN_UP}))
    assert node.steps == ["clean crashed", "down users", "clean users"]


ENDS = [
    (EndCause.USER, False),
    (EndCause.USER, True),
    (EndCause.CRASH, False),
    (EndCause.REBOOT, False),
]


@pytest.mark.parametrize(("end", "restart"), ENDS)
@pytest.mark.parametrize("life", [Life.PRESERVED, Life.DOWN])
@pytest.mark.parametrize("killed_at", [1, 2])
def test_killed_at_any_step_the_next_pass_ends_right(
    life: Life, end: EndCause, restart: bool, killed_at: int
) -> None:
    node = Node(killed_at=killed_at)
    node.has("web1", life, end, restart=restart)
    try:
        run(node)
    except Killed:
        node.killed_at = 0
        run(node, clock=lambda: NOW + 600)
    now = node.cases["web1"].seen
    assert now
    if end is EndCause.USER and not restart:
        assert now.spec.admin_state == "down"
        assert node.cases["web1"].life is Life.DOWN
    else:
        assert now.spec.admin_state == "up"
        assert node.cases["web1"].life is Life.RUNNING
    assert record.of("web1").count <= 2


def test_starts_that_hang_hold_up_no_other_one() -> None:
    node, may_end = Node(), Event()
    start = node.start

    def slow(case: Case) -> Callable[[], bool]:
        runs = start(case)
        if case.name.startswith("dead"):
            return lambda: may_end.wait(60) and runs()
        if case.name == "good1":
            may_end.set()  # nobody waits for those that hang any more
        return runs

    node.start = slow  # type: ignore[method-assign]
    for name in ("dead1", "dead2", "dead3", "good1"):
        node.has(name, Life.DOWN, EndCause.CRASH)
    found = run(node, parallel=1, slot_s=0.1)
    assert node.steps == ["start dead1", "start dead2", "start dead3", "start good1"]
    assert {one.fault for one in found.values()} == {None}
    assert may_end.is_set()


def test_what_was_tried_most_is_started_last() -> None:
    node = Node()
    for name in ("a", "b", "c", "d"):
        node.has(name, Life.DOWN, EndCause.CRASH)
    for name, count in (("a", 2), ("b", 1), ("d", 1)):
        record.note(name, Tries(count, NOW - 99_999))
    found = run(node)
    assert node.steps == ["start c", "start b", "start d"]
    assert list(found) == ["a", "b", "c", "d"]
    assert found["a"].actions == (Action.GIVE_UP,)
