"""Stopping an instance: ``brine instance stop``, and whatever ends one for another reason.

An instance is stopped in one of three ways, by the state of its unit: its guest is asked, systemd
stops it, as a start that is still in progress, or only a domain that no unit watches is removed.
What a way marks and asks at first happens under the instance's lock, so that a start that comes
next sees it; the wait for the end comes after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

from brine.common.errors import BrineError
from brine.common.process import TERM_TIMEOUT_S, Process
from brine.common.progress import spoken_wait
from brine.instance import messages, store, unit
from brine.instance.hypervisor import DeafGuestError, Guest
from brine.instance.hypervisor_choice import hypervisor_of, hypervisor_running
from brine.instance.intent import want
from brine.instance.observe import GOING, Oper, oper_of, suspended
from brine.instance.shutdown import shut_down, shutdown_timeout_of, stop_marked
from brine.instance.store import InstanceError
from brine.instance.unit import Active, Unit
from brine.instance.xen import last_start, xl
from brine.vm.run import Run
from brine.vm.spec import AdminState, Source, Spec
from brine.vm.unit_name import unit_of

_GONE_S = 180.0


class Stopped(StrEnum):
    """The result of a stop.

    An instance that was down already may be *noted* to be down from now on, or *cleaned up*: a
    start that was broken off had left a domain.
    """

    STOPPED = "stopped"
    NOTED = "noted"
    CLEANED_UP = "cleaned up"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class StopLimits:
    """How long the guest may take, and whether it is ended (*force*) after that."""

    timeout_s: float
    force: bool = False

    def of_systemd(self) -> float:
        """How long a stop by systemd may take, in seconds."""
        return min(self.timeout_s, TERM_TIMEOUT_S) if self.force else self.timeout_s


@dataclass(frozen=True, slots=True)
class _Wish:
    """That an instance should be down.

    :param spec: None if it has none that can be read.
    :param is_new: whether it should have been up before.
    :param fault: why that could not be written.
    """

    spec: Spec | None
    is_new: bool = False
    fault: BrineError | None = None


@dataclass(frozen=True, slots=True)
class _DomainEnd:
    """The end of a domain without a unit: whether there was one, and whether it ran."""

    was_there: bool = False
    ran: bool = False


def stop_instance(
    name: str,
    *,
    force: bool = False,
    timeout_s: float | None = None,
    by: Source = Source.ADMIN,
    cause: str = "",
    keeps_admin_state: bool = False,
) -> Stopped:
    """Stop an instance, and set its admin_state to down. One that runs needs no spec.

    :param force: end it when its guest does not shut down in time.
    :param timeout_s: how long the guest may take; None is the timeout of its spec.
    :param cause: of the verdict on its end; empty is ``stopping``.
    :param keeps_admin_state: leave its admin_state as it is: it is to run again soon.
    :raises InstanceError: if the guest does not shut down, and *force* is not given: the instance
        runs on. Also if its admin_state can't be written: the instance is stopped nevertheless.
    """
    with ExitStack() as marks:
        with store.alone(name):
            found = unit.find_unit(name)
            wish = _Wish(store.load(name)) if keeps_admin_state else _want_down(name, by)
            if timeout_s is None:
                timeout_s = shutdown_timeout_of(name, wish.spec)
            limits = StopLimits(timeout_s, force)
            wait = marks.enter_context(_begin(name, found, limits, cause))
        ran = oper_of(found) in GOING
        if wish.fault and not ran:
            raise wish.fault
        wait()
    domain = _DomainEnd()
    if wish.spec and wish.spec.is_xen() and not _is_started_again(name, found):
        domain = _end_domain(wish.spec, limits)
    ran = ran or domain.ran
    if ran and wish.fault and wish.spec:
        text = f"is stopped, but its admin_state could not be set: {wish.fault}"
        hint = f"remove the cause, then brine instance stop {name}: it would start with the node"
        raise InstanceError(name, text, hint=hint)
    if found and found.active is Active.FAILED and not ran:
        unit.forget_failure(name)
    return _result(ran=ran, had_domain=domain.was_there, is_noted=wish.is_new)


def _result(*, ran: bool, had_domain: bool, is_noted: bool) -> Stopped:
    if ran:
        return Stopped.STOPPED
    if had_domain:
        return Stopped.CLEANED_UP
    return Stopped.NOTED if is_noted else Stopped.UNCHANGED


def _want_down(name: str, by: Source) -> _Wish:
    """Set the admin_state of an instance to down, as far as that is possible."""
    spec = None
    try:
        spec = store.load(name)
        return _Wish(spec, is_new=want(spec, AdminState.DOWN, by))
    except BrineError as error:
        return _Wish(spec, fault=error)


# The ways. Each is a block, and gives what waits for the end.


def _begin(
    name: str, found: Unit | None, limits: StopLimits, cause: str
) -> AbstractContextManager[Callable[[], None]]:
    """Choose the way to stop an instance by the state of its unit."""
    oper = oper_of(found)
    # Another command may be stopping it with a longer timeout.
    if found and (oper is Oper.RUNNING or (limits.force and oper is Oper.STOPPING)):
        return _by_guest(found, limits, cause)
    if found and oper in GOING:
        return _by_systemd(found, limits, cause)
    return nullcontext(lambda: None)


@contextmanager
def _by_guest(found: Unit, limits: StopLimits, cause: str) -> Iterator[Callable[[], None]]:
    """Have its guest shut down."""
    with told_to_stop(found.name, found, cause=cause) as told:

        def wait() -> None:
            end_guest(told, "stop", limits)
            wait_stopped(found.run)

        yield wait


@contextmanager
def _by_systemd(found: Unit, limits: StopLimits, cause: str) -> Iterator[Callable[[], None]]:
    """Have systemd stop a start in progress, or go on with a stop; there is no guest to ask."""
    name, limit_s = found.name, limits.of_systemd()
    messages.tell(messages.STOP_ASKED, name, how="systemd ends it", timeout=limit_s)
    with Process.of(found.main_pid, unit=unit_of(name)) as qemu, ExitStack() as stack:
        if qemu:
            stack.enter_context(stop_marked(qemu, run_of(found, name), must=False, cause=cause))
        unit.stop_unit(name)
        # The run of a start that waited may have begun just before.
        stopped = (unit.find_unit(name) if found.is_queued else None) or found
        yield lambda: _wait_for_systemd(stopped, qemu, limits)


def _wait_for_systemd(found: Unit, qemu: Process | None, limits: StopLimits) -> None:
    """Wait until systemd has stopped a run; with *force*, end its process if that takes long."""
    run, name, limit_s = found.run, found.name, limits.of_systemd()
    with spoken_wait(f"{name}: waiting for systemd to stop it, at most {limit_s:g} s"):
        if unit.wait_ended(run, timeout_s=limit_s):
            return
    if not limits.force:
        text = f"did not stop within {limit_s:g} s, and is being stopped still"
        raise InstanceError(name, text, hint=f"brine instance stop --force {name} ends it")
    if qemu and (number := qemu.terminate()):
        messages.tell(messages.ENDED, name, timeout=limit_s, signal=number.name)
    wait_stopped(run)


def remove_leftover(spec: Spec) -> None:
    """Remove the domain that is left of an instance that does not run."""
    _end_domain(spec, StopLimits(0))


def _end_domain(spec: Spec, limits: StopLimits) -> _DomainEnd:
    """End and remove a domain without a unit."""
    domain = xl.domain_of(spec.uuid)
    # The rest of a start that was broken off has no guest to ask.
    ran = domain is not None and domain.lives() and not last_start.is_half_made(spec, domain)
    if ran:
        with told_to_stop(spec.name, None, spec) as guest:
            end_guest(guest, "stop", limits)
        left = xl.domain_of(spec.uuid)
        # A domain with another number is a later run's.
        domain = left if left and domain and left.number == domain.number else None
    if domain and not domain.is_dying():
        if domain.is_suspended() and not limits.force:
            raise suspended(spec.name)
        xl.destroy(domain)
    return _DomainEnd(domain is not None or ran, ran)


def _is_started_again(name: str, before: Unit | None) -> bool:
    """Whether a later run of an instance has begun since its unit was looked at."""
    now = unit.find_unit(name)
    if now is None or oper_of(now) not in GOING:
        return False
    return now.is_queued or before is None or now.run != before.run


# The steps of an end, of a reboot's, too.


@contextmanager
def told_to_stop(
    name: str, found: Unit | None, of_domain: Spec | None = None, *, cause: str = ""
) -> Iterator[tuple[Guest, Run]]:
    """The guest and the run of an instance, which are marked as being stopped in the block.

    :param of_domain: the spec of a domain, which may have no unit; else None.
    """
    run, pid = run_of(found, name), found.main_pid if found else 0
    hypervisor = hypervisor_of(of_domain) if of_domain else hypervisor_running(name)
    uuid = of_domain.uuid if of_domain else None
    with hypervisor.guest(name, pid, uuid=uuid) as guest:
        with stop_marked(guest, run, must=True, cause=cause):
            yield guest, run


def run_of(found: Unit | None, name: str) -> Run:
    """The present run of its unit."""
    return found.run if found and found.invocation else Run.last(name)


def end_guest(told: tuple[Guest, Run], verb: str, limits: StopLimits) -> None:
    """Ask the guest to shut down; with *force*, end it if it does not."""
    (guest, run), timeout_s = told, limits.timeout_s
    name = run.name
    ways = "its guest is asked, and ended if need be" if limits.force else "its guest is asked"
    messages.tell(messages.STOP_ASKED, name, how=ways, timeout=timeout_s)
    with spoken_wait(f"{name}: waiting for its guest to shut down, at most {timeout_s:g} s"):
        hint = f"brine instance {verb} --force {name} ends it"
        try:
            if shut_down(guest, run, timeout_s=timeout_s, force=limits.force):
                return
        except DeafGuestError as error:
            raise InstanceError(name, str(error).removeprefix(f"{name}: "), hint=hint) from error
    messages.tell(messages.NOT_IN_TIME, name, timeout=timeout_s)
    text = f"did not shut down within {timeout_s:g} s, and runs on"
    raise InstanceError(name, text, hint=hint)


def wait_stopped(run: Run) -> None:
    """Wait until a run has ended, and its unit has cleaned up after QEMU."""
    with spoken_wait(f"{run.name}: waiting for its unit to clear up, at most {_GONE_S:g} s"):
        if not unit.wait_ended(run, timeout_s=_GONE_S):
            raise InstanceError(run.name, f"its unit has not stopped within {_GONE_S:g} s")
