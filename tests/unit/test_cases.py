"""What the watcher makes of what systemd and kvmd say of an instance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brine.instance.history import needs_verdict
from brine.instance.spec import Spec, parse
from brine.instance.status import Observed
from brine.instance.unit import Active, Unit
from brine.instance.xen.xl import Domain, ShutdownReason
from brine.watcher.decide import EndCause, Life, case_of


def seen(
    active: str = "inactive",
    result: str = "success",
    *,
    user: bool = False,
    stopped: bool = False,
    has_run: bool = True,
    forgotten: bool = False,
    reboots: bool = False,
    begun_us: int = 1,
    admin_state: str = "up",
) -> Observed:
    """An instance; `forgotten` is its unit by systemd, as those that ended in order are."""
    spec = parse(Spec, {"name": "web1", "uuid": "", "admin_state": admin_state})
    keys: dict[str, Any] = {
        "result": result,
        "invocation": "1",
        "begun_us": begun_us,
        "since_us": 2,
    }
    unit = None if forgotten else Unit("web1", Active(active), **keys)
    return Observed(
        spec,
        unit,
        has_user_marker=user,
        was_stopped=stopped,
        has_run=has_run,
        awaits_reboot=reboots,
    )


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
    found = case_of(seen(active, user=True, stopped=True), "crash")
    assert (found.life, found.end) == (life, None)


ENDS: dict[str, tuple[Observed, str | None, EndCause]] = {
    "its user's mark": (seen(user=True), None, EndCause.USER),
    "its user's mark, and a verdict of an earlier run": (seen(user=True), "crash", EndCause.USER),
    "an admin's mark": (seen(stopped=True), "user", EndCause.ADMIN),
    "an admin's mark, killed": (seen("failed", "signal", stopped=True), None, EndCause.ADMIN),
    "an admin's reboot": (seen(stopped=True, reboots=True), None, EndCause.REBOOT),
    "its user's, whatever its admin wanted": (seen(user=True, reboots=True), None, EndCause.USER),
    "killed": (seen("failed", "signal"), None, EndCause.CRASH),
    "killed, whatever was said": (seen("failed", "signal"), "user", EndCause.CRASH),
    "crashed": (seen("failed", "core-dump"), None, EndCause.CRASH),
    "out of memory": (seen("failed", "oom-kill"), None, EndCause.CRASH),
    "failed": (seen("failed", "exit-code"), None, EndCause.CRASH),
    "did not start": (
        seen("failed", "exit-code", has_run=False, begun_us=3),
        None,
        EndCause.FAILED,
    ),
    "in order, its user": (seen(forgotten=True), "user", EndCause.USER),
    "in order, an admin": (seen(forgotten=True), "admin", EndCause.ADMIN),
    "in order, an admin's reboot": (seen(forgotten=True, reboots=True), "admin", EndCause.REBOOT),
    "in order, a panic": (seen(forgotten=True), "crash", EndCause.CRASH),
    "in order, a signal that no mark explains": (seen(forgotten=True), "crash", EndCause.CRASH),
    "in order, a signal that a mark explains": (seen(stopped=True), "crash", EndCause.ADMIN),
    "in order, kvmd is off": (seen(forgotten=True), "unknown", EndCause.UNKNOWN),
    "in order, nobody knows": (seen(forgotten=True), None, EndCause.UNTOLD),
    "in order, an odd verdict": (seen(forgotten=True), "alien", EndCause.UNTOLD),
    "not since the node's start": (seen(forgotten=True, has_run=False), None, EndCause.NEVER),
    "not since the node's start, refused": (
        seen("inactive", "exec-condition", has_run=False),
        None,
        EndCause.NEVER,
    ),
}


@pytest.mark.parametrize("row", ENDS)
def test_who_ended_it(row: str) -> None:
    what, verdict, end = ENDS[row]
    found = case_of(what, verdict)
    assert (found.life, found.end) == (Life.DOWN, end)


def test_kvmd_is_asked_only_where_nothing_else_says_it() -> None:
    asked = [row for row, (what, _, _) in ENDS.items() if needs_verdict(what)]
    marked = "in order, a signal that a mark explains"
    assert asked == [row for row in ENDS if row.startswith("in order") and row != marked]
    assert not needs_verdict(seen("active"))
    assert not needs_verdict(seen(forgotten=True, admin_state="down"))


@pytest.mark.parametrize("result", ["signal", "oom-kill"])
def test_a_domain_that_is_gone_when_its_xl_was_killed_is_somebodys_doing(result: str) -> None:
    assert case_of(seen_on_xen(None, "failed", result), None).end is EndCause.ADMIN
    # What it ended by is noted before a pass removes it.
    noted = seen_on_xen(None, "failed", result, has_run=False)
    assert case_of(noted, None).end is EndCause.CRASH
    assert case_of(seen_on_xen(None, "failed", "exit-code"), None).end is EndCause.CRASH


def test_a_case_has_the_words_of_the_state() -> None:
    assert "signal" in case_of(seen("failed", "signal"), None).said


def domain(state: str, reason: int | None = None, name: str = "web1") -> Domain:
    return Domain(name, 7, 64, 1, state, "", reason)


def seen_on_xen(
    found: Domain | None,
    active: str = "inactive",
    result: str = "success",
    *,
    admin_state: str = "up",
    has_run: bool = True,
    **marks: bool,
) -> Observed:
    keys = {"name": "web1", "uuid": "", "admin_state": admin_state, "hypervisor": "xen-pvm"}
    unit = Unit("web1", Active(active), result=result, invocation="1", begun_us=1, since_us=2)
    return Observed(parse(Spec, keys), unit, found, has_run=has_run, **marks)  # type: ignore[arg-type]


OFF, CRASH = domain("---s--", ShutdownReason.POWEROFF), domain("---sc-", ShutdownReason.CRASH)
ZOMBIE = domain("--ps-d", name="(null)")
UNNAMED = domain("--p---", name="(null)")

ON_XEN: dict[str, tuple[Observed, Life, EndCause | None]] = {
    "runs": (seen_on_xen(domain("-b----"), "active"), Life.RUNNING, None),
    "is paused": (seen_on_xen(domain("--p---"), "active"), Life.PAUSED, None),
    "reboots": (seen_on_xen(None, "active"), Life.STARTING, None),
    "starts": (seen_on_xen(domain("--p---"), "activating"), Life.STARTING, None),
    "ends": (seen_on_xen(OFF, "deactivating"), Life.STOPPING, None),
    "dies": (seen_on_xen(domain("---s-d")), Life.STOPPING, None),
    "has lost its xl": (seen_on_xen(domain("r-----"), "failed", "signal"), Life.RUNNING, None),
    "its user": (seen_on_xen(OFF), Life.PRESERVED, EndCause.USER),
    "its user, without xl": (seen_on_xen(OFF, "failed", "signal"), Life.PRESERVED, EndCause.USER),
    "an admin": (seen_on_xen(OFF, was_stopped=True), Life.PRESERVED, EndCause.ADMIN),
    "a crash": (seen_on_xen(CRASH, "failed", "exit-code"), Life.PRESERVED, EndCause.CRASH),
    "a watchdog": (
        seen_on_xen(domain("---s--", ShutdownReason.WATCHDOG), "failed", "exit-code"),
        Life.PRESERVED,
        EndCause.CRASH,
    ),
    "a reboot": (
        seen_on_xen(domain("---s--", ShutdownReason.REBOOT)),
        Life.PRESERVED,
        EndCause.REBOOT,
    ),
    "is saved": (seen_on_xen(domain("---s--", ShutdownReason.SUSPEND)), Life.SUSPENDED, None),
    "ended for an odd reason": (seen_on_xen(domain("---s--", 9)), Life.UNKNOWN, None),
    "is odd": (seen_on_xen(domain("x-----"), "active"), Life.UNKNOWN, None),
    "is just being made": (seen_on_xen(UNNAMED, "activating"), Life.STARTING, None),
    "is being made by others": (seen_on_xen(UNNAMED), Life.PAUSED, None),
    "can't die": (seen_on_xen(ZOMBIE), Life.DOWN, EndCause.ADMIN),
    "crashed and can't die": (
        seen_on_xen(ZOMBIE, "failed", "exit-code"),
        Life.DOWN,
        EndCause.CRASH,
    ),
    "its user, cleaned up": (
        seen_on_xen(None, has_user_marker=True),
        Life.DOWN,
        EndCause.USER,
    ),
    "an admin, cleaned up": (seen_on_xen(None, was_stopped=True), Life.DOWN, EndCause.ADMIN),
    "destroyed": (seen_on_xen(None), Life.DOWN, EndCause.ADMIN),
    "a crash, cleaned up": (seen_on_xen(None, "failed", "exit-code"), Life.DOWN, EndCause.CRASH),
    "not since the node's start": (
        seen_on_xen(None, has_run=False),
        Life.DOWN,
        EndCause.NEVER,
    ),
}


@pytest.mark.parametrize("row", ON_XEN)
def test_what_xen_shows(row: str) -> None:
    what, life, end = ON_XEN[row]
    found = case_of(what, None)
    assert (found.life, found.end) == (life, end)
    assert not needs_verdict(what)


def test_one_that_somebody_stops_is_left_to_him() -> None:
    for what in (seen_on_xen(OFF), seen_on_xen(domain("-b----"), "active")):
        assert case_of(replace(what, was_stopped=True, is_being_stopped=True), None).is_busy
