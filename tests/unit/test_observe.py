"""The observed state of instances: out of specs, systemd's words, Xen's and markers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.common.errors import BrineError
from brine.instance import store
from brine.instance.observe import Observed, Oper, Status, look, look_at_all
from brine.instance.operations import reboot_instance
from brine.instance.registry import rename_instance, undefine_instance
from brine.instance.start import start_instance
from brine.instance.store import InstanceError
from brine.instance.unit import Active, Unit
from brine.instance.validate import completed
from brine.instance.xen.xl import Domain, ShutdownReason
from brine.vm.markers import MarkerKind, write_marker
from brine.vm.spec import Spec, parse, to_json
from brine.vm.unit_name import unit_of
from lab.scripted_systemctl import ScriptedSystemctl
from unit.runs import observed

STOP, SHUTDOWN = MarkerKind.STOP, MarkerKind.SHUTDOWN

# Of a QEMU: admin_state (and who said so), what systemd says, whether its user shut it down;
# and then oper_state and status. Of a unit that does not run systemd may say several things.
TABLE = """
    up       down          no   down      ERROR_down
    up       down          yes  S         USER_down
    down     down          no   down      ADMIN_down
    down     down          yes  S         ADMIN_down
    by-user  down          no   down      USER_down
    by-user  down          yes  S         USER_down
    offline  down          no   down      ADMIN_offline
    offline  down          yes  S         ADMIN_offline
    up       active        any  running   running
    down     active        any  running   ERROR_up
    by-user  active        any  running   ERROR_up
    offline  active        any  running   ERROR_up
    any      activating    any  starting  starting
    any      deactivating  any  stopping  stopping
"""
ADMIN = {
    "up": {"admin_state": "up"},
    "down": {"admin_state": "down"},
    "by-user": {"admin_state": "down", "admin_state_source": "user"},
    "offline": {"admin_state": "offline"},
}
UNITS: dict[str, tuple[Active | None, ...]] = {
    "down": (None, Active.INACTIVE, Active.FAILED, Active.MAINTENANCE),
    "active": (Active.ACTIVE, Active.RELOADING, Active.REFRESHING),
    "activating": (Active.ACTIVATING,),
    "deactivating": (Active.DEACTIVATING,),
}


def rows() -> Iterator[Any]:
    for line in TABLE.strip().splitlines():
        admin, found, shut_down, oper, status = line.split()
        for keys in ADMIN.values() if admin == "any" else [ADMIN[admin]]:
            for active in UNITS[found]:
                for by_user in ("yes", "no") if shut_down == "any" else (shut_down,):
                    yield keys, active, by_user == "yes", oper, status


def instance(**keys: Any) -> Spec:
    return parse(Spec, {"name": "web1", **keys})


def unit(active: Active = Active.INACTIVE, **others: Any) -> Unit:
    return Unit("web1", active, **{"invocation": "abc", **others})


@pytest.mark.parametrize(("admin", "active", "shut_down", "oper", "status"), [*rows()])
def test_a_row(
    admin: dict[str, str], active: Active | None, oper: str, status: str, *, shut_down: bool
) -> None:
    found = None if active is None else unit(active)
    state = observed(instance(**admin), found, marks=(SHUTDOWN,) if shut_down else ()).state
    assert (state.oper, state.status) == (oper, status)
    is_right = status in ("running", "starting", "stopping", "ADMIN_down", "ADMIN_offline")
    assert bool(state.why) is not is_right


def why_down(found: Unit | None, **others: Any) -> str:
    state = observed(instance(admin_state="up"), found, **others).state
    begin = "it should be up but is down: "
    assert state.why.startswith(begin)
    return state.why.removeprefix(begin)


@pytest.mark.parametrize(
    ("result", "status", "said"),
    [
        ("success", 0, "QEMU ended by itself"),
        ("exit-code", 1, "its process ended with status 1"),
        ("exit-code", 0, "what is run beside QEMU failed"),
        ("signal", 9, "QEMU was ended by signal 9"),
        ("core-dump", 11, "QEMU crashed, by signal 11"),
        ("timeout", 0, "it took too long"),
        ("oom-kill", 9, "the kernel ended it for want of memory"),
        ("resources", 0, "systemd could not start it"),
        ("watchdog", 6, "systemd says watchdog"),
    ],
)
def test_why_it_is_down(result: str, status: int, said: str) -> None:
    assert why_down(unit(Active.FAILED, result=result, exit_status=status)) == said


@pytest.mark.parametrize("found", [None, unit(invocation="")])
def test_a_unit_that_systemd_has_forgotten_has_run_if_its_mark_says_so(found: Unit | None) -> None:
    """It forgets one that has ended well as soon as nobody asks for it."""
    assert why_down(found) == "it has not run since the node's start"
    assert why_down(found, has_run=True) == "QEMU ended by itself"
    assert why_down(found, has_run=True, marks=(STOP,)) == "it was stopped"


def test_what_was_stopped_did_not_end_by_itself() -> None:
    assert why_down(unit(), marks=(STOP,)) == "it was stopped"
    assert why_down(None, marks=(STOP,)) == "it was stopped"
    killed = unit(Active.FAILED, result="signal", exit_status=9)
    assert why_down(killed, marks=(STOP,)) == "it was stopped"
    # Who stopped it before has nothing to do with a start that failed since.
    failed = unit(Active.FAILED, result="exit-code", exit_status=1)
    assert why_down(failed, marks=(STOP,)) == "its process ended with status 1"


def test_a_user_who_shut_it_down_is_the_reason() -> None:
    found = unit(Active.FAILED, result="exit-code", exit_status=1)
    up = observed(instance(admin_state="up"), found, marks=(SHUTDOWN,))
    assert up.state.why == "it should be up but was shut down by its user"
    down = instance(admin_state="down", admin_state_source="user")
    assert observed(down, found).state.why == "it was shut down by its user"


@pytest.mark.parametrize("admin_state", ["down", "offline"])
def test_what_should_not_run_says_what_it_should(admin_state: str) -> None:
    state = observed(instance(admin_state=admin_state), unit(Active.ACTIVE)).state
    assert state.why == f"it runs, but should be {admin_state}"


# Of Xen's: each row of what unit, domain and markers can say.

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
UP = parse(Spec, {"name": "web1", "uuid": UUID, "admin_state": "up", "hypervisor": "xen-pvm"})
DOWN = replace(UP, admin_state="down")
USERS = replace(DOWN, admin_state_source="user")
OFFLINE = replace(UP, admin_state="offline")

Marks = dict[str, bool]
NONE: Marks = {}
HAS_RUN = {"has_run": True}
STOPPED = {"has_run": True, "marks": (STOP,)}
STOPPING = {**STOPPED, "held": (STOP,)}
BY_USER = {"has_run": True, "marks": (SHUTDOWN,)}


def xen_unit(active: Active, result: str = "success", **values: Any) -> Unit:
    return Unit("web1", active, result=result, invocation="1", **values)


def domain(state: str, reason: int | None = None, name: str = "web1") -> Domain:
    return Domain(name, 7, 64, 1, state, UUID, reason)


ACTIVE = xen_unit(Active.ACTIVE, main_pid=1)
ENDED = xen_unit(Active.INACTIVE)
CRASHED = xen_unit(Active.FAILED, "exit-code", begun_us=1, since_us=2)
NOT_STARTED = xen_unit(Active.FAILED, "exit-code", begun_us=3, since_us=2)
KILLED = xen_unit(Active.FAILED, "signal", exit_status=9)
OFF, REBOOT, CRASH = (
    domain("---s--", ShutdownReason.POWEROFF),
    domain("---s--", ShutdownReason.REBOOT),
    domain("---sc-", ShutdownReason.CRASH),
)
ZOMBIE = domain("--ps-d", name="(null)")
UNNAMED = domain("--p---", name="(null)")

ROWS = [
    # While it runs.
    (UP, ACTIVE, domain("-b----"), HAS_RUN, Status.RUNNING, ""),
    (UP, ACTIVE, domain("--p---"), HAS_RUN, Status.RUNNING, "it is paused"),
    (UP, ACTIVE, domain("-b---x"), HAS_RUN, Status.RUNNING, "-b---x, which is not known"),
    (UP, ACTIVE, None, HAS_RUN, Status.STARTING, "its guest reboots"),
    (UP, ACTIVE, UNNAMED, HAS_RUN, Status.STARTING, "its guest reboots"),
    (UP, ACTIVE, ZOMBIE, HAS_RUN, Status.STARTING, "its guest reboots"),
    # Its xl has not seen to that yet.
    (UP, ACTIVE, REBOOT, HAS_RUN, Status.STARTING, "its guest reboots"),
    (UP, ACTIVE, CRASH, HAS_RUN, Status.STOPPING, "it crashed"),
    (UP, ACTIVE, OFF, HAS_RUN, Status.STOPPING, "it has shut down"),
    (DOWN, ACTIVE, domain("r-----"), HAS_RUN, Status.ERROR_UP, "should be down"),
    (UP, KILLED, domain("r-----"), HAS_RUN, Status.RUNNING, "its xl was ended"),
    (UP, None, domain("r-----"), NONE, Status.RUNNING, "its xl was ended"),
    (UP, ACTIVE, domain("r-----"), STOPPING, Status.STOPPING, ""),
    (UP, xen_unit(Active.ACTIVATING), domain("--p---"), NONE, Status.STARTING, ""),
    (UP, xen_unit(Active.ACTIVATING), OFF, NONE, Status.STARTING, ""),
    (UP, xen_unit(Active.DEACTIVATING), OFF, NONE, Status.STOPPING, ""),
    (UP, ENDED, domain("---s-d"), NONE, Status.STOPPING, "takes back"),
    # It has ended, and its domain is left.
    (UP, ENDED, OFF, HAS_RUN, Status.USER_DOWN, "by its user; what is left of it takes memory"),
    (UP, KILLED, OFF, HAS_RUN, Status.USER_DOWN, "by its user; what is left of it takes memory"),
    (UP, ENDED, OFF, STOPPED, Status.ERROR_DOWN, "it was stopped; what is left"),
    (UP, CRASHED, CRASH, HAS_RUN, Status.ERROR_DOWN, "it crashed; what is left"),
    (UP, ENDED, REBOOT, HAS_RUN, Status.ERROR_DOWN, "rebooted"),
    (
        UP,
        ENDED,
        domain("---ss-", ShutdownReason.SUSPEND),
        STOPPED,
        Status.ERROR_DOWN,
        "to be saved or",
    ),
    (UP, ENDED, domain("---s--"), HAS_RUN, Status.ERROR_DOWN, "not known here: none"),
    (UP, ENDED, domain("---s--", 9), HAS_RUN, Status.ERROR_DOWN, "not known here: 9"),
    (DOWN, ENDED, OFF, STOPPED, Status.ADMIN_DOWN, "what is left of it takes memory"),
    (USERS, ENDED, OFF, HAS_RUN, Status.USER_DOWN, "by its user; what is left"),
    (OFFLINE, ENDED, OFF, STOPPED, Status.ADMIN_OFFLINE, "what is left"),
    # Nothing is left.
    (UP, ENDED, None, BY_USER, Status.USER_DOWN, "it should be up but was shut down by its user"),
    (UP, ENDED, None, STOPPED, Status.ERROR_DOWN, "it was stopped"),
    (UP, None, None, STOPPED, Status.ERROR_DOWN, "it was stopped"),
    (UP, ENDED, None, HAS_RUN, Status.ERROR_DOWN, "its domain was destroyed"),
    (UP, None, None, NONE, Status.ERROR_DOWN, "has not run since the node's start"),
    (UP, CRASHED, None, HAS_RUN, Status.ERROR_DOWN, "it crashed"),
    (UP, NOT_STARTED, None, HAS_RUN, Status.ERROR_DOWN, "it did not start"),
    (UP, KILLED, None, HAS_RUN, Status.ERROR_DOWN, "by signal 9"),
    (
        UP,
        xen_unit(Active.FAILED, "timeout"),
        None,
        HAS_RUN,
        Status.ERROR_DOWN,
        "systemd says timeout",
    ),
    (UP, ENDED, ZOMBIE, STOPPED, Status.ERROR_DOWN, "not got rid of its domain"),
    (DOWN, ENDED, ZOMBIE, STOPPED, Status.ADMIN_DOWN, "not got rid of its domain"),
    (DOWN, ENDED, None, STOPPED, Status.ADMIN_DOWN, ""),
    (USERS, None, None, NONE, Status.USER_DOWN, "it was shut down by its user"),
    (OFFLINE, None, None, NONE, Status.ADMIN_OFFLINE, ""),
]


@pytest.mark.parametrize("row", ROWS)
def test_a_domain(row: tuple[Spec, Unit | None, Domain | None, Marks, Status, str]) -> None:
    spec, of_systemd, of_xen, marks, status, why = row
    found = observed(spec, of_systemd, of_xen, **marks).state  # type: ignore[arg-type]
    assert found.status is status
    assert why in found.why
    assert bool(why) == bool(found.why)
    is_by_user = spec == UP and status is Status.USER_DOWN
    assert (found.oper is Oper.USER_SHUTDOWN) >= is_by_user
    assert (found.oper is Oper.USER_SHUTDOWN) <= (status is Status.USER_DOWN)


@pytest.mark.parametrize("reason", ShutdownReason)
def test_each_reason_has_words(reason: ShutdownReason) -> None:
    assert "not known" not in domain("---s--", reason).how_it_ended()


# All of a node's.


@pytest.fixture
def systemctl(own_node: Path, systemctl: ScriptedSystemctl) -> ScriptedSystemctl:
    """A node of its own, where no instance is defined."""
    return systemctl


def defined(name: str, **keys: Any) -> Spec:
    spec = completed({"name": name, "admin_state": "up", **keys})
    store.save(spec)
    return spec


def begun(name: str, run: str = "a") -> None:
    write_marker(MarkerKind.START, name, run=run)


def everyone() -> dict[str, tuple[str, str]]:
    seen = [one for one in look_at_all() if isinstance(one, Observed)]
    return {one.spec.name: (one.state.oper, one.state.status) for one in seen}


def test_each_has_its_own_state(systemctl: ScriptedSystemctl) -> None:
    for name in ("runs", "off", "crashed", "web.shutdown", "web"):
        defined(name)
    systemctl.unit(unit_of("runs"), ActiveState="active", MainPID="7", InvocationID="a")
    systemctl.unit(unit_of("crashed"), ActiveState="failed", Result="signal", InvocationID="a")
    for name in ("off", "crashed", "web.shutdown", "web"):
        begun(name)
    write_marker(MarkerKind.SHUTDOWN, "off", run="a")
    write_marker(MarkerKind.SHUTDOWN, "web.shutdown", run="a")  # which is not that of web
    write_marker(MarkerKind.SHUTDOWN, "web", run="the run before")
    write_marker(MarkerKind.SHUTDOWN, "crashed", run="the run before")
    assert everyone() == {
        "crashed": ("down", "ERROR_down"),
        "off": ("S", "USER_down"),
        "runs": ("running", "running"),
        "web": ("down", "ERROR_down"),
        "web.shutdown": ("S", "USER_down"),
    }
    for name, expected in everyone().items():
        one = look(name).state
        assert (one.oper, one.status) == expected


def test_one_that_was_stopped_behind_our_back_says_so(systemctl: ScriptedSystemctl) -> None:
    defined("web1")
    systemctl.unit(unit_of("web1"), ActiveState="inactive", Result="success", InvocationID="a")
    begun("web1")
    assert look("web1").state.why.endswith("QEMU ended by itself")
    write_marker(MarkerKind.STOP, "web1", run="the run before")
    assert look("web1").state.why.endswith("QEMU ended by itself")
    write_marker(MarkerKind.STOP, "web1", run="a")
    assert look("web1").state.why.endswith("it was stopped")


@pytest.mark.parametrize("ended", [MarkerKind.STOP, MarkerKind.SHUTDOWN])
def test_a_start_that_failed_counts_more_than_the_end_before_it(
    systemctl: ScriptedSystemctl, ended: MarkerKind
) -> None:
    defined("web1")
    begun("web1")
    write_marker(ended, "web1", run="a")
    failed = {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "1"}
    seen = []
    for run in ("a", "b"):
        systemctl.unit(unit_of("web1"), **failed, InvocationID=run)
        seen.append(look("web1"))
    assert [(one.state.oper == "S", one.run.was_stopped()) for one in seen] == [
        (ended == MarkerKind.SHUTDOWN, ended == MarkerKind.STOP),
        (False, False),
    ]
    assert seen[1].state.why.endswith("its process ended with status 1")


@pytest.mark.parametrize("state", ["active", "activating", "deactivating"])
def test_what_runs_without_a_sound_spec_is_told(systemctl: ScriptedSystemctl, state: str) -> None:
    defined("sound")
    (paths.SPECS_DIR / "bad.json").write_text("{")
    for name in ("bad", "gone", "sound"):
        systemctl.unit(unit_of(name), ActiveState=state, MainPID="7", InvocationID="a")
    systemctl.unit(unit_of("forgotten"), ActiveState="failed")
    bad, seen, gone = look_at_all()
    assert isinstance(seen, Observed)
    assert isinstance(bad, InstanceError)
    assert str(bad).startswith("bad: runs, and its spec can't be used: ")
    assert isinstance(gone, InstanceError)
    assert str(gone) == "gone: runs, and has no spec"
    does = "stops it, and brine instance define gives it a spec"
    assert gone.hint == f"brine instance stop gone {does}"


@pytest.mark.parametrize(
    "work",
    [
        look,
        start_instance,
        reboot_instance,
        undefine_instance,
        lambda name: rename_instance(name, "web2"),
    ],
)
def test_what_runs_without_a_spec_is_no_unknown_name(
    systemctl: ScriptedSystemctl, work: Callable[[str], object]
) -> None:
    systemctl.unit(unit_of("web1"), ActiveState="active", MainPID="7", InvocationID="a")
    with pytest.raises(InstanceError, match="^web1: runs, and has no spec$") as told:
        work("web1")
    assert "brine instance stop web1 stops it" in (told.value.hint or "")


def test_five_hundred_take_one_question(systemctl: ScriptedSystemctl) -> None:
    data = to_json(defined("web0"))
    for number in range(1, 500):
        name = f"web{number}"
        (paths.SPECS_DIR / f"{name}.json").write_text(json.dumps({**data, "name": name}))
    assert len(everyone()) == 500
    assert (len(systemctl.asked("show")), systemctl.asked("list-jobs")) == (1, [])


def test_marks_that_can_not_be_read_are_not_none(systemctl: ScriptedSystemctl) -> None:
    defined("web1")
    paths.MARKS_DIR.rmdir()
    paths.MARKS_DIR.write_text("")
    for work in (lambda: look("web1"), lambda: list(look_at_all())):
        with pytest.raises(BrineError, match="can't be read: Not a directory"):
            work()


@pytest.mark.parametrize(
    ("state", "began", "limit_s"),
    [
        ("activating", "InactiveExitTimestampMonotonic", 7),
        ("deactivating", "StateChangeTimestampMonotonic", 50),
    ],
)
def test_a_start_or_stop_that_takes_longer_than_it_may_is_told(
    systemctl: ScriptedSystemctl,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    began: str,
    limit_s: int,
) -> None:
    store.save(completed({"name": "web1", "start_timeout": 7, "shutdown_timeout": 50}))
    verb = {"activating": "starting", "deactivating": "stopping"}[state]
    now_s = 1000.0
    monkeypatch.setattr(time, "clock_gettime", lambda _clock: now_s)  # since boot
    for ago_s, is_overdue in ((limit_s + 30, False), (limit_s + 300, True)):
        begun_us = {began: str(int((now_s - ago_s) * 1e6))}
        systemctl.unit(unit_of("web1"), ActiveState=state, InvocationID="a", **begun_us)
        seen = look("web1")
        assert (bool(seen.overdue), seen.state.status) == (is_overdue, verb)
        assert bool(seen.state.why) == is_overdue
    assert seen.state.why.startswith(f"it has been {verb} for {limit_s + 300} s")
    assert seen.state.why.endswith(f", and {limit_s} s are its limit")
