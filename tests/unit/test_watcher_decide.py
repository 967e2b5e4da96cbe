"""The watcher's decision, from the words of systemd, kvmd and Xen about an instance."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from brine.instance.history import needs_verdict
from brine.instance.observe import Observed
from brine.instance.unit import Active, Unit
from brine.instance.xen.xl import Domain, ShutdownReason
from brine.vm.end import EndCause
from brine.vm.halt import Halt
from brine.vm.markers import MarkerKind
from brine.vm.spec import AdminState, Spec, parse
from brine.watcher.decide import Action, Decision, Life, decide, end_of, life_of
from brine.watcher.restart_counter import NONE, Tries, with_one_more
from brine.watcher.settings import WatcherSettings
from unit.runs import marked_run, observed

NOW = 1_800_000_000.0
HOUR_S = 3600.0
SETTINGS = WatcherSettings()
ALL = WatcherSettings(manage="all")

CLEAN_UP, SET_DOWN, START = Action.CLEAN_UP, Action.SET_DOWN, Action.START
STOP, SHUTDOWN, REBOOT = MarkerKind.STOP, MarkerKind.SHUTDOWN, MarkerKind.REBOOT
STOPPING: dict[str, Any] = {"marks": (STOP,), "held": (STOP,)}
TRY, GIVE_UP, FORGET = Action.TRY, Action.GIVE_UP, Action.FORGET


def seen(
    active: str = "",
    result: str = "success",
    *,
    keys: dict[str, str] | None = None,
    begun_us: int = 1,
    has_run: bool = True,
    **marks: Any,
) -> Observed:
    """An instance that should be up; systemd has forgotten its unit if `active` is empty."""
    spec = parse(Spec, {"name": "web1", "uuid": "", "admin_state": "up", **(keys or {})})
    times: dict[str, Any] = {"begun_us": begun_us, "since_us": 2}
    unit = Unit("web1", Active(active), result=result, invocation="1", **times) if active else None
    return observed(spec, unit, has_run=has_run, **marks)


def domain(state: str, reason: int | None = None, name: str = "web1") -> Domain:
    return Domain(name, 7, 64, 1, state, "", reason)


def on_xen(found: Domain | None, active: str = "inactive", *args: Any, **others: Any) -> Observed:
    return seen(active, *args, keys={"hypervisor": "xen-pvm"}, domain=found, **others)


OFF, CRASH = domain("---s--", ShutdownReason.POWEROFF), domain("---sc-", ShutdownReason.CRASH)
ZOMBIE, UNNAMED = domain("--ps-d", name="(null)"), domain("--p---", name="(null)")

THERE: dict[str, tuple[Observed, Life]] = {
    "runs": (seen("active", marks=(SHUTDOWN, STOP)), Life.RUNNING),
    "reloads": (seen("reloading"), Life.RUNNING),
    "starts": (seen("activating"), Life.STARTING),
    "stops": (seen("deactivating"), Life.STOPPING),
    "runs on Xen": (on_xen(domain("-b----"), "active"), Life.RUNNING),
    "is paused": (on_xen(domain("--p---"), "active"), Life.PAUSED),
    "reboots": (on_xen(None, "active"), Life.STARTING),
    "starts on Xen": (on_xen(domain("--p---"), "activating"), Life.STARTING),
    "ends": (on_xen(OFF, "deactivating"), Life.STOPPING),
    "dies": (on_xen(domain("---s-d")), Life.STOPPING),
    "has lost its xl": (on_xen(domain("r-----"), "failed", "signal"), Life.RUNNING),
    "is saved": (on_xen(domain("---s--", ShutdownReason.SUSPEND)), Life.SUSPENDED),
    "ended for an odd reason": (on_xen(domain("---s--", 9)), Life.UNKNOWN),
    "is odd": (on_xen(domain("x-----"), "active"), Life.UNKNOWN),
    "is just being made": (on_xen(UNNAMED, "activating"), Life.STARTING),
    "is being made by others": (on_xen(UNNAMED), Life.PAUSED),
}


@pytest.mark.parametrize("row", THERE)
def test_what_is_there_has_no_end_and_is_left_alone(row: str) -> None:
    what, life = THERE[row]
    assert (life_of(what), end_of(what)) == (life, None)
    assert not needs_verdict(what)
    assert decision(what).actions == ()


FULL = Halt("io-error", "No space left on device", no_space=True)


@pytest.mark.parametrize(
    ("halt", "has_room", "actions", "is_odd"),
    [
        (FULL, False, (), True),
        (FULL, True, (Action.CONTINUE,), False),
        (Halt("io-error"), True, (), True),
        (Halt("internal-error"), False, (), True),
        (Halt("suspended"), False, (), False),
        (Halt("paused"), False, (), False),
    ],
)
def test_one_that_qemu_has_stopped_is_reported_and_goes_on_once_there_is_room(
    halt: Halt, has_room: bool, actions: tuple[Action, ...], is_odd: bool
) -> None:
    one = seen("active", halted=halt, has_room=has_room)
    found = decision(one)
    assert (found.actions, found.is_odd) == (actions, is_odd)
    assert halt.why() in found.why
    assert life_of(one) is (Life.HALTED if halt.is_fault else Life.RUNNING)


def by(who: str, **marks: Any) -> Observed:
    """One that ended in order, with a verdict of kvmd's."""
    return seen(verdict=who, **marks)


ENDS: dict[str, tuple[Observed, EndCause]] = {
    "its user's mark": (seen("inactive", marks=(SHUTDOWN,)), EndCause.USER),
    "an admin's mark, killed": (seen("failed", "signal", marks=(STOP,)), EndCause.ADMIN),
    "an admin's reboot": (seen("inactive", marks=(STOP, REBOOT)), EndCause.REBOOT),
    "its user's, whatever its admin wanted": (
        seen("inactive", marks=(SHUTDOWN, REBOOT)),
        EndCause.USER,
    ),
    "killed": (seen("failed", "signal"), EndCause.CRASH),
    "crashed": (seen("failed", "core-dump"), EndCause.CRASH),
    "out of memory": (seen("failed", "oom-kill"), EndCause.CRASH),
    "failed": (seen("failed", "exit-code"), EndCause.CRASH),
    "did not start": (seen("failed", "exit-code", has_run=False, begun_us=3), EndCause.FAILED),
    "in order, its user": (by("user"), EndCause.USER),
    "in order, an admin": (by("admin"), EndCause.ADMIN),
    "in order, an admin's reboot": (by("admin", marks=(REBOOT,)), EndCause.REBOOT),
    "in order, a panic": (by("crash"), EndCause.CRASH),
    "in order, kvmd is off": (by("unknown"), EndCause.UNKNOWN),
    "in order, nobody knows": (by(""), EndCause.UNTOLD),
    "in order, an odd verdict": (by("alien"), EndCause.UNTOLD),
    "an admin's mark, whatever was said": (by("crash", marks=(STOP,)), EndCause.ADMIN),
    "not since the node's start": (seen(has_run=False), EndCause.NEVER),
    "not since the node's start, refused": (
        seen("inactive", "exec-condition", has_run=False),
        EndCause.NEVER,
    ),
    "can't die": (on_xen(ZOMBIE), EndCause.ADMIN),
    "crashed and can't die": (on_xen(ZOMBIE, "failed", "exit-code"), EndCause.CRASH),
    "its user, cleaned up": (on_xen(None, marks=(SHUTDOWN,)), EndCause.USER),
    "destroyed": (on_xen(None), EndCause.ADMIN),
    "a crash, cleaned up": (on_xen(None, "failed", "exit-code"), EndCause.CRASH),
    # A domain that is gone when its xl was killed is somebody's doing.
    "its xl was killed": (on_xen(None, "failed", "oom-kill"), EndCause.ADMIN),
    # What it ended by is noted before a pass removes it.
    "its xl was killed, noted": (on_xen(None, "failed", "signal", has_run=False), EndCause.CRASH),
    "not since the node's start on Xen": (on_xen(None, has_run=False), EndCause.NEVER),
}
PRESERVED: dict[str, tuple[Observed, EndCause]] = {
    "its user, preserved": (on_xen(OFF), EndCause.USER),
    "its user, without xl, preserved": (on_xen(OFF, "failed", "signal"), EndCause.USER),
    "an admin, preserved": (on_xen(OFF, marks=(STOP,)), EndCause.ADMIN),
    "a crash, preserved": (on_xen(CRASH, "failed", "exit-code"), EndCause.CRASH),
    "a watchdog, preserved": (
        on_xen(domain("---s--", ShutdownReason.WATCHDOG), "failed", "exit-code"),
        EndCause.CRASH,
    ),
    "a reboot, preserved": (on_xen(domain("---s--", ShutdownReason.REBOOT)), EndCause.REBOOT),
}


@pytest.mark.parametrize("row", [*ENDS, *PRESERVED])
def test_who_ended_it(row: str) -> None:
    what, end = {**ENDS, **PRESERVED}[row]
    life = Life.DOWN if row in ENDS else Life.PRESERVED
    assert (life_of(what), end_of(what)) == (life, end)
    assert needs_verdict(what) == row.startswith("in order")
    assert not needs_verdict(down(what))


def test_a_failure_that_systemd_forgot_counts_unless_somebody_ended_that_run() -> None:
    failed = marked_run(MarkerKind.FAILURE, run="a")
    later = marked_run(MarkerKind.FAILURE, MarkerKind.STARTED, run="a")
    assert end_of(seen(failed=failed)) is EndCause.FAILED
    assert end_of(seen(failed=later)) is EndCause.CRASH
    assert end_of(seen("failed", "signal", failed=failed)) is EndCause.CRASH
    assert end_of(seen(failed=failed, run="a", marks=(SHUTDOWN,))) is EndCause.USER
    assert end_of(seen(failed=failed, run="b", marks=(SHUTDOWN,))) is EndCause.FAILED


# Each row of the table.


def with_spec(what: Observed, **keys: Any) -> Observed:
    return replace(what, spec=replace(what.spec, **keys))


def down(what: Observed) -> Observed:
    return with_spec(what, admin_state="down")


def again(what: Observed) -> Observed:
    return with_spec(what, user_shutdown="restart")


def decision(
    what: Observed | Domain, tries: Tries = NONE, settings: WatcherSettings = SETTINGS
) -> Decision:
    return decide(what, tries, settings, NOW)


RUNS, CRASHED, KEPT = seen("active"), seen("failed", "signal"), on_xen(CRASH)
FAILED = seen("failed", "exit-code", begun_us=3)
RESET = marked_run(MarkerKind.FAILURE, run="a")
BY_USER = with_spec(down(on_xen(OFF)), admin_state_source="user")
OVERDUE = "it has been starting for 900 s, and 60 s are its limit"
GIVEN_UP = Tries(5, NOW - HOUR_S, given_up=True)

Row = tuple[Observed | Domain, Tries, tuple[Action, ...], bool, bool]


def row(
    what: Observed | Domain,
    *actions: Action,
    tries: Tries = NONE,
    is_odd: bool = False,
    is_quiet: bool = False,
) -> Row:
    """The observed state, the number of tries, and the decision; *is_quiet* has no reason."""
    return what, tries, actions, is_odd, is_quiet


ROWS: dict[str, Row] = {
    "runs": row(RUNS, is_quiet=True),
    "runs, should not": row(down(RUNS), is_odd=True),
    "runs, was tried just now": row(RUNS, tries=Tries(3, NOW - 60), is_quiet=True),
    "runs for long": row(RUNS, FORGET, tries=Tries(3, NOW - 8 * HOUR_S), is_quiet=True),
    "runs, was tried in the future": row(RUNS, FORGET, tries=Tries(1, NOW + 1), is_quiet=True),
    "runs, was given up": row(RUNS, tries=GIVEN_UP, is_quiet=True),
    "runs, was given up untried": row(
        RUNS, FORGET, tries=Tries(0, 0.0, given_up=True), is_quiet=True
    ),
    "runs, a stop of it was broken off": row(
        seen("active", marks=(STOP,), is_stop_over=True), CLEAN_UP
    ),
    "starts for too long": row(seen("activating", overdue=OVERDUE), is_odd=True),
    "stops for too long": row(down(seen("deactivating", overdue=OVERDUE, **STOPPING)), is_odd=True),
    "is worked on": row(seen("failed", "signal", **STOPPING)),
    "preserved, is worked on": row(on_xen(OFF, **STOPPING)),
    "is a zombie": row(ZOMBIE, is_odd=True),
    "is unknown": row(on_xen(domain("x-----"), "active"), is_odd=True),
    "its user's": row(seen(marks=(SHUTDOWN,)), SET_DOWN),
    "its user's, preserved": row(on_xen(OFF), SET_DOWN, CLEAN_UP),
    "its user's, again": row(again(seen(marks=(SHUTDOWN,))), START),
    "its user's, again, preserved": row(again(on_xen(OFF)), CLEAN_UP, START),
    "its user's, after tries": row(seen(marks=(SHUTDOWN,)), SET_DOWN, tries=Tries(5, NOW)),
    "its user's, again, given up": row(again(seen(marks=(SHUTDOWN,))), START, tries=GIVEN_UP),
    "rebooted": row(on_xen(domain("---s--", ShutdownReason.REBOOT)), CLEAN_UP, TRY),
    "its admin's": row(by("admin")),
    "its admin's, preserved": row(on_xen(OFF, marks=(STOP,)), CLEAN_UP),
    "down": row(down(CRASHED), is_quiet=True),
    "down, preserved": row(down(KEPT), CLEAN_UP),
    "down, its user's, preserved": row(down(on_xen(OFF)), CLEAN_UP),
    "down, its user's, half done": row(
        with_spec(down(seen(marks=(SHUTDOWN,))), admin_state_source="user"), SET_DOWN
    ),
    "down, its user's, noted, preserved": row(BY_USER, CLEAN_UP),
    "down, its user's, crashed since": row(
        with_spec(down(CRASHED), admin_state_source="user"), is_quiet=True
    ),
    "crashed": row(CRASHED, TRY),
    "crashed, preserved": row(KEPT, CLEAN_UP, TRY),
    "crashed, to start again": row(again(CRASHED), TRY),
    "crashed, too early": row(CRASHED, tries=Tries(1, NOW - 239)),
    "crashed, too early, preserved": row(KEPT, CLEAN_UP, tries=Tries(1, NOW - 239)),
    "crashed, after a clock was set back": row(CRASHED, TRY, tries=Tries(1, NOW + 1e9)),
    "crashed, last try": row(CRASHED, TRY, tries=Tries(4, NOW - 2400)),
    "crashed, too often": row(CRASHED, GIVE_UP, tries=Tries(5, NOW - HOUR_S), is_odd=True),
    "crashed, too often, preserved": row(
        KEPT, CLEAN_UP, GIVE_UP, tries=Tries(5, NOW - HOUR_S), is_odd=True
    ),
    "given up": row(CRASHED, tries=GIVEN_UP, is_odd=True),
    "given up, preserved": row(KEPT, CLEAN_UP, tries=GIVEN_UP, is_odd=True),
    "given up, due": row(CRASHED, TRY, tries=Tries(9, NOW - 8 * HOUR_S, given_up=True)),
    "given up, reset": row(seen(failed=RESET), TRY, tries=GIVEN_UP),
    "given up, lacks": row(replace(FAILED, lacks=("/d",)), tries=GIVEN_UP, is_odd=True),
    "given up, lacked": row(replace(FAILED, lacks=()), TRY, tries=GIVEN_UP),
    "too early, lacked": row(replace(FAILED, lacks=()), TRY, tries=Tries(2, NOW - 9)),
    "did not start": row(FAILED, TRY),
    "never started": row(seen(has_run=False), TRY),
    "never started, and its turn comes": row(seen(has_run=False, awaits_node=True)),
    "kvmd is off": row(by("unknown"), SET_DOWN),
    "kvmd is off, to start again": row(again(by("unknown")), START),
    "nobody knows": row(by(""), is_odd=True),
    "not ours, runs": row(domain("-b----")),
    "not ours, preserved": row(OFF),
    "not ours, crashed": row(CRASH),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_row(name: str) -> None:
    what, tries, actions, is_odd, is_quiet = ROWS[name]
    found = decision(what, tries)
    assert (found.actions, found.is_odd, not found.why) == (actions, is_odd, is_quiet)


def test_what_is_not_ours_is_cleaned_up_only_where_it_is_to_be() -> None:
    for ended in (OFF, CRASH):
        assert decision(ended, settings=ALL).actions == (CLEAN_UP,)
    for state in ("r-----", "--p---", "---s-d", "x-----", "---s--"):
        assert not decision(domain(state), settings=ALL).actions


@pytest.mark.parametrize("row", [*THERE, *ENDS, *PRESERVED])
def test_whatever_is_seen_only_an_ended_domain_is_cleaned_up(row: str) -> None:
    what = {**THERE, **ENDS, **PRESERVED}[row][0]
    for one, settings in product((what, down(what), again(what)), (SETTINGS, ALL)):
        found = decision(one, settings=settings)
        assert (CLEAN_UP in found.actions) <= (life_of(what) is Life.PRESERVED)
        if one.spec.admin_state != AdminState.UP:
            assert set(found.actions) <= {CLEAN_UP}


# How often a crashed instance is started again.


def test_five_tries_each_after_twice_the_wait_and_then_one_every_eight_hours() -> None:
    tries, now, waits = NONE, NOW, []
    while (found := decide(CRASHED, tries, SETTINGS, now)).actions != (GIVE_UP,):
        if found.actions == (TRY,):
            waits.append(now - (tries.last or now))
            tries = with_one_more(tries, SETTINGS, now)
        else:
            now += 1
    # Each may be as early as the timer's passes are, compared with its settings.
    assert waits == [0, 240, 540, 1140, 2340]
    for count in (5, 6, 7):
        assert tries == Tries(count, now, given_up=count > 5)
        tries = replace(tries, given_up=True)
        assert decide(CRASHED, tries, SETTINGS, now + 28799).was_told
        now += 28800
        assert decide(CRASHED, tries, SETTINGS, now).actions == (TRY,)
        tries = with_one_more(tries, SETTINGS, now)


def test_who_allows_more_tries_has_them() -> None:
    given_up, more = Tries(5, NOW - 9600, given_up=True), WatcherSettings(tries=6)
    assert decision(CRASHED, given_up).actions == ()
    assert decision(CRASHED, given_up, more).actions == (TRY,)
    # After which it is given up anew, and that is said.
    assert decision(CRASHED, with_one_more(given_up, more, NOW), more).actions == (GIVE_UP,)


def test_without_tries_nothing_is_started_again() -> None:
    assert decision(KEPT, settings=WatcherSettings(tries=0)).actions == (CLEAN_UP,)


def test_a_try_before_a_clock_was_set_back_is_on_record_with_the_new_clock() -> None:
    again = with_one_more(Tries(1, NOW + 86400), SETTINGS, NOW)
    assert decide(CRASHED, again, SETTINGS, NOW + 539).actions == ()
    assert decide(CRASHED, again, SETTINGS, NOW + 540).actions == (TRY,)


@pytest.mark.parametrize(
    ("row", "actions"),
    [("killed", ()), ("in order, kvmd is off", (SET_DOWN,)), ("in order, its user", (SET_DOWN,))],
)
def test_without_its_owner_nothing_starts_again(row: str, actions: tuple[Action, ...]) -> None:
    what = replace(ENDS[row][0], lacks_owner="there is no watchdog")
    assert decision(what).actions == actions
    again = replace(what, spec=replace(what.spec, user_shutdown="restart"))
    found = decision(again)
    assert (found.actions, found.why) == ((), "its owner is not there: there is no watchdog")
