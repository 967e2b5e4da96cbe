"""The status of an instance: its observations, and the state that follows from them.

Source: "Other required changes" in the design of the detection of user shutdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from brine.common import markers
from brine.instance.spec import AdminState, Source, Spec
from brine.instance.store import InstanceError
from brine.instance.unit import Active, Unit

if TYPE_CHECKING:
    from brine.instance.xen.xl import Domain


class Oper(StrEnum):
    """What an instance is doing."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPING = "stopping"
    DOWN = "down"
    USER_SHUTDOWN = "S"


GOING = (Oper.RUNNING, Oper.STARTING, Oper.STOPPING)
"""The states in which an instance has a QEMU or a domain, or is about to have one."""


class Status(StrEnum):
    """The state of an instance, compared with its admin_state."""

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

    :param oper: what it is doing; *status* says whether that is as wanted.
    :param why: an explanation for people, in a sentence; empty if there is nothing to explain.
    """

    oper: Oper
    status: Status
    why: str = ""


@dataclass(frozen=True)
class Observed:
    """An observed instance: its spec, and the states in systemd, Xen and its markers.

    :param unit: of systemd; None if systemd has not loaded the unit.
    :param domain: of Xen; None if there is no domain, or the instance is a QEMU.
    :param run: the last run of the unit, which the markers name.
    :param has_user_marker: a marker says that its user has shut it down since its last start.
    :param was_stopped: an admin has stopped that run.
    :param is_being_stopped: a stop is in progress, and waits for the guest.
    :param is_stop_over: the stop that left its marker was given up long ago.
    :param has_run: it has run since the node's start.
    :param awaits_reboot: its last end was the first half of a reboot, and the command for the
        second half is gone.
    :param overdue: by how much a start or a stop exceeds its timeout, in words.
    :param reason: a more exact reason why it is down, if one is known.
    """

    spec: Spec
    unit: Unit | None = None
    domain: Domain | None = None
    run: str = markers.UNKNOWN_RUN
    has_user_marker: bool = False
    was_stopped: bool = False
    is_being_stopped: bool = False
    is_stop_over: bool = False
    has_run: bool = False
    awaits_reboot: bool = False
    overdue: str = ""
    reason: str = ""

    @cached_property
    def state(self) -> InstanceState:
        """Its state."""
        state = _of_domain(self) if self.spec.is_xen() else _of_qemu(self)
        why = self.overdue or self.reason
        return InstanceState(state.oper, state.status, why) if why else state

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def is_going(self) -> bool:
        """Whether it has a QEMU or a domain, or is about to."""
        return self.state.oper in GOING

    @property
    def has_stale_stop(self) -> bool:
        """Whether it runs, and has the marker of a stop that was given up."""
        is_broken_off = self.was_stopped and not self.is_being_stopped and self.is_stop_over
        return is_broken_off and self.state.oper is Oper.RUNNING

    @property
    def is_to_reboot(self) -> bool:
        """Whether it should be up and is down, in the middle of a reboot."""
        should_run = self.spec.admin_state == AdminState.UP
        return self.awaits_reboot and should_run and self.state.oper is Oper.DOWN


WAITS = "systemd has not begun its start yet: it waits for something"
_ENDED = "QEMU ended by itself"
_BY_USER = "it was shut down by its user"
_UP_BY_USER = "it should be up but was shut down by its user"
_STOPPED = "it was stopped"
_NOT_RUN = "it has not run since the node's start"
_REBOOTS = "its guest reboots"
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
    """The state of a unit; never ``S``.

    :param unit: None if systemd has not loaded it.
    :param being_stopped: whether a stop waits for the guest.
    """
    if unit is None:
        return Oper.DOWN
    if unit.is_queued:
        return Oper.STARTING
    if unit.active in _RUNNING:
        return Oper.STOPPING if being_stopped else Oper.RUNNING
    return _MOVING.get(unit.active, Oper.DOWN)


def _of_qemu(seen: Observed) -> InstanceState:
    unit = seen.unit
    oper = oper_of(unit, being_stopped=seen.is_being_stopped)
    if oper is Oper.STARTING:
        return _starting(WAITS if unit and unit.is_queued else "")
    if oper is Oper.STOPPING:
        return _stopping()
    if oper is Oper.RUNNING:
        return _running(seen.spec)
    return _down(seen.spec, _reason(seen), by_user=seen.has_user_marker)


def _of_domain(seen: Observed) -> InstanceState:
    spec, unit, domain = seen.spec, seen.unit, seen.domain
    oper = oper_of(unit, being_stopped=seen.is_being_stopped)
    if oper is Oper.STOPPING or (seen.is_being_stopped and domain and domain.lives()):
        return _stopping()
    if oper is Oper.STARTING:
        return _starting(WAITS if unit and unit.is_queued else "")
    if oper is Oper.RUNNING and (domain is None or domain.has_no_name()):
        return _starting(_REBOOTS)
    if domain is None or domain.is_zombie():
        note = "Xen has not got rid of its domain: somebody may have its memory" if domain else ""
        return _down(spec, _domain_reason(seen), by_user=seen.has_user_marker, note=note)
    if domain.is_dying():
        return _stopping("Xen takes back what it had")
    if not domain.has_ended():
        return _running(spec, *_notes(domain, has_unit=oper is Oper.RUNNING))
    if oper is Oper.RUNNING:  # its xl still has to see to its end
        if domain.has_rebooted():
            return _starting(_REBOOTS)
        return _stopping(domain.how_it_ended())
    # The marker of a suspended domain only says that the admin did it.
    is_stopped = seen.was_stopped and not domain.is_suspended()
    reason = _STOPPED if is_stopped else domain.how_it_ended()
    by_user = domain.was_powered_off() and not seen.was_stopped
    return _down(spec, reason, by_user=by_user, note="what is left of it takes memory")


def _starting(why: str) -> InstanceState:
    return InstanceState(Oper.STARTING, Status.STARTING, why)


def _stopping(why: str = "") -> InstanceState:
    return InstanceState(Oper.STOPPING, Status.STOPPING, why)


def _running(spec: Spec, *notes: str) -> InstanceState:
    if spec.admin_state == AdminState.UP:
        return InstanceState(Oper.RUNNING, Status.RUNNING, "; ".join(notes))
    wrong = f"it runs, but should be {spec.admin_state}"
    return InstanceState(Oper.RUNNING, Status.ERROR_UP, "; ".join([wrong, *notes]))


def _notes(domain: Domain, *, has_unit: bool) -> list[str]:
    """Remarks about a running domain."""
    notes = []
    if not domain.is_known():
        notes.append(f"Xen says {domain.state}, which is not known here")
    elif domain.has("p"):
        notes.append("it is paused")
    if not has_unit:
        notes.append(
            "its xl was ended, and nobody waits for its end: brine instance reboot mends that"
        )
    return notes


def _down(spec: Spec, reason: str, *, by_user: bool, note: str = "") -> InstanceState:
    """The state of an instance that does not run.

    :param reason: why, if neither its admin nor its user wanted that.
    :param by_user: whether its user has shut it down.
    :param note: a further remark.
    """
    oper = Oper.USER_SHUTDOWN if by_user else Oper.DOWN
    status, why = Status.ADMIN_DOWN, ""
    if spec.admin_state == AdminState.UP and by_user:
        status, why = Status.USER_DOWN, _UP_BY_USER
    elif spec.admin_state == AdminState.UP:
        status, why = Status.ERROR_DOWN, f"it should be up but is down: {reason}"
    elif spec.admin_state == AdminState.OFFLINE:
        status = Status.ADMIN_OFFLINE
    elif spec.admin_state_source == Source.USER:
        status, why = Status.USER_DOWN, _BY_USER
    return InstanceState(oper, status, "; ".join(part for part in (why, note) if part))


def _reason(seen: Observed) -> str:
    unit = seen.unit
    # systemd may have forgotten a unit that it has stopped.
    if seen.was_stopped and (unit is None or unit.result in ("success", "signal")):
        return _STOPPED
    if unit is None or not unit.invocation:
        # systemd keeps a failed unit until its failure is reset.
        return _ENDED if seen.has_run else _NOT_RUN
    if unit.result == "success":
        return _ENDED
    if unit.result == "exit-code" and unit.exit_status == 0:
        return "what is run beside QEMU failed"
    words = _RESULTS.get(unit.result, f"systemd says {unit.result}")
    return words.format(status=unit.exit_status)


def _domain_reason(seen: Observed) -> str:
    unit = seen.unit
    if seen.was_stopped and (unit is None or unit.result in ("success", "signal")):
        return _STOPPED
    if unit is None or not unit.invocation or unit.result == "success":
        return "its domain was destroyed" if seen.has_run else _NOT_RUN
    if unit.result == "exit-code":
        # The unit's last step fails if a domain has crashed.
        return "it crashed" if unit.came_up() else "it did not start"
    if unit.result == "signal":
        return f"its xl was ended by signal {unit.exit_status}, and its domain is gone"
    return f"systemd says {unit.result}"


def suspended(name: str) -> InstanceError:
    """The error of an instance whose domain is suspended, to be saved or moved."""
    hint = f"brine instance stop --force {name} destroys it"
    return InstanceError(name, "is suspended, to be saved or moved", hint=hint)
