"""What state an instance is in: one decision, from what is known of it.

Source: "Other required changes" in the design of the detection of user shutdown. The words of
*status* are Ganeti's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from brine.instance.spec import AdminState, Source, Spec
from brine.instance.unit import Active, Unit


class Oper(StrEnum):
    """What an instance is doing."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPING = "stopping"
    DOWN = "down"
    USER_SHUTDOWN = "S"


class Status(StrEnum):
    """That, beside what it should be doing."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPING = "stopping"
    ERROR_UP = "ERROR_up"
    ERROR_DOWN = "ERROR_down"
    USER_DOWN = "USER_down"
    ADMIN_DOWN = "ADMIN_down"
    ADMIN_OFFLINE = "ADMIN_offline"


@dataclass(frozen=True, slots=True)
class State:
    """The state of an instance.

    :param oper: what it is doing; *status* says whether that is right.
    :param why: the same for people, in a sentence; empty where there is nothing to say.
    """

    oper: Oper
    status: Status
    why: str = ""


WAITS = "systemd has not begun its start yet: it waits for something"
_ENDED = "QEMU ended by itself"
_RESULTS = {
    "exit-code": "its process ended with status {status}",
    "signal": "QEMU was ended by signal {status}",
    "core-dump": "QEMU crashed, by signal {status}",
    "timeout": "it took too long",
    "oom-kill": "the kernel ended it for want of memory",
    "resources": "systemd could not start it",
    "protocol": "systemd could not start it",
    "exec-condition": "it was not to be started",
}

_MOVING = {Active.ACTIVATING: Oper.STARTING, Active.DEACTIVATING: Oper.STOPPING}
_RUNNING = (Active.ACTIVE, Active.RELOADING, Active.REFRESHING)


def oper_of(unit: Unit | None, *, being_stopped: bool = False) -> Oper:
    """What a unit does, whatever it should; ``S`` is none of that.

    :param unit: what systemd says; None if it has not loaded it.
    :param being_stopped: whether somebody waits for its guest to shut down.
    """
    if unit is None:
        return Oper.DOWN
    if unit.is_queued:
        return Oper.STARTING
    if unit.active in _RUNNING:
        return Oper.STOPPING if being_stopped else Oper.RUNNING
    return _MOVING.get(unit.active, Oper.DOWN)


def state_of(
    spec: Spec,
    unit: Unit | None,
    *,
    user_shut_down: bool,
    stopped: bool = False,
    being_stopped: bool = False,
    has_run: bool = False,
) -> State:
    """The state of an instance.

    :param unit: what systemd says; None if it has not loaded it.
    :param user_shut_down: whether its user has shut it down since it started last.
    :param stopped: whether somebody has stopped it on the admin's behalf since then.
    :param being_stopped: whether somebody waits for its guest to shut down.
    :param has_run: whether it has run since the node's start.
    """
    should_run = spec.admin_state == AdminState.UP
    oper = oper_of(unit, being_stopped=being_stopped)
    if oper in (Oper.STARTING, Oper.STOPPING):
        return State(oper, Status(oper.value), WAITS if unit and unit.is_queued else "")
    if oper is Oper.RUNNING:
        if should_run:
            return State(Oper.RUNNING, Status.RUNNING)
        return State(Oper.RUNNING, Status.ERROR_UP, f"it runs, but should be {spec.admin_state}")
    if user_shut_down:
        oper = Oper.USER_SHUTDOWN
    if should_run:
        if user_shut_down:
            why = "it should be up but was shut down by its user"
            return State(oper, Status.USER_DOWN, why)
        why = f"it should be up but is down: {_reason(unit, stopped, has_run)}"
        return State(oper, Status.ERROR_DOWN, why)
    if spec.admin_state == AdminState.OFFLINE:
        return State(oper, Status.ADMIN_OFFLINE)
    if spec.admin_state_source == Source.USER:
        return State(oper, Status.USER_DOWN, "it was shut down by its user")
    return State(oper, Status.ADMIN_DOWN)


def _reason(unit: Unit | None, stopped: bool, has_run: bool) -> str:
    # systemd may have forgotten a unit that it has stopped.
    if stopped and (unit is None or unit.result in ("success", "signal")):
        return "it was stopped"
    if unit is None or not unit.invocation:
        # It keeps one that has failed, until somebody has it forget that.
        return _ENDED if has_run else "it has not run since the node's start"
    if unit.result == "success":
        return _ENDED
    if unit.result == "exit-code" and unit.exit_status == 0:
        return "what is run beside QEMU failed"
    words = _RESULTS.get(unit.result, f"systemd says {unit.result}")
    return words.format(status=unit.exit_status)
