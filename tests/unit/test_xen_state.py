"""The state of an instance of Xen's: each row of what unit, domain and marks can say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brine.instance.observe import InstanceState, Observed, Oper, Status
from brine.instance.spec import Spec, parse
from brine.instance.unit import Active, Unit
from brine.instance.xen.xl import Domain, ShutdownReason

UUID = "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"
UP = parse(Spec, {"name": "web1", "uuid": UUID, "admin_state": "up", "hypervisor": "xen-pvm"})
DOWN = replace(UP, admin_state="down")
USERS = replace(DOWN, admin_state_source="user")
OFFLINE = replace(UP, admin_state="offline")

Marks = dict[str, bool]
NONE: Marks = {}
HAS_RUN = {"has_run": True}
STOPPED = {"has_run": True, "was_stopped": True}
STOPPING = {**STOPPED, "is_being_stopped": True}
BY_USER = {"has_run": True, "has_user_marker": True}


def unit(active: Active, result: str = "success", **values: Any) -> Unit:
    return Unit("web1", active, result=result, invocation="1", **values)


def domain(state: str, reason: int | None = None, name: str = "web1") -> Domain:
    return Domain(name, 7, 64, 1, state, UUID, reason)


ACTIVE = unit(Active.ACTIVE, main_pid=1)
ENDED = unit(Active.INACTIVE)
CRASHED = unit(Active.FAILED, "exit-code", begun_us=1, since_us=2)
NOT_STARTED = unit(Active.FAILED, "exit-code", begun_us=3, since_us=2)
KILLED = unit(Active.FAILED, "signal", exit_status=9)
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
    (UP, unit(Active.ACTIVATING), domain("--p---"), NONE, Status.STARTING, ""),
    (UP, unit(Active.ACTIVATING), OFF, NONE, Status.STARTING, ""),
    (UP, unit(Active.DEACTIVATING), OFF, NONE, Status.STOPPING, ""),
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
    (UP, unit(Active.FAILED, "timeout"), None, HAS_RUN, Status.ERROR_DOWN, "systemd says timeout"),
    (UP, ENDED, ZOMBIE, STOPPED, Status.ERROR_DOWN, "not got rid of its domain"),
    (DOWN, ENDED, ZOMBIE, STOPPED, Status.ADMIN_DOWN, "not got rid of its domain"),
    (DOWN, ENDED, None, STOPPED, Status.ADMIN_DOWN, ""),
    (USERS, None, None, NONE, Status.USER_DOWN, "it was shut down by its user"),
    (OFFLINE, None, None, NONE, Status.ADMIN_OFFLINE, ""),
]


def state(
    spec: Spec, of_systemd: Unit | None, of_xen: Domain | None, marks: Marks
) -> InstanceState:
    return Observed(spec, of_systemd, of_xen, **marks).state  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS)
def test_rows(row: tuple[Spec, Unit | None, Domain | None, Marks, Status, str]) -> None:
    spec, of_systemd, of_xen, marks, status, why = row
    found = state(spec, of_systemd, of_xen, marks)
    assert found.status is status
    assert why in found.why
    assert bool(why) == bool(found.why)


@pytest.mark.parametrize(
    ("spec", "of_xen", "marks", "oper"),
    [
        (UP, OFF, HAS_RUN, Oper.USER_SHUTDOWN),
        (UP, OFF, STOPPED, Oper.DOWN),
        (UP, CRASH, HAS_RUN, Oper.DOWN),
        (UP, None, BY_USER, Oper.USER_SHUTDOWN),
        (UP, domain("r-----"), HAS_RUN, Oper.RUNNING),
    ],
)
def test_what_it_does(spec: Spec, of_xen: Domain | None, marks: Marks, oper: Oper) -> None:
    assert state(spec, ENDED, of_xen, marks).oper is oper


@pytest.mark.parametrize("reason", ShutdownReason)
def test_each_reason_has_words(reason: ShutdownReason) -> None:
    assert "not known" not in domain("---s--", reason).how_it_ended()
