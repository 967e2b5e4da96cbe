"""What state an instance is in, in every row there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from brine.instance.observe import Observed, Oper, Status
from brine.instance.spec import Spec, parse
from brine.instance.unit import Active, Unit

# admin_state (and who said so), what systemd says, whether its user shut it down;
# and then oper_state and status. Of a unit that does not run systemd may say several things.
TABLE = """
    up       down          no   down      ERROR_down
    up       down          yes  S         USER_down
    up       active        no   running   running
    up       active        yes  running   running
    up       activating    no   starting  starting
    up       activating    yes  starting  starting
    up       deactivating  no   stopping  stopping
    up       deactivating  yes  stopping  stopping
    down     down          no   down      ADMIN_down
    down     down          yes  S         ADMIN_down
    down     active        no   running   ERROR_up
    down     active        yes  running   ERROR_up
    down     activating    no   starting  starting
    down     activating    yes  starting  starting
    down     deactivating  no   stopping  stopping
    down     deactivating  yes  stopping  stopping
    by-user  down          no   down      USER_down
    by-user  down          yes  S         USER_down
    by-user  active        no   running   ERROR_up
    by-user  active        yes  running   ERROR_up
    by-user  activating    no   starting  starting
    by-user  activating    yes  starting  starting
    by-user  deactivating  no   stopping  stopping
    by-user  deactivating  yes  stopping  stopping
    offline  down          no   down      ADMIN_offline
    offline  down          yes  S         ADMIN_offline
    offline  active        no   running   ERROR_up
    offline  active        yes  running   ERROR_up
    offline  activating    no   starting  starting
    offline  activating    yes  starting  starting
    offline  deactivating  no   stopping  stopping
    offline  deactivating  yes  stopping  stopping
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
        admin, unit, shut_down, oper, status = line.split()
        for active in UNITS[unit]:
            name = f"{admin}-{active}-{shut_down}"
            yield pytest.param(ADMIN[admin], active, shut_down == "yes", oper, status, id=name)


def instance(**keys: Any) -> Spec:
    return parse(Spec, {"name": "web1", **keys})


def unit(active: Active = Active.INACTIVE, **others: Any) -> Unit:
    return Unit("web1", active, **{"invocation": "abc", **others})


def test_every_row_is_in_the_table() -> None:
    assert len(list(rows())) == len(ADMIN) * (len(Active) + 1) * 2
    assert {active for group in UNITS.values() for active in group} == {None, *Active}


@pytest.mark.parametrize(("admin", "active", "shut_down", "oper", "status"), [*rows()])
def test_a_row(
    admin: dict[str, str], active: Active | None, oper: str, status: str, *, shut_down: bool
) -> None:
    found = None if active is None else unit(active)
    state = Observed(instance(**admin), found, has_user_marker=shut_down).state
    assert (state.oper, state.status) == (oper, status)
    is_right = status in ("running", "starting", "stopping", "ADMIN_down", "ADMIN_offline")
    assert bool(state.why) is not is_right


def test_each_word_is_used() -> None:
    seen = [row.values for row in rows()]
    assert {row[3] for row in seen} == set(Oper)
    assert {row[4] for row in seen} == set(Status)


def why_down(found: Unit | None, **others: Any) -> str:
    state = Observed(instance(admin_state="up"), found, **others).state
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
    assert why_down(found, has_run=True, was_stopped=True) == "it was stopped"


def test_what_was_stopped_did_not_end_by_itself() -> None:
    assert why_down(unit(), was_stopped=True) == "it was stopped"
    assert why_down(None, was_stopped=True) == "it was stopped"
    killed = unit(Active.FAILED, result="signal", exit_status=9)
    assert why_down(killed, was_stopped=True) == "it was stopped"
    # Who stopped it before has nothing to do with a start that failed since.
    failed = unit(Active.FAILED, result="exit-code", exit_status=1)
    assert why_down(failed, was_stopped=True) == "its process ended with status 1"


def test_a_user_who_shut_it_down_is_the_reason() -> None:
    found = unit(Active.FAILED, result="exit-code", exit_status=1)
    up = Observed(instance(admin_state="up"), found, has_user_marker=True)
    assert up.state.why == "it should be up but was shut down by its user"
    down = instance(admin_state="down", admin_state_source="user")
    assert Observed(down, found).state.why == "it was shut down by its user"


@pytest.mark.parametrize("admin_state", ["down", "offline"])
def test_what_should_not_run_says_what_it_should(admin_state: str) -> None:
    state = Observed(instance(admin_state=admin_state), unit(Active.ACTIVE)).state
    assert state.why == f"it runs, but should be {admin_state}"
