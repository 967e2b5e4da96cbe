"""A pass of the watcher: what is done, in which order, and what a kill at each step leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from brine.common.errors import BrineError
from brine.common.locks import LockedError
from brine.instance.observe import Observed
from brine.instance.store import KeptOutError
from brine.instance.unit import Active, Unit
from brine.instance.xen.xl import Domain, ShutdownReason
from brine.vm.end import EndCause
from brine.vm.markers import MarkerKind
from brine.vm.spec import Spec, parse
from brine.watcher import passes, restart_counter
from brine.watcher.decide import Action, Life, life_of
from brine.watcher.passes import Instances, Pass, PassOutcome
from brine.watcher.restart_counter import NONE, Tries
from brine.watcher.settings import WatcherSettings
from unit.runs import observed

NOW = 1_800_000_000.0

pytestmark = pytest.mark.usefixtures("own_node")

UP = parse(Spec, {"name": "web1", "admin_state": "up", "hypervisor": "xen-pvm"})
RUNS = observed(UP, Unit("", Active.ACTIVE), Domain("", 7, 64, 1, "-b----"))
STOPPED = observed(UP, marks=(MarkerKind.STOP,), has_run=True)
CRASHED = observed(UP, Unit("", Active.FAILED, result="exit-code", invocation="1"), has_run=True)
USERS = observed(UP, marks=(MarkerKind.SHUTDOWN,))
NEVER = observed(UP)
PRESERVED = {
    EndCause.USER: Domain("", 7, 64, 1, "---s--", "", ShutdownReason.POWEROFF),
    EndCause.CRASH: Domain("", 7, 64, 1, "---sc-", "", ShutdownReason.CRASH),
    EndCause.REBOOT: Domain("", 7, 64, 1, "---s--", "", ShutdownReason.REBOOT),
}


def preserved(end: EndCause) -> Observed:
    return observed(UP, domain=PRESERVED[end], has_run=True)


class Killed(BaseException):
    """The watcher was killed."""


class Node(Instances):
    """Instances that are worked on by turning what there is of them.

    :param killed_at: the step before which the watcher is killed, from 1.
    """

    def __init__(
        self, *, broken: str = "", stopped: str = "", killed_at: int = 0, **several: Observed
    ) -> None:
        super().__init__(timeout_s=1)
        self.found: dict[str, Observed] = {}
        self.steps: list[str] = []
        self.broken, self.stopped, self.killed_at = broken, stopped, killed_at
        self.before_work: Callable[[], object] = lambda: None
        for name, seen in several.items():
            self.has(name, seen)

    def has(self, name: str, seen: Observed) -> None:
        self.found[name] = replace(seen, spec=replace(seen.spec, name=name))

    def look(self) -> Iterator[Observed]:
        yield from self.found.values()

    def look_again(self, seen: Observed | Domain) -> Observed | None:
        return self.found.get(seen.name)

    @contextmanager
    def alone(self, seen: Observed | Domain) -> Iterator[None]:
        self.before_work()
        yield

    def set_down(self, seen: Observed | Domain) -> None:
        self._step(seen, "down")
        self.has(seen.name, set_down(self.found[seen.name]))

    def clean_up(self, seen: Observed | Domain) -> None:
        self._step(seen, "clean")
        now = self.found[seen.name]
        # With a domain goes all that is known of its end.
        left = USERS if now.spec.admin_state == "down" else NEVER
        self.has(seen.name, replace(left, spec=now.spec))

    def start(self, seen: Observed | Domain) -> Callable[[], bool]:
        name = seen.name
        self._step(seen, "start")
        if name in self.broken:

            def fail() -> bool:
                raise BrineError(f"{name}: did not start")

            self.has(name, CRASHED)
            return fail
        self.has(name, STOPPED if name == self.stopped else RUNS)
        return lambda: name != self.stopped

    def _step(self, seen: Observed | Domain, what: str) -> None:
        self.steps.append(f"{what} {seen.name}")
        if len(self.steps) == self.killed_at:
            raise Killed


def set_down(seen: Observed) -> Observed:
    return replace(seen, spec=replace(seen.spec, admin_state="down"))


def tries_of(name: str) -> Tries:
    return restart_counter.load().get(name, NONE)


def note(name: str, tries: Tries) -> None:
    with restart_counter.changed() as record:
        record[name] = tries


def run(node: Node, *, parallel: int = 1, **options: Any) -> dict[str, PassOutcome]:
    """A pass, one instance at a time."""
    settings = WatcherSettings(tries=2, parallel=parallel)
    options = {"clock": lambda: NOW, **options}
    return {each.name: each for each in Pass(node, settings, **options).run()}


def test_one_that_was_stopped_while_it_started_is_not_said_to_run() -> None:
    found = run(Node(stopped="web1", web1=CRASHED))["web1"]
    assert (found.actions, found.fault) == ((Action.TRY,), None)
    assert found.decision.why == "it crashed: try 1 of 2; and it was stopped meanwhile"


def test_a_clean_up_that_is_stuck_holds_up_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even as many of them as are worked on at the same time."""
    monkeypatch.setattr(passes, "_STUCK_S", 0.1)
    node = Node(a=preserved(EndCause.USER), b=preserved(EndCause.USER), db1=CRASHED)
    is_started = Event()

    def clean_up(_: object) -> None:
        assert is_started.wait(60)

    def start(_: object) -> Callable[[], bool]:
        is_started.set()
        return lambda: True

    monkeypatch.setattr(node, "clean_up", clean_up)
    monkeypatch.setattr(node, "start", start)
    last = {name: one.actions[-1] for name, one in run(node).items()}
    assert last == {"a": Action.CLEAN_UP, "b": Action.CLEAN_UP, "db1": Action.TRY}


def test_a_pause_ends_a_pass_that_is_in_progress() -> None:
    node = Node(a=CRASHED, b=CRASHED, c=CRASHED)
    found = run(node, is_paused=lambda: bool(node.steps))
    assert node.steps == ["start a"]
    assert found["b"].decision.why == "the watcher was paused meanwhile"
    assert (tries_of("a").count, tries_of("b").count) == (1, 0)


def test_each_has_its_own_outcome_and_what_frees_memory_comes_before_what_needs_it() -> None:
    node = Node(a=CRASHED, b=preserved(EndCause.CRASH), c=preserved(EndCause.USER), d=RUNS)
    found = run(node)
    assert node.steps == ["down c", "clean c", "start a", "clean b", "start b"]
    assert {name: one.actions for name, one in found.items()} == {
        "a": (Action.TRY,),
        "b": (Action.CLEAN_UP, Action.TRY),
        "c": (Action.SET_DOWN, Action.CLEAN_UP),
        "d": (),
    }
    assert list(found) == ["a", "b", "c", "d"]
    assert tries_of("b") == Tries(1, NOW)


def test_who_has_had_enough_of_a_pass_has_nothing_more_begun() -> None:
    node = Node()
    for name in "abcdefgh":
        node.has(name, CRASHED)
    begun, may_end = Event(), Event()

    def start(seen: Observed | Domain) -> Callable[[], bool]:
        node.steps.append(seen.name)
        begun.set()
        return lambda: may_end.wait(60)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(node, "start", start)

        def result(_: object) -> None:
            begun.wait(60)
            raise KeyboardInterrupt

        patched.setattr("concurrent.futures.Future.result", result)
        run(node)
    may_end.set()
    assert node.steps == ["a"]


def test_a_dry_run_counts_as_a_pass_does_that_finds_a_damaged_record(own_node: Path) -> None:
    (own_node / "watcher.json").write_text("{")
    found = run(Node(web1=CRASHED), dry_run=True)
    assert found["web1"].actions == (Action.TRY,)
    assert "damaged" in str(found[""].fault)


def test_a_dry_run_shows_the_same_and_does_nothing() -> None:
    node = Node(crashed=CRASHED, users=preserved(EndCause.USER))
    would = run(node, dry_run=True)
    assert (node.steps, tries_of("crashed")) == ([], NONE)
    assert {each.name: each.actions for each in would.values()} == {
        name: each.actions for name, each in run(node).items()
    }


def test_what_changed_meanwhile_is_decided_anew() -> None:
    """An administrator's command came in between."""
    node = Node(crashed=CRASHED)
    node.before_work = lambda: node.has("crashed", set_down(CRASHED))
    found = run(node)["crashed"]
    assert (found.actions, found.decision.why) == ((), "")
    assert (node.steps, tries_of("crashed")) == ([], NONE)


def test_what_somebody_else_works_on_or_what_is_gone_is_no_fault() -> None:
    node = Node(crashed=CRASHED)

    def locked() -> None:
        raise LockedError("web1.lock: locked by another process, and was for 5 s")

    def moving() -> None:
        raise KeptOutError("crashed", "is being moved to n2")

    for before_work, why in (
        (locked, "another process is working on it"),
        (moving, "is being moved to n2"),
        (node.found.clear, "it is gone"),
    ):
        node.before_work = before_work
        found = run(node)["crashed"]
        assert (found.decision.why, found.fault) == (why, None)
    assert node.steps == []


def test_a_clean_up_does_not_say_that_it_gives_up() -> None:
    node = Node(crashed=CRASHED)
    note("crashed", Tries(2, NOW - 9999))
    assert run(node, only=frozenset({Action.CLEAN_UP}))["crashed"].decision.is_odd is False
    assert run(node)["crashed"].decision.is_odd


def test_one_that_fails_does_not_stop_the_others() -> None:
    node = Node(broken="a", a=CRASHED, b=CRASHED, c=CRASHED)
    found = run(node)
    assert [name for name, each in found.items() if each.fault] == ["a"]
    assert life_of(node.found["b"]) is life_of(node.found["c"]) is Life.RUNNING


def test_giving_up_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(broken="web1", web1=CRASHED)
    caplog.set_level("INFO")
    now = itertools.count(NOW, 10_000)
    for _ in range(6):
        run(node, clock=lambda: next(now))
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert [(one["BRINE_EVENT"], one["BRINE_TRIES"]) for one in fields] == [
        ("restart-tried", "1"),
        ("restart-tried", "2"),
        ("given-up", "2"),
        ("restart-tried", "3"),
    ]
    assert tries_of("web1").given_up
    # Somebody has mended it, and started it.
    node.has("web1", RUNS)
    now = itertools.count(NOW + 200_000)
    run(node, clock=lambda: next(now))
    assert tries_of("web1").count == 0


def test_only_some_things_are_done() -> None:
    node = Node(crashed=preserved(EndCause.CRASH), users=preserved(EndCause.USER))
    run(node, only=frozenset({Action.SET_DOWN, Action.CLEAN_UP}))
    assert node.steps == ["clean crashed", "down users", "clean users"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("end", [None, *PRESERVED])
@pytest.mark.parametrize("killed_at", [1, 2])
def test_killed_at_any_step_the_next_pass_ends_right(
    end: EndCause | None, restart: bool, killed_at: int
) -> None:
    seen = preserved(end) if end else USERS
    if restart:
        seen = replace(seen, spec=replace(seen.spec, user_shutdown="restart"))
    node = Node(killed_at=killed_at, web1=seen)
    try:
        run(node)
    except Killed:
        node.killed_at = 0
        run(node, clock=lambda: NOW + 600)
    now = node.found["web1"]
    is_left_down = end in (None, EndCause.USER) and not restart
    assert now.spec.admin_state == ("down" if is_left_down else "up")
    assert life_of(now) is (Life.DOWN if is_left_down else Life.RUNNING)
    assert tries_of("web1").count <= 2


def test_starts_that_hang_hold_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    node, may_end = Node(), Event()
    start = node.start

    def slow(seen: Observed | Domain) -> Callable[[], bool]:
        runs = start(seen)
        if seen.name.startswith("dead"):
            return lambda: may_end.wait(60) and runs()
        may_end.set()  # those that hang may end now
        return runs

    monkeypatch.setattr(node, "start", slow)
    for name in ("dead1", "dead2", "dead3", "good1"):
        node.has(name, CRASHED)
    found = run(node, slot_s=0.1)
    # Threads make the steps, in any order.
    assert sorted(node.steps) == ["start dead1", "start dead2", "start dead3", "start good1"]
    assert {one.fault for one in found.values()} == {None}
    assert may_end.is_set()


def test_what_was_tried_most_is_started_last() -> None:
    node = Node(a=CRASHED, b=CRASHED, c=CRASHED, d=CRASHED)
    for name, count in (("a", 2), ("b", 1), ("d", 1)):
        note(name, Tries(count, NOW - 99_999))
    found = run(node)
    assert node.steps == ["start c", "start b", "start d"]
    assert list(found) == ["a", "b", "c", "d"]
    assert found["a"].actions == (Action.GIVE_UP,)
