"""The observed state of each instance: systemd, kvmd, Xen and files combined."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from brine.common import markers, paths
from brine.common.errors import BrineError
from brine.common.markers import BELIEVED_S, MarkerKind
from brine.common.process import begun
from brine.instance import store, unit
from brine.instance.spec import Spec, name_fault
from brine.instance.status import Observed, Oper, oper_of
from brine.instance.store import InstanceError, NoSpecError
from brine.instance.unit import Active, Unit, UnitError

if TYPE_CHECKING:
    from brine.instance.xen.xl import Domain, Listing

_STEPS_S = 60.0
"""How much longer than its timeout a start or a stop may take: the work before and after it."""


def look(name: str) -> Observed:
    """Observe one instance.

    :raises BrineError: if it does not exist, or its state can't be read.
    """
    spec = load_or_why(name)
    found = unit.units([name]).get(name)
    return _observed(spec, found, _marked(), Domains().of(spec))


def load_or_why(name: str) -> Spec:
    """The spec of an instance.

    :raises InstanceError: if there is none, or it can't be used; the error says whether it runs.
    """
    try:
        return store.load(name)
    except NoSpecError:
        with contextlib.suppress(UnitError):  # where there is no systemd, nothing runs
            if oper_of(unit.units([name]).get(name)) is not Oper.DOWN:
                raise _without_spec(name) from None
        raise


def look_at_all(domains: Domains | None = None) -> Iterator[Observed | InstanceError]:
    """Observe all of this node's instances, by name; an error for each spec that can't be used.

    Last come running instances without a spec.

    :param domains: Xen's list, for a caller that uses it again.
    :raises BrineError: if the states can't be read.
    """
    # systemd answers while the specs are read: both take about as long.
    asked = begun(unit.units)
    specs = list(store.load_all())
    loaded = asked()
    marked = _marked()
    domains = domains or Domains()
    for spec in specs:
        if isinstance(spec, InstanceError):
            yield _also_if_it_runs(spec, loaded.pop(spec.name, None))
        else:
            found = loaded.pop(spec.name, None)
            try:
                yield _observed(spec, found, marked, domains.of(spec))
            except InstanceError as error:
                yield error
    for name, found in sorted(loaded.items()):
        # An instance that was defined just now has a spec after all.
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


class Domains:
    """The domains that Xen lists. Xen is asked once, when the list is first needed."""

    def __init__(self) -> None:
        self._listing: Listing | None = None
        self._fault: BrineError | None = None

    def of(self, spec: Spec) -> Domain | None:
        """The domain of an instance; None if there is none, or the instance is QEMU's.

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
        if self._fault:
            raise self._fault
        if self._listing is None:
            from brine.instance.xen import xl  # most nodes have no Xen

            try:
                self._listing = xl.domains()
            except xl.XlError as error:
                self._fault = error
                raise
        return self._listing


def _observed(
    spec: Spec, found: Unit | None, marked: frozenset[str], domain: Domain | None
) -> Observed:
    name = spec.name
    run = _run(name, found)
    was_stopped = _says(MarkerKind.STOP, name, run, marked)
    is_being_stopped = was_stopped and markers.is_held(MarkerKind.STOP, name)
    is_rebooted = _says(MarkerKind.REBOOT, name, run, marked)
    return Observed(
        spec,
        found,
        domain,
        run=run,
        has_user_marker=_says(MarkerKind.SHUTDOWN, name, run, marked),
        was_stopped=was_stopped,
        is_being_stopped=is_being_stopped,
        is_stop_over=was_stopped and not is_being_stopped and is_stop_over(spec),
        has_run=f"{name}.{MarkerKind.STARTED}" in marked,
        awaits_reboot=is_rebooted and not markers.is_held(MarkerKind.REBOOT, name),
        overdue=_overdue(spec, found),
    )


def _overdue(spec: Spec, found: Unit | None) -> str:
    """By how much a start or a stop exceeds the timeout of its spec; empty if it does not.
    systemd's own limits are the same for all instances, and so are longer."""
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
    """The run that an instance's markers must name: the last that began. A start that failed before
    its run began does not count."""
    invocation = found.invocation if found else ""
    if found and found.active is Active.FAILED and invocation:
        return invocation
    begun = markers.last_run(name)
    return invocation if invocation and begun == markers.UNKNOWN_RUN else begun


def _says(kind: MarkerKind, name: str, run: str, marked: frozenset[str]) -> bool:
    # Most instances have no such marker, and there may be hundreds.
    return f"{name}.{kind}" in marked and markers.read_marker(kind, name, run=run) is not None


def is_stop_over(spec: Spec) -> bool:
    """Whether the stop that left a marker is surely over: no command works on it, and no guest
    follows it. The age decides too, as not all commands hold the marker."""
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
