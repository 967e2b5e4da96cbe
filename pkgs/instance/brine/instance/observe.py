"""The state of each instance: what systemd, kvmd, Xen and files show, joined."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from brine.common import markers, paths
from brine.common.errors import BrineError
from brine.common.markers import MarkerKind
from brine.common.process import begun
from brine.instance import store, unit
from brine.instance.control import BELIEVED_S
from brine.instance.spec import AdminState, Spec, name_fault
from brine.instance.status import (
    DomainMarkers,
    InstanceState,
    Oper,
    oper_of,
    state_of,
    state_of_domain,
)
from brine.instance.store import InstanceError, NoSpecError
from brine.instance.unit import Active, Unit, UnitError

if TYPE_CHECKING:
    from brine.instance.xen.xl import Domain, Listing


_STEPS_S = 60.0
"""So much longer than QEMU or its guest itself a start or a stop may take: what is before, and
after."""


@dataclass(frozen=True, slots=True)
class Observed:
    """An instance as it is.

    :param unit: what systemd says of it; None if it has not loaded it.
    :param run: of its unit, the last one that its markers are about.
    :param was_stopped: whether somebody has stopped that on the admin's behalf.
    :param is_being_stopped: whether somebody does so right now, and waits for its guest.
    :param has_stale_stop: whether it runs, and a stop that was broken off says still that its admin
        is ending it.
    :param has_run: whether it has run since the node's start.
    :param has_user_marker: whether a marker says that its user has shut it down since its last
        start.
    :param is_to_reboot: whether it should be up and is down, and its last end was to be the first
        half of a reboot, of which nobody does the second.
    :param is_overdue: whether it is starting or stopping, and takes longer than it may.
    :param domain: what Xen says of it; None if there is none, or it is not Xen's.
    """

    spec: Spec
    state: InstanceState
    unit: Unit | None
    run: str = markers.UNKNOWN_RUN
    was_stopped: bool = False
    is_being_stopped: bool = False
    has_stale_stop: bool = False
    has_run: bool = False
    has_user_marker: bool = False
    is_to_reboot: bool = False
    is_overdue: bool = False
    domain: Domain | None = None


def look(name: str) -> Observed:
    """One instance.

    :raises BrineError: if there is none, or that can't be found out.
    """
    spec = load_or_why(name)
    found = unit.units([name]).get(name)
    return _seen(spec, found, _marked(), Xen().domain_of(spec))


def load_or_why(name: str) -> Spec:
    """The spec of an instance.

    :raises InstanceError: if there is none, whether it runs or not, or it can't be used.
    """
    try:
        return store.load(name)
    except NoSpecError:
        with contextlib.suppress(UnitError):  # where there is no systemd, nothing runs
            if oper_of(unit.units([name]).get(name)) is not Oper.DOWN:
                raise _without_spec(name) from None
        raise


def look_at_all(xen: Xen | None = None) -> Iterator[Observed | InstanceError]:
    """All of this node's instances, by name; what is wrong, where one's spec can't be used. Last
    come those that run and have no spec at all.

    :param xen: what Xen says, for who wants to know more of that.
    :raises BrineError: if that can't be found out.
    """
    # systemd takes as long to answer as hundreds of specs take to be read.
    asked = begun(unit.units)
    specs = list(store.load_all())
    loaded = asked()
    marked = _marked()
    xen = xen or Xen()
    for spec in specs:
        if isinstance(spec, InstanceError):
            yield _also_if_it_runs(spec, loaded.pop(spec.name, None))
        else:
            found = loaded.pop(spec.name, None)
            try:
                yield _seen(spec, found, marked, xen.domain_of(spec))
            except InstanceError as error:
                yield error
    for name, found in sorted(loaded.items()):
        # One that was defined just now has a spec after all.
        if name_fault(name) or oper_of(found) is Oper.DOWN:
            continue
        if not store.spec_file_of(name).exists():
            yield _without_spec(name)


def _without_spec(name: str) -> InstanceError:
    return InstanceError(name, "runs, and has no spec", hint=_how_to_stop(name))


def _also_if_it_runs(error: InstanceError, found: Unit | None) -> InstanceError:
    if oper_of(found) is Oper.DOWN:
        return error
    text = f"runs, and its spec can't be used: {str(error).removeprefix(f'{error.name}: ')}"
    return InstanceError(error.name, text, hint=_how_to_stop(error.name))


def _how_to_stop(name: str) -> str:
    return f"brine instance stop {name} stops it, and brine instance define gives it a spec"


class Xen:
    """What Xen says, which is asked once, and only if somebody wants to know."""

    def __init__(self) -> None:
        self._listing: Listing | None = None
        self._fault: BrineError | None = None

    def domain_of(self, spec: Spec) -> Domain | None:
        """The domain of an instance; None if there is none, or it is not Xen's.

        :raises InstanceError: if that can't be known.
        """
        if not spec.is_xen():
            return None
        try:
            return self.listing().domain_of(spec.uuid)
        except BrineError as error:
            text = f"its state can't be known: {error}"
            raise InstanceError(spec.name, text, hint=error.hint) from error

    def listing(self) -> Listing:
        """All domains.

        :raises brine.instance.xen.xl.XlError: if they can't be known.
        """
        from brine.instance.xen import xl  # most are QEMU's

        if self._fault:
            raise self._fault
        if self._listing is None:
            try:
                self._listing = xl.domains()
            except xl.XlError as error:
                self._fault = error
                raise
        return self._listing


def _seen(
    spec: Spec, found: Unit | None, marked: frozenset[str], domain: Domain | None
) -> Observed:
    name = spec.name
    run = _run(name, found)
    shut_down = _says(MarkerKind.SHUTDOWN, name, run, marked)
    stopped = _says(MarkerKind.STOP, name, run, marked)
    being_stopped = stopped and markers.is_held(MarkerKind.STOP, name)
    has_run = f"{name}.{MarkerKind.STARTED}" in marked
    if spec.is_xen():
        said = DomainMarkers(shut_down, stopped, being_stopped, has_run)
        state = state_of_domain(spec, found, domain, said)
    else:
        state = state_of(
            spec,
            found,
            user_shut_down=shut_down,
            stopped=stopped,
            being_stopped=being_stopped,
            has_run=has_run,
        )
    if overdue := _overdue(spec, found):
        state = replace(state, why=overdue)
    return Observed(
        spec,
        state,
        found,
        run=run,
        was_stopped=stopped,
        is_being_stopped=being_stopped,
        has_stale_stop=(
            stopped and not being_stopped and state.oper is Oper.RUNNING and is_stop_over(spec)
        ),
        has_run=has_run,
        has_user_marker=shut_down,
        is_to_reboot=_is_to_reboot(spec, state, run),
        is_overdue=bool(overdue),
        domain=domain,
    )


def _overdue(spec: Spec, found: Unit | None) -> str:
    """How much longer a start or a stop takes than its spec allows; empty if it does not. systemd's
    own limits are for all instances, and so are longer."""
    if found is None:
        return ""
    if found.active is Active.ACTIVATING:
        what, since_us, limit_s = "starting", found.begun_us, spec.start_limit_s()
    elif found.active is Active.DEACTIVATING:
        what, since_us, limit_s = "stopping", found.changed_us, spec.shutdown_timeout
    else:
        return ""
    took_s = time.clock_gettime(time.CLOCK_MONOTONIC) - since_us / 1e6
    if not since_us or took_s <= limit_s + _STEPS_S:
        return ""
    return f"it has been {what} for {took_s:.0f} s, and {limit_s} s are its limit"


def _run(name: str, found: Unit | None) -> str:
    """The run that an instance's markers are to be about: the last that began. A start that failed
    before it began came after what had ended that one."""
    invocation = found.invocation if found else ""
    if found and found.active is Active.FAILED and invocation:
        return invocation
    begun = markers.last_run(name)
    return invocation if invocation and begun == markers.UNKNOWN_RUN else begun


def _says(kind: MarkerKind, name: str, run: str, marked: frozenset[str]) -> bool:
    # Most have no such marker, and there may be hundreds.
    return f"{name}.{kind}" in marked and markers.read_marker(kind, name, run=run) is not None


def _is_to_reboot(spec: Spec, state: InstanceState, run: str) -> bool:
    if spec.admin_state != AdminState.UP or state.oper is not Oper.DOWN:
        return False
    note = markers.read_marker(MarkerKind.REBOOT, spec.name, run=run)
    return note is not None and not markers.is_held(MarkerKind.REBOOT, spec.name)


def is_stop_over(spec: Spec) -> bool:
    """Whether nobody can be at the stop any more that left its marker, and no guest still follows
    it. Not all who stop instances hold it."""
    mark = markers.read_marker(MarkerKind.STOP, spec.name)
    if mark is None:
        return False
    return time.time() - mark.made_at > spec.shutdown_timeout + BELIEVED_S


def _marked() -> frozenset[str]:
    """The files of markers, of all instances."""
    try:
        return frozenset(os.listdir(paths.MARKS_DIR))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise BrineError(f"{paths.MARKS_DIR}: can't be read: {error.strerror}") from error
