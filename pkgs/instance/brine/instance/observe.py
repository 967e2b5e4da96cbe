"""The observed state of each instance: systemd, kvmd, Xen and files combined.

Source: "Other required changes" in the design of the detection of user shutdown.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from brine.common import paths
from brine.common.background import begun
from brine.common.errors import BrineError
from brine.instance import store, unit
from brine.instance.claims import ClaimBar, KnownClaims, notes
from brine.instance.owner import why_owner_absent
from brine.instance.store import InstanceError, NoSpecError
from brine.instance.unit import Active, Unit, UnitError
from brine.instance.xen import last_start
from brine.vm.end import (
    IN_ORDER,
    DomainEnd,
    LastEnd,
    is_by_admin,
    is_by_user,
    is_stop_over,
)
from brine.vm.halt import Halt
from brine.vm.markers import UNKNOWN_RUN, MarkerKind
from brine.vm.run import Run
from brine.vm.spec import AdminState, Source, Spec
from brine.vm.values import vm_name_fault

if TYPE_CHECKING:
    from brine.instance.xen.xl import Domain, Listing

_READ = (
    MarkerKind.STOP,
    MarkerKind.SHUTDOWN,
    MarkerKind.REBOOT,
    MarkerKind.PAUSED,
    MarkerKind.HALTED,
    MarkerKind.AWAITS,
)
"""The markers that an observation goes by."""

_STEPS_S = 60.0
"""How much longer than its timeout a start or a stop may take: the work before and after it."""


class Oper(StrEnum):
    """The operational state of an instance."""

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
    ERROR_HALTED = "ERROR_halted"
    ERROR_UP = "ERROR_up"
    ERROR_DOWN = "ERROR_down"
    USER_DOWN = "USER_down"
    ADMIN_DOWN = "ADMIN_down"
    ADMIN_OFFLINE = "ADMIN_offline"
    ELSEWHERE = "elsewhere"
    INCOMING = "incoming"


class InstanceState(NamedTuple):
    """The state of an instance; *why* explains it to people in a sentence, or is empty."""

    oper: Oper
    status: Status
    why: str = ""


@dataclass(frozen=True)
class Observed:
    """An observed instance: its spec, and the states in systemd, Xen and its markers.

    :param unit: of systemd; None if systemd has not loaded the unit.
    :param domain: of Xen; None if there is no domain, or the instance is a QEMU.
    :param is_half_made: its domain is what a start left that was broken off.
    :param run: the last run of the unit, with its markers as they were then.
    :param is_stop_over: the stop that left its marker was given up long ago.
    :param has_run: it has run since the node's start.
    :param overdue: by how much a start or a stop exceeds its timeout, in words.
    :param failed: the run that failed last, if none has begun since.
    :param reason: a more exact reason why it is down, if one is known.
    :param verdict: who ended its last run, by kvmd; empty if that is not known, or not needed.
    :param lacks: what its last start lacked and is still missing; None if it lacked nothing.
    :param awaits_node: the node's start of all instances will start it.
    :param halted: how its QEMU stands still, if no administrator has paused it.
    :param has_room: its storage, which was full, has room again.
    :param lacks_owner: why its owner does not let it start; empty if it does, or there is none.
    :param bar: why this node may not run it.
    """

    spec: Spec
    unit: Unit | None = None
    domain: Domain | None = None
    is_half_made: bool = False
    run: Run = field(kw_only=True)
    is_stop_over: bool = False
    has_run: bool = False
    overdue: str = ""
    failed: Run | None = None
    reason: str = ""
    verdict: str = ""
    lacks: tuple[str, ...] | None = None
    awaits_node: bool = False
    halted: Halt | None = None
    has_room: bool = False
    lacks_owner: str = ""
    bar: ClaimBar | None = None

    @cached_property
    def state(self) -> InstanceState:
        state = _of_domain(self) if self.spec.is_xen() else _of_qemu(self)
        why = self.overdue or self.reason
        if not why and self.lacks_owner and state.status is Status.ERROR_DOWN:
            why = f"its owner is not there: {self.lacks_owner}"
        if self.bar:
            return _barred(state, self.bar, self.run)
        return InstanceState(state.oper, state.status, why) if why else state

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_going(self) -> bool:
        """Whether it has a QEMU or a domain, or is about to."""
        return self.state.oper in GOING

    @property
    def has_stale_stop(self) -> bool:
        """Whether it runs, and has the marker of a stop that was given up."""
        return self.is_stop_over and self.state.oper is Oper.RUNNING

    def last_end(self) -> LastEnd:
        """The end of its last run, if it is down."""
        unit, spec = self.unit, self.spec
        return LastEnd(
            self.run,
            self.failed,
            result=unit.result if unit else IN_ORDER[0],
            is_failed=unit is not None and unit.active is Active.FAILED,
            came_up=unit is None or unit.came_up(),
            domain=self.domain_end(),
            has_run=self.has_run,
            is_wanted=spec.admin_state == AdminState.UP,
            is_noted=spec.is_down_by_user(),
            verdict=self.verdict,
        )

    def domain_end(self) -> DomainEnd | None:
        """How its domain has ended, if it has; None if it is a QEMU."""
        if not self.spec.is_xen():
            return None
        if self.is_half_made:
            return DomainEnd.HALF_MADE
        return self.domain.end() if self.domain else DomainEnd.GONE

    @property
    def may_be_paused(self) -> bool:
        """Whether its hypervisor is to be asked if it is paused: QEMU is, if a marker says so."""
        return self.run.is_paused() or self.halted is not None or self.domain is not None

    def ended_in_order(self) -> bool:
        """Whether its process exited cleanly; else it crashed, or did not start."""
        return self.unit is None or self.unit.result in IN_ORDER

    def failed_to_start(self) -> bool:
        """Whether its last run failed before it counted as started."""
        unit = self.unit
        return bool(unit and unit.active is Active.FAILED and not unit.came_up())


def look(name: str) -> Observed:
    spec = load_or_why(name)
    domain = Domains().of(spec)
    return _observed(spec, unit.find_unit(name), _marked(), domain, KnownClaims())


def load_or_why(name: str) -> Spec:
    """The spec of an instance; the error of one without it says whether it runs, or has moved."""
    try:
        return store.load(name)
    except NoSpecError:
        refuse_running_without_spec(name)
        _refuse_moved(name)
        raise


def _refuse_moved(name: str) -> None:
    """Refuse an instance that another node has by now, and name that."""
    for note in notes():
        if note.name == name:
            text, hint = f"has moved to {note.node}", f"do that on {note.node}"
            raise NoSpecError(name, text, hint=hint) from None


def refuse_running_without_spec(name: str) -> None:
    """Refuse an instance that runs without a spec."""
    with contextlib.suppress(UnitError):  # where there is no systemd, nothing runs
        if oper_of(unit.find_unit(name)) is not Oper.DOWN:
            raise _running_without(name, "has no spec") from None


def look_at_all(
    domains: Domains | None = None, asked: Callable[[], dict[str, Unit]] | None = None
) -> Iterator[Observed | InstanceError]:
    """Observe all of this node's instances, by name; an error for each spec that can't be used.

    Last come running instances without a spec.

    :param domains: Xen's list, for a caller that uses it again.
    :param asked: what waits for systemd's answer, for a caller that has asked it already.
    """
    # systemd answers while the specs are read: both take about as long.
    asked = asked or begun(unit.units)
    specs = list(store.load_all())
    loaded = asked()
    marked, claims = _marked(), KnownClaims()
    domains = domains or Domains()
    for spec in specs:
        found = loaded.pop(spec.name, None)
        if not isinstance(spec, InstanceError):
            try:
                yield _observed(spec, found, marked, domains.of(spec), claims)
            except InstanceError as error:
                yield error
        elif oper_of(found) is Oper.DOWN:
            yield spec
        else:
            fault = str(spec).removeprefix(f"{spec.name}: ")
            yield _running_without(spec.name, f"its spec can't be used: {fault}")
    for name, found in sorted(loaded.items()):
        # An instance that was defined just now has a spec after all.
        if vm_name_fault(name) or oper_of(found) is Oper.DOWN:
            continue
        if not store.spec_file_of(name).exists():
            yield _running_without(name, "has no spec")


def _running_without(name: str, lack: str) -> InstanceError:
    hint = f"brine instance stop {name} stops it, and brine instance define gives it a spec"
    return InstanceError(name, f"runs, and {lack}", hint=hint)


class Domains:
    """The domains that Xen lists. Xen is asked once, when the list is first needed."""

    def __init__(self) -> None:
        self._answer: Listing | BrineError | None = None

    def of(self, spec: Spec) -> Domain | None:
        """The domain of an instance; None if there is none, or the instance is QEMU's."""
        if not spec.is_xen():
            return None
        try:
            return self.listing().domain_of(spec.uuid)
        except BrineError as error:
            text = f"its state can't be known: {error}"
            raise InstanceError(spec.name, text, hint=error.hint) from error

    def listing(self) -> Listing:
        from brine.instance.xen import xl  # most nodes have no Xen

        if self._answer is None:
            try:
                self._answer = xl.domains()
            except xl.XlError as error:
                self._answer = error
        if isinstance(self._answer, BrineError):
            raise self._answer
        return self._answer


def _observed(
    spec: Spec,
    found: Unit | None,
    marked: frozenset[str],
    domain: Domain | None,
    claims: KnownClaims,
) -> Observed:
    name = spec.name
    # Most instances have none of these markers, and there may be hundreds.
    run = _run(name, found, marked).read(*_READ, files=marked)
    failed = None
    if f"{name}.{MarkerKind.FAILURE}" in marked and (
        failed := Run.marked(MarkerKind.FAILURE, name)
    ):
        failed.read(MarkerKind.STARTED, files=marked)
    return Observed(
        spec,
        found,
        domain,
        is_half_made=_is_half_made(spec, found, domain),
        run=run,
        is_stop_over=not run.is_being_stopped()
        and is_stop_over(run, spec.shutdown_timeout, time.time()),
        has_run=f"{name}.{MarkerKind.STARTED}" in marked,
        overdue=_overdue(spec, found),
        failed=failed,
        halted=run.halt(),
        lacks_owner=why_owner_absent(spec),
        bar=claims.bar_to(spec),
    )


def _is_half_made(spec: Spec, found: Unit | None, domain: Domain | None) -> bool:
    if domain is None or oper_of(found) is not Oper.DOWN:
        return False
    return last_start.is_half_made(spec, domain)


def _overdue(spec: Spec, found: Unit | None) -> str:
    """By how much a start or a stop exceeds the timeout of its spec; empty if it does not.
    systemd's own limits are the same for all instances, and so are longer."""
    if found and found.active is Active.ACTIVATING:
        what, since_us, limit_s = "starting", found.begun_us, spec.start_limit_s()
    elif found and found.active is Active.DEACTIVATING:
        what, since_us, limit_s = "stopping", found.changed_us, spec.shutdown_timeout
    else:
        return ""
    took_s = time.clock_gettime(time.CLOCK_MONOTONIC) - since_us / 1e6
    if not since_us or took_s <= limit_s + _STEPS_S:
        return ""
    return f"it has been {what} for {took_s:.0f} s, and {limit_s} s are its limit"


def _run(name: str, found: Unit | None, marked: frozenset[str]) -> Run:
    """The run that an instance's markers must name: the last that began. A start that failed before
    its run began does not count."""
    invocation = found.invocation if found else ""
    if found and found.active is Active.FAILED and invocation:
        return found.run
    begun = Run.last(name) if f"{name}.{MarkerKind.START}" in marked else Run(name)
    return found.run if found and invocation and begun.id == UNKNOWN_RUN else begun


def _marked() -> frozenset[str]:
    """The files of markers, of all instances."""
    try:
        return frozenset(os.listdir(paths.MARKS_DIR))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise BrineError(f"{paths.MARKS_DIR}: can't be read: {error.strerror}") from error


# The state that follows from what was observed.

_WAITS = "systemd has not begun its start yet: it waits for something"
_ENDED = "QEMU ended by itself"
_STOPPED = "it was stopped"
_NOT_RUN = "it has not run since the node's start"
_REBOOTS = "its guest reboots"
_BROKEN_OFF = "its start was broken off before its guest ran"
_TAKES_MEMORY = "what is left of it takes memory"
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
    """The state of a unit, whose guest may be *being_stopped*; never ``S``."""
    if unit is None:
        return Oper.DOWN
    if unit.is_queued:
        return Oper.STARTING
    if unit.active in _RUNNING:
        return Oper.STOPPING if being_stopped else Oper.RUNNING
    return _MOVING.get(unit.active, Oper.DOWN)


def _of_qemu(seen: Observed) -> InstanceState:
    oper = oper_of(seen.unit, being_stopped=seen.run.is_being_stopped())
    if oper is Oper.STARTING:
        return _starting(seen)
    if oper is Oper.STOPPING:
        return _stopping()
    if oper is Oper.RUNNING:
        return _halted(seen.spec, seen.halted) if seen.halted else _running(seen.spec)
    return _down(seen.spec, _reason(seen), by_user=is_by_user(seen.run, None))


def _of_domain(seen: Observed) -> InstanceState:
    spec, domain, is_being_stopped = seen.spec, seen.domain, seen.run.is_being_stopped()
    oper = oper_of(seen.unit, being_stopped=is_being_stopped)
    if oper is Oper.STOPPING or (is_being_stopped and domain and domain.lives()):
        return _stopping()
    if oper is Oper.STARTING:
        return _starting(seen)
    if oper is Oper.RUNNING and (domain is None or domain.has_no_name()):
        return _starting(seen, _REBOOTS)
    if domain is None or domain.is_zombie():
        note = (
            "Xen has not got rid of its domain: another domain may have its memory"
            if domain
            else ""
        )
        by_user = is_by_user(seen.run, DomainEnd.GONE)
        return _down(spec, _reason(seen), by_user=by_user, note=note)
    if domain.is_dying():
        return _stopping("Xen takes back what it had")
    if seen.is_half_made:
        return _down(spec, _BROKEN_OFF, by_user=False, note=_TAKES_MEMORY)
    if not domain.has_ended():
        return _running(spec, *_notes(domain, has_unit=oper is Oper.RUNNING))
    if oper is Oper.RUNNING:  # its xl still has to see to its end
        if domain.has_rebooted():
            return _starting(seen, _REBOOTS)
        return _stopping(domain.how_it_ended())
    end = domain.end()
    reason = _STOPPED if is_by_admin(seen.run, end) else domain.how_it_ended()
    return _down(spec, reason, by_user=is_by_user(seen.run, end), note=_TAKES_MEMORY)


def _barred(state: InstanceState, bar: ClaimBar, run: Run) -> InstanceState:
    """The state of an instance that this node may not run."""
    if state.oper in GOING:
        if bar.node and run.awaits_from:
            why = f"its QEMU waits for the guest, which comes from {run.awaits_from}"
            return InstanceState(state.oper, Status.INCOMING, why)
        # One that is only held back was running before.
        why = f"it runs, but {bar.why}"
        return InstanceState(state.oper, Status.ERROR_UP, why) if bar.node else state
    if bar.node:
        return InstanceState(state.oper, Status.ELSEWHERE, f"it {bar.why}")
    if state.status is Status.ERROR_DOWN:
        return state._replace(why=f"it {bar.why}")
    return state


def _starting(seen: Observed, why: str = "") -> InstanceState:
    is_queued = seen.unit is not None and seen.unit.is_queued
    return InstanceState(Oper.STARTING, Status.STARTING, _WAITS if is_queued else why)


def _stopping(why: str = "") -> InstanceState:
    return InstanceState(Oper.STOPPING, Status.STOPPING, why)


def _running(spec: Spec, *notes: str) -> InstanceState:
    if spec.admin_state == AdminState.UP:
        return InstanceState(Oper.RUNNING, Status.RUNNING, "; ".join(notes))
    wrong = f"it runs, but should be {spec.admin_state}"
    return InstanceState(Oper.RUNNING, Status.ERROR_UP, "; ".join([wrong, *notes]))


def _halted(spec: Spec, halt: Halt) -> InstanceState:
    """The state of an instance whose QEMU stands still."""
    # Its nodes have the beginning of the disk's UUID in their names.
    paths = (disk.path for disk in spec.disks if f"-{disk.uuid[:8]}-" in halt.device)
    state = _running(spec, halt.why(next(paths, "")))
    is_error = halt.is_fault and state.status is Status.RUNNING
    return state._replace(status=Status.ERROR_HALTED) if is_error else state


def _notes(domain: Domain, *, has_unit: bool) -> Iterator[str]:
    if not domain.is_known():
        yield f"Xen says {domain.state}, which is not known here"
    elif domain.has("p"):
        yield "it is paused"
    if not has_unit:
        yield "its xl was ended, and no process waits for its end: brine instance reboot mends that"


def _down(spec: Spec, reason: str, *, by_user: bool, note: str = "") -> InstanceState:
    """The state of an instance that does not run; *note* is a further remark."""
    oper = Oper.USER_SHUTDOWN if by_user else Oper.DOWN
    status, why = Status.ADMIN_DOWN, ""
    if spec.admin_state == AdminState.UP and by_user:
        status, why = Status.USER_DOWN, "it should be up but was shut down by its user"
    elif spec.admin_state == AdminState.UP:
        status, why = Status.ERROR_DOWN, f"it should be up but is down: {reason}"
    elif spec.admin_state == AdminState.OFFLINE:
        status = Status.ADMIN_OFFLINE
    elif spec.admin_state_source == Source.USER:
        status, why = Status.USER_DOWN, "it was shut down by its user"
    return InstanceState(oper, status, "; ".join(part for part in (why, note) if part))


def _reason(seen: Observed) -> str:
    """Why an instance is down, as far as systemd knows."""
    unit, is_xen = seen.unit, seen.spec.is_xen()
    ended = "its domain was destroyed" if is_xen else _ENDED
    # systemd may have forgotten a unit that it has stopped.
    if seen.run.was_stopped() and (unit is None or unit.result in ("success", "signal")):
        return _STOPPED
    if unit is None or not unit.invocation:
        # systemd keeps a failed unit until its failure is reset.
        return ended if seen.has_run else _NOT_RUN
    if unit.result == "success":
        return ended if seen.has_run or not is_xen else _NOT_RUN
    if is_xen:
        return _xl_reason(unit)
    if unit.result == "exit-code" and unit.exit_status == 0:
        return "what is run beside QEMU failed"
    words = _RESULTS.get(unit.result, f"systemd says {unit.result}")
    return words.format(status=unit.exit_status)


def _xl_reason(unit: Unit) -> str:
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
