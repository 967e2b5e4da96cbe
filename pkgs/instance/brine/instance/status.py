"""The status of an instance: a decision from its unit, its markers and its domain.

Source: "Other required changes" in the design of the detection of user shutdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from brine.instance.spec import AdminState, Source, Spec
from brine.instance.store import InstanceError
from brine.instance.unit import Active, Unit
from brine.instance.xen.xl import Domain, ShutdownReason

# What state an instance is in: one decision, from what is known of it.


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
class InstanceState:
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
) -> InstanceState:
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
        return InstanceState(oper, Status(oper.value), WAITS if unit and unit.is_queued else "")
    if oper is Oper.RUNNING:
        if should_run:
            return InstanceState(Oper.RUNNING, Status.RUNNING)
        return InstanceState(
            Oper.RUNNING, Status.ERROR_UP, f"it runs, but should be {spec.admin_state}"
        )
    if user_shut_down:
        oper = Oper.USER_SHUTDOWN
    if should_run:
        if user_shut_down:
            why = "it should be up but was shut down by its user"
            return InstanceState(oper, Status.USER_DOWN, why)
        why = f"it should be up but is down: {_reason(unit, stopped, has_run)}"
        return InstanceState(oper, Status.ERROR_DOWN, why)
    if spec.admin_state == AdminState.OFFLINE:
        return InstanceState(oper, Status.ADMIN_OFFLINE)
    if spec.admin_state_source == Source.USER:
        return InstanceState(oper, Status.USER_DOWN, "it was shut down by its user")
    return InstanceState(oper, Status.ADMIN_DOWN)


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


_MEMORY = "what is left of it takes memory"
_REASONS = {
    ShutdownReason.REBOOT: "its user rebooted it, and it did not start again",
    ShutdownReason.SUSPEND: "it is suspended, to be saved or moved",
    ShutdownReason.SOFT_RESET: "it has reset itself",
}


@dataclass(frozen=True, slots=True)
class DomainMarkers:
    """What has been said of an instance since its last start.

    :param user_shut_down: its user has shut it down.
    :param stopped: somebody has stopped it on the admin's behalf.
    :param stopping: somebody is doing so right now.
    :param has_run: it has run since the node's start.
    """

    user_shut_down: bool = False
    stopped: bool = False
    stopping: bool = False
    has_run: bool = False


def state_of_domain(
    spec: Spec, unit: Unit | None, domain: Domain | None, marks: DomainMarkers
) -> InstanceState:
    """The state of an instance.

    :param unit: what systemd says; None if it has not loaded it.
    :param domain: of its UUID; None if there is none.
    """
    oper = oper_of(unit, being_stopped=marks.stopping)
    if oper is Oper.STOPPING or (marks.stopping and domain and domain.lives()):
        return InstanceState(Oper.STOPPING, Status.STOPPING)
    if oper is Oper.STARTING:
        return InstanceState(oper, Status.STARTING, WAITS if unit and unit.is_queued else "")
    if oper is Oper.RUNNING and (domain is None or domain.has_no_name()):
        return InstanceState(Oper.STARTING, Status.STARTING, "its guest reboots")
    if domain is None or domain.is_zombie():
        return _down(spec, unit, marks, is_zombie=domain is not None)
    if domain.is_dying():
        return InstanceState(Oper.STOPPING, Status.STOPPING, "Xen takes back what it had")
    if not domain.has_ended():
        return _running(spec, domain, has_unit=oper is Oper.RUNNING)
    if oper is Oper.RUNNING:
        return _ending(domain)
    return _ended(spec, domain, marks)


def was_shut_down_by_user(domain: Domain, *, stopped: bool) -> bool:
    """Whether what is left of an instance says that its user has shut it down.

    :param stopped: whether somebody has stopped it on the admin's behalf.
    """
    return domain.was_powered_off() and not stopped


def how_it_ended(domain: Domain) -> str:
    """Why a domain has ended, in words."""
    if domain.has_crashed():
        return (
            "it did not feed its watchdog"
            if domain.reason == ShutdownReason.WATCHDOG
            else "it crashed"
        )
    if domain.was_powered_off():
        return "it has shut down"
    known = {int(reason): text for reason, text in _REASONS.items()}
    number = "none" if domain.reason is None else domain.reason
    return known.get(domain.reason or -1, f"it ended for a reason that is not known here: {number}")


def suspended(name: str) -> InstanceError:
    """What to tell of an instance whose domain is somebody's to save or to move."""
    hint = f"brine instance stop --force {name} destroys it"
    return InstanceError(name, "is suspended, to be saved or moved", hint=hint)


def _running(spec: Spec, domain: Domain, *, has_unit: bool) -> InstanceState:
    notes = []
    if not domain.is_known():
        notes.append(f"Xen says {domain.state}, which is not known here")
    elif domain.has("p"):
        notes.append("it is paused")
    if not has_unit:
        notes.append(
            "its xl was ended, and nobody waits for its end: brine instance reboot mends that"
        )
    if spec.admin_state == AdminState.UP:
        return InstanceState(Oper.RUNNING, Status.RUNNING, "; ".join(notes))
    wrong = f"it runs, but should be {spec.admin_state}"
    return InstanceState(Oper.RUNNING, Status.ERROR_UP, "; ".join([wrong, *notes]))


def _ending(domain: Domain) -> InstanceState:
    """The state of one whose xl still has to see to its end."""
    if domain.reason == ShutdownReason.REBOOT:
        return InstanceState(Oper.STARTING, Status.STARTING, "its guest reboots")
    return InstanceState(Oper.STOPPING, Status.STOPPING, how_it_ended(domain))


def _ended(spec: Spec, domain: Domain, marks: DomainMarkers) -> InstanceState:
    is_users = was_shut_down_by_user(domain, stopped=marks.stopped)
    oper = Oper.USER_SHUTDOWN if is_users else Oper.DOWN
    if spec.admin_state == AdminState.UP:
        if is_users:
            why = f"it should be up but was shut down by its user; {_MEMORY}"
            return InstanceState(oper, Status.USER_DOWN, why)
        # Of one that is suspended its marker says only that it is the admin's doing.
        is_stopped = marks.stopped and not domain.is_suspended()
        how = "it was stopped" if is_stopped else how_it_ended(domain)
        return InstanceState(
            oper, Status.ERROR_DOWN, f"it should be up but is down: {how}; {_MEMORY}"
        )
    if spec.admin_state == AdminState.OFFLINE:
        return InstanceState(oper, Status.ADMIN_OFFLINE, _MEMORY)
    if spec.admin_state_source == Source.USER:
        return InstanceState(oper, Status.USER_DOWN, f"it was shut down by its user; {_MEMORY}")
    return InstanceState(oper, Status.ADMIN_DOWN, _MEMORY)


def _down(spec: Spec, unit: Unit | None, marks: DomainMarkers, *, is_zombie: bool) -> InstanceState:
    """The state of one that has no domain, or none that anything can be done about."""
    oper = Oper.USER_SHUTDOWN if marks.user_shut_down else Oper.DOWN
    zombie = "Xen has not got rid of its domain: somebody may have its memory" if is_zombie else ""
    if spec.admin_state == AdminState.UP:
        if marks.user_shut_down:
            why = "it should be up but was shut down by its user"
            return InstanceState(oper, Status.USER_DOWN, _joined(why, zombie))
        why = f"it should be up but is down: {_domain_reason(unit, marks)}"
        return InstanceState(oper, Status.ERROR_DOWN, _joined(why, zombie))
    if spec.admin_state == AdminState.OFFLINE:
        return InstanceState(oper, Status.ADMIN_OFFLINE, zombie)
    if spec.admin_state_source == Source.USER:
        return InstanceState(
            oper, Status.USER_DOWN, _joined("it was shut down by its user", zombie)
        )
    return InstanceState(oper, Status.ADMIN_DOWN, zombie)


def _domain_reason(unit: Unit | None, marks: DomainMarkers) -> str:
    if marks.stopped and (unit is None or unit.result in ("success", "signal")):
        return "it was stopped"
    if unit is None or not unit.invocation or unit.result == "success":
        return (
            "its domain was destroyed" if marks.has_run else "it has not run since the node's start"
        )
    if unit.result == "exit-code":
        # The unit's last step fails where a domain has ended by a fault.
        return "it crashed" if unit.since_us >= unit.begun_us else "it did not start"
    if unit.result == "signal":
        return f"its xl was ended by signal {unit.exit_status}, and its domain is gone"
    return f"systemd says {unit.result}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
