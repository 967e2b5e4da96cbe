"""What the watcher makes of what systemd and kvmd say of an instance."""

from __future__ import annotations

import pytest

from brine.instance.schema import parse
from brine.instance.spec import Spec
from brine.instance.state import state_of
from brine.instance.states import Seen
from brine.instance.unit import Active, Unit
from brine.watcher.decisions import End, Life, Sight
from brine.watcher.sights import needs_verdict, sight_of, wish_of


def seen(
    active: str = "inactive",
    result: str = "success",
    *,
    user: bool = False,
    stopped: bool = False,
    has_run: bool = True,
    forgotten: bool = False,
    admin_state: str = "up",
) -> Seen:
    """An instance; `forgotten` is its unit by systemd, as those that ended in order are."""
    spec = parse(Spec, {"name": "web1", "uuid": "", "admin_state": admin_state})
    unit = None if forgotten else Unit("web1", Active(active), result=result, invocation="1")
    state = state_of(spec, unit, user_shut_down=user, stopped=stopped, has_run=has_run)
    return Seen(spec, state, unit, was_stopped=stopped, has_run=has_run)


@pytest.mark.parametrize(
    ("active", "life"),
    [
        ("active", Life.RUNNING),
        ("reloading", Life.RUNNING),
        ("activating", Life.STARTING),
        ("deactivating", Life.STOPPING),
    ],
)
def test_what_is_there_has_no_end(active: str, life: Life) -> None:
    found = sight_of(seen(active, user=True, stopped=True), "crash")
    assert (found.life, found.end) == (life, None)


ENDS: dict[str, tuple[Seen, str | None, End]] = {
    "its user's mark": (seen(user=True), None, End.USER),
    "its user's mark, and a verdict of an earlier run": (seen(user=True), "crash", End.USER),
    "an admin's mark": (seen(stopped=True), "user", End.ADMIN),
    "an admin's mark, killed": (seen("failed", "signal", stopped=True), None, End.ADMIN),
    "killed": (seen("failed", "signal"), None, End.CRASH),
    "killed, whatever was said": (seen("failed", "signal"), "user", End.CRASH),
    "crashed": (seen("failed", "core-dump"), None, End.CRASH),
    "out of memory": (seen("failed", "oom-kill"), None, End.CRASH),
    "did not start": (seen("failed", "exit-code", has_run=False), None, End.CRASH),
    "in order, its user": (seen(forgotten=True), "user", End.USER),
    "in order, an admin": (seen(forgotten=True), "admin", End.ADMIN),
    "in order, a panic": (seen(forgotten=True), "crash", End.CRASH),
    "in order, nobody knows": (seen(forgotten=True), None, End.UNTOLD),
    "in order, an odd verdict": (seen(forgotten=True), "alien", End.UNTOLD),
    "not since the node's start": (seen(forgotten=True, has_run=False), None, End.NEVER),
    "not since the node's start, refused": (
        seen("inactive", "exec-condition", has_run=False),
        None,
        End.NEVER,
    ),
}


@pytest.mark.parametrize("row", ENDS)
def test_who_ended_it(row: str) -> None:
    what, verdict, end = ENDS[row]
    found = sight_of(what, verdict)
    assert (found.life, found.end) == (Life.DOWN, end)


def test_kvmd_is_asked_only_where_nothing_else_says_it() -> None:
    asked = [row for row, (what, _, _) in ENDS.items() if needs_verdict(what)]
    assert asked == [row for row in ENDS if row.startswith("in order")]
    assert not needs_verdict(seen("active"))
    assert not needs_verdict(seen(forgotten=True, admin_state="down"))


@pytest.mark.parametrize("admin_state", ["up", "down", "offline"])
def test_what_is_wanted(admin_state: str) -> None:
    assert wish_of(seen(admin_state=admin_state).spec).up == (admin_state == "up")


def test_the_sight_has_the_states_words() -> None:
    assert isinstance(sight_of(seen("active"), None), Sight)
    assert "signal" in sight_of(seen("failed", "signal"), None).said
